"""Runs one schedule, or explores many."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from gcmoe.protocol import FaultRecord
from gcmoe.sim.checks import Violation
from gcmoe.sim.config import SimConfig, random_config
from gcmoe.sim.data import DataMode
from gcmoe.sim.host import start
from gcmoe.sim.machine import Event, Simulation
from gcmoe.sim.schedule import schedule_for
from gcmoe.sim.variant import SPECIFIED, Variant

WAIT_KINDS = ("header", "routes", "full", "empty", "bits", "arrivals")


@dataclass
class SimResult:
    """What one schedule did.

    ``verdict`` is "ok", "fault" (a fault was raised, every y right or NaN) or "violation".
    """

    seed: int
    schedule: str
    config: SimConfig
    verdict: str
    violations: list[tuple[str, str]]
    trace: int
    steps: int
    blocked: dict[str, int]
    ran_ahead: bool
    most_blocks: int
    faults: list[FaultRecord]
    timeline: list[Event] = field(repr=False)
    y: list[dict[int, Any]] = field(repr=False)

    @property
    def more_blocks_than_slots(self) -> bool:
        return self.most_blocks > self.config.num_slots

    def to_json(self) -> dict[str, Any]:
        """A plain object for ``--json``."""
        return {
            "seed": self.seed,
            "schedule": self.schedule,
            "config": asdict(self.config),
            "verdict": self.verdict,
            "violations": [{"name": name, "detail": detail} for name, detail in self.violations],
            "trace": f"{self.trace:016x}",
            "steps": self.steps,
            "blocked": dict(self.blocked),
            "ran_ahead": self.ran_ahead,
            "most_blocks": self.most_blocks,
            "faults": [fault.describe() for fault in self.faults],
        }


def simulate(
    config: SimConfig,
    seed: int = 0,
    schedule: str = "random",
    variant: Variant = SPECIFIED,
    data: DataMode | None = None,
) -> SimResult:
    """Runs one schedule to its end or to the first violation; the same arguments, the same run."""
    sim = Simulation(config, seed, schedule, variant, data)
    violations: list[tuple[str, str]] = []
    try:
        start(sim)
        sim.run()
    except Violation as violation:
        violations.append((violation.name, violation.detail))
    if not violations and sim.faults and not config.expiries and config.calls is None:
        violations.append(("no_fault", sim.faults[0].describe()))
    verdict = "violation" if violations else "fault" if sim.faults else "ok"
    return SimResult(
        seed=seed,
        schedule=schedule,
        config=config,
        verdict=verdict,
        violations=violations,
        trace=sim.trace,
        steps=sim.steps,
        blocked=dict(sim.blocked_waits),
        ran_ahead=sim.check.ran_ahead,
        most_blocks=sim.most_blocks,
        faults=sim.faults,
        timeline=sim.events,
        y=sim.y,
    )


@dataclass
class ExploreResult:
    """Counts over many schedules."""

    schedules: int = 0
    traces: set[int] = field(default_factory=set)
    more_blocks_than_slots: int = 0
    ran_ahead: int = 0
    weak: int = 0
    steps: int = 0
    blocked: Counter[str] = field(default_factory=Counter)
    failures: list[SimResult] = field(default_factory=list)

    def add(self, result: SimResult) -> None:
        self.schedules += 1
        self.traces.add(result.trace)
        self.more_blocks_than_slots += result.more_blocks_than_slots
        self.ran_ahead += result.ran_ahead
        self.weak += result.config.weak
        self.steps += result.steps
        self.blocked.update(result.blocked)
        if result.violations:
            self.failures.append(result)

    def merge(self, other: ExploreResult) -> None:
        self.schedules += other.schedules
        self.traces |= other.traces
        self.more_blocks_than_slots += other.more_blocks_than_slots
        self.ran_ahead += other.ran_ahead
        self.weak += other.weak
        self.steps += other.steps
        self.blocked.update(other.blocked)
        self.failures += other.failures

    def summary(self) -> dict[str, Any]:
        return {
            "schedules": self.schedules,
            "distinct_traces": len(self.traces),
            "more_blocks_than_slots": self.more_blocks_than_slots,
            "ran_ahead": self.ran_ahead,
            "weak": self.weak,
            "steps": self.steps,
            "blocked": dict(self.blocked),
            "failures": [failure.to_json() for failure in self.failures],
        }


def run_seed(seed: int, config: SimConfig | None = None) -> SimResult:
    """The exploration's schedule of ``seed``; this is how a failure is replayed."""
    return simulate(config or random_config(seed), seed, schedule_for(seed))


def _explore_seeds(seeds: Iterable[int], config: SimConfig | None) -> ExploreResult:
    total = ExploreResult()
    for seed in seeds:
        total.add(run_seed(seed, config))
    return total


def explore(
    num_schedules: int,
    first_seed: int = 0,
    config: SimConfig | None = None,
    processes: int = 1,
) -> ExploreResult:
    """Runs ``num_schedules`` seeds; each draws its configuration unless one is given."""
    if processes <= 1:
        return _explore_seeds(range(first_seed, first_seed + num_schedules), config)
    end = first_seed + num_schedules
    shares = [(range(first_seed + p, end, processes), config) for p in range(processes)]
    # A forked child would inherit the locks of threads that it does not have.
    context = multiprocessing.get_context("spawn")
    total = ExploreResult()
    with context.Pool(processes) as pool:
        for part in pool.starmap(_explore_seeds, shares):
            total.merge(part)
    return total
