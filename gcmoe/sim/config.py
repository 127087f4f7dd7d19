"""What is simulated: sizes, grids, routing, memory model, faults."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gcmoe.protocol import WorkspaceShape

Routing = Literal[
    "random",
    "one_expert",
    "one_rank",
    "last_expert",
    "empty",
    "idle_rank",
    "silent_rank",
    "one_token",
    "masked",
    "dense",
]
ROUTINGS: tuple[Routing, ...] = (
    "random",
    "one_expert",
    "one_rank",
    "last_expert",
    "empty",
    "idle_rank",
    "silent_rank",
    "one_token",
    "masked",
    "dense",
)
Start = Literal["zero", "wrap"]
STARTS: tuple[Start, ...] = ("zero", "wrap")

# Problem[layer][rank][token][slot] is an expert id; ids outside [0, E) are masked.
Problem = tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


@dataclass(frozen=True)
class SimConfig:
    """One simulated run. Tuples named after a grid cycle over ``rank + replay``.

    Args:
        ranks: R.
        tokens: capacity; the tokens of a rank vary between 0 and this number.
        top_k, experts, hidden, intermediate: the layer; ``experts`` over all ranks.
        num_slots: S. slot_rows: U. header_words: Q.
        block_rows: BM, cycling over replays: capacities with different blocks share one ring.
        dispatch_ctas, compute_ctas, finalize_ctas: grids.
        late_ctas: further compute CTAs, which start when dispatch has ended.
        w2_columns: columns of a W2 item, cycling over ranks only.
        warps: warps of a dispatch CTA that pull rows.
        rows_in_flight: rows that a warp loads before it stores the first of them.
        tickets_ahead: tickets that a compute CTA holds besides that of the running item.
        replays: layer calls of every rank.
        routing: kind of routing.
        problem: routing itself; None draws it from the seed.
        start: "wrap" starts every cumulative counter just below 2^32.
        weak: weak memory instead of sequential consistency.
        expiries: waits that the schedule lets expire (faults are injected).
        broadcast: whether the first expired waiter's abort reaches the peers.
        reset_after: replays after which all ranks reset; None for never.
        calls: per rank the layers it calls, in order; None is all layers.
        resident: compute CTAs that are resident at a time; None is all.
    """

    ranks: int = 2
    tokens: int = 2
    top_k: int = 2
    experts: int = 4
    hidden: int = 256
    intermediate: int = 128
    num_slots: int = 2
    slot_rows: int = 8
    header_words: int = 2
    block_rows: tuple[int, ...] = (2,)
    dispatch_ctas: tuple[int, ...] = (2, 1)
    compute_ctas: tuple[int, ...] = (2,)
    finalize_ctas: tuple[int, ...] = (2, 1)
    late_ctas: tuple[int, ...] = (0,)
    w2_columns: tuple[int, ...] = (256,)
    warps: int = 1
    rows_in_flight: int = 2
    tickets_ahead: int = 0
    replays: int = 3
    routing: Routing = "random"
    problem: Problem | None = None
    start: Start = "zero"
    weak: bool = False
    expiries: int = 0
    broadcast: bool = True
    reset_after: int | None = None
    calls: tuple[tuple[int, ...], ...] | None = None
    resident: int | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "top_k", "experts", "replays", "warps", "rows_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        if self.experts % self.ranks:
            raise ValueError(
                f"experts = {self.experts}: must be a multiple of the {self.ranks} ranks"
            )
        if max(self.dispatch_ctas) > self.header_words:
            raise ValueError(
                f"dispatch_ctas = {self.dispatch_ctas}: at most header_words = "
                f"{self.header_words}, because every CTA writes a word"
            )
        group = self.shape.arrivals.columns
        for columns in self.w2_columns:
            if columns % 64 or group % columns:
                raise ValueError(
                    f"w2_columns = {columns}: must be a multiple of 64 that divides the {group} "
                    f"columns of a group of hidden = {self.hidden}"
                )

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @cached_property
    def shape(self) -> WorkspaceShape:
        return WorkspaceShape(
            hidden=self.hidden,
            intermediate=self.intermediate,
            top_k=self.top_k,
            max_tokens=self.tokens,
            num_ranks=self.ranks,
            local_experts=self.local_experts,
            num_slots=self.num_slots,
            slot_rows=self.slot_rows,
            block_rows=max(self.block_rows),
            least_block_rows=min(self.block_rows),
            header_words=self.header_words,
        )

    def grid(self, sizes: tuple[int, ...], rank: int, replay: int) -> int:
        return sizes[(rank + replay) % len(sizes)]

    def layers(self, rank: int) -> tuple[int, ...]:
        """The layers that ``rank`` calls, in order."""
        return tuple(range(self.replays)) if self.calls is None else self.calls[rank]


def draw_rank(config: SimConfig, rng: random.Random, rank: int) -> tuple[tuple[int, ...], ...]:
    """Expert ids of the tokens of one rank in one call."""
    e, k, local, kind = config.experts, config.top_k, config.local_experts, config.routing
    last = config.ranks - 1
    count = rng.randint(0, config.tokens)
    if kind == "dense":
        count = config.tokens
    if kind == "empty" or (kind in ("idle_rank", "silent_rank") and rank == last):
        count = 0
    if kind == "one_token":
        count = int(rng.random() < 0.5)
    tokens = []
    for _ in range(count):
        if kind == "one_expert":
            ids = [1 % e] * k
        elif kind == "last_expert":
            ids = [e - 1] * k
        elif kind == "one_rank":
            ids = [rng.randrange(local) for _ in range(k)]
        elif kind == "silent_rank":
            # Nothing is routed to the last rank either: only the header words tie it to the others.
            ids = [rng.randrange(max(1, local * last)) for _ in range(k)]
        elif kind == "masked":
            ids = [rng.choice((-1, e, rng.randrange(e), 2**31 - 1)) for _ in range(k)]
        else:
            ids = [rng.randrange(e) if rng.random() < 0.9 else -1 for _ in range(k)]
        tokens.append(tuple(ids))
    return tuple(tokens)


def draw_problem(config: SimConfig, seed: int) -> Problem:
    """Routing of every layer and rank."""
    if config.problem is not None:
        return config.problem
    rng = random.Random(f"problem {seed}")
    num_layers = 1 + max((max(config.layers(r), default=0) for r in range(config.ranks)), default=0)
    return tuple(
        tuple(draw_rank(config, rng, rank) for rank in range(config.ranks))
        for _ in range(num_layers)
    )


def random_config(
    seed: int,
    weak: bool | None = None,
    start: Start | None = None,
    faults: bool | None = None,
) -> SimConfig:
    """A small configuration drawn from ``seed``, for exploration; None leaves a choice to it."""
    rng = random.Random(f"config {seed}")
    ranks = rng.choice((2, 2, 2, 3))
    tokens = rng.choice((1, 2, 2, 3)) if ranks == 2 else rng.choice((1, 2))
    q = rng.choice((2, 2, 3))
    top_k = rng.choice((1, 2, 2))
    small = ranks * tokens * top_k <= 8
    faults = rng.random() < 0.12 if faults is None else faults
    return SimConfig(
        ranks=ranks,
        tokens=tokens,
        top_k=top_k,
        experts=ranks * rng.choice((1, 2, 3)),
        hidden=rng.choice((256, 256, 512)) if small else 256,
        intermediate=rng.choice((128, 128, 256)) if small else 128,
        num_slots=rng.choice((2, 2, 2, 4)),
        header_words=q,
        block_rows=rng.choice(((1,), (1,), (2,), (1, 2), (4, 1))),
        dispatch_ctas=tuple(rng.randint(1, q if ranks == 2 else 2) for _ in range(2)),
        compute_ctas=tuple(rng.randint(1, 4 if ranks == 2 else 2) for _ in range(2)),
        finalize_ctas=tuple(rng.randint(1, 2) for _ in range(2)),
        w2_columns=rng.choice(((256,), (256,), (256, 128))),
        warps=rng.choice((1, 1, 2)),
        rows_in_flight=rng.choice((1, 2)),
        tickets_ahead=rng.choice((0, 0, 1, 2)),
        routing=rng.choice((*ROUTINGS, "random", "dense", "dense", "dense", "random")),
        start=rng.choice(STARTS) if start is None else start,
        weak=rng.random() < 0.4 if weak is None else weak,
        resident=rng.choice((None, None, 1)),
        expiries=rng.choice((1, 2)) if faults else 0,
        broadcast=rng.random() < 0.5 or not faults,
        reset_after=rng.choice((None, 1, 2)) if faults else None,
        late_ctas=rng.choice(((0,), (0,), (1,), (2, 1))),
    )
