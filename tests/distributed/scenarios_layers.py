"""Layers of two ranks against the oracle and against one rank with all experts."""

from __future__ import annotations

from typing import Any

import torch
from pair import Pair, differences, expect
from pair_cases import CASES
from pair_oracle import Batch, Problems, check_layer

Call = tuple[int, str]


def calls_of(most: int) -> list[tuple[str, Call, Call]]:
    """(what, rank 0's tokens and routing, rank 1's)."""
    few = min(8, most)
    both = [(f"T = {t}", (t, "distinct"), (t, "distinct")) for t in (1, few, most)]
    routings = ("rank0", "rank1", "single", "last", "masked", "nothing", "duplicates", "int64")
    return [
        *both,
        ("ragged", (most, "distinct"), (3, "distinct")),
        ("rank 0 empty", (0, "distinct"), (most, "distinct")),
        ("rank 1 empty", (most, "distinct"), (0, "distinct")),
        ("all empty", (0, "distinct"), (0, "distinct")),
        *((name, (most, name), (few, name)) for name in routings),
        ("mixed", (few, "masked"), (most, "duplicates")),
        ("everything to one expert", (most, "single"), (most, "single")),
    ]


def call(layer: Any, batch: Batch) -> torch.Tensor:
    y = layer(batch.x, batch.ids, batch.weights)
    layer.op.check(synchronize=True)
    return y


def check_calls(pair: Pair, name: str, alone: str | None = None) -> dict[str, Any]:
    """All calls of a case; ``alone`` is the case of one rank with all experts."""
    config = CASES[name].config
    layer = pair.layer(name)
    single = pair.layer(alone) if alone else None
    experts, _ = pair.weights(name)
    problems = Problems()
    compared = 0
    calls = calls_of(config.max_tokens)
    for n, (what, *mine) in enumerate(calls):
        num_tokens, routing = mine[pair.rank]
        batch = pair.batch(name, num_tokens, routing, n)
        y = call(layer, batch)
        label = f"{name} {what}, {num_tokens} tokens {routing}"
        check_layer(problems, label, y, batch, experts, config)
        if single is not None:
            problems.expect_equal(f"{label}: against one rank", y, call(single, batch))
            compared += 1
    problems.finish()
    return {"calls": len(calls), "equal to one rank": compared}


def small_shapes(pair: Pair) -> dict[str, Any]:
    found = {"tiny": check_calls(pair, "tiny")}
    for name in ("odd-33", "odd-256", "top-8"):
        found[name] = check_calls(pair, name, f"{name}-one")
    return found


def flash_layer(pair: Pair) -> dict[str, Any]:
    return check_calls(pair, "flash-64")


def two_layers_in_a_graph(pair: Pair) -> dict[str, Any]:
    """Two layers with other work between, mixed with eager calls; T differs over the ranks."""
    name = "top-8"
    op = pair.operator(name)
    layers = [op.bind(pair.weights(name, seed)[1]) for seed in (1, 2)]
    num_tokens = (33, 7)[pair.rank]
    batches = [pair.batch(name, num_tokens, "distinct", 30 + n) for n in range(4)]

    def chain(batch: Batch, out: torch.Tensor | None = None) -> torch.Tensor:
        middle = layers[0](batch.x, batch.ids, batch.weights)
        between = middle.float().mul(8.0).bfloat16()
        return layers[1](between, batch.ids, batch.weights, out=out)

    wanted = [chain(batch).clone() for batch in batches]
    op.check(synchronize=True)
    problems = Problems()
    first = layers[0](batches[0].x, batches[0].ids, batches[0].weights)
    experts, _ = pair.weights(name, 1)
    check_layer(problems, "first layer", first, batches[0], experts, CASES[name].config)
    inputs = pair.batch(name, num_tokens, "distinct", 39)
    y = torch.empty_like(inputs.x)
    graph = pair.capture(lambda: chain(inputs, y))
    for n in range(40):
        batch = batches[n % 4]
        inputs.x.copy_(batch.x)
        inputs.ids.copy_(batch.ids)
        inputs.weights.copy_(batch.weights)
        y.zero_()
        graph.replay()
        problems.expect_equal(f"replay {n}", y, wanted[n % 4])
        if n % 3 == 0:
            problems.expect_equal(f"eager {n}", chain(batches[(n + 1) % 4]), wanted[(n + 1) % 4])
    op.check(synchronize=True)
    problems.finish()
    return {"replays": 40}


def two_streams(pair: Pair) -> dict[str, Any]:
    """Eager calls that change streams follow each other."""
    layer = pair.layer("top-8")
    batch = pair.batch("top-8", 64, "distinct", 40)
    wanted = call(layer, batch).clone()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for n in range(40):
        with torch.cuda.stream(streams[n % 2]):
            results.append(layer(batch.x, batch.ids, batch.weights))
    layer.op.check(synchronize=True)
    bad = [n for n, y in enumerate(results) if int(differences(y, wanted))]
    expect(not bad, f"calls {bad} differ")
    return {"calls": 40}


def two_operators(pair: Pair) -> dict[str, Any]:
    """Operators of two shapes take turns on one stream, without a wait between."""
    names = ("odd-33", "top-8")
    layers = [pair.layer(name) for name in names]
    batches = [pair.batch(name, (33, 5)[pair.rank], "distinct", 50) for name in names]
    wanted = [call(layer, b).clone() for layer, b in zip(layers, batches, strict=True)]
    results = []
    for _ in range(20):
        for layer, b in zip(layers, batches, strict=True):
            results.append(layer(b.x, b.ids, b.weights))
    for layer in layers:
        layer.op.check(synchronize=True)
    bad = [n for n, y in enumerate(results) if int(differences(y, wanted[n % 2]))]
    expect(not bad, f"calls {bad} differ")
    return {"calls": 40}
