"""The protocol with one thing wrong: generated from the edge table, and by hand.

Every mutant is either caught within ``MAX_SCHEDULES`` schedules or listed as equivalent with the
reason. A mutant names the configurations in which it can show at all; seeds vary the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gcmoe.protocol import EDGES, GRAPH_EDGES, Edge
from gcmoe.protocol.edges import LONE_OPERATIONS
from gcmoe.sim.config import SimConfig, random_config
from gcmoe.sim.run import SimResult, simulate
from gcmoe.sim.schedule import schedule_for
from gcmoe.sim.variant import SPECIFIED, Variant

MAX_SCHEDULES = 600


@dataclass(frozen=True)
class Mutant:
    """One wrong protocol.

    Args:
        name: unique.
        text: what is wrong.
        variant: the wrong protocol.
        fixed: fields of the configuration that it needs to show.
        equivalent: why no schedule can show it; empty if some schedule must.
        schedule: the schedule that shows it soonest; empty takes the exploration's.
    """

    name: str
    text: str
    variant: Variant
    fixed: tuple[tuple[str, Any], ...] = ()
    equivalent: str = ""
    schedule: str = ""

    def schedule_of(self, seed: int) -> str:
        return self.schedule or schedule_for(seed)

    def config(self, seed: int) -> SimConfig:
        """The configuration of ``seed``: drawn, then fixed where the mutant needs it."""
        fixed = dict(self.fixed)
        drawn = random_config(seed, fixed.get("weak", False), fixed.get("start", "zero"), False)
        return replace(drawn, **fixed)

    def run(self, seed: int) -> SimResult:
        return simulate(self.config(seed), seed, self.schedule_of(seed), self.variant)

    def run_specified(self, seed: int) -> SimResult:
        """The same run of the protocol as specified: what the mutant must differ from."""
        return simulate(self.config(seed), seed, self.schedule_of(seed))


@dataclass(frozen=True)
class Outcome:
    """How a mutant fared."""

    mutant: Mutant
    schedules: int
    result: SimResult | None

    @property
    def caught(self) -> bool:
        return self.result is not None

    def line(self) -> str:
        """One row of the mutant table."""
        name = self.mutant.name
        if self.result is not None:
            first, detail = self.result.violations[0]
            seed, schedule = self.result.seed, self.result.schedule
            return f"{name}: caught by {first}, seed {seed}, schedule {schedule}: {detail[:160]}"
        if self.mutant.equivalent:
            return f"{name}: equivalent, {self.mutant.equivalent}"
        return f"{name}: NOT CAUGHT in {self.schedules} schedules"


def hunt(mutant: Mutant, max_schedules: int = MAX_SCHEDULES, first_seed: int = 0) -> Outcome:
    """Runs seeds until one shows a violation."""
    for count, seed in enumerate(range(first_seed, first_seed + max_schedules), 1):
        result = mutant.run(seed)
        if result.violations:
            return Outcome(mutant, count, result)
    return Outcome(mutant, max_schedules, None)


# ---- generated from the edge table --------------------------------------------------------

# No other ingredient may hide the one that is dropped; the reasons are checked by dropping both.
EQUIVALENT = {
    "recv_header/write_proxy_fence": (
        "the reader of recv_header executes fence.proxy.async.global after its acquire and before "
        "it pulls, which alone orders generic stores before its bulk loads"
    ),
    "recv_header/read_proxy_fence": (
        "each writer of recv_header executes fence.proxy.async.global after staging, which alone "
        "makes staged_x visible to bulk loads ordered by the flag"
    ),
    "token_ring_full/write_proxy_fence": (
        "the reader of token_ring_full executes fence.proxy.async.global after its acquire and "
        "before its bulk loads"
    ),
    "token_ring_full/read_proxy_fence": (
        "each writer of token_ring_full executes fence.proxy.async.global after its stores and "
        "after wait_group 0"
    ),
    "token_ring_empty/write_release": (
        "the thread that adds to token_ring_empty has executed fence.acq_rel.sys for the edge "
        "combine_arrivals after the last read of the slot, and a fence before a relaxed add "
        "releases too"
    ),
    "compute_done/write_release": (
        "what finalize reads behind it, the routes, dispatch has made visible at gpu scope by the "
        "release of the edge routes, which every CTA of compute has acquired before it adds"
    ),
    "finalize_done/order": (
        "the end of the kernel and the graph edges finalize_before_dispatch and "
        "finalize_before_compute cover y, the bases and the ticket"
    ),
}


def _weakened(edge: Edge) -> Iterator[tuple[str, str, Edge]]:
    """(ingredient, text, edge without it) for every ingredient of ``edge``."""
    write, read = edge.write, edge.read
    if write.order in ("release", "acq_rel"):
        yield "write_release", "relaxed flag", replace(edge, write=replace(write, order="relaxed"))
    if read.order in ("acquire", "acq_rel"):
        yield "read_acquire", "relaxed poll", replace(edge, read=replace(read, order="relaxed"))
    if write.scope == "sys":
        yield "write_scope", "flag of scope gpu", replace(edge, write=replace(write, scope="gpu"))
    if read.scope == "sys":
        yield "read_scope", "poll of scope gpu", replace(edge, read=replace(read, scope="gpu"))
    if edge.write_fence:
        yield "write_fence", "no fence before the flag", replace(edge, write_fence="")
        narrow: Any = "acq_rel.gpu"
        yield "write_fence_scope", "fence of scope gpu", replace(edge, write_fence=narrow)
    if edge.write_proxy_fence:
        yield "write_proxy_fence", "no proxy fence", replace(edge, write_proxy_fence=None)
    if edge.completion_wait:
        yield "completion_wait", "no wait_group 0", replace(edge, completion_wait=False)
    if edge.read_proxy_fence:
        yield "read_proxy_fence", "no proxy fence", replace(edge, read_proxy_fence=None)
    if edge.write_proxy_fence and edge.read_proxy_fence:
        yield (
            "both_proxy_fences",
            "no proxy fence on either side",
            replace(edge, write_proxy_fence=None, read_proxy_fence=None),
        )


def edge_mutants() -> list[Mutant]:
    """Each ingredient of each edge dropped in turn, under weak memory."""
    mutants = []
    for edge in EDGES:
        for ingredient, text, weak_edge in _weakened(edge):
            name = f"{edge.name}/{ingredient}"
            mutants.append(
                Mutant(
                    name,
                    f"{edge.name}: {text}",
                    Variant(edges={**SPECIFIED.edges, edge.name: weak_edge}),
                    fixed=(*_EDGE_NEEDS.get(edge.name, ()), ("weak", True)),
                    equivalent=EQUIVALENT.get(name, ""),
                )
            )
    empty, arrivals = SPECIFIED.edges["token_ring_empty"], SPECIFIED.edges["combine_arrivals"]
    mutants.append(
        Mutant(
            "token_ring_empty/write_release+combine_arrivals/write_fence",
            "neither the release of the slot nor the fence that hides its absence",
            Variant(
                edges={
                    **SPECIFIED.edges,
                    empty.name: replace(empty, write=replace(empty.write, order="relaxed")),
                    arrivals.name: replace(arrivals, write_fence=""),
                }
            ),
            fixed=(*_REUSE, ("weak", True)),
        )
    )
    for row in LONE_OPERATIONS:
        if row.operation.order != "relaxed":
            weak_row = replace(row, operation=replace(row.operation, order="relaxed"))
            mutants.append(
                Mutant(
                    f"{row.name}/order",
                    f"{row.name}: relaxed",
                    Variant(lone={**SPECIFIED.lone, row.name: weak_row}),
                    fixed=(("weak", True), ("finalize_ctas", (2,))),
                    equivalent=EQUIVALENT.get(f"{row.name}/order", ""),
                )
            )
    return mutants


_BUSY: tuple[tuple[str, Any], ...] = (("routing", "dense"), ("top_k", 2), ("tokens", 2))
_REUSE: tuple[tuple[str, Any], ...] = (*_BUSY, ("num_slots", 2), ("block_rows", (1,)))
_EDGE_NEEDS: dict[str, tuple[tuple[str, Any], ...]] = {
    "recv_header": _BUSY,
    "routes": _BUSY,
    "token_ring_full": _REUSE,
    "token_ring_empty": _REUSE,
    "w1_bitmap": (*_REUSE, ("compute_ctas", (3, 2)), ("resident", None)),
    "combine_arrivals": _BUSY,
}


def graph_mutants() -> list[Mutant]:
    """Each graph edge dropped in turn."""
    every = frozenset(edge.name for edge in GRAPH_EDGES)
    needs: dict[str, tuple[tuple[str, Any], ...]] = {
        # A slow dispatch CTA without rows: the rest of the replay ends without it.
        "dispatch_before_dispatch": (("dispatch_ctas", (2, 2)), ("routing", "empty")),
        # Items for another rank run when this one has all its own rows.
        "compute_before_dispatch": (
            *_BUSY,
            ("ranks", 2),
            ("experts", 4),
            ("tokens", 3),
            ("block_rows", (1, 2)),
            ("num_slots", 4),
        ),
    }
    return [
        Mutant(
            f"graph/{edge.name}",
            f"no graph edge: {edge.meaning}",
            Variant(graph_edges=every - {edge.name}),
            fixed=needs.get(edge.name, _BUSY),
        )
        for edge in GRAPH_EDGES
    ]


# ---- by hand ------------------------------------------------------------------------------

_ONE_CTA: tuple[tuple[str, Any], ...] = (*_REUSE, ("tokens", 3), ("ranks", 2), ("experts", 4),
                                         ("compute_ctas", (1,)), ("resident", None))  # fmt: skip
_FAULTS: tuple[tuple[str, Any], ...] = (*_BUSY, ("expiries", 2))
_RESET: tuple[tuple[str, Any], ...] = (*_BUSY, ("expiries", 2), ("replays", 4), ("reset_after", 2))

# (switch, text, configuration it needs)
_SWITCHES: tuple[tuple[str, str, tuple[tuple[str, Any], ...]], ...] = (
    ("skip_zero_header", "no header word at a rank to which nothing is routed", ()),
    (
        "skip_header_wait_without_tokens",
        "a rank without tokens does not wait for the other ranks' header words",
        (("routing", "silent_rank"), ("replays", 4)),
    ),
    ("one_parity", "one set of header words for all replays", ()),
    ("double_segments", "segments of S blocks, one compute CTA", _ONE_CTA),
    ("swap_order", "W2 of a block before its W1, one compute CTA", _ONE_CTA),
    ("set_bitmap", "bits of the W1 bitmap are set, not flipped", _REUSE),
    ("short_arrivals", "one unit less is added to combine_arrivals", _BUSY),
    (
        "first_cta_advances",
        "the first finished CTA of finalize advances the generation",
        (*_BUSY, ("finalize_ctas", (2,))),
    ),
    ("forget_abort", "abort is not read on entry", (*_FAULTS, ("broadcast", False))),
    ("publish_after_abort", "a CTA whose wait was aborted goes on", _FAULTS),
    ("skip_first_barrier", "reset zeroes before all ranks have ended their kernels", _RESET),
    ("skip_second_barrier", "a rank replays before all ranks have zeroed", _RESET),
    (
        "ignore_call",
        "a rank skips a layer call and the call number is not compared",
        (*_BUSY, ("ranks", 2), ("experts", 4), ("calls", ((0, 1, 2, 3), (0, 2, 3)))),
    ),
    (
        "count_tiles",
        "arrivals count tiles; two ranks have tiles of different widths",
        (*_BUSY, ("ranks", 2), ("experts", 4), ("w2_columns", (256, 128))),
    ),
    ("plain_compare", "counters are compared without the wrap", (*_REUSE, ("start", "wrap"))),
    (
        "count_block_rows",
        "the full counter counts to BM; blocks of different BM share the ring",
        (*_BUSY, ("block_rows", (1, 2)), ("num_slots", 2)),
    ),
    (
        "empty_blocks",
        "an expert without rows has a block",
        (("routing", "one_expert"), ("ranks", 2), ("experts", 6)),
    ),
    (
        "wait_before_publishing",
        "a warp waits for a slot before it publishes rows that it has stored",
        (*_ONE_CTA, ("rows_in_flight", 4), ("warps", 1), ("dispatch_ctas", (1,))),
    ),
    (
        "skip_own_headers",
        "a rank does not wait for its own header words",
        (*_BUSY, ("dispatch_ctas", (2, 2))),
    ),
    (
        "assume_own_grid",
        "a reader waits for as many words as its own grid has CTAs",
        (*_BUSY, ("dispatch_ctas", (2, 1))),
    ),
    ("sum_counts", "the counts of a source's words are added up", _BUSY),
    (
        "reread_generation",
        "dispatch reads the generation again after the header wait",
        (("dispatch_ctas", (2, 2)), ("routing", "empty")),
    ),
    (
        "skip_compute_done",
        "the last CTA of finalize does not wait for compute before it advances",
        _BUSY,
    ),
    (
        "wait_for_one_group",
        "finalize waits for the first group of columns only",
        (*_BUSY, ("hidden", 512)),
    ),
    (
        "first_item_is_index",
        "the first item is the CTA index, one CTA is resident at a time",
        (*_BUSY, ("compute_ctas", (2, 3)), ("resident", 1)),
    ),
    ("keep_poisoned_y", "a poisoned CTA of finalize leaves its rows of y", _FAULTS),
    ("advance_after_abort", "the last CTA of finalize advances although abort is set", _FAULTS),
    ("skip_ticket_reset", "the work ticket is not zeroed", _BUSY),
    ("add_before_scatter", "arrivals are added before the rows are stored", _BUSY),
    ("empty_before_read", "a slot is freed before W2 has read it", _REUSE),
    (
        "skip_full_before_bits",
        "a W2 item waits for its bits only, whose parity is also that of two epochs ago",
        (
            *_REUSE,
            ("tokens", 3),
            ("ranks", 2),
            ("experts", 2),
            ("compute_ctas", (4,)),
            ("resident", None),
        ),
    ),
)

_EQUIVALENT_SWITCHES = {
    "advance_after_abort": (
        "abort is sticky and every role reads it on entry, so nothing is staged, sent or published "
        "with the new bases, and reset zeroes them; forget_abort is the mutant that shows"
    ),
}


def hand_mutants() -> list[Mutant]:
    mutants = []
    for switch, text, fixed in _SWITCHES:
        switches: dict[str, Any] = {switch: True}
        variant = replace(SPECIFIED, **switches)
        reason = _EQUIVALENT_SWITCHES.get(switch, "")
        mutants.append(Mutant(switch, text, variant, fixed, reason))
    return mutants


def all_mutants() -> list[Mutant]:
    """Every mutant, generated ones first."""
    return [*edge_mutants(), *graph_mutants(), *hand_mutants()]
