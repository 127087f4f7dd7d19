"""FP4 weights times FP8 tokens on Hopper: decode in registers, QGMMA with register A, promotion.

A unit is 256 weight rows x 256 columns: two blocks of 128 columns, each four sub-blocks of 64 rows
and 4,352 bytes (1,024 words of nibbles, then 256 scale bytes; ``gcmoe.numerics.packing``). One
128-bit load gives a thread one MX group of one row, which has one scale.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from gcmoe.kernels import ptx, sync
from gcmoe.plan.layer import TilePlan

U16, U32, I32 = cutlass.Uint16, cutlass.Uint32, cutlass.Int32
F8, F32 = cutlass.Float8E4M3FN, cutlass.Float32

SUBBLOCK_WORDS = 1088
NIBBLE_WORDS = 1024
UNIT_BYTES = 8 * SUBBLOCK_WORDS * 4

# E4M3 codes of the E2M1 magnitudes 0, .5, 1, 1.5 | 2, 3, 4, 6 times 2^-5; adding 8 to each byte of
# a non-zero code doubles it. Entry i of the table holds them times 2^(i - 8); the first three are
# subnormal in part and written out.
LOW_CODES, HIGH_CODES = 0x14100800, 0x24201C18
LOW_STEP, HIGH_STEP = 0x08080800, 0x08080808
SUBNORMAL_CODES = (
    (0x03020100, 0x0C080604),
    (0x06040200, 0x14100C08),
    (0x0C080400, 0x1C181410),
)
TABLE_ENTRIES = 16
MAGNITUDES, SIGNS = 0x77777777, 0x80808080


@cute.jit
def fill_decode_table(lut, tid):
    """The 16 x 8 byte table at shared address ``lut``; by the first 16 threads."""
    if tid < TABLE_ENTRIES:
        low = U32(tid) * U32(LOW_STEP) + U32((LOW_CODES - 3 * LOW_STEP) & 0xFFFF_FFFF)
        high = U32(tid) * U32(HIGH_STEP) + U32((HIGH_CODES - 3 * HIGH_STEP) & 0xFFFF_FFFF)
        for i in cutlass.range_constexpr(len(SUBNORMAL_CODES)):
            if tid == i:
                low = U32(SUBNORMAL_CODES[i][0])
                high = U32(SUBNORMAL_CODES[i][1])
        ptx.shared_store(lut + tid * 8, low)
        ptx.shared_store(lut + tid * 8 + 4, high)


def make_words(subtiles: int) -> list[Any]:
    """Registers for the nibble words of one block: [word i][row half h] per sub-tile."""
    return [cute.make_rmem_tensor(cute.make_layout((4, 2)), U32) for _ in range(subtiles)]


def weight_view(pointer: Any, subtiles: int, warpgroups: int, stages: int) -> tuple[Any, Any]:
    """Views of the weight stages: words [4, thread, h, m, wg, block, stage], scales likewise."""
    block = subtiles * warpgroups * SUBBLOCK_WORDS
    words = cute.make_tensor(
        pointer,
        cute.make_layout(
            (4, 128, 2, subtiles, warpgroups, 2, stages),
            stride=(
                1,
                4,
                512,
                SUBBLOCK_WORDS,
                subtiles * SUBBLOCK_WORDS,
                block,
                2 * block,
            ),
        ),
    )
    scales = cute.make_tensor(
        cute.recast_ptr(pointer + NIBBLE_WORDS, dtype=U16),
        cute.make_layout(
            (128, subtiles, warpgroups, 2, stages),
            stride=(1, 2 * SUBBLOCK_WORDS, 2 * subtiles * SUBBLOCK_WORDS, 2 * block, 4 * block),
        ),
    )
    return words, scales


@cute.jit
def load_words(view, words, scale_bytes, t, wg, block: cutlass.Constexpr, s):
    """One block's nibbles and scale bytes of this thread to registers."""
    nibbles, scales = view
    for m in cutlass.range_constexpr(len(words)):
        for h in cutlass.range_constexpr(2):
            cute.autovec_copy(nibbles[None, t, h, m, wg, block, s], words[m][None, h])
        scale_bytes[m] = U32(scales[t, m, wg, block, s])


@cute.jit
def decode(words, scales, table: cute.Pointer, fragment: cute.Tensor):
    """Eight words of nibbles to the A registers of four k32 steps; 7 instructions per 8 values."""
    entries = cute.make_tensor(table, cute.make_layout((2, TABLE_ENTRIES), stride=(1, 2)))
    codes = cute.make_rmem_tensor(cute.make_layout((2, 2)), U32)
    for h in cutlass.range_constexpr(2):
        index = (scales >> U32(8 * h)) & U32(0xFF)
        cute.autovec_copy(entries[None, I32(index)], codes[None, h])
    for i in cutlass.range_constexpr(4):
        for h in cutlass.range_constexpr(2):
            word = words[i, h]
            magnitudes = word & U32(MAGNITUDES)
            first = ptx.prmt(codes[0, h], codes[1, h], magnitudes)
            second = ptx.prmt(codes[0, h], codes[1, h], magnitudes >> U32(16))
            fragment[h, i] = ptx.and_or(word, U32(SIGNS), first)
            fragment[2 + h, i] = ptx.and_or(word << U32(4), U32(SIGNS), second)


