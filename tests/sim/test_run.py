"""Single runs: routing families, wrap, determinism, faults, reset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gcmoe.protocol import FaultKind, Role
from gcmoe.protocol.invariants import INVARIANTS
from gcmoe.sim import SimConfig, random_config, simulate
from gcmoe.sim.checks import CHECKS
from gcmoe.sim.config import ROUTINGS, draw_problem
from gcmoe.sim.data import NAN
from gcmoe.sim.mutants import hand_mutants, hunt
from gcmoe.sim.run import run_seed
from gcmoe.sim.schedule import SCHEDULES

SOME_SCHEDULES = (*SCHEDULES, "delay:rank=0", "delay:role=compute", "delay:cell=recv_header")


def assert_clean(config: SimConfig, seeds: range, *schedules: str) -> None:
    for seed in seeds:
        for schedule in schedules or SCHEDULES:
            result = simulate(config, seed, schedule)
            assert result.violations == [], (seed, schedule)


def test_checks_belong_to_stated_invariants() -> None:
    assert {check.invariant for check in CHECKS.values()} == {i.name for i in INVARIANTS}


@pytest.mark.parametrize("weak", [False, True], ids=["sequential", "weak"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_families(routing: str, weak: bool) -> None:
    config = SimConfig(ranks=3, experts=6, tokens=3, routing=routing, weak=weak)  # type: ignore[arg-type]
    assert_clean(config, range(3))


@pytest.mark.parametrize("schedule", SOME_SCHEDULES)
def test_schedules(schedule: str) -> None:
    assert_clean(SimConfig(routing="dense", block_rows=(1,)), range(6), schedule)


@pytest.mark.parametrize(
    "config",
    [
        SimConfig(ranks=1, experts=2, tokens=4),
        SimConfig(ranks=4, experts=4, tokens=1, top_k=4),
        SimConfig(ranks=2, experts=2, top_k=3, tokens=3, block_rows=(4,)),
        SimConfig(ranks=2, experts=8, hidden=512, intermediate=384, w2_columns=(256, 128)),
        SimConfig(ranks=2, tokens=6, num_slots=8, block_rows=(8, 2), slot_rows=16, warps=2),
        SimConfig(ranks=2, tokens=8, header_words=4, dispatch_ctas=(4, 1, 3), compute_ctas=(6,)),
    ],
    ids=["one_rank", "experts_as_ranks", "k_above_local_experts", "tiles", "large_slots", "grids"],
)
def test_shapes(config: SimConfig) -> None:
    for weak in (False, True):
        assert_clean(replace(config, routing="dense", weak=weak), range(2))


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
def test_block_remainders(rows: int) -> None:
    """All tokens to one expert: 1, BM - 1, BM, BM + 1 and more rows."""
    tokens = tuple((0,) for _ in range(rows))
    config = SimConfig(
        ranks=2, tokens=9, top_k=1, experts=2, block_rows=(4,), problem=((tokens, ()),) * 3
    )
    assert_clean(config, range(2))
    assert simulate(config).most_blocks == -(-rows // 4)


@pytest.mark.parametrize("weak", [False, True], ids=["sequential", "weak"])
def test_counters_just_below_the_wrap(weak: bool) -> None:
    config = SimConfig(start="wrap", weak=weak, routing="dense", block_rows=(1,), replays=4)
    assert_clean(config, range(12))


def test_ring_reuse_with_many_compute_ctas() -> None:
    """W2 of a block whose slot's last W1 is late must not take the bits of two epochs ago."""
    config = SimConfig(
        tokens=3, experts=2, routing="dense", block_rows=(1,), compute_ctas=(4,), warps=2
    )
    assert_clean(config, range(40), "delay:cta=0,cell=w1_bitmap", "random")


# ---- determinism --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_same_seed_same_run(seed: int) -> None:
    one, two = run_seed(seed), run_seed(seed)
    assert one.config == two.config == random_config(seed)
    assert (one.trace, one.steps, one.blocked, one.y) == (two.trace, two.steps, two.blocked, two.y)
    assert one.timeline == two.timeline


def test_other_seed_other_run() -> None:
    config = SimConfig(routing="dense")
    assert len({simulate(config, seed, "random").trace for seed in range(20)}) == 20


def test_failing_schedule_replays_from_its_seed() -> None:
    mutant = next(m for m in hand_mutants() if m.name == "skip_full_before_bits")
    found = hunt(mutant).result
    assert found is not None
    config = mutant.config(found.seed)
    again = simulate(config, found.seed, found.schedule, mutant.variant)
    assert (again.violations, again.trace) == (found.violations, found.trace)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of"):
        simulate(SimConfig(), 0, "alphabetical")
    with pytest.raises(ValueError, match="region"):
        simulate(SimConfig(), 0, "delay:cell=nothing")


