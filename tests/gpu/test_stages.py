"""Every stage of the two shares against the oracle."""

from __future__ import annotations

import pytest
from helpers import (
    CASES,
    Problems,
    layer_of,
    make_batch,
    reference,
    run,
)
from stages import bases, check_layer, check_stages

pytestmark = pytest.mark.gpu

STAGES = [
    ("flash-8", 8, 4),
    ("flash-64", 8, 4),
    ("flash-64", 64, 4),
    ("flash-64", 64, 12),
    ("flash-256", 64, 4),
    ("flash41-64", 8, 4),
    ("flash41-64", 64, 4),
    ("flash41-256", 256, 4),
]


@pytest.mark.parametrize(("case", "num_tokens", "octaves"), STAGES)
def test_stages(case: str, num_tokens: int, octaves: int) -> None:
    layer, weights = layer_of(case, octaves)
    op, config = layer.op, CASES[case].config
    batch = make_batch(config, num_tokens, 11)
    before = bases(op)
    y = run(layer, batch)
    trace = reference(batch, weights, config)
    problems = Problems()
    what = f"{case} T = {num_tokens}, {octaves} octaves"
    check_layer(problems, what, op, batch, y, trace, weights)
    summary = check_stages(problems, op, batch, y, trace, weights, before)
    print(f"    {summary}")
    problems.finish()
