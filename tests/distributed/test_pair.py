"""Two ranks on two GPUs: every scenario of every group. One torchrun runs a whole group."""

from __future__ import annotations

import pytest
from pair_cases import GPU_SCENARIOS
from pair_launch import report_of

pytestmark = pytest.mark.gpus(2)


@pytest.mark.parametrize(
    ("group", "scenario"), GPU_SCENARIOS, ids=[f"{group}-{name}" for group, name in GPU_SCENARIOS]
)
def test_two_ranks(group: str, scenario: str) -> None:
    problem = report_of(group).problem(group, scenario)
    if problem:
        pytest.fail(problem, pytrace=False)
