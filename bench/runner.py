"""Runs cases: weights once per model, then for each case all implementations side by side."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import timing
from bench.bank import WeightBank
from bench.cases import SHARE_OF, Case
from bench.checks import Reference, judge, make_references
from bench.data import Inputs, Load, case_inputs, measure_load
from bench.environment import read_clocks
from bench.impls import Impl, Session
from bench.impls.gcmoe_layer import GcMoE
from bench.phases import read_phases
from bench.stats import layer_times, percentile, slowest, summarize
from bench.watchdog import Watchdog
from bench.world import World

FOREIGN = "foreign"
ONE = ", one layer"
STEP_LIMIT_S = 240.0
"""For one step of a case; peers may compile in it."""
SLOW_STEP_S = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """How a run measures.

    Args:
        layers: L, layers of a graph.
        replays: timed replays of each graph.
        sustained_s: seconds of replays back to back whose last quarter is timed too; 0 for none.
        trace: also phases of our own layer, by role.
        seed: of weights, tokens and routing.
        budget_s: no case starts later than this.
        variants: of our own layer.
    """

    layers: int = 20
    replays: int = 30
    sustained_s: float = 0.0
    trace: bool = False
    seed: int = 0
    budget_s: float = float("inf")
    variants: tuple[str, ...] = ("default",)


@dataclass
class Entry:
    """One implementation and variant of a case, and what became of it."""

    impl: Impl
    variant: str
    session: Session | None = None
    graphs: timing.Graphs | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.impl.name} {self.variant}"

    def fail(self, error: str) -> None:
        self.error = self.error or error
        self.columns["correct"] = False

    def close(self) -> None:
        """Destroy the graphs, then the session."""
        self.graphs = None
        session, self.session = self.session, None
        if session is not None:
            try:
                session.close()
            except Exception as error:
                self.fail(f"closing: {type(error).__name__}: {error}")


class DeviceLost(RuntimeError):
    """The CUDA context is broken: nothing more can be measured in this process."""


def attempt(world: World, step: str, action: Callable[[], None]) -> str:
    """Run a step on all ranks. The same text on all of them: what failed, empty if nothing did.

    Raises:
        DeviceLost: the device does not answer any more.
    """
    error = ""
    try:
        action()
    except Exception as failure:
        error = f"{step}: {type(failure).__name__}: {failure}"[:600]
        traceback.print_exc()
        try:
            torch.cuda.synchronize()
        except Exception as broken:
            raise DeviceLost(f"{error}; then {broken}") from failure
    return world.failures(error)


class Runner:
    """Measures cases on this rank, in step with the other ranks."""

    def __init__(
        self,
        impls: Sequence[Impl],
        options: Options,
        world: World,
        watchdog: Watchdog,
        say: Callable[[str], None],
    ) -> None:
        self.impls, self.options, self.world = impls, options, world
        self._watchdog, self._say = watchdog, say
        self.skipped: list[str] = []
        self._start = time.monotonic()
        self._longest_case_s = 0.0

    def has_time(self) -> bool:
        """Whether another case fits into the budget; the same answer on all ranks."""
        spent = time.monotonic() - self._start
        fits = spent + self._longest_case_s <= self.options.budget_s
        return all(self.world.gather(fits))

    def prepare(self, cases: list[Case], limit_s: float) -> None:
        """Compile ahead what implementations want compiled."""
        for impl in self.impls:
            with self._watchdog.step(f"{impl.name}: compiling", limit_s + 60):
                missing = ""
                try:
                    missing = impl.prepare(cases, limit_s)
                except Exception as error:
                    missing = f"{type(error).__name__}: {error}"
                if missing:
                    self._say(f"{impl.name}: {missing}")

    def open_bank(self, cases: list[Case]) -> WeightBank:
        """Weights of one model's cases."""
        case = cases[0]
        fitting = [impl for impl in self.impls if not impl.unfit(case)]
        with self._watchdog.step(f"{case.model}: weights", STEP_LIMIT_S):
            start = time.monotonic()
            bank = WeightBank(case, fitting, self.options.layers, self.options.seed, self.world)
        for name, why in bank.failed.items():
            self._say(f"{name}: {why}")
        self._say(f"{case.model}: {bank.sets} weight sets in {time.monotonic() - start:.1f} s")
        return bank

    def close_bank(self) -> None:
        """Free what the implementations share; the caller has dropped the bank."""
        for impl in self.impls:
            impl.release()
        gc.collect()
        torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------- one case

    def run_case(self, case: Case, bank: WeightBank) -> list[dict[str, Any]]:
        """Rows of a case: one for each implementation and variant that offers it."""
        start = time.monotonic()
        world, options = self.world, self.options
        inputs = case_inputs(case, options.layers, options.seed, world.rank)
        ids = world.gather([one.ids.cpu() for one in inputs])
        loads = [measure_load(case, ids, rank) for rank in range(world.size)]
        entries = self._entries(case)
        references: list[Reference] = []

        def refer() -> None:
            references.extend(make_references(case, inputs, bank.packed_of))

        with self._watchdog.step(f"{case.model} T = {case.tokens}: oracle", STEP_LIMIT_S):
            error = attempt(world, "oracle", refer)
        try:
            if error:
                for entry in entries:
                    entry.fail(error)
            for entry in entries:
                if not entry.error:
                    self._ready(entry, case, bank, inputs, references)
            self._time(entries, case, inputs)
            if options.trace:
                self._trace(entries, case, bank, inputs)
        finally:
            for entry in entries:
                entry.close()
        self._longest_case_s = max(self._longest_case_s, time.monotonic() - start)
        return [self._row(entry, case, bank, loads) for entry in entries]

    def _entries(self, case: Case) -> list[Entry]:
        """What runs; what does not is noted in ``skipped``."""
        found = []
        for impl in self.impls:
            for variant in impl.variants(self.options.variants):
                entry = Entry(impl, variant)
                why = impl.unfit(case, variant)
                if why:
                    self.skipped.append(f"{case.model} T = {case.tokens} {entry.key}: {why}")
                else:
                    found.append(entry)
        return found

    def _ready(
        self,
        entry: Entry,
        case: Case,
        bank: WeightBank,
        inputs: list[Inputs],
        references: list[Reference],
    ) -> None:
        """Open, warm up, capture, check."""
        world = self.world

        def open_session() -> None:
            weights = bank.of(entry.impl.name)
            entry.session = entry.impl.open(case, entry.variant, weights, inputs, world)

        def warm_up() -> None:
            assert entry.session is not None
            timing.run_layers(inputs, entry.session.layer)
            entry.session.check()

        def capture() -> None:
            assert entry.session is not None
            entry.graphs = timing.make_graphs(inputs, entry.session.layer)

        def check() -> None:
            session, graphs = entry.session, entry.graphs
            assert session is not None
            assert graphs is not None
            session.clear()
            graphs.whole.replay()
            session.check()
            entry.columns |= session.facts()
            entry.columns |= judge(references, session.result, session.rule)

        steps = {"opening": open_session, "first run": warm_up, "capture": capture, "check": check}
        for name, action in steps.items():
            what = f"{case.model} T = {case.tokens} {entry.key}: {name}"
            start = time.monotonic()
            with self._watchdog.step(what, STEP_LIMIT_S):
                error = attempt(world, name, action)
            if time.monotonic() - start > SLOW_STEP_S:
                self._say(f"{what} took {time.monotonic() - start:.1f} s")
            if error:
                entry.fail(error)
                entry.close()
                return
        verdicts = world.gather({n: entry.columns[n] for n in ("correct", "finite", "cosine")})
        entry.columns["correct"] = all(one["correct"] for one in verdicts)
        entry.columns["finite"] = all(one["finite"] for one in verdicts)

    def _time(self, entries: list[Entry], case: Case, inputs: list[Inputs]) -> None:
        """Time all that are ready, taking turns."""
        ready = [entry for entry in entries if entry.graphs is not None]
        if not ready:
            return
        foreign = timing.make_graphs(inputs, None)
        graphs = {FOREIGN: foreign.whole, FOREIGN + ONE: foreign.one}
        for entry in ready:
            assert entry.graphs is not None
            graphs[entry.key] = entry.graphs.whole
            graphs[entry.key + ONE] = entry.graphs.one
        times: dict[str, list[float]] = {}

        def measure() -> None:
            times.update(timing.replay_times(graphs, self.options.replays))
            for entry in ready:
                assert entry.session is not None
                entry.session.check()

        with self._watchdog.step(f"{case.model} T = {case.tokens}: timing", STEP_LIMIT_S):
            error = attempt(self.world, "timing", measure)
        if error:
            for entry in ready:
                entry.fail(error)
            return
        clocks = read_clocks()
        by_rank = self.world.gather(times)
        for entry in ready:
            entry.columns["clocks"] = clocks
            self._summarize(entry, by_rank)
        if self.options.sustained_s:
            for entry in ready:
                self._sustain(entry, case)

    def _summarize(self, entry: Entry, by_rank: list[dict[str, list[float]]]) -> None:
        layers = self.options.layers

        def samples(name: str, base: str, count: int) -> list[float]:
            return slowest([layer_times(t[name], t[base], count) for t in by_rank])

        whole = samples(entry.key, FOREIGN, layers)
        summary = summarize(whole)
        entry.columns |= {
            "median_us": summary.median_us,
            "p10_us": summary.p10_us,
            "p90_us": summary.p90_us,
            "one_layer_us": timing.median(samples(entry.key + ONE, FOREIGN + ONE, 1)),
            "samples_us": [round(t, 3) for t in whole],
            "graph_us": [round(timing.median(t[entry.key]), 3) for t in by_rank],
            "foreign_us": [round(timing.median(t[FOREIGN]), 3) for t in by_rank],
            "rank_p50_us": [
                percentile(layer_times(t[entry.key], t[FOREIGN], layers), 50) for t in by_rank
            ],
        }

    def _sustain(self, entry: Entry, case: Case) -> None:
        """Replays back to back: clocks settle where power lets them."""
        graphs = entry.graphs
        assert graphs is not None
        slow = max(entry.columns["graph_us"])
        replays = timing.sustained_replays(slow, self.options.sustained_s)
        found: list[float] = []

        def measure() -> None:
            found.append(timing.sustained_time(graphs.whole, replays))

        limit = 60 + 4 * self.options.sustained_s
        with self._watchdog.step(f"{case.model} T = {case.tokens} {entry.key}: sustained", limit):
            error = attempt(self.world, "sustained", measure)
        if error:
            entry.fail(error)
            return
        bases = entry.columns["foreign_us"]
        times = self.world.gather(found[0])
        layers = self.options.layers
        entry.columns["sustained_us"] = max(
            (t - base) / layers for t, base in zip(times, bases, strict=True)
        )
        entry.columns["sustained_s"] = self.options.sustained_s

    def _trace(
        self, entries: list[Entry], case: Case, bank: WeightBank, inputs: list[Inputs]
    ) -> None:
        """Phases of our own layer, from kernels that record timestamps."""
        for entry in entries:
            impl = entry.impl
            if not isinstance(impl, GcMoE) or entry.error:
                continue

            def measure(impl: GcMoE = impl, entry: Entry = entry) -> None:
                weights = bank.of(impl.name)
                session = impl.open_traced(
                    case, entry.variant, weights, inputs, self.world, trace=True
                )
                try:
                    timing.run_layers(inputs, session.layer)
                    session.check()
                    graph = timing.make_graphs(inputs, session.layer).whole
                    entry.columns["trace_us"] = read_phases(session.op, graph)
                    del graph
                finally:
                    session.close()

            what = f"{case.model} T = {case.tokens} {entry.key}: trace"
            with self._watchdog.step(what, STEP_LIMIT_S):
                error = attempt(self.world, "trace", measure)
            if error:
                self._say(f"{entry.key}: {error}")

    def _row(self, entry: Entry, case: Case, bank: WeightBank, loads: list[Load]) -> dict[str, Any]:
        touched = max(load.touched_experts for load in loads)
        medians = entry.columns.pop("rank_p50_us", [None] * len(loads))
        row: dict[str, Any] = {
            "model": case.model,
            "tokens_per_rank": case.tokens,
            "ranks": case.ranks,
            "share_of": SHARE_OF,
            "variant": entry.variant,
            "impl": entry.impl.name,
            "whole_layer": entry.impl.whole_layer,
            "median_us": None,
            "p10_us": None,
            "p90_us": None,
            "floor_us": case.floor_us(touched),
            "touched_experts": touched,
            "layers": self.options.layers,
            "weight_sets": bank.sets,
            "per_rank": [
                {
                    "rank": rank,
                    "rows": load.rows,
                    "touched_experts": load.touched,
                    "median_us": medians[rank],
                }
                for rank, load in enumerate(loads)
            ],
        }
        row |= entry.columns
        if entry.error:
            row["error"] = entry.error
        return row
