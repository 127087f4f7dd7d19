"""``python -m bench``: the command line of a run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import dry_run, schema
from bench.cases import (
    ABLATIONS,
    CUSTOM,
    DEFAULT,
    PRESETS,
    VARIANTS,
    Case,
    custom_variant,
    make_cases,
)
from bench.impls import IMPLS, Impl
from bench.impls.gcmoe_layer import compile_kernels
from bench.progress import Progress
from bench.runner import DeviceLost, Options, Runner
from bench.table import text_table
from bench.watchdog import Watchdog
from bench.world import World, close_world, open_world, size_from_environment
from gcmoe.models import MODELS

COMPILE_LIMIT_S = 150.0
LOST = "the device was lost"
EPILOG = """\
Layer time = (a graph of L layers with a foreign kernel before each - the same graph with the
foreign kernels only) / L; distinct weights, fresh routing and random data for each layer, graphs
taking turns. Every case is compared with the oracle first. With several ranks start it by
torchrun; the slowest rank counts. Exit status 1: a result is wrong or a case failed.
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Time the layer and its peers.", epilog=EPILOG
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="smoke", help="(smoke)")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), metavar="NAME")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="T", help="tokens of each rank")
    parser.add_argument("--impls", nargs="+", choices=sorted(IMPLS), metavar="NAME")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=[*VARIANTS, "ablations"],
        metavar="NAME",
        help=f"of gcmoe: {', '.join(VARIANTS)}; ablations is all of them",
    )
    parser.add_argument(
        "--custom",
        nargs="+",
        metavar="NAME=N",
        help="one more variant: integer options of gcmoe.MoE, such as dispatch_sms=24",
    )
    parser.add_argument("--layers", type=int, default=20, metavar="L", help="of a graph (20)")
    parser.add_argument("--replays", type=int, default=30, metavar="N", help="at least 20 (30)")
    parser.add_argument(
        "--sustained",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="also replay back to back for so long and time the last quarter",
    )
    parser.add_argument("--trace", action="store_true", help="also phases by role, of gcmoe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no case later"
    )
    parser.add_argument(
        "--compile-limit",
        type=float,
        default=COMPILE_LIMIT_S,
        metavar="SECONDS",
        help=f"for peers that compile ahead ({COMPILE_LIMIT_S:.0f})",
    )
    parser.add_argument("--out", default="bench/results", metavar="DIR", help="(bench/results)")
    parser.add_argument("--name", default="bench", help="first part of the record's file name")
    parser.add_argument("--ranks", type=int, help="of --dry-run and --compile-only (WORLD_SIZE)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan of the run")
    parser.add_argument("--compile-only", action="store_true", help="fill caches; needs no GPU")
    ns = parser.parse_args(arguments)
    preset = PRESETS[ns.preset]
    ns.models = tuple(ns.models or preset.models)
    ns.tokens = tuple(ns.tokens or preset.tokens)
    ns.impls = tuple(name for name in IMPLS if name in (ns.impls or preset.impls))
    variants = tuple(ns.variants or preset.variants)
    if ns.custom:
        try:
            VARIANTS[CUSTOM] = custom_variant(ns.custom)
        except ValueError as error:
            parser.error(f"--custom {error}")
        variants = (*variants, CUSTOM)
    if "ablations" in variants:
        variants = (DEFAULT, *ABLATIONS, *variants)
    ns.variants = tuple(name for name in VARIANTS if name in variants)
    ns.ranks = ns.ranks or size_from_environment()
    if ns.layers < 1 or ns.replays < 20:
        parser.error("--layers must be positive, --replays at least 20")
    try:
        ns.cases = make_cases(ns.models, ns.tokens, ns.ranks)
        for case in ns.cases:
            case.config()
    except ValueError as error:
        parser.error(str(error))
    return ns


def options_of(ns: argparse.Namespace) -> Options:
    return Options(
        layers=ns.layers,
        replays=ns.replays,
        sustained_s=ns.sustained,
        trace=ns.trace,
        seed=ns.seed,
        budget_s=ns.budget,
        variants=ns.variants,
    )


def survey(ns: argparse.Namespace) -> tuple[list[Impl], dict[str, dict[str, str]]]:
    """Implementations that can run, and the state of all that were asked for."""
    usable, states = [], {}
    for name in ns.impls:
        impl = IMPLS[name]
        absent, unfit = impl.absent(), impl.unfit(ns.cases[0])
        state = "absent" if absent else "unfit" if unfit else "present"
        states[name] = {"state": state, "reason": absent or unfit, "install": impl.install}
        if state == "present":
            usable.append(impl)
    return usable, states


