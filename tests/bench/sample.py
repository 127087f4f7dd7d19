"""A small record, as a run writes it."""

from __future__ import annotations

from typing import Any

from bench import schema
from bench.cases import Case

FACTORS = {
    ("gcmoe", "default"): 1.2,
    ("gcmoe", "serial"): 1.5,
    ("mega_moe_sm90", "layer"): 2.5,
    ("humming_w4a8", "group128"): 1.3,
}


def make_row(tokens: int, impl: str, variant: str) -> dict[str, Any]:
    case = Case("deepseek-v4-flash", tokens)
    floor = case.floor_us(case.expected_touched)
    median = floor * FACTORS[impl, variant] + 10
    return {
        "model": case.model,
        "tokens_per_rank": tokens,
        "ranks": 1,
        "share_of": 8,
        "variant": variant,
        "impl": impl,
        "whole_layer": impl != "humming_w4a8",
        "median_us": median,
        "p10_us": median - 1,
        "p90_us": median + 2,
        "floor_us": floor,
        "touched_experts": case.expected_touched,
        "layers": 20,
        "weight_sets": 20,
        "per_rank": [],
        "correct": True,
        "cosine": 0.9999,
    }


def make_record(created: str = "2026-01-01T00:00:00Z", **changes: Any) -> dict[str, Any]:
    record = {
        "schema_version": schema.VERSION,
        "created": created,
        "command": [],
        "commit": "abc",
        "source": "0" * 64,
        "gpu": "NVIDIA H200",
        "driver": "1",
        "versions": {"torch": "2"},
        "ranks": 1,
        "clocks_before": {},
        "options": {},
        "implementations": {
            "gcmoe": {"state": "present", "reason": "", "install": ""},
            "torch_unfused": {"state": "absent", "reason": "too old", "install": "x"},
        },
        "skipped": [],
        "ended": "complete",
        "rows": [make_row(t, *pair) for t in (1, 8, 64) for pair in FACTORS],
    }
    return record | changes
