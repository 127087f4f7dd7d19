"""Shared memory of a dispatch CTA: what lies where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

import cutlass

from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol import Field
from gcmoe.protocol.workspace import LINE

I32, I64 = cutlass.Int32, cutlass.Int64

WARP = 32
THREADS = 1024
WARPS = THREADS // WARP
# A row takes 1.5 us when few are under way and 4 us when all warps pull. With eight, the first
# blocks are full 3 us earlier at 64 tokens, and the last row comes before compute wants it (H200).
PULLING_WARPS = 8
HISTOGRAM_BYTES = 48 << 10
SHARED_LIMIT = 232_448
UNROLL = 8
ALL_ONES = 0xFFFF_FFFF


class Word(IntEnum):
    """Single words of shared memory. Each flag is written between two barriers and read after the
    second, so that a branch on it is the same for the whole CTA; but a warp of the pull looks at
    STOPPED, which another one may set, where no barrier depends on it."""

    GENERATION = 0
    EPOCH_BASE = 1
    SLOT_BASE = 2
    ABORT = 3
    CLAIM_LOST = 4
    BAD_HEADER = 5
    BAD_ENTRY = 6
    BAD_IDS = 7
    NUM_BLOCKS = 8
    STOPPED = 9


class RowPlace:
    """Where a row of this CTA goes in the ring: u32 in shared memory; 0 rows means no row."""

    ROW = Field("row in the block", 0, 7)
    ROWS = Field("rows of the block", 7, 8)
    BLOCK = Field("block", 15, 17)

    @classmethod
    def pack(cls, block: Any, row: Any, rows: Any) -> Any:
        return cls.BLOCK.put(block) | cls.ROWS.put(rows) | cls.ROW.put(row)


@dataclass(frozen=True, slots=True)
class SharedMap:
    """Byte offsets in shared memory; arrays of u32 unless said otherwise.

    Args:
        dest_total: [R] entries for each rank.
        source_first: [sources] first row of each source in the list of all sources, padded.
        source_count: [R].
        scratch: [32][R] entries of a warp for each rank; later the histogram,
            [chunks][pitch] u16.
        first_row, first_block, base, tally: [experts + 1] per local expert.
        row_meta, row_weight, row_place: [rows] rows of this CTA.
        buffers: [pullers][row_stride] u8.
        sources: R rounded up to a power of two.
        chunks: warps that sort 32 rows each in one round.
        pitch: experts in a line of the histogram.
        lane_experts: experts of one lane in the scan, odd: no bank conflicts.
        rows: most rows of a CTA.
        pullers: warps that pull rows.
    """

    dest_total: int
    source_first: int
    source_count: int
    scratch: int
    first_row: int
    first_block: int
    base: int
    tally: int
    row_meta: int
    row_weight: int
    row_place: int
    buffers: int
    num_bytes: int
    sources: int
    chunks: int
    pitch: int
    lane_experts: int
    rows: int
    pullers: int

    @classmethod
    def of(cls, spec: KernelSpec) -> Self:
        shape = spec.shape
        num_ranks, local_experts = shape.num_ranks, shape.local_experts
        sources = 1 << (num_ranks - 1).bit_length()
        pitch = (local_experts + 1) // 2 * 2
        chunks = min(WARPS, HISTOGRAM_BYTES // (2 * pitch))
        lane_experts = -(-local_experts // WARP) | 1
        experts = WARP * lane_experts
        rows = -(-num_ranks * shape.entry_capacity // spec.dispatch_ctas)
        sizes = {
            "dest_total": 4 * num_ranks,
            "source_first": 4 * sources,
            "source_count": 4 * num_ranks,
            "scratch": max(4 * WARPS * num_ranks, 2 * chunks * pitch),
            "first_row": 4 * (experts + 1),
            "first_block": 4 * experts,
            "base": 4 * experts,
            "tally": 4 * experts,
            "row_meta": 4 * rows,
            "row_weight": 4 * rows,
            "row_place": 4 * rows,
        }
        offset = LINE
        offsets = {}
        for name, size in sizes.items():
            offsets[name] = offset
            offset += -(-size // 16) * 16
        buffers = -(-offset // LINE) * LINE
        room = SHARED_LIMIT - 2 * LINE - 8 * WARPS - buffers
        pullers = min(PULLING_WARPS, room // shape.row_stride)
        if pullers < 1:
            raise ValueError(f"{rows} rows of a CTA leave no shared memory for a row buffer")
        return cls(
            **offsets,
            buffers=buffers,
            num_bytes=buffers + pullers * shape.row_stride,
            sources=sources,
            chunks=chunks,
            pitch=pitch,
            lane_experts=lane_experts,
            rows=rows,
            pullers=pullers,
        )


def word_at(s: dict[str, Any], offset: int, index: Any = 0) -> Any:
    """Shared address of word ``index`` of the array at ``offset``."""
    return s["smem"] + I32(offset) + I32(index) * 4


def at(base: Any, offset: int, index: Any, item_bytes: int) -> Any:
    """Global address of item ``index`` of the region at ``offset``."""
    return base + I64(offset) + I64(index) * item_bytes
