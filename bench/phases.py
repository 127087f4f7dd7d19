"""Where the time of a layer goes: timestamps that traced kernels leave behind."""

from __future__ import annotations

import statistics

import torch

from gcmoe import MoE

PHASES = {
    "dispatch": {"staged": 2, "headers": 3, "binned": 4, "first_row": 5, "last_row": 6, "end": 7},
    "compute": {"routes": 2, "first_block": 3, "w1_over": 5, "end": 7},
    "finalize": {"start": 1, "arrivals": 2, "end": 3},
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
        first = min(int(records[role][:, 1].min()) for role in ("dispatch", "compute"))
        for role, words in PHASES.items():
            for name, word in words.items():
                times = records[role][:, word]
                times = times[times >= first]  # others are of an earlier layer
                if len(times):
                    best = times.min() if name in FIRST else times.max()
                    found.setdefault(f"{role}.{name}", []).append((int(best) - first) / 1000)
    return {name: round(statistics.median(times), 2) for name, times in found.items()}
