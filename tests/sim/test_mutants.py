"""Every wrong protocol is caught, or listed with the reason why it is not wrong."""

from __future__ import annotations

import pytest

from gcmoe.protocol import EDGES, GRAPH_EDGES
from gcmoe.sim.checks import CHECKS
from gcmoe.sim.mutants import MAX_SCHEDULES, Mutant, all_mutants, hunt

MUTANTS = all_mutants()
WRONG = [mutant for mutant in MUTANTS if not mutant.equivalent]
EQUIVALENT = [mutant for mutant in MUTANTS if mutant.equivalent]


@pytest.mark.parametrize("mutant", WRONG, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    outcome = hunt(mutant)
    assert outcome.result is not None, f"not caught in {MAX_SCHEDULES} schedules"
    name, _ = outcome.result.violations[0]
    assert name in CHECKS
    # The seed and the schedule that the report names show it again, the specified text passes.
    again = mutant.run(outcome.result.seed)
    assert again.schedule == outcome.result.schedule
    assert (again.trace, again.violations) == (outcome.result.trace, outcome.result.violations)
    assert mutant.run_specified(outcome.result.seed).violations == []


@pytest.mark.parametrize("mutant", EQUIVALENT, ids=lambda mutant: mutant.name)
def test_equivalent_mutant_is_not_caught_and_says_why(mutant: Mutant) -> None:
    covers = [edge.name for edge in EDGES] + [edge.name for edge in GRAPH_EDGES] + ["forget_abort"]
    assert any(name in mutant.equivalent for name in covers)
    outcome = hunt(mutant, 100)
    assert outcome.result is None, outcome.line()


def test_table_of_mutants_follows_the_edge_table() -> None:
    names = {mutant.name for mutant in MUTANTS}
    assert len(names) == len(MUTANTS)
    for edge in EDGES:
        assert f"{edge.name}/read_acquire" in names
        assert f"{edge.name}/write_release" in names or f"{edge.name}/write_fence" in names
        assert (f"{edge.name}/completion_wait" in names) == edge.completion_wait
        for side in ("write", "read"):
            has_fence = bool(getattr(edge, f"{side}_proxy_fence"))
            assert (f"{edge.name}/{side}_proxy_fence" in names) == has_fence
            is_sys = getattr(edge, side).scope == "sys"
            assert (f"{edge.name}/{side}_scope" in names) == is_sys
    assert {f"graph/{edge.name}" for edge in GRAPH_EDGES} <= names
