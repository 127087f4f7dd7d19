"""Bit layouts of the words that ranks and roles exchange.

``pack`` and the field methods work on 64-bit (headers, entries) or 32-bit (ring metadata, blocks)
words. Field widths are stated once, here; ``docs/protocol.md`` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Field:
    """``bits`` bits from bit ``shift`` up."""

    name: str
    shift: int
    bits: int

    @property
    def limit(self) -> int:
        """One more than the largest value."""
        return 1 << self.bits

    def put(self, value: Any) -> Any:
        return value << self.shift

    def get(self, word: Any) -> Any:
        return (word >> self.shift) & (self.limit - 1)


class RecvHeader:
    """What one dispatch CTA of a source says of one replay: u64, the same count in all words."""

    COUNT = Field("count", 0, 20)
    CALL = Field("call", 20, 12)
    GENERATION = Field("generation", 32, 32)
    FIELDS = (COUNT, CALL, GENERATION)

    @classmethod
    def pack(cls, generation: Any, call: Any, count: Any) -> Any:
        return cls.GENERATION.put(generation) | cls.CALL.put(call) | cls.COUNT.put(count)


class Entry:
    """One (token, slot) that a source routes here: u64."""

    EXPERT = Field("local expert", 0, 11)
    SLOT = Field("slot", 11, 5)
    TOKEN = Field("token", 16, 16)
    WEIGHT = Field("routing weight, FP32 bits", 32, 32)
    FIELDS = (EXPERT, SLOT, TOKEN, WEIGHT)

    @classmethod
    def pack(cls, weight_bits: Any, token: Any, slot: Any, expert: Any) -> Any:
        return (
            cls.WEIGHT.put(weight_bits)
            | cls.TOKEN.put(token)
            | cls.SLOT.put(slot)
            | cls.EXPERT.put(expert)
        )


class RowMeta:
    """Where the result of one ring row goes: u32."""

    SLOT = Field("slot", 0, 5)
    TOKEN = Field("token", 5, 16)
    SRC = Field("source rank", 21, 7)
    FIELDS = (SLOT, TOKEN, SRC)

    @classmethod
    def pack(cls, src: Any, token: Any, slot: Any) -> Any:
        return cls.SRC.put(src) | cls.TOKEN.put(token) | cls.SLOT.put(slot)


class BlockEntry:
    """One block of the route table: u32."""

    EXPERT = Field("local expert", 0, 11)
    ROWS = Field("rows", 16, 8)
    FIELDS = (EXPERT, ROWS)

    @classmethod
    def pack(cls, expert: Any, rows: Any) -> Any:
        return cls.ROWS.put(rows) | cls.EXPERT.put(expert)


class RoutesHeader:
    """Generation and number of blocks of the route table: u64."""

    NUM_BLOCKS = Field("number of blocks", 0, 32)
    GENERATION = Field("generation", 32, 32)
    FIELDS = (NUM_BLOCKS, GENERATION)

    @classmethod
    def pack(cls, generation: Any, num_blocks: Any) -> Any:
        return cls.GENERATION.put(generation) | cls.NUM_BLOCKS.put(num_blocks)


CODECS: tuple[type, ...] = (RecvHeader, Entry, RowMeta, BlockEntry, RoutesHeader)
NUM_CALLS = RecvHeader.CALL.limit


def is_valid(expert_id: int, num_experts: int) -> bool:
    """The one predicate of binning, targets and summation; kernels use the same comparison."""
    return 0 <= expert_id < num_experts


def header_words(cta: int, grid: int, header_words_per_source: int) -> range:
    """The words that CTA ``cta`` of a dispatch grid of ``grid`` <= Q writes at every rank."""
    return range(cta, header_words_per_source, grid)
