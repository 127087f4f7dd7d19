"""Schedules: which of the actors that can run makes the next step.

A schedule is a name; with the seed it fixes the whole run. ``delay:...`` names starve something:
``delay:rank=1``, ``delay:role=dispatch``, ``delay:cta=0``, ``delay:cell=token_ring_full`` (whoever
is about to access that region), or several at once, ``delay:role=compute,cta=0``; plain ``delay``
draws the victim from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from gcmoe.protocol import Role
from gcmoe.sim.config import SimConfig
from gcmoe.sim.memory import REGION_NAMES, Actor

Policy = Callable[[list[Actor]], int]
SCHEDULES = ("round_robin", "random", "burst", "priority", "delay")
DELAY_CELLS = (
    "recv_header",
    "token_ring_full",
    "token_ring_empty",
    "w1_bitmap",
    "combine_arrivals",
    "routes",
    "staged_x",
    "combine",
    "finalize_done",
)


def schedule_for(seed: int) -> str:
    """The schedule that exploration uses for ``seed``."""
    return SCHEDULES[seed % len(SCHEDULES)]


def make_policy(name: str, rng: random.Random, config: SimConfig) -> Policy:
    """The policy of a schedule name.

    Raises:
        ValueError: unknown name.
    """
    kind, _, rest = name.partition(":")
    if kind == "round_robin":
        return _round_robin()
    if kind == "random":
        uniform = rng.random
        return lambda runnable: int(uniform() * len(runnable))
    if kind == "burst":
        return _burst(rng)
    if kind == "priority":
        return _priority(rng)
    if kind == "delay":
        return _delay(rng, _victim(rest or _draw_victim(rng, config)))
    raise ValueError(f"schedule = {name!r}: must be one of {', '.join(SCHEDULES)}")


def _round_robin() -> Policy:
    last = -1

    def pick(runnable: list[Actor]) -> int:
        nonlocal last
        best, wrapped = -1, 0
        for index, actor in enumerate(runnable):
            if actor.ident > last and (best < 0 or actor.ident < runnable[best].ident):
                best = index
            if actor.ident < runnable[wrapped].ident:
                wrapped = index
        if best < 0:
            best = wrapped
        last = runnable[best].ident
        return best

    return pick


def _burst(rng: random.Random) -> Policy:
    """Long stretches of one actor."""
    uniform, going = rng.random, rng.choice((0.7, 0.9, 0.97))
    last: Actor | None = None

    def pick(runnable: list[Actor]) -> int:
        nonlocal last
        if last is not None and uniform() < going:
            for index, actor in enumerate(runnable):
                if actor is last:
                    return index
        index = int(uniform() * len(runnable))
        last = runnable[index]
        return index

    return pick


def _priority(rng: random.Random) -> Policy:
    """The actor of the highest priority runs; now and then it falls behind all others."""
    uniform, change = rng.random, rng.choice((0.005, 0.02, 0.1))

    def pick(runnable: list[Actor]) -> int:
        best = 0
        for index in range(1, len(runnable)):
            if runnable[index].priority > runnable[best].priority:
                best = index
        if uniform() < change:
            runnable[best].priority = -uniform()
        return best

    return pick


def _draw_victim(rng: random.Random, config: SimConfig) -> str:
    """What a plain ``delay`` starves."""
    rank = f"rank={rng.randrange(config.ranks)}"
    role = f"role={rng.choice(('dispatch', 'compute', 'finalize'))}"
    cta = f"cta={rng.randrange(2)}"
    cell = f"cell={rng.choice(DELAY_CELLS)}"
    return rng.choice((rank, role, cta, cell, f"{rank},{role}", f"{role},{cta}", f"{cta},{cell}"))


def _fits(key: str, value: str) -> Callable[[Actor], bool]:
    if key == "rank":
        rank = int(value)
        return lambda actor: actor.rank == rank
    if key == "role":
        role = Role[value.upper()]
        return lambda actor: actor.cta.role is role
    if key == "cta":
        cta = int(value)
        return lambda actor: actor.cta.index == cta and actor.cta.role is not Role.HOST
    if key == "cell" and value in REGION_NAMES:
        return lambda actor: actor.region == value
    raise ValueError(
        f"schedule delays {key}={value}: must be rank=, role=, cta= or the cell= of a region"
    )


def _victim(rest: str) -> Callable[[Actor], bool]:
    """Whether an actor fits all ``key=value`` parts of ``rest``."""
    tests: list[Callable[[Actor], bool]] = []
    for part in rest.split(","):
        key, _, value = part.partition("=")
        tests.append(_fits(key, value))
    if len(tests) == 1:
        return tests[0]
    return lambda actor: all(test(actor) for test in tests)


def _delay(rng: random.Random, is_victim: Callable[[Actor], bool]) -> Policy:
    uniform, leak = rng.random, rng.choice((0.0, 0.01, 0.05))

    def pick(runnable: list[Actor]) -> int:
        index = int(uniform() * len(runnable))
        if not is_victim(runnable[index]) or uniform() < leak:
            return index
        free = [i for i, actor in enumerate(runnable) if not is_victim(actor)]
        return free[int(uniform() * len(free))] if free else index

    return pick
