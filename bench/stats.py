"""Statistics of samples; the standard library suffices."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(samples: Sequence[float], percent: float) -> float:
    """The sample at that share of the order, the nearest one.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[round((len(ordered) - 1) * percent / 100)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Microseconds of one layer."""

    median_us: float
    p10_us: float
    p90_us: float


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each replay the time of the slowest rank.

    Args:
        by_rank: samples of each rank, in the order of the replays.

    Raises:
        ValueError: the ranks have different numbers of samples.
    """
    return [max(times) for times in zip(*by_rank, strict=True)]


def layer_times(whole: Sequence[float], foreign: Sequence[float], layers: int) -> list[float]:
    """Samples of a layer: the whole graph, less the median of the foreign kernels, by layer."""
    base = statistics.median(foreign)
    return [(t - base) / layers for t in whole]


def summarize(samples: Sequence[float]) -> Summary:
    return Summary(statistics.median(samples), percentile(samples, 10), percentile(samples, 90))
