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


@pytest.mark.parametrize("green_contexts", [False, True])
def test_calls_on_changing_streams_with_changing_inputs(green_contexts: bool) -> None:
    """Each call's y is the bits of its own input, whatever stream it and the last one were on;
    work behind it on the same stream finds it whole."""
    config = CASES["flash-64"].config
    batches = [make_batch(config, t, 140 + t) for t in (64, 33, 1, 48)]
    problems = Problems()
    with fresh_operator("flash-64", green_contexts=green_contexts) as op:
        layer = op.bind(weights_of(config).packed)
        wanted = [run(layer, batch).clone() for batch in batches]
        streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        outputs = [[torch.empty_like(batch.x) for batch in batches] for _ in streams]
        torch.cuda.synchronize()
        results = []
        for n in range(120):
            which, side = (n * 3 + n // 7) % len(batches), (n * 5 + n // 4) % len(streams)
            batch, y = batches[which], outputs[side][which]
            with torch.cuda.stream(streams[side]):
                layer(batch.x, batch.ids, batch.weights, out=y if n % 2 else None)
                y = layer(batch.x, batch.ids, batch.weights, out=y)
                results.append((which, y.clone()))
                y.zero_()
        torch.cuda.synchronize()
        op.check()
        for n, (which, y) in enumerate(results):
            problems.expect_equal(f"call {n}", y, wanted[which])
    problems.finish()


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
