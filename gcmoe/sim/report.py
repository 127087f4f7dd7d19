"""What ``gcmoe sim`` prints: a timeline of the roles and a verdict. Also a small real layer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gcmoe.protocol import Role
from gcmoe.sim.checks import CHECKS
from gcmoe.sim.config import SimConfig
from gcmoe.sim.run import WAIT_KINDS, ExploreResult, SimResult, simulate
from gcmoe.sim.schedule import SCHEDULES, schedule_for
from gcmoe.timeline import Span, Timeline, write

WIDTH = 72
ROLES = (Role.DISPATCH, Role.COMPUTE, Role.FINALIZE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gcmoe sim``."""
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the group (default 2)")
    parser.add_argument(
        "--tokens", type=int, default=3, help="tokens of a rank, at most (default 3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of routing and schedule")
    parser.add_argument(
        "--schedules", type=int, default=1, help="seeds to run, from --seed on (default 1)"
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="write the result to FILE")
    parser.add_argument(
        "--schedule",
        default=None,
        help=f"{', '.join(SCHEDULES)} or delay:KEY=VALUE; default: by seed",
    )
    parser.add_argument("--weak", action="store_true", help="weak memory")
    parser.add_argument(
        "--trace", metavar="FILE", default=None, help="write the shown run as a trace, or as .png"
    )


def config_of(args: argparse.Namespace) -> SimConfig:
    """A layer of two experts a rank, and a ring that a busy replay overflows."""
    return SimConfig(
        ranks=args.ranks,
        tokens=args.tokens,
        top_k=2,
        experts=2 * args.ranks,
        intermediate=256,
        num_slots=4,
        block_rows=(1,),
        compute_ctas=(3,),
        weak=bool(getattr(args, "weak", False)),
    )


def timeline(result: SimResult) -> str:
    """One row per rank and role: when its CTAs ran, the replay number as the mark."""
    scale = max(result.steps, 1) / WIDTH
    rows = []
    for rank in range(result.config.ranks):
        for role in ROLES:
            row = [" "] * WIDTH
            spans: dict[int, list[int]] = {}
            for event in result.timeline:
                if event.rank == rank and event.role is role:
                    spans.setdefault(event.replay, []).append(event.step)
            for replay, steps in spans.items():
                first, last = int(min(steps) / scale), int(max(steps) / scale)
                for column in range(first, min(last + 1, WIDTH)):
                    row[column] = str(replay % 10)
            rows.append(f"rank {rank} {role.name.lower():8s} |{''.join(row)}|")
    return "\n".join(rows)


def to_timeline(result: SimResult) -> Timeline:
    """The run in the form of a traced replay: CTAs of dispatch, then those of the other roles, as
    SMs; steps as time."""
    started: dict[tuple[int, Role, int, int], int] = {}
    grid = 1 + max((e.cta for e in result.timeline if e.role is Role.DISPATCH), default=0)
    spans = []
    for event in result.timeline:
        key = (event.rank, event.role, event.replay, event.cta)
        if event.what == "start":
            started[key] = event.step
            continue
        role, begin = event.role.name.lower(), float(started.pop(key))
        sm = event.cta if event.role is Role.DISPATCH else grid + event.cta
        name, end = f"{role} {event.replay}", float(event.step)
        spans.append(Span(name, role, event.rank, sm, event.cta, begin, end))
    title = f"simulated: seed {result.seed}, schedule {result.schedule}, {result.verdict}"
    facts = {"seed": result.seed, "schedule": result.schedule, "verdict": result.verdict}
    return Timeline(title, tuple(spans), facts, "steps")


def describe(result: SimResult) -> str:
    """The verdict of one schedule in a few lines."""
    waits = ", ".join(f"{kind} {result.blocked.get(kind, 0)}" for kind in WAIT_KINDS)
    lines = [
        f"seed {result.seed}, schedule {result.schedule}, {result.steps} steps, "
        f"trace {result.trace:016x}",
        f"waits that blocked: {waits}",
        f"largest replay: {result.most_blocks} blocks, ring of {result.config.num_slots} slots; "
        f"a rank was {'' if result.ran_ahead else 'never '}one replay ahead",
    ]
    lines += [f"fault: {fault.describe()}" for fault in result.faults]
    for name, detail in result.violations:
        lines.append(f"violation of {name} ({CHECKS[name].text}): {detail}")
    if result.violations:
        lines.append(
            f"replay it: simulate(config, seed={result.seed}, schedule={result.schedule!r})"
        )
    lines.append(f"verdict: {result.verdict}")
    return "\n".join(lines)


def _run_all(args: argparse.Namespace) -> tuple[ExploreResult, SimResult]:
    config, total = config_of(args), ExploreResult()
    shown: SimResult | None = None
    for seed in range(args.seed, args.seed + max(args.schedules, 1)):
        result = simulate(config, seed, getattr(args, "schedule", None) or schedule_for(seed))
        total.add(result)
        if shown is None or (result.violations and not shown.violations):
            shown = result
    assert shown is not None
    return total, shown


def main_sim(args: argparse.Namespace) -> int:
    """Runs the schedules that ``args`` ask for and prints the first, or the first that failed.

    Returns:
        0 if no invariant was violated, 1 otherwise, 2 for arguments that make no layer.
    """
    try:
        total, shown = _run_all(args)
    except ValueError as error:
        print(f"error: {error}")
        return 2
    print(timeline(shown))
    print(describe(shown))
    if total.schedules > 1:
        print(
            f"{total.schedules} schedules, {len(total.traces)} distinct, "
            f"{total.more_blocks_than_slots} with more blocks than slots, "
            f"{len(total.failures)} failed"
        )
    if getattr(args, "trace", None):
        write(to_timeline(shown), args.trace)
    if args.json:
        found = {
            "run": shown.to_json(),
            "all": total.summary(),
            "checks": {k: v.text for k, v in CHECKS.items()},
        }
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if total.failures else 0


main = main_sim


def demo(
    show: Callable[[str], object] = print,
    *,
    ranks: int = 4,
    tokens: int = 3,
    replays: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs a small real layer through the simulator, weak memory included.

    Returns:
        verdict, whether y has the oracle's bits, and the worst token's cosine and relative L2
        against the oracle and against the unquantised layer.
    """
    import torch

    from gcmoe.numerics import compare
    from gcmoe.sim.numbers import Numbers

    config = SimConfig(
        ranks=ranks, tokens=tokens, top_k=2, experts=8, hidden=256, intermediate=128,
        num_slots=4, block_rows=(2,), replays=replays, weak=True, routing="dense",
    )  # fmt: skip
    numbers = Numbers(config, seed)
    result = simulate(config, seed, "random", data=numbers)
    show(timeline(result))
    show(f"verdict: {result.verdict}")
    found: dict[str, Any] = {"verdict": result.verdict, "seed": seed, "ranks": ranks}
    if result.violations:
        found["violations"] = result.violations
        return found
    last = replays - 1
    y = torch.cat(
        [result.y[r][t][None] for r in range(ranks) for t in range(len(numbers.x[last][r]))]
    )
    oracle, plain = torch.cat(numbers.oracle[last]), torch.cat(numbers.unquantized[last])
    found["bitwise"] = bool(torch.equal(y, oracle))
    for name, reference in (("oracle", oracle), ("unquantized", plain)):
        cosine, relative = compare(y, reference)
        found[name] = {"cosine": cosine, "relative_l2": relative}
        show(f"against the {name} layer: cosine {cosine:.6f}, relative L2 {relative:.3e}")
    return found
