"""Times of graph replays.

Layer time = (a graph of L layers with a foreign kernel before each - the same graph with the
foreign kernels only) / L, so the edges into the layer count. Graphs take turns, so that clocks and
temperature favour none.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.data import Inputs

WARM_UP = 3
LAST_PART = 4
"""Of a sustained run, the last quarter is timed."""
MAX_QUEUED = 200
"""Replays between two waits of a sustained run: a launch queue holds about 1,000."""


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """What ``call`` enqueues, as a graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


def run_layers(inputs: list[Inputs], layer: Callable[[int], None] | None) -> None:
    """The foreign kernel of each layer, which also writes its input, and the layer behind it."""
    for n, one in enumerate(inputs):
        torch.mul(one.source, 1.0, out=one.x)
        if layer is not None:
            layer(n)


@dataclass
class Graphs:
    """All layers, and one layer, behind foreign kernels."""

    whole: torch.cuda.CUDAGraph
    one: torch.cuda.CUDAGraph


def make_graphs(inputs: list[Inputs], layer: Callable[[int], None] | None) -> Graphs:
    """Capture; ``layer`` enqueues layer n, None is the foreign kernels only."""
    return Graphs(
        capture(lambda: run_layers(inputs, layer)),
        capture(lambda: run_layers(inputs[:1], layer)),
    )


def replay_times(graphs: dict[str, torch.cuda.CUDAGraph], replays: int) -> dict[str, list[float]]:
    """Microseconds of each replay, the graphs taking turns in an order that rotates."""
    names = list(graphs)
    events = {
        name: [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
        for name in names
    }
    for _ in range(WARM_UP):
        for graph in graphs.values():
            graph.replay()
    for n in range(replays):
        turn = n % len(names)
        for name in names[turn:] + names[:turn]:
            start, stop = events[name][n]
            start.record()
            graphs[name].replay()
            stop.record()
    torch.cuda.synchronize()
    return {
        name: [1000 * start.elapsed_time(stop) for start, stop in pairs]
        for name, pairs in events.items()
    }


def sustained_time(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Mean microseconds of a replay in the last part of many, back to back."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    last = max(1, replays // LAST_PART)
    behind: list[torch.cuda.Event] = []
    for n in range(replays):
        if n == replays - last:
            start.record()
        graph.replay()
        if n % MAX_QUEUED == MAX_QUEUED - 1:
            # Wait for the batch before, so that the queue neither fills nor runs dry.
            mark = torch.cuda.Event()
            mark.record()
            behind.append(mark)
            if len(behind) > 1:
                behind.pop(0).synchronize()
    stop.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(stop) / last


def sustained_replays(replay_us: float, seconds: float) -> int:
    """How many replays last that long."""
    return max(LAST_PART, round(seconds * 1e6 / replay_us))


def median(samples: list[float]) -> float:
    return statistics.median(samples)
