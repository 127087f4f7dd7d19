"""Where the time of a layer goes: timestamps that traced kernels leave behind."""

from __future__ import annotations

import statistics
from enum import IntEnum

import torch

from gcmoe import MoE
from gcmoe.kernels.trace_words import ComputeTrace, DispatchTrace, FinalizeTrace

PHASES: dict[str, dict[str, IntEnum]] = {
    "dispatch": {
        "staged": DispatchTrace.STAGED,
        "headers": DispatchTrace.HEADERS,
        "binned": DispatchTrace.BINNED,
        "first_row": DispatchTrace.FIRST_ROW,
        "last_row": DispatchTrace.LAST_ROW,
        "end": DispatchTrace.END,
    },
    "compute": {
        "routes": ComputeTrace.ROUTES,
        "first_block": ComputeTrace.FIRST_BLOCK,
        "w1_over": ComputeTrace.W1_OVER,
        "end": ComputeTrace.END,
    },
    "finalize": {
        "start": FinalizeTrace.START,
        "arrivals": FinalizeTrace.ARRIVED,
        "end": FinalizeTrace.END,
    },
}
"""Word of the trace record, by role and phase."""
FIRST = {"first_row", "first_block", "routes", "start"}
"""Phases of which the earliest CTA counts; of the others the last one."""


def read_phases(op: MoE, graph: torch.cuda.CUDAGraph, replays: int = 9) -> dict[str, float]:
    """Microseconds from the first CTA's start, medians over replays, of the graph's last layer."""
    found: dict[str, list[float]] = {}
    for _ in range(replays):
        graph.replay()
        records = {role.name.lower(): words for role, words in op.trace_records().items()}
        starts = {"dispatch": DispatchTrace.START, "compute": ComputeTrace.START}
        first = min(int(records[role][:, word].min()) for role, word in starts.items())
        for role, words in PHASES.items():
            for name, word in words.items():
                times = records[role][:, word]
                times = times[times >= first]  # others are of an earlier layer
                if len(times):
                    best = times.min() if name in FIRST else times.max()
                    found.setdefault(f"{role}.{name}", []).append((int(best) - first) / 1000)
    return {name: round(statistics.median(times), 2) for name, times in found.items()}