def compile_only(ns: argparse.Namespace, usable: list[Impl]) -> int:
    """Fill the kernel caches of the run."""

    def say(text: str) -> None:
        print(text, flush=True)

    if "gcmoe" in ns.impls:
        count = compile_kernels(ns.cases, ns.variants, trace=ns.trace, say=say)
        say(f"gcmoe: {count} kernels")
    status = 0
    for impl in usable:
        start = time.perf_counter()
        missing = impl.prepare(ns.cases, ns.compile_limit)
        say(f"{impl.name}: {missing or 'complete'} ({time.perf_counter() - start:.0f} s)")
        status = max(status, int(bool(missing)))
    return status


def command_words(words: list[str]) -> list[str]:
    """The arguments of a run without its folder, which says nothing about what was measured."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if "--out" not in (before, word) and not word.startswith("--out=")
    ]


class Recorder:
    """The record of a run; on rank 0 it is written after every case."""

    def __init__(self, ns: argparse.Namespace, world: World, states: dict[str, Any]) -> None:
        from bench import environment

        self._world = world
        options = asdict(options_of(ns)) | {"variants": list(ns.variants)}
        options["budget_s"] = ns.budget if ns.budget != float("inf") else None
        self.record: dict[str, Any] = {
            "schema_version": schema.VERSION,
            "command": command_words(sys.argv[1:]),
            "ranks": world.size,
            **environment.describe(),
            "options": options,
            "implementations": states,
            "skipped": [],
            "ended": "running",
            "rows": [],
        }
        stamp = self.record["created"].replace(":", "").replace("-", "")
        ranks = f"-r{world.size}" if world.size > 1 else ""
        self.path = Path(ns.out) / f"{ns.name}{ranks}-{stamp}.json"
        self.write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.record["rows"])

    def add(self, rows: list[dict[str, Any]], skipped: list[str]) -> None:
        """Rows of a case, and all that was skipped so far."""
        self.record["rows"] += rows
        self.record["skipped"] = list(skipped)
        self.write()

    def end(self, how: str) -> None:
        self.record["ended"] = how
        self.write()

    def write(self) -> None:
        if self._world.rank == 0:
            schema.write(self.record, self.path)


def headline(case: Case, rows: list[dict[str, Any]]) -> str:
    """One line about a case."""
    parts = [
        f"{row['impl']} {row['variant']} "
        + (f"{row['median_us']:.1f}" if row["median_us"] else "failed")
        + ("" if row["correct"] else " (WRONG)" if row["median_us"] else "")
        for row in rows
    ]
    floor = f"floor {rows[0]['floor_us']:.1f}" if rows else "nothing to run"
    return f"{case.model} T = {case.tokens}: {floor}; " + ", ".join(parts)


def run_model(runner: Runner, cases: list[Case], recorder: Recorder, progress: Progress) -> None:
    """All cases of one model."""
    bank = runner.open_bank(cases)
    try:
        for case in cases:
            if not runner.has_time():
                runner.skipped.append(f"{case.model} T = {case.tokens}: the time budget is used up")
                progress.case_done(f"{case.model} T = {case.tokens}: no time left")
                continue
            rows = runner.run_case(case, bank)
            recorder.add(rows, runner.skipped)
            progress.case_done(headline(case, rows))
    finally:
        del bank
        runner.close_bank()


def run(ns: argparse.Namespace, usable: list[Impl], states: dict[str, Any]) -> int:
    """Measure; 0 if every row is right."""
    from bench import environment

    world = open_world()
    recorder = Recorder(ns, world, states)
    watchdog = Watchdog(recorder.end)
    with Progress(len(ns.cases), quiet=world.rank > 0) as progress:
        for name, state in states.items():
            if state["state"] != "present":
                progress.say(f"{name}: {dry_run.state_text(state)}")
        runner = Runner(usable, options_of(ns), world, watchdog, progress.say)
        runner.prepare(ns.cases, ns.compile_limit)
        ended = "complete"
        for model in ns.models:
            cases = [case for case in ns.cases if case.model == model]
            try:
                run_model(runner, cases, recorder, progress)
            except DeviceLost as error:
                ended = f"{LOST}: {error}"
                break
            except Exception as error:
                ended = f"{model}: {type(error).__name__}: {error}"
                progress.say(ended)
                runner.skipped.append(ended)
                if world.size > 1:
                    break
    recorder.add([], runner.skipped)
    if not ended.startswith(LOST):
        recorder.record["clocks_after"] = environment.read_clocks()
    recorder.end(ended)
    if world.rank == 0:
        print(text_table(recorder.rows))
        print(f"{ended}; record: {recorder.path}", flush=True)
    if ended != "complete":
        # Other ranks may be gone and the device may hang: leave without taking leave.
        sys.stdout.flush()
        os._exit(1)
    close_world()
    good = recorder.rows and all(row["correct"] for row in recorder.rows)
    return 0 if good else 1


def main(arguments: list[str] | None = None) -> int:
    ns = parse(arguments)
    usable, states = survey(ns)
    if ns.dry_run:
        return dry_run.show(ns.cases, ns.variants, usable, states, options_of(ns))
    if ns.compile_only:
        return compile_only(ns, usable)
    return run(ns, usable, states)
