"""Exploration of the specified protocol: many schedules, none of which violates a check."""

from __future__ import annotations

import pytest

from gcmoe.sim.run import WAIT_KINDS, ExploreResult, explore, run_seed

SCHEDULES = 20_000


@pytest.fixture(scope="module")
def explored() -> ExploreResult:
    return explore(SCHEDULES, processes=2)


def test_no_schedule_violates_a_check(explored: ExploreResult) -> None:
    first = [(f.seed, f.schedule, f.violations) for f in explored.failures[:3]]
    assert explored.schedules == SCHEDULES
    assert first == []


def test_the_schedules_differ(explored: ExploreResult) -> None:
    assert len(explored.traces) >= 15_000


def test_the_ring_is_reused_within_a_replay(explored: ExploreResult) -> None:
    assert explored.more_blocks_than_slots >= 0.3 * SCHEDULES


def test_every_kind_of_wait_blocks(explored: ExploreResult) -> None:
    assert all(explored.blocked[kind] > 1000 for kind in WAIT_KINDS), explored.blocked


def test_ranks_run_ahead_and_memory_is_weak(explored: ExploreResult) -> None:
    assert explored.ran_ahead >= 0.5 * SCHEDULES
    assert explored.weak >= 0.3 * SCHEDULES


def test_configurations_have_two_ranks_and_three_replays_at_least() -> None:
    configs = [run_seed(seed).config for seed in range(50)]
    assert all(config.ranks >= 2 and config.replays >= 3 for config in configs)


def test_processes_do_not_change_what_is_explored() -> None:
    one, two = explore(30), explore(30, processes=2)
    assert one.traces == two.traces
    assert one.blocked == two.blocked
