"""From accumulators to memory: epilogues of the Hopper compute kernel and their publisher."""

from enum import IntEnum

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.records import Kind, Word
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import ComputeTrace, ItemTrace
from gcmoe.protocol import RowMeta
from gcmoe.protocol.edges import ARRIVALS, EMPTY, W1_DONE
from gcmoe.protocol.order import W2_COLUMNS
from gcmoe.protocol.ring import UNIT_COLUMNS

U8, U32, U64 = cutlass.Uint8, cutlass.Uint32, cutlass.Uint64
I32, I64, F32, BF16 = cutlass.Int32, cutlass.Int64, cutlass.Float32, cutlass.BFloat16

TILE_ROWS = 256
STAGE_STRIDE = 528
LOG2_E = 1.4426950408889634


class NamedBarrier(IntEnum):
    """Barriers beside ``sync_threads``."""

    CONSUMERS = 1


class TileOutput:
    """Epilogues, run by the consumer warps, and the publisher warp that follows them.

    The consumers leave one finished tile in the staging buffer and a record of it; the publisher
    copies it out, waits for its own copies, and publishes. It alone waits for fences (1-5 us each
    at system scope under peer stores on H200).
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.spec, self.shape = spec, spec.shape
        self.max_width = spec.tiles.max_width
        self.subtiles = spec.tiles.subtiles
        self.consumer_threads = spec.tiles.warpgroups * 128
        self.w2_windows = spec.shape.intermediate // 128

    @cute.jit
    def publisher_warp(self, at, workspace, lane, events):
        """Finished tiles out; consumers never wait for a fence."""
        parity, go = U32(0), I32(1)
        while go != 0:
            ptx.mbarrier_wait(at["out_full"], parity)
            parity ^= 1
            record = at["out_record"]
            kind = ptx.shared_load(record + int(Word.KIND) * 4)
            slot = ptx.shared_load(record + int(Word.SLOT) * 4)
            tile = ptx.shared_load(record + int(Word.TILE) * 4)
            rows = ptx.shared_load(record + int(Word.ROWS) * 4)
            width = ptx.shared_load(record + int(Word.WIDTH) * 4)
            # By ballot, so that all lanes take the same branch.
            poisoned = ptx.ballot(ptx.shared_load(at["poisoned"]))
            if kind == U32(int(Kind.STOP)):
                go = I32(0)
            else:
                if poisoned == U32(0):
                    if kind == U32(int(Kind.W1)):
                        self.publish_w1(at, workspace, lane, slot, tile, width)
                    else:
                        self.publish_w2(at, workspace, lane, slot, tile, rows)
                else:
                    ptx.mbarrier_arrive(at["out_free"])
                if cutlass.const_expr(self.spec.trace):
                    if lane == 0:
                        sync.mark_item(self.spec, at, events, ItemTrace.PUBLISHED)
        if lane == 0:
            sync.mark(self.spec, events, ComputeTrace.END)

    @cute.jit
    def publish_w1(self, at, workspace, lane, slot, tile, width):
        """A window of ``a`` and its scales, then the two bits of the window."""
        rows = self.max_width
        offsets = self.shape.offsets
        if lane == 0:
            window_bytes = I32(width) * 128
            ptx.bulk_store(
                workspace
                + offsets["a_rows"]
                + I64(slot) * (self.w2_windows * rows * 128)
                + I64(tile) * I64(window_bytes),
                at["stage"],
                window_bytes,
            )
            ptx.bulk_store(
                workspace
                + offsets["a_scale"]
                + (I64(slot) * self.w2_windows + I64(tile)) * (rows * 4),
                at["out_scale"],
                rows * 4,
            )
            ptx.bulk_commit()
            sync.complete(W1_DONE)
            sync.publish(
                W1_DONE,
                workspace + offsets["w1_bitmap"] + I64(slot) * 8,
                self.shape.bitmap.window_bits(U64(1), U64(tile)),
            )
        ptx.mbarrier_arrive(at["out_free"])

    @cute.jit
    def publish_w2(self, at, workspace, lane, slot, tile, rows):
        """Rows of 256 columns to the source ranks, then their arrivals, then the ring slot."""
        offsets, stride = self.shape.offsets, self.shape.slot_rows
        for first in cutlass.range_constexpr(0, self.max_width, 32):
            row = lane + first
            if U32(row) < rows:
                meta = ptx.load_u32(
                    workspace + offsets["ring_meta"] + (I64(slot) * stride + row) * 4
                )
                token, k_slot = RowMeta.TOKEN.get(meta), RowMeta.SLOT.get(meta)
                target = self.peer(workspace, RowMeta.SRC.get(meta)) + offsets["combine"]
                target += I64(token * self.shape.top_k + k_slot) * (self.shape.hidden * 2)
                target += I64(tile) * (W2_COLUMNS * 2)
                ptx.bulk_store(target, at["stage"] + row * STAGE_STRIDE, W2_COLUMNS * 2)
        ptx.bulk_commit()
        sync.complete(ARRIVALS)
        ptx.mbarrier_arrive(at["out_free"])
        cute.arch.sync_warp()
        sync.release(ARRIVALS)
        for first in cutlass.range_constexpr(0, self.max_width, 32):
            self.publish_arrivals(workspace, lane, slot, rows, first)
        cute.arch.sync_warp()
        if lane == 0:
            sync.publish(
                EMPTY,
                workspace + offsets["token_ring_empty"] + I64(slot) * 4,
                U32(W2_COLUMNS // UNIT_COLUMNS),
            )

    @cute.jit
    def publish_arrivals(self, workspace, lane, slot, rows, first: cutlass.Constexpr):
        """Add 32 rows to the arrivals of their sources, one lane per source."""
        offsets, arrivals = self.shape.offsets, self.shape.arrivals
        if cutlass.const_expr(self.shape.num_ranks == 1):
            if cutlass.const_expr(first == 0):
                if lane == 0:
                    sync.publish(
                        ARRIVALS,
                        workspace + offsets["combine_arrivals"],
                        arrivals.increment(rows, W2_COLUMNS),
                    )
        else:
            row = lane + first
            src = U32(0xFFFF)
            if U32(row) < rows:
                meta = ptx.load_u32(
                    workspace + offsets["ring_meta"] + (I64(slot) * self.shape.slot_rows + row) * 4
                )
                src = RowMeta.SRC.get(meta)
            same = ptx.match_any(src)
            earlier = same & ((U32(1) << U32(lane)) - 1)
            if (U32(row) < rows) & (earlier == U32(0)):
                sync.publish(
                    ARRIVALS,
                    self.peer(workspace, src) + offsets["combine_arrivals"],
                    arrivals.increment(ptx.popcount(same), W2_COLUMNS),
                )

    @cute.jit
    def peer(self, workspace, rank):
        """The workspace of a rank."""
        if cutlass.const_expr(self.shape.num_ranks == 1):
            address = workspace
        else:
            address = ptx.parameter_u64(self.spec.peers_symbol, I32(rank))
        return address

    @cute.jit
    def w1_epilogue(
        self, width: cutlass.Constexpr, at, pointers, tiles, t, lane, warpgroup, q, phases
    ):
        """SwiGLU times routing weight, one scale per token, E4M3 codes in W2's order.

        A thread holds gate (row g) and up (row g + 8) of the same feature, for columns
        n = 8j + 2t4 + c. The scale needs the largest magnitude over the 128 features of the tile,
        which lie in all consumer warps: an atomic maximum in shared memory, double-buffered.
        """
        limit = self.spec.clamp
        warp, g, t4 = t // 32, lane // 4, lane % 4
        group = self.max_width // 4
        weights = cute.make_tensor(
            pointers["weights"] + q * self.max_width + t4 * group,
            cute.make_layout((2, width // 8), stride=(1, 2)),
        )
        amax = at["amax"] + (I32(phases[2]) * self.max_width + t4 * group) * 4
        for m in cutlass.range_constexpr(self.subtiles):
            gate_scale, up_scale = tiles.row_scales(pointers["row_scales"], q, warpgroup, m)
            acc = tiles.main[m]
            for j in cutlass.range_constexpr(width // 8):
                for c in cutlass.range_constexpr(2):
                    gate, up = acc[4 * j + c] * gate_scale, acc[4 * j + 2 + c] * up_scale
                    if cutlass.const_expr(limit is not None):
                        gate = ptx.min_nan(gate, F32(limit))
                        up = ptx.max_nan(ptx.min_nan(up, F32(limit)), F32(0.0) - F32(limit))
                    sigmoid = ptx.rcp_approx(F32(1.0) + ptx.exp2_approx(gate * F32(-LOG2_E)))
                    value = gate * sigmoid * up * weights[c, j]
                    bits = ptx.bits_of(value)
                    magnitude = bits & U32(0x7FFF_FFFF)
                    if magnitude >= U32(0x7F80_0000):
                        magnitude = U32(0)
                        bits = U32(0x7FFF_FFFF)
                    acc[4 * j + c] = ptx.float_of(bits)
                    for distance in (4, 8, 16):
                        other = cute.arch.shuffle_sync_bfly(magnitude, distance)
                        magnitude = ptx.umax(magnitude, other)
                    acc[4 * j + 2 + c] = ptx.float_of(magnitude)
            if g == 0:
                for j in cutlass.range_constexpr(width // 8):
                    for c in cutlass.range_constexpr(2):
                        ptx.shared_max(amax + (2 * j + c) * 4, ptx.bits_of(acc[4 * j + 2 + c]))
        cute.arch.barrier(
            barrier_id=int(NamedBarrier.CONSUMERS), number_of_threads=self.consumer_threads
        )
        exponents = cute.make_rmem_tensor(cute.make_layout(width // 4), U32)
        source = pointers["amax"] + (I32(phases[2]) * self.max_width + t4 * group)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(width // 4)), exponents)
        for i in cutlass.range_constexpr(width // 4):
            exponents[i] = ptx.umax((exponents[i] + U32(0x1F_FFFF)) >> U32(23), U32(9))
        if warpgroup * 128 + t < self.max_width:
            next_amax = at["amax"] + (I32(phases[2] ^ 1) * self.max_width + t) * 4
            ptx.shared_store(next_amax, U32(0))
        if (g == 0) & (warp == 0) & (warpgroup == 0):
            for i in cutlass.range_constexpr(width // 4):
                ptx.shared_store(
                    at["out_scale"] + (t4 * group + i) * 4, (exponents[i] - U32(8)) << U32(23)
                )
        phases[2] = phases[2] ^ 1
        stage = cute.recast_ptr(pointers["stage"], dtype=U8)
        for j in cutlass.range_constexpr(width // 8):
            low = ptx.float_of((U32(262) - exponents[2 * j]) << U32(23))
            high = ptx.float_of((U32(262) - exponents[2 * j + 1]) << U32(23))
            for m in cutlass.range_constexpr(self.subtiles):
                acc = tiles.main[m]
                codes = ptx.e4m3x2(acc[4 * j + 1] * high, acc[4 * j] * low)
                position = (warpgroup * self.subtiles + m) * 32 + warp * 8 + g
                for c in cutlass.range_constexpr(2):
                    n = t4 * 2 + c
                    offset = (n + 8 * j) * 128 + ((position // 16) ^ n) * 16 + position % 16
                    cute.make_tensor(stage + offset, cute.make_layout(1))[0] = U8(
                        (codes >> U32(8 * c)) & U32(0xFF)
                    )

    @cute.jit
    def w2_epilogue(self, width: cutlass.Constexpr, at, pointers, tiles, t, lane, warpgroup, q):
        """BF16 rows of 256 columns, padded to 528 B so that the stores meet no bank twice."""
        warp, g, t4 = t // 32, lane // 4, lane % 4
        stride = STAGE_STRIDE // 2
        for m in cutlass.range_constexpr(self.subtiles):
            low_scale, high_scale = tiles.row_scales(pointers["row_scales"], q, warpgroup, m)
            column = (warpgroup * self.subtiles + m) * 64 + warp * 16 + g
            out = cute.make_tensor(
                cute.recast_ptr(pointers["stage"], dtype=BF16) + (t4 * 2 * stride + column),
                cute.make_layout((2, 2, width // 8), stride=(stride, 8, 8 * stride)),
            )
            acc = tiles.main[m]
            for i in cutlass.range_constexpr(width // 2):
                h = (i // 2) % 2
                scale = high_scale if h else low_scale
                out[i % 2, h, i // 4] = (acc[i] * scale).to(BF16)
