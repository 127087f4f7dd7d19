"""The one global order of work items, known to every CTA without communication.

The blocks of a replay, in ring order, are cut into segments of G consecutive blocks: one segment of
all blocks when they fit the ring, else segments of S/2. W1 of the first segment comes first; then,
segment by segment, W1 of segment s followed by W2 of segment s - 1 (a lag of one); W2 of the last
segment ends the order. Blocks of two consecutive segments are alive at a time, and they fit the
ring, so every item waits for earlier items only and a single CTA that takes items in ticket order
makes progress. When all blocks fit, the order is all of W1, then all of W2.

The W2 items that end the order, those of the last two segments or of the only one, go by groups of
columns: the first group of all their blocks, then the second. So most columns of y can be summed
before the last items end. Those before them go block by block, so that slots are soon free again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gcmoe.protocol.ring import is_less, smaller

W1_COLUMNS = 128
W2_COLUMNS = 256
MAX_GROUPS = 4


def column_groups(hidden: int) -> int:
    """Groups that the columns of W2 are cut into, each of equally many whole tiles."""
    return next(n for n in range(MAX_GROUPS, 0, -1) if n == 1 or hidden % (n * W2_COLUMNS) == 0)


@dataclass(frozen=True, slots=True)
class Item:
    """One whole work item; the fields are words."""

    is_w2: Any
    block: Any
    tile: Any


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """Maps a ticket to an item.

    Args:
        num_slots: S of the ring.
        w1_tiles: W1 items of one block, I / 128.
        w2_tiles: W2 items of one block, H / 256.
        groups: column groups, a divisor of ``w2_tiles``.
    """

    num_slots: int
    w1_tiles: int
    w2_tiles: int
    groups: int

    def __post_init__(self) -> None:
        if self.w2_tiles % self.groups:
            raise ValueError(f"groups = {self.groups}: must divide the {self.w2_tiles} W2 tiles")
        if self.num_slots < 2:
            raise ValueError(f"num_slots = {self.num_slots}: two segments need at least 2 slots")

    def segment_blocks(self, num_blocks: Any) -> Any:
        """G: all blocks when they fit the ring, else half of the ring."""
        return num_blocks + (self.num_slots // 2 - num_blocks) * self.slot_recurs(num_blocks)

    def slot_recurs(self, num_blocks: Any) -> Any:
        """1 when a slot serves two blocks of this replay, else 0.

        Then a W2 item waits for its own block to be full before it looks at the bitmap: a bit tells
        only the parity of an epoch, and a full block says that the epoch before is over.
        """
        return is_less(num_blocks * 0 + self.num_slots, num_blocks)

    def num_items(self, num_blocks: Any) -> Any:
        return num_blocks * (self.w1_tiles + self.w2_tiles)

    def item(self, ticket: Any, num_blocks: Any) -> Item:
        """The item of ``ticket`` < ``num_items``; ``num_blocks`` > 0."""
        g = self.segment_blocks(num_blocks)
        first = g * self.w1_tiles
        later = 1 - is_less(ticket, first)
        # Tickets after the first W1 segment: step q + 1 holds W1 of segment q + 1, then W2 of
        # segment q. The last step runs on into W2 of the last segment.
        u = (ticket - first) * later
        step = g * (self.w1_tiles + self.w2_tiles)
        last = (num_blocks - 1) // g
        last_step = (last - 1) * is_less(last * 0, last)
        q = smaller(u // step, last_step)
        v = u - q * step
        w1_first = (q + 1) * g
        inside = is_less(w1_first, num_blocks)
        w1_blocks = smaller(g, (num_blocks - w1_first) * inside)
        w1_items = w1_blocks * self.w1_tiles
        is_w2 = later * (1 - is_less(v, w1_items))
        w1_index = ticket + (v + w1_first * self.w1_tiles - ticket) * later
        w2_index = (v - w1_items) * is_w2
        w1_block = w1_index // self.w1_tiles
        w1_tile = w1_index - w1_block * self.w1_tiles
        is_end = 1 - is_less(q, last_step)
        w2_blocks = g + (num_blocks - w1_first) * is_end
        tiles = self.w2_tiles - (self.w2_tiles - self.w2_tiles // self.groups) * is_end
        group = w2_index // (w2_blocks * tiles)
        w2_index = w2_index - group * (w2_blocks * tiles)
        w2_block = w2_index // tiles
        w2_tile = group * tiles + w2_index - w2_block * tiles
        block = w1_block + (q * g + w2_block - w1_block) * is_w2
        return Item(is_w2=is_w2, block=block, tile=w1_tile + (w2_tile - w1_tile) * is_w2)
