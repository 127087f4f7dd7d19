"""The invariants, checked while a run goes on, from outside the protocol.

The checker sees what no rank sees: the routing of all ranks, which replay each rank runs, who still
reads which slot. It only observes; no role takes a decision from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gcmoe.protocol import is_valid
from gcmoe.sim.memory import Actor

if TYPE_CHECKING:
    from gcmoe.sim.config import Problem, SimConfig


@dataclass(frozen=True, slots=True)
class Check:
    """``text`` is looked at while a run goes on; it belongs to a stated invariant."""

    text: str
    invariant: str


CHECKS: dict[str, Check] = {
    "generation_read": Check("every role of a replay reads the same generation", "one_generation"),
    "generation_once": Check(
        "generation advances once per replay, after all CTAs of finalize", "one_generation"
    ),
    "one_ahead": Check(
        "a rank starts replay i only after every rank has finished replay i - 2", "one_ahead"
    ),
    "header_unread": Check(
        "a header word is not overwritten before every dispatch CTA has read it", "header_parity"
    ),
    "routes_right": Check("the block table is that of the routing", "header_total"),
    "malformed": Check("no role reads a value that it cannot decode", "bounded_input"),
    "full_early": Check("W1 starts after every row of its block is published", "full_before_read"),
    "counter_passed": Check("a cumulative counter never passes its target", "same_targets"),
    "slot_in_use": Check(
        "a ring slot is not overwritten before W2 of its last block has read it",
        "empty_before_store",
    ),
    "bit_flipped_twice": Check("a bit of the bitmap is flipped once per epoch", "bitmap_parity"),
    "bits_early": Check("W2 starts after W1 of its own block and epoch", "bitmap_parity"),
    "item_once": Check("a work item is taken by one CTA", "each_item_once"),
    "no_deadlock": Check("somebody can run until everybody has finished", "backward_waits"),
    "arrivals_passed": Check(
        "arrivals never exceed what the destination waits for", "arrivals_complete"
    ),
    "y_right": Check(
        "y holds exactly the expected rows of this layer call, or NaN after an abort", "one_call"
    ),
    "combine_in_use": Check(
        "a combine slot is written in its own rank's replay only", "single_copies"
    ),
    "staged_x_in_use": Check(
        "staged x is not overwritten while a peer still has to pull it", "single_copies"
    ),
    "bases_right": Check(
        "the bases of the next replay follow from the blocks and rows of this one", "cumulative"
    ),
    "y_written": Check("every row of y is written in every replay", "never_wrong"),
    "poisoned_publish": Check("a CTA whose wait was aborted publishes nothing", "never_wrong"),
    "aborted_entry": Check(
        "a CTA that finds abort set on entry stages, sends and publishes nothing", "never_wrong"
    ),
    "no_fault": Check("no fault is raised unless one was injected", "never_wrong"),
}


class Violation(Exception):
    """A check failed; ``name`` is a key of ``CHECKS``."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name, self.detail = name, detail


@dataclass(slots=True)
class RankView:
    """What the checker knows of one rank."""

    finished: int = 0
    arrival_target: int = 0
    advanced: bool = False
    arrived: int = 0
    pulls: dict[int, int] = field(default_factory=dict)
    unread: dict[tuple[int, int, int], int] = field(default_factory=dict)
    slots: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    items: set[tuple[bool, int, int]] = field(default_factory=set)
    published: dict[int, int] = field(default_factory=dict)
    tiles: set[tuple[int, int]] = field(default_factory=set)

    def end_replay(self) -> None:
        self.advanced = False
        self.items.clear()
        self.published.clear()
        self.tiles.clear()


