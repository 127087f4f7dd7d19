"""From accumulators to the staging buffer: the epilogue of the Blackwell compute kernel."""

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels import ptx_sm100 as ptx100
from gcmoe.kernels.layout_sm100 import (
    HALF_ROWS,
    OUTPUT_STRIDE,
    TensorMemory,
    swizzled_byte,
)
from gcmoe.kernels.ptx_sm100 import ACCUMULATOR_COLUMNS
from gcmoe.kernels.records import QUEUE_ENTRIES, RECORD_WORDS, Kind, Word
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import ComputeTrace, ItemTrace
from gcmoe.protocol import atom_word

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64
F32 = cutlass.Float32

WARP = 32
EPILOGUE_WARPS = HALF_ROWS // WARP
LOG2_E = 1.4426950408889634


class Epilogue:
    """Four warps, one for each 32 lanes of tensor memory: a thread is a weight row, and a warp the
    32 features of one MX block.

    They leave one finished tile in the staging buffer and a record of it; see
    :class:`gcmoe.kernels.publisher.Publisher`.
    """

    def __init__(self, spec: KernelSpec, memory: TensorMemory) -> None:
        self.spec, self.memory = spec, memory
        self.max_width = spec.tiles.max_width

    @cute.jit
    def epilogue_warps(self, at, columns, tid, events):
        """Items in queue order; ``columns`` is the first allocated column."""
        lanes = columns + (U32(tid // WARP) << U32(21))
        q, item_parity, b, full_parity = I32(0), U32(0), I32(0), U32(0)
        out_parity, go, was_w1 = U32(1), I32(1), I32(1)
        while go != 0:
            ptx.mbarrier_wait(at["item"] + q * 8, item_parity)
            record = at["records"] + q * (RECORD_WORDS * 4)
            kind = ptx.shared_load(record + int(Word.KIND) * 4)
            n = ptx.shared_load(record + int(Word.WIDTH) * 4)
            if cutlass.const_expr(self.spec.trace):
                if tid == 0:
                    was_w1 = self.trace_start(at, record, events, kind, was_w1)
            if kind == U32(int(Kind.STOP)):
                go = I32(0)
            else:
                ptx.mbarrier_wait(at["item_data"] + q * 8, item_parity)
                ptx.mbarrier_wait(at["out_free"], out_parity)
                ptx.mbarrier_wait(at["acc_full"] + b * 8, full_parity)
                ptx100.fence_after_sync()
                d = lanes + U32(b) * self.memory.accumulator_columns
                if kind == U32(int(Kind.W1)):
                    self.w1_tile(at, d, n, q, tid)
                else:
                    self.w2_tile(at, d, n, tid)
                ptx100.fence_before_sync()
                if cutlass.const_expr(self.spec.trace):
                    if tid == 0:
                        sync.mark_item(self.spec, at, events, ItemTrace.END)
                self.hand_over(at, record, tid, b)
                out_parity ^= 1
                b, full_parity = sync.advance(b, full_parity, self.memory.accumulators)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ptx.mbarrier_arrive(at["item_free"] + q * 8)
            q, item_parity = sync.advance(q, item_parity, QUEUE_ENTRIES)
        ptx.mbarrier_wait(at["out_free"], out_parity)
        if tid == 0:
            ptx.shared_store(at["out_record"] + int(Word.KIND) * 4, U32(int(Kind.STOP)))
            if cutlass.const_expr(self.spec.trace):
                count = ptx.shared_load(at["traced"] + 4 * int(ItemTrace.END))
                ptx.store_u64(events + 8 * int(ComputeTrace.ITEMS), U64(count))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(at["out_full"])

    @cute.jit
    def trace_start(self, at, record, events, kind, was_w1):
        """Record what the item is and when the epilogue got its record; by one thread."""
        if (kind != U32(int(Kind.W1))) & (was_w1 != 0):
            sync.mark(self.spec, events, ComputeTrace.W1_OVER)
            was_w1 = I32(0)
        if kind != U32(int(Kind.STOP)):
            what = U64(kind)
            for word, shift in ((Word.ROWS, 8), (Word.TILE, 24), (Word.SLOT, 40)):
                value = ptx.shared_load(record + int(word) * 4)
                what = what | (U64(value) << U64(shift))
            sync.record_item(self.spec, at, events, ItemTrace.WHAT, what)
            sync.mark_item(self.spec, at, events, ItemTrace.START)
        return was_w1

    @cute.jit
    def hand_over(self, at, record, tid, b):
        """The accumulators back to the MMA warp, the staged tile to the publisher.

        The proxy fence passes the tile to the bulk stores, and orders the reads of routing weights
        before the bulk load that fills their queue entry again.
        """
        if tid == 0:
            for word in (Word.KIND, Word.SLOT, Word.TILE, Word.ROWS, Word.WIDTH):
                value = ptx.shared_load(record + int(word) * 4)
                ptx.shared_store(at["out_record"] + int(word) * 4, value)
        ptx.fence("proxy.async.shared::cta", "stage write")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(at["acc_free"] + b * 8)
            ptx.mbarrier_arrive(at["out_full"])

    @cute.jit
    def w1_tile(self, at, d, n, q, tid):
        """SwiGLU times routing weight; codes and scale atom of one window of W2's tokens.

        The codes go where the swizzle wants them, so that the window is one bulk copy each way.
        """
        feature, lane, block = U32(tid), tid % WARP, U32(tid // WARP)
        for chunk in cutlass.range(n >> U32(3), unroll=1):
            first = U32(chunk) * ACCUMULATOR_COLUMNS
            # Lanes may have parted in a wait or a branch: the load wants the warp together.
            cute.arch.sync_warp()
            values = ptx100.load_accumulators(d + first, d + first + self.max_width)
            weights = at["row_words"] + q * (self.max_width * 4) + I32(first) * 4
            for pair in cutlass.range_constexpr(ACCUMULATOR_COLUMNS // 2):
                scaled = []
                for j in (2 * pair, 2 * pair + 1):
                    weight = ptx.float_of(ptx.shared_load(weights + j * 4))
                    gate, up = values[j], values[ACCUMULATOR_COLUMNS + j]
                    value, exponent = self.activate(gate, up, weight)
                    scaled.append(value)
                    if lane == 0:
                        place = at["out_scale"] + I32(atom_word(first + j) * 4 + block)
                        ptx100.shared_store_u8(place, exponent)
                codes = ptx.e4m3x2(scaled[1], scaled[0])
                row = first + 2 * pair
                low = at["stage"] + I32(swizzled_byte(row, feature))
                high = at["stage"] + I32(swizzled_byte(row + 1, feature))
                ptx100.shared_store_u8(low, codes & U32(0xFF))
                ptx100.shared_store_u8(high, codes >> U32(8))

    @cute.jit
    def activate(self, gate, up, weight):
        """(a scaled for E4M3, UE8M0 byte) of a thread's feature for one token.

        NaN and infinity have no say in the scale and become the NaN code. The scale is
        ceil(log2(amax / 448)) from the bits: 448 = 1.75 * 2^8; 9 keeps its inverse a normal number.
        """
        limit = self.spec.clamp
        if cutlass.const_expr(limit is not None):
            gate = ptx.min_nan(gate, F32(limit))
            up = ptx.max_nan(ptx.min_nan(up, F32(limit)), F32(0.0) - F32(limit))
        sigmoid = ptx.rcp_approx(F32(1.0) + ptx.exp2_approx(gate * F32(-LOG2_E)))
        bits = ptx.bits_of(gate * sigmoid * up * weight)
        magnitude = bits & U32(0x7FFF_FFFF)
        if magnitude >= U32(0x7F80_0000):
            magnitude = U32(0)
            bits = U32(0x7FFF_FFFF)
        t = ptx.umax((ptx100.warp_max(magnitude) + U32(0x1F_FFFF)) >> U32(23), U32(9))
        inverse = ptx.float_of((U32(262) - t) << U32(23))
        return ptx.float_of(bits) * inverse, t - U32(8)

    @cute.jit
    def w2_tile(self, at, d, n, tid):
        """BF16 rows of 256 columns, a token each."""
        for chunk in cutlass.range(n >> U32(3), unroll=1):
            first = U32(chunk) * ACCUMULATOR_COLUMNS
            cute.arch.sync_warp()
            values = ptx100.load_accumulators(d + first, d + first + self.max_width)
            rows = at["stage"] + I32(first) * OUTPUT_STRIDE + tid * 2
            for half in cutlass.range_constexpr(2):
                for pair in cutlass.range_constexpr(ACCUMULATOR_COLUMNS // 2):
                    j = half * ACCUMULATOR_COLUMNS + 2 * pair
                    both = ptx.bf16x2(values[j + 1], values[j])
                    place = rows + (2 * pair * OUTPUT_STRIDE + half * HALF_ROWS * 2)
                    ptx.shared_store_u16(place, both)
                    ptx.shared_store_u16(place + OUTPUT_STRIDE, both >> U32(16))
