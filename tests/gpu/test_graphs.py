"""Layers inside captured graphs."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    CASES,
    Batch,
    Problems,
    Weights,
    capture,
    fresh_operator,
    layer_of,
    make_batch,
    pack_experts,
    random_experts,
    reference,
    run,
    weights_of,
)
from stages import check_layer

from gcmoe.errors import CaptureError

pytestmark = pytest.mark.gpu


def copy_into(target: Batch, source: Batch) -> None:
    target.x.copy_(source.x)
    target.ids.copy_(source.ids)
    target.weights.copy_(source.weights)


@pytest.mark.parametrize("case", ["top-8", "flash-64"])
def test_two_layers_in_a_graph(case: str) -> None:
    """Two layers with other work between, inputs and weights changed in place afterwards."""
    config = CASES[case].config
    experts = [random_experts(config, 4, seed) for seed in (2, 3)]
    packed = [pack_experts(e, config) for e in experts]
    num_tokens = 33
    inputs = make_batch(config, num_tokens, 100)
    middle, y = torch.empty_like(inputs.x), torch.empty_like(inputs.x)
    problems = Problems()
    with fresh_operator(case) as op:
        first, second = (op.bind(p) for p in packed)
        run(first, inputs)

        def call() -> None:
            first(inputs.x, inputs.ids, inputs.weights, out=middle)
            between = middle.float().mul(8.0).bfloat16()
            second(between, inputs.ids, inputs.weights, out=y)

        graph = capture(call)
        for n in range(4):
            if n == 2:  # new weights in the same storage; the graph is not captured again
                experts = [random_experts(config, 4, seed) for seed in (4, 5)]
                for e, p in zip(experts, packed, strict=True):
                    pack_experts(e, config, out=p)
            batch = make_batch(config, num_tokens, 101 + n)
            copy_into(inputs, batch)
            graph.replay()
            op.check(synchronize=True)
            w = [Weights(e, p, 4) for e, p in zip(experts, packed, strict=True)]
            after = Batch(middle.float().mul(8.0).bfloat16(), batch.ids, batch.weights)
            for which, layer, own, given, found in (
                ("second", second, w[1], after, y),
                ("first", first, w[0], batch, middle),
            ):
                what = f"replay {n}, {which} layer"
                trace = reference(given, own, config)
                if layer is first:  # the workspace holds the second layer: call the first again
                    problems.expect_equal(what, found, run(first, given))
                check_layer(problems, what, op, given, found, trace, own)
        del graph
    problems.finish()


def test_a_model_on_the_stream_of_the_compute_partition() -> None:
    """Captured on it, the bits are those of the default stream; eager calls are refused."""
    layer, _ = layer_of("flash-64")
    config = CASES["flash-64"].config
    batch = make_batch(config, 48, 130)
    wanted = run(layer, batch)
    source, y = batch.x.clone(), torch.empty_like(batch.x)
    stream = layer.op.stream
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.mul(source, 1.0, out=batch.x)
        layer(batch.x, batch.ids, batch.weights, out=y)
        after = y.float().mul(2.0)
    for _ in range(20):
        batch.x.zero_()
        y.zero_()
        graph.replay()
        layer.op.check(synchronize=True)
        assert torch.equal(y.view(torch.int16), wanted.view(torch.int16))
        assert torch.equal(after, 2.0 * wanted.float())
    with torch.cuda.stream(stream), pytest.raises(CaptureError, match="for captures"):
        layer(batch.x, batch.ids, batch.weights)
    del graph


def test_graphs_of_several_sizes_mixed_with_eager_calls() -> None:
    layer, _ = layer_of("top-8")
    config = CASES["top-8"].config
    batches = [make_batch(config, t, 110 + t) for t in (64, 33, 7, 1, 0)]
    wanted = [run(layer, batch).clone() for batch in batches]
    outputs = [torch.empty_like(batch.x) for batch in batches]
    graphs = []
    for batch, y in zip(batches, outputs, strict=True):
        graphs.append(
            capture(lambda b=batch, y=y: layer(b.x, b.ids, b.weights, out=y))  # type: ignore[misc]
        )
    problems = Problems()
    for n in range(30):
        which = (7 * n + n // 5) % len(batches)
        outputs[which].zero_()
        graphs[which].replay()
        problems.expect_equal(f"replay {n} of graph {which}", outputs[which], wanted[which])
        if n % 3 == 0:
            batch = batches[(which + 1) % len(batches)]
            y = layer(batch.x, batch.ids, batch.weights)
            problems.expect_equal(
                f"eager call after replay {n}", y, wanted[(which + 1) % len(batches)]
            )
    layer.op.check(synchronize=True)
    problems.finish()


def test_capture_before_any_call_is_refused() -> None:
    config = CASES["top-8"].config
    batch = make_batch(config, 7, 120)
    other = torch.zeros(8, device=batch.x.device)
    with fresh_operator("top-8") as op:
        layer = op.bind(weights_of(config).packed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            other.add_(1)
            with pytest.raises(CaptureError, match="outside the capture"):
                layer(batch.x, batch.ids, batch.weights, out=torch.empty_like(batch.x))
        del graph
        # The refusal leaves the operator as it was.
        eager = run(layer, batch).clone()
        y = torch.empty_like(batch.x)
        graph = capture(lambda: layer(batch.x, batch.ids, batch.weights, out=y))
        graph.replay()
        op.check(synchronize=True)
        assert torch.equal(y, eager)
        del graph


def test_output_may_be_the_input() -> None:
    layer, _ = layer_of("top-8")
    batch = make_batch(CASES["top-8"].config, 33, 130)
    wanted = run(layer, batch).clone()
    x = batch.x.clone()
    assert layer(x, batch.ids, batch.weights, out=x) is x
    layer.op.check(synchronize=True)
    assert torch.equal(x.view(torch.int16), wanted.view(torch.int16))


def test_another_stream_waits_for_the_call_before() -> None:
    layer, _ = layer_of("flash-64")
    batch = make_batch(CASES["flash-64"].config, 64, 140)
    wanted = run(layer, batch).clone()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for n in range(12):
        with torch.cuda.stream(streams[n % 2]):
            results.append(layer(batch.x, batch.ids, batch.weights))
    layer.op.check(synchronize=True)
    problems = Problems()
    for n, y in enumerate(results):
        problems.expect_equal(f"call {n}", y, wanted)
    problems.finish()
