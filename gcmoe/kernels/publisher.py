"""The publisher warp of compute, the same on all architectures."""

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

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64


class Publisher:
    """One warp that copies finished tiles out of the staging buffer, waits for its own copies, and
    publishes. It alone waits for fences (1-5 us each at system scope under peer stores on H200).

    Args:
        scale_bytes: of the scales of one window of ``a``.
        row_stride: bytes between rows of a W2 tile in the staging buffer.
    """

    def __init__(self, spec: KernelSpec, scale_bytes: int, row_stride: int) -> None:
        self.spec, self.shape = spec, spec.shape
        self.max_width = spec.tiles.max_width
        self.w2_windows = spec.shape.intermediate // 128
        self.scale_bytes, self.row_stride = scale_bytes, row_stride

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
                + (I64(slot) * self.w2_windows + I64(tile)) * self.scale_bytes,
                at["out_scale"],
                self.scale_bytes,
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
        offsets, stride = self.shape.offsets, self.shape.block_rows
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
                ptx.bulk_store(target, at["stage"] + row * self.row_stride, W2_COLUMNS * 2)
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
                    workspace + offsets["ring_meta"] + (I64(slot) * self.shape.block_rows + row) * 4
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
