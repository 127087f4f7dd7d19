"""Records of the item queue inside a compute CTA: 8 words of shared memory."""

from __future__ import annotations

from enum import IntEnum

QUEUE_ENTRIES = 4
RECORD_WORDS = 8


class Kind(IntEnum):
    """What a record asks for."""

    W1 = 0
    W2 = 1
    STOP = 2


class Word(IntEnum):
    """Words of a record."""

    KIND = 0
    SLOT = 1
    EXPERT = 2
    TILE = 3
    ROWS = 4
    WIDTH = 5
    EPOCH = 6
    SLOT_RECURS = 7
