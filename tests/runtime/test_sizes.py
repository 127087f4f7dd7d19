"""Calls of other sizes: their kernels, argument blocks and graphs over one workspace."""

from dataclasses import replace

from small_layer import CONFIG, inputs, weights


def test_calls_of_other_sizes_have_their_own_graphs(make, standin):
    """Each as an operator of that capacity would have it, over one workspace."""
    op = make(replace(CONFIG, max_tokens=200))
    tiles = [each.tiles for each in op.plan.classes]
    assert [most for most, _ in op.plan.tile_classes] == [104, 144, 200]
    layer = op.bind(weights())
    maps = standin.maps[-sum(len(t.widths) for t in tiles) :]
    block_rows = [t.max_width for t in tiles for _ in t.widths]
    assert [dims[1] for _, _, dims, *_ in maps] == block_rows
    for tokens in (5, 104, 144, 145, 200):
        layer(*inputs(tokens))
        assert standin.names().count("cuGraphInstantiate") == 3  # by the first call
    launched = [int(a[0]) for a in standin.arguments("cuGraphLaunch")]
    assert [launched.index(graph) for graph in launched] == [0, 0, 2, 3, 3]
    updates = standin.arguments("cuGraphExecKernelNodeSetParams")
    assert [int(update[0]) for update in updates[::2]] == launched[1:]
    arguments = inputs(5)
    for _ in range(2):
        layer(*arguments, out=arguments[0])
    assert len(standin.arguments("cuGraphExecKernelNodeSetParams")) == len(updates) + 2
    op.close()
    assert standin.names().count("cuGraphExecDestroy") == 3


def test_a_serial_operator_has_one_size_because_its_ring_holds_every_block(make, standin):
    op = make(replace(CONFIG, max_tokens=200), serial=True)
    assert op.plan.classes == (op.plan,) == (op.plan.for_tokens(1),)
    assert list(op._sizes) == [op.plan]
    layer = op.bind(weights())
    layer(*inputs(1))
    layer(*inputs(200))
    assert standin.names().count("cuGraphInstantiate") == 1


def test_a_class_that_comes_twice_has_one_graph(make, standin):
    op = make(replace(CONFIG, max_tokens=400))
    assert [most for most, _ in op.plan.tile_classes] == [104, 144, 224, 288, 400]
    assert len(op.plan.classes) == len(op._sizes) == 4
    layer = op.bind(weights())
    layer(*inputs(224))
    layer(*inputs(400))
    assert standin.names().count("cuGraphInstantiate") == 4
    first, second = (int(a[0]) for a in standin.arguments("cuGraphLaunch"))
    assert first == second