@pytest.mark.parametrize(
    "wrong",
    [
        {"experts": 3},
        {"dispatch_ctas": (5,)},
        {"w2_columns": (96,)},
        {"w2_columns": (512,), "hidden": 512},
    ],
)
def test_bad_configuration_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|at most"):
        SimConfig(**wrong)  # type: ignore[arg-type]


# ---- faults -------------------------------------------------------------------------------


def test_faults_leave_y_right_or_nan() -> None:
    """Violations would name wrong rows; here rows of both kinds and every role must occur."""
    roles, nan, right = set(), 0, 0
    for seed in range(300):
        result = simulate(random_config(seed, faults=True), seed, SCHEDULES[seed % 5])
        assert result.violations == [], seed
        roles |= {fault.role for fault in result.faults}
        for rows in result.y:
            nan += sum(row is NAN for row in rows.values())
            right += sum(row is not NAN for row in rows.values())
    assert len(roles) == 3
    assert nan > 100
    assert right > 100


def test_fault_says_who_waited_for_what() -> None:
    config = SimConfig(routing="dense", expiries=1)
    faults = [f for seed in range(60) for f in simulate(config, seed, "priority").faults]
    headers = [f for f in faults if f.cell.name == "RECV_HEADER"]
    assert headers
    assert "waited for recv_header" in headers[0].describe()
    assert "from rank" in headers[0].describe()


@pytest.mark.parametrize("weak", [False, True], ids=["sequential", "weak"])
def test_reset_recovers(weak: bool) -> None:
    config = SimConfig(
        routing="dense", expiries=2, broadcast=False, replays=5, reset_after=2, weak=weak
    )
    faulty = 0
    for seed in range(60):
        result = simulate(config, seed, SCHEDULES[seed % 5])
        assert result.violations == [], seed
        faulty += bool(result.faults)
        assert all(row is not NAN for rows in result.y for row in rows.values())
    assert faulty > 30


def test_skipped_layer_call_is_a_fault_on_every_rank() -> None:
    config = SimConfig(routing="dense", calls=((0, 1, 2, 3), (0, 2, 3)))
    for seed in range(40):
        result = simulate(config, seed, SCHEDULES[seed % 5])
        assert result.violations == [], seed
        assert FaultKind.CALL_MISMATCH in {fault.kind for fault in result.faults}
        # The first call is right everywhere, the later ones are NaN on both ranks.
        last = [len(ids) for ids in draw_problem(config, seed)[3]]
        for rank, tokens in enumerate(last):
            assert all(result.y[rank][token] is NAN for token in range(tokens))


def test_rank_that_calls_one_time_less_hangs_nobody() -> None:
    config = SimConfig(routing="dense", calls=((0, 1, 2), (0, 1)), expiries=1)
    for seed in range(20):
        result = simulate(config, seed, SCHEDULES[seed % 5])
        assert result.violations == [], seed
        assert result.verdict == "fault"


def test_without_budgets_a_missing_call_is_a_deadlock_that_names_the_peer() -> None:
    config = SimConfig(routing="dense", calls=((0, 1, 2), (0, 1)))
    result = simulate(config, 0, "random")
    (name, detail), *_ = result.violations
    assert name == "no_deadlock"
    assert "rank 0 replay 2 dispatch CTA 0 waits for header from rank 1" in detail


def test_late_compute_starts_behind_dispatch_and_takes_items() -> None:
    config = SimConfig(routing="dense", compute_ctas=(1,), late_ctas=(2,), tokens=3)
    for seed in range(20):
        result = simulate(config, seed, SCHEDULES[seed % 5])
        assert result.violations == [], seed
        events = [e for e in result.timeline if (e.rank, e.replay) == (0, 0)]
        ended = max(e.step for e in events if e.role is Role.DISPATCH and e.what == "end")
        started = {e.cta: e.step for e in events if e.role is Role.COMPUTE and e.what == "start"}
        assert sorted(started) == [0, 1, 2]
        assert min(started[1], started[2]) >= ended


def test_finalize_may_start_and_end_before_compute_ends() -> None:
    config = SimConfig(routing="dense", compute_ctas=(2,), tokens=3)
    starts, ends = 0, 0
    for seed in range(40):
        result = simulate(config, seed, SCHEDULES[seed % 5])
        assert result.violations == [], seed
        for rank, replay in {(e.rank, e.replay) for e in result.timeline}:
            events = [e for e in result.timeline if (e.rank, e.replay) == (rank, replay)]
            compute = max(e.step for e in events if e.role is Role.COMPUTE)
            finalize = [e.step for e in events if e.role is Role.FINALIZE]
            starts += min(finalize) < compute
            ends += max(finalize) < compute
    assert starts > 40
    assert ends > 0
