"""Arithmetic of the token ring, the W1 bitmap and the arrival counters.

Every argument called a word is a ``Word32``/``Word64`` in the simulator and a ``Uint32``/``Uint64``
in a kernel. Methods are branch-free, so one text serves both. Differences are modulo 2^32; a
comparison is right while the two sides are less than 2^31 apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNIT_COLUMNS = 64
WINDOW_COLUMNS = 128
ALL_ONES_64 = (1 << 64) - 1


def is_less(a: Any, b: Any) -> Any:
    """1 where ``a < b`` else 0, as a word; both below 2^31."""
    return (a - b) >> 31


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two words below 2^31."""
    return b + (a - b) * is_less(a, b)


def is_reached(value: Any, target: Any) -> Any:
    """A cumulative counter has passed ``target``: a comparison, true or false."""
    return ((value - target) >> 31) == 0


@dataclass(frozen=True, slots=True)
class TokenRing:
    """S slots that hold one row block each and are reused in order.

    Args:
        num_slots: S, a power of two.
        slot_rows: U, rows that a slot holds; every block size BM <= U.
        hidden: H; a slot is emptied by H/64 units of W2 output columns.
    """

    num_slots: int
    slot_rows: int
    hidden: int

    def __post_init__(self) -> None:
        if self.num_slots <= 0 or self.num_slots & (self.num_slots - 1):
            raise ValueError(f"num_slots = {self.num_slots}: must be a power of two")
        if self.slot_rows <= 0:
            raise ValueError(f"slot_rows = {self.slot_rows}: must be positive")
        if self.hidden % UNIT_COLUMNS:
            raise ValueError(f"hidden = {self.hidden}: must be a multiple of {UNIT_COLUMNS}")

    @property
    def shift(self) -> int:
        return self.num_slots.bit_length() - 1

    @property
    def empty_units(self) -> int:
        """Units that one use of a slot adds to ``token_ring_empty``."""
        return self.hidden // UNIT_COLUMNS

    def place(self, slot_base: Any, block: Any) -> Any:
        """Where block ``block`` of this replay lies; below S plus the blocks of a replay."""
        return slot_base + block

    def slot(self, place: Any) -> Any:
        return place & (self.num_slots - 1)

    def epoch(self, epoch_base: Any, place: Any) -> Any:
        """How often this place's slot was used before."""
        return epoch_base + (place >> self.shift)

    def full_increment(self, row: Any, rows: Any) -> Any:
        """What row ``row`` of a block of ``rows`` rows adds; a block adds U however small it is."""
        return 1 + (1 - is_less(row + 1, rows)) * (self.slot_rows - rows)

    def full_target(self, epoch: Any) -> Any:
        return (epoch + 1) * self.slot_rows

    def empty_target(self, epoch: Any) -> Any:
        return epoch * self.empty_units

    def next_epoch_base(self, epoch_base: Any, slot_base: Any, num_blocks: Any) -> Any:
        return epoch_base + ((slot_base + num_blocks) >> self.shift)

    def next_slot_base(self, slot_base: Any, num_blocks: Any) -> Any:
        return (slot_base + num_blocks) & (self.num_slots - 1)


@dataclass(frozen=True, slots=True)
class W1Bitmap:
    """One bit per 64 intermediate columns of a slot, flipped once per epoch.

    Args:
        intermediate: I, a multiple of 128, at most 4096.
    """

    intermediate: int

    def __post_init__(self) -> None:
        if self.intermediate % WINDOW_COLUMNS or not 0 < self.intermediate <= 4096:
            raise ValueError(
                f"intermediate = {self.intermediate}: a multiple of 128 in [128, 4096]"
            )

    @property
    def num_windows(self) -> int:
        return self.intermediate // WINDOW_COLUMNS

    @property
    def mask(self) -> int:
        return ALL_ONES_64 >> (64 - self.intermediate // UNIT_COLUMNS)

    def window_bits(self, one: Any, window: Any) -> Any:
        """The two bits of a 128-column window; ``one`` is a 64-bit word of value 1, ``window`` one
        of 64 bits too or an int."""
        return (one + 2) << (window * 2)

    def is_complete(self, bitmap: Any, bits: Any, odd_epoch: Any) -> Any:
        """All of ``bits`` were flipped in this epoch; ``odd_epoch`` is a 64-bit word, 0 or 1."""
        return ((bitmap ^ (odd_epoch * ALL_ONES_64)) & bits) == bits


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Cumulative rows x 64-column units that reached this rank's combine slots, a counter for each
    group of columns.

    Args:
        hidden: H.
        groups: of equally many columns, so that one base serves all counters.
    """

    hidden: int
    groups: int

    @property
    def columns(self) -> int:
        """Columns of a group."""
        return self.hidden // self.groups

    def group(self, tile: Any, columns: int) -> Any:
        """The counter of a W2 tile of ``columns`` columns."""
        return tile // (self.columns // columns)

    def increment(self, rows: Any, columns: int) -> Any:
        return rows * (columns // UNIT_COLUMNS)

    def target(self, arrivals_base: Any, valid_slots: Any) -> Any:
        return arrivals_base + valid_slots * (self.columns // UNIT_COLUMNS)
