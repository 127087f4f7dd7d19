"""The codecs' own text on words, run once per distinct word."""

from __future__ import annotations

from functools import lru_cache

from gcmoe.protocol import (
    BlockEntry,
    Entry,
    RecvHeader,
    RoutesHeader,
    RowMeta,
    Word32,
    Word64,
)

SIZE = 1 << 16


@lru_cache(maxsize=SIZE)
def decode_header(value: int) -> tuple[int, int, int]:
    """(generation, call, count) of a receive header."""
    word = Word64(value)
    return (
        int(RecvHeader.GENERATION.get(word)),
        int(RecvHeader.CALL.get(word)),
        int(RecvHeader.COUNT.get(word)),
    )


@lru_cache(maxsize=SIZE)
def decode_entry(value: int) -> tuple[int, int, int, int]:
    """(token, slot, local expert, weight bits) of an entry."""
    word = Word64(value)
    return (
        int(Entry.TOKEN.get(word)),
        int(Entry.SLOT.get(word)),
        int(Entry.EXPERT.get(word)),
        int(Entry.WEIGHT.get(word)),
    )


@lru_cache(maxsize=SIZE)
def decode_meta(value: int) -> tuple[int, int, int]:
    """(source rank, token, slot) of a ring row."""
    word = Word32(value)
    return int(RowMeta.SRC.get(word)), int(RowMeta.TOKEN.get(word)), int(RowMeta.SLOT.get(word))


@lru_cache(maxsize=SIZE)
def decode_block(value: int) -> tuple[int, int]:
    """(local expert, rows) of a block."""
    word = Word32(value)
    return int(BlockEntry.EXPERT.get(word)), int(BlockEntry.ROWS.get(word))


@lru_cache(maxsize=SIZE)
def decode_routes(value: int) -> int:
    """Number of blocks of the routes word."""
    return int(RoutesHeader.NUM_BLOCKS.get(Word64(value)))
