"""FP4 weights times FP8 tokens on Hopper: decode in registers, QGMMA with register A, promotion.

A unit is 256 weight rows x 256 columns: two blocks of 128 columns, each four sub-blocks of 64 rows
and 4,352 bytes (1,024 words of nibbles, then 256 scale bytes; ``gcmoe.numerics.packing``). One
128-bit load gives a thread one MX group of one row, which has one scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Ahead(NamedTuple):
    """Registers of what a thread has ahead of a block's products, of its two rows per sub-tile.

    Args:
        words: per sub-tile: nibbles, [word i][row half h].
        scales: per sub-tile: the two scale bytes in one word.
        codes: per sub-tile: what the magnitudes mean under these scales, [low, high][row half h].
        decoded: of the first sub-tile: A registers, [register][k32 step].
    """

    words: list[Any]
    scales: Any
    codes: list[Any]
    decoded: Any


def make_ahead(subtiles: int) -> Ahead:
    """Its registers; they hold across items of different token widths."""

    def per_subtile(shape: tuple[int, int]) -> list[Any]:
        return [cute.make_rmem_tensor(cute.make_layout(shape), U32) for _ in range(subtiles)]

    scales = cute.make_rmem_tensor(cute.make_layout(subtiles), U32)
    decoded = cute.make_rmem_tensor(cute.make_layout((4, 4)), U32)
    return Ahead(per_subtile((4, 2)), scales, per_subtile((2, 2)), decoded)


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
def load_words(view, ahead, t, wg, m: cutlass.Constexpr, block: cutlass.Constexpr, s):
    """One block's nibbles and scale bytes of sub-tile ``m`` of this thread to registers."""
    nibbles, scales = view
    for h in cutlass.range_constexpr(2):
        cute.autovec_copy(nibbles[None, t, h, m, wg, block, s], ahead.words[m][None, h])
    ahead.scales[m] = U32(scales[t, m, wg, block, s])


@cute.jit
def load_codes(table: cute.Pointer, ahead, m: cutlass.Constexpr):
    """The table's entries for the scale bytes of sub-tile ``m``."""
    entries = cute.make_tensor(table, cute.make_layout((2, TABLE_ENTRIES), stride=(1, 2)))
    for h in cutlass.range_constexpr(2):
        # Within the table also where a stage holds no weights: nothing, or a guess over the buffer
        # of the hand-off probe.
        index = (ahead.scales[m] >> U32(8 * h)) & U32(TABLE_ENTRIES - 1)
        cute.autovec_copy(entries[None, I32(index)], ahead.codes[m][None, h])


@cute.jit
def decode(words: cute.Tensor, codes: cute.Tensor, fragment: cute.Tensor):
    """Eight words of nibbles to the A registers of four k32 steps; 7 instructions per 8 values."""
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

    def __init__(
        self, width: int, tiles: TilePlan, pointers: dict[str, Any], ahead: Ahead, t: Any, lane: Any
    ):
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
        self.words = [
            cute.make_rmem_tensor(cute.make_layout((4, 4)), U32) if m else ahead.decoded
            for m in count
        ]
        self.a = [
            cute.make_tensor(cute.recast_ptr(words.iterator, dtype=F8), layout)
            for words in self.words
        ]
        self.scales = cute.make_rmem_tensor(cute.make_layout((2, width // 8)), F32)
        self.x_scale = cute.make_tensor(
            pointers["x_scale"],
            cute.make_layout(
                (width // 4, 4, 2, stages), stride=(1, width // 4, width, 2 * max_width)
            ),
        )
        self.view = weight_view(pointers["w"], tiles.subtiles, tiles.warpgroups, stages)

    def main_loop(
        self, at: dict[str, Any], units: Any, ahead: Ahead, wg: Any, s: Any, p: Any
    ) -> tuple[Any, Any]:
        """All units of an item; its first block is in ``ahead`` on entry, and the next item's
        first block on return. Returns the next stage and its parity."""
        for m in range(self.tiles.subtiles):
            self.main[m].fill(0.0)
        return main_loop(self, at, units, ahead, wg, s, p)

    def row_scales(self, pointer: Any, q: Any, wg: Any, m: int) -> tuple[Any, Any]:
        """FP32 scales of the thread's two weight rows of sub-tile ``m``."""
        row = (wg * self.tiles.subtiles + m) * 64 + (self.t // 32) * 16 + self.lane // 4
        scales = cute.make_tensor(pointer + q * 256 + row, cute.make_layout(2, stride=8))
        return scales[0], scales[1]


@cute.jit
def main_loop(tile, at, units, ahead, wg, s, parity):
    """See :meth:`TileMma.main_loop`.

    Few warps share a scheduler, so the next block's words and codes come as early as their
    registers are free, and its first sub-tile is decoded while products of this block run. The
    barrier of the next weights is tested a group of products before it must be over.
    """
    subtiles, stages, view = tile.tiles.subtiles, tile.tiles.stages, tile.view
    t, lane = tile.t, tile.lane
    scales = cute.make_tensor(tile.scales.iterator, cute.make_layout(tile.width // 4))
    for _ in cutlass.range(units, unroll=1):
        this = s
        x_is_here = ptx.mbarrier_test(at["full_x"] + this * 8, parity)
        for block in cutlass.range_constexpr(2):
            if cutlass.const_expr(block == 0):
                ptx.mbarrier_wait_unless(x_is_here, at["full_x"] + this * 8, parity)
            else:
                s, parity = sync.advance(s, parity, stages)
                w_is_here = ptx.mbarrier_test(at["full_w"] + s * 8, parity)
            for m in cutlass.range_constexpr(subtiles):
                if cutlass.const_expr(m > 0):
                    decode(ahead.words[m], ahead.codes[m], tile.words[m])
                multiply(tile.fresh, tile.more, tile.window[m], tile.a[m], tile.b, (block, this))
                if cutlass.const_expr(m == subtiles - 1):
                    cute.autovec_copy(tile.x_scale[None, lane % 4, block, this], scales)
                if cutlass.const_expr(block == 0):
                    load_words(view, ahead, t, wg, m, 1, this)
                else:
                    if cutlass.const_expr(m == 0):
                        ptx.mbarrier_wait_unless(w_is_here, at["full_w"] + s * 8, parity)
                    load_words(view, ahead, t, wg, m, 0, s)
                load_codes(tile.pointers["lut"], ahead, m)
            for m in cutlass.range_constexpr(subtiles):
                warpgroup.wait_group(subtiles - 1 - m)
                if cutlass.const_expr(m == 0):
                    decode(ahead.words[0], ahead.codes[0], tile.words[0])
                promote(tile.main[m], tile.window[m], tile.scales)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(at["empty"] + this * 8)
    return s, parity
