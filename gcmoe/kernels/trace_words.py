"""What a CTA records when its kernel is compiled with ``trace``: u64 words; no DSL.

A record is :data:`TRACE_WORDS` words: 16 named ones of its role, then, for compute only,
:data:`TRACE_ITEMS` items of :data:`ITEM_WORDS` words in the order in which the CTA ran them. Times
are ``%globaltimer`` nanoseconds. Words keep the values of earlier replays: one that is older than
the CTA's ``START`` was not written in this replay.
"""

from __future__ import annotations

from enum import IntEnum

HEAD_WORDS = 16
TRACE_ITEMS = 64
ITEM_WORDS = 5
TRACE_WORDS = HEAD_WORDS + TRACE_ITEMS * ITEM_WORDS


class DispatchTrace(IntEnum):
    """Words of a dispatch CTA; nanoseconds but for the first."""

    SM = 0
    START = 1
    STAGED = 2
    HEADERS = 3
    BINNED = 4
    FIRST_ROW = 5
    LAST_ROW = 6
    END = 7
    ROW_LOADED = 8
    ROW_STORED = 9


class ComputeTrace(IntEnum):
    """Words of a compute CTA; nanoseconds but for SM and ITEMS, the number of items it ran."""

    SM = 0
    START = 1
    ROUTES = 2
    FIRST_BLOCK = 3
    W1_OVER = 5
    ITEMS = 6
    END = 7


class FinalizeTrace(IntEnum):
    """Words of a finalize CTA; nanoseconds but for the first.

    ``ARRIVED``: the rows of its last pass are there; the sums of earlier passes lie before it.
    """

    SM = 0
    START = 1
    ARRIVED = 2
    END = 3


class ItemTrace(IntEnum):
    """Words of an item: kind | rows << 8 | tile << 24 | slot << 40, then times.

    ``START``: the consumers have the item's record. ``FED``: the loads of its first token tile were
    issued, so its rows (W1) or its block of ``a`` (W2) were there. ``END``: the tile is in the
    staging buffer. ``PUBLISHED``: it is in memory and its flag is set.
    """

    WHAT = 0
    START = 1
    FED = 2
    END = 3
    PUBLISHED = 4


def unpack_item(what: int) -> tuple[int, int, int, int]:
    """(kind, rows, tile, slot) of an item's first word."""
    return what & 0xFF, (what >> 8) & 0xFFFF, (what >> 24) & 0xFFFF, what >> 40


def item_word(index: int, word: ItemTrace) -> int:
    """The place of a word of the CTA's ``index``-th item in its record."""
    return HEAD_WORDS + ITEM_WORDS * index + word