@cute.jit
def multiply(
    fresh: cute.TiledMma, more: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, x
):
    """One 128-column window into a fresh accumulator: four QGMMAs as one group."""
    warpgroup.fence()
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(i == 0):
            cute.gemm(fresh, acc, a[None, None, i], b[None, None, i, x], acc)
        else:
            cute.gemm(more, acc, a[None, None, i], b[None, None, i, x], acc)
    warpgroup.commit_group()


@cute.jit
def promote(main: cute.Tensor, window: cute.Tensor, scales: cute.Tensor):
    """Add a window's product to the FP32 accumulator, times the token's scale of the window."""
    for i in cutlass.range_constexpr(cute.size(main)):
        main[i] = main[i] + window[i] * scales[i % 2, i // 4]


class TileMma:
    """The MMA of one token width: fragments and main loop of one consumer thread.

    The tensor core keeps fewer bits than FP32 across a long K, so each 128-column window starts a
    fresh accumulator that is promoted into ``main`` with the window's token scales.
    """

    def __init__(self, width: int, tiles: TilePlan, pointers: dict[str, Any], t: Any, lane: Any):
        stages, max_width = tiles.stages, tiles.max_width
        self.width, self.tiles, self.pointers, self.t, self.lane = width, tiles, pointers, t, lane
        op = warpgroup.MmaF8Op(
            F8,
            F8,
            F32,
            (64, width, 32),
            warpgroup.OperandSource.RMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        self.fresh = cute.make_tiled_mma(cute.make_mma_atom(op))
        self.more = cute.make_tiled_mma(cute.make_mma_atom(op))
        self.fresh.set(warpgroup.Field.ACCUMULATE, False)
        self.more.set(warpgroup.Field.ACCUMULATE, True)
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, F8)
        outer = cute.make_layout(
            ((8, width // 8), (128, 1), (2, stages)),
            stride=((128, 1024), (1, 0), (width * 128, max_width * 256)),
        )
        x = cute.make_tensor(cute.recast_ptr(pointers["x"], swizzle_=atom.inner, dtype=F8), outer)
        thread = self.fresh.get_slice(t)
        self.b = self.fresh.make_fragment_B(thread.partition_B(x))
        count = range(tiles.subtiles)
        layout = cute.make_layout(((4, 2, 2), 1, 4), stride=((1, 4, 8), 0, 16))
        self.window = [thread.make_fragment_C(thread.partition_shape_C((64, width))) for _ in count]
        self.main = [cute.make_rmem_tensor(cute.make_layout(width // 2), F32) for _ in count]
        self.words = [cute.make_rmem_tensor(cute.make_layout((4, 4)), U32) for _ in count]
        self.a = [
            cute.make_tensor(cute.recast_ptr(words.iterator, dtype=F8), layout)
            for words in self.words
        ]
        self.scales = cute.make_rmem_tensor(cute.make_layout((2, width // 8)), F32)
        self.x_scale = cute.make_tensor(
            pointers["x_scale"],
            cute.make_layout(
                (width // 4, 4, 2, stages), stride=(1, max_width // 4, max_width, 2 * max_width)
            ),
        )
        self.view = weight_view(pointers["w"], tiles.subtiles, tiles.warpgroups, stages)

    def main_loop(
        self, at: dict[str, Any], units: Any, words: Any, scale_bytes: Any, wg: Any, s: Any, p: Any
    ) -> tuple[Any, Any]:
        """All units of an item; the first block's words are in registers on entry, and those of
        the next item's first block on return. Returns the next stage and its parity."""
        for m in range(self.tiles.subtiles):
            self.main[m].fill(0.0)
        return main_loop(self, at, units, words, scale_bytes, wg, s, p)

    def row_scales(self, pointer: Any, q: Any, wg: Any, m: int) -> tuple[Any, Any]:
        """FP32 scales of the thread's two weight rows of sub-tile ``m``."""
        row = (wg * self.tiles.subtiles + m) * 64 + (self.t // 32) * 16 + self.lane // 4
        scales = cute.make_tensor(pointer + q * 256 + row, cute.make_layout(2, stride=8))
        return scales[0], scales[1]


@cute.jit
def main_loop(tile, at, units, words, scale_bytes, wg, s, parity):
    """See :meth:`TileMma.main_loop`."""
    subtiles, stages = tile.tiles.subtiles, tile.tiles.stages
    t, lane = tile.t, tile.lane
    scales = cute.make_tensor(tile.scales.iterator, cute.make_layout(tile.width // 4))
    for _ in cutlass.range(units, unroll=1):
        ptx.mbarrier_wait(at["full_x"] + s * 8, parity)
        this = s
        for block in cutlass.range_constexpr(2):
            for m in cutlass.range_constexpr(subtiles):
                decode(words[m], scale_bytes[m], tile.pointers["lut"], tile.words[m])
                multiply(tile.fresh, tile.more, tile.window[m], tile.a[m], tile.b, (block, this))
            cute.autovec_copy(tile.x_scale[None, lane % 4, block, this], scales)
            if cutlass.const_expr(block == 0):
                load_words(tile.view, words, scale_bytes, t, wg, 1, this)
            else:
                s, parity = sync.advance(s, parity, stages)
                ptx.mbarrier_wait(at["full_w"] + s * 8, parity)
                load_words(tile.view, words, scale_bytes, t, wg, 0, s)
            for m in cutlass.range_constexpr(subtiles):
                warpgroup.wait_group(subtiles - 1 - m)
                promote(tile.main[m], tile.window[m], tile.scales)
        # The stage was read by ordinary loads and is refilled by bulk copies (free on H200).
        ptx.fence("proxy.async.shared::cta", "stage read")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(at["empty"] + this * 8)
    return s, parity
