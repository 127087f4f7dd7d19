"""Time of a layer on two ranks against one rank with as many rows per expert."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from pair import Pair, expect
from pair_cases import CASES

from bench.data import random_inputs, random_packed

LAYERS = 20
LOCAL_EXPERTS = 32
REPLAYS = 30
WARM_UP = 5


def medians(pair: Pair, layers: list[Any], inputs: list[Any]) -> dict[str, float]:
    """Microseconds of a layer: the whole graph, less one of the foreign kernels, by layer."""

    def work(with_layers: bool) -> None:
        for layer, one in zip(layers, inputs, strict=True):
            torch.mul(one.source, 1.0, out=one.x)
            if with_layers:
                layer(one.x, one.ids, one.weights, out=one.y)

    graphs = [pair.capture(lambda w=w: work(w)) for w in (True, False)]
    events = [
        [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
        for _ in graphs
    ]
    pair.meet("warm up")
    for _ in range(WARM_UP):
        for graph in graphs:
            graph.replay()
    for n in range(REPLAYS):
        for graph, pairs in zip(graphs, events, strict=True):
            pairs[n][0].record()
            graph.replay()
            pairs[n][1].record()
    torch.cuda.synchronize()
    whole, foreign = ([1000 * a.elapsed_time(b) for a, b in pairs] for pairs in events)
    base = statistics.median(foreign)
    samples = sorted((t - base) / len(layers) for t in whole)
    return {
        "median": round(statistics.median(samples), 1),
        "p10": round(samples[len(samples) // 10], 1),
        "p90": round(samples[-1 - len(samples) // 10], 1),
    }


def speed(pair: Pair) -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(3 + pair.rank)
    config = CASES["flash-64"].config
    h, i = config.hidden, config.intermediate
    packed = [random_packed(h, i, LOCAL_EXPERTS, generator) for _ in range(LAYERS)]
    rows: dict[str, Any] = {}
    for num_tokens in (1, 8, 64):
        name = "flash-8" if num_tokens <= 8 else "flash-64"
        for label, case in (("R = 2", name), ("R = 1", f"{name}-one")):
            op = pair.operator(case)
            layers = [op.bind(p) for p in packed]
            inputs = [random_inputs(CASES[case].config, num_tokens, generator) for _ in packed]
            for layer, one in zip(layers, inputs, strict=True):
                layer(one.x, one.ids, one.weights, out=one.y)
            op.check(synchronize=True)
            expect(all(bool(one.y.isfinite().all()) for one in inputs), "y is not finite")
            found = medians(pair, layers, inputs)
            op.check(synchronize=True)
            rows.setdefault(f"T = {num_tokens}", {})[label] = found
    return rows