class Checker:
    """Observes a run; every method may raise :class:`Violation`."""

    def __init__(self, config: SimConfig, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.ranks = [RankView() for _ in range(config.ranks)]
        self.aborted = [False] * config.ranks
        self.ran_ahead = False

    # ---- who may act ----------------------------------------------------------------------

    def publish(self, actor: Actor, what: str) -> None:
        """``actor`` stores to a flag cell, to a peer or into staged x."""
        if actor.cta.poisoned:
            raise Violation("poisoned_publish", f"{actor.name} publishes {what}")
        if actor.cta.entered_aborted:
            raise Violation("aborted_entry", f"{actor.name} publishes {what}")

    def start_replay(self, rank: int, replay: int) -> None:
        for other, view in enumerate(self.ranks):
            if self.aborted[rank] or self.aborted[other]:
                continue
            if view.finished < replay - 1:
                raise Violation(
                    "one_ahead",
                    f"rank {rank} starts replay {replay}, rank {other} has finished "
                    f"{view.finished} replays",
                )
            if view.finished == replay - 1 and other != rank:
                self.ran_ahead = True

    def read_generation(self, actor: Actor, found: int, expected: int) -> None:
        if found != expected and not self.aborted[actor.rank]:
            raise Violation(
                "generation_read", f"{actor.name} reads generation {found}, not {expected}"
            )

    # ---- dispatch -------------------------------------------------------------------------

    def stage(self, rank: int, token: int, ids: tuple[int, ...]) -> None:
        view = self.ranks[rank]
        left = view.pulls.get(token, 0)
        if left > 0 and not self.aborted[rank]:
            raise Violation(
                "staged_x_in_use", f"x[{token}] of rank {rank}: {left} pulls are outstanding"
            )
        view.pulls[token] = sum(is_valid(i, self.config.experts) for i in ids)

    def pull(self, rank: int, token: int) -> None:
        view = self.ranks[rank]
        view.pulls[token] = view.pulls.get(token, 0) - 1

    def send_header(self, dst: int, parity: int, src: int, word: int, readers: int) -> None:
        view = self.ranks[dst]
        if view.unread.get((parity, src, word), 0) > 0 and not self.aborted[dst]:
            raise Violation(
                "header_unread",
                f"word {word} of rank {src} at rank {dst}, parity {parity}, is overwritten",
            )
        view.unread[parity, src, word] = readers

    def read_header(self, dst: int, parity: int, src: int, word: int) -> None:
        unread = self.ranks[dst].unread
        unread[parity, src, word] = unread.get((parity, src, word), 0) - 1

    def store_row(self, rank: int, slot: int, replay: int, block: int, w2_tiles: int) -> None:
        slots = self.ranks[rank].slots
        seen = slots.get(slot)
        if seen is None or seen[:2] != (replay, block):
            if seen is not None and seen[2] > 0 and not self.aborted[rank]:
                raise Violation(
                    "slot_in_use",
                    f"slot {slot} of rank {rank}: block {block} of replay {replay} is stored while "
                    f"{seen[2]} W2 items of block {seen[1]} of replay {seen[0]} read it",
                )
            slots[slot] = (replay, block, w2_tiles)

    def count(self, what: str, actor: Actor, value: int, target: int) -> None:
        """A counter was raised to ``value``, words of 32 bits; its epoch ends at ``target``."""
        past = (value - target) & 0xFFFF_FFFF
        if past and past < 1 << 31:
            raise Violation("counter_passed", f"{actor.name}: {what} is {past} past its target")

    def publish_row(self, rank: int, block: int) -> None:
        published = self.ranks[rank].published
        published[block] = published.get(block, 0) + 1

    # ---- compute --------------------------------------------------------------------------

    def start_w1(self, actor: Actor, block: int, rows: int) -> None:
        found = self.ranks[actor.rank].published.get(block, 0)
        if found != rows:
            raise Violation("full_early", f"{actor.name} block {block}: {found} of {rows} rows")

    def end_w1(self, rank: int, block: int, tile: int) -> None:
        self.ranks[rank].tiles.add((block, tile))

    def read_activations(self, actor: Actor, block: int, tile: int) -> None:
        """A W2 item passed its wait for one window of ``a``."""
        if (block, tile) not in self.ranks[actor.rank].tiles:
            raise Violation("bits_early", f"{actor.name} block {block}: W1 tile {tile} is not done")

    def take_item(self, rank: int, is_w2: bool, block: int, tile: int) -> None:
        key = (is_w2, block, tile)
        items = self.ranks[rank].items
        if key in items:
            kind = "W2" if is_w2 else "W1"
            raise Violation("item_once", f"rank {rank} runs {kind}{key[1:]} twice")
        items.add(key)

    def flip_bits(self, actor: Actor, old: int, bits: int, odd: int) -> None:
        if (old ^ ((1 << 64) - 1 if odd else 0)) & bits:
            raise Violation("bit_flipped_twice", f"{actor.name}: bits {bits:#x} of {old:#x}")

    def read_slot(self, rank: int, slot: int, block: int) -> None:
        """A W2 item has made its last read of a slot."""
        replay, seen, left = self.ranks[rank].slots.get(slot, (0, -1, 0))
        if seen == block:
            self.ranks[rank].slots[slot] = (replay, seen, left - 1)

    def scatter(self, src: int, dst: int, replay: int) -> None:
        if self.ranks[dst].finished != replay and not (self.aborted[dst] or self.aborted[src]):
            raise Violation(
                "combine_in_use",
                f"rank {src} in replay {replay} writes a combine slot of rank {dst}, which has "
                f"finished {self.ranks[dst].finished} replays",
            )

    def arrive(self, actor: Actor, dst: int, value: int, target: int) -> None:
        past = (value - target) & 0xFFFF_FFFF
        if past and past < 1 << 31:
            raise Violation(
                "arrivals_passed", f"{actor.name} at rank {dst}: {past} units past the target"
            )

    # ---- finalize -------------------------------------------------------------------------

    def advance(self, actor: Actor, done: bool) -> None:
        view = self.ranks[actor.rank]
        if view.advanced:
            raise Violation("generation_once", f"{actor.name} advances a second time")
        if not done:
            raise Violation("generation_once", f"{actor.name} advances before all CTAs are done")
        view.advanced = True

    def end_replay(self, rank: int) -> None:
        view = self.ranks[rank]
        if not self.aborted[rank] and not view.advanced:
            raise Violation("generation_once", f"rank {rank} ends a replay without advancing")
        view.end_replay()
        view.finished += 1

    def reset(self, rank: int) -> None:
        view = self.ranks[rank]
        view.pulls.clear()
        view.unread.clear()
        view.slots.clear()
        view.end_replay()
        self.aborted[rank] = False
