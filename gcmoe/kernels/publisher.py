"""The publisher warp of compute, the same on all architectures."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.records import QUEUE_ENTRIES, Kind, Word
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
        scale_bytes: by the width of a tile, of the scales of one window of ``a``.
        row_stride: bytes between rows of a W2 tile in the staging buffer.
    """

    def __init__(
        self, spec: KernelSpec, scale_bytes: Callable[[Any], Any], row_stride: int
    ) -> None:
        self.spec, self.shape = spec, spec.shape
        self.max_width = spec.tiles.max_width
        self.w2_windows = spec.shape.intermediate // 128
        self.scale_bytes, self.row_stride = scale_bytes, row_stride

    @cute.jit
    def publisher_warp(self, at, workspace, lane, events):
        """Finished tiles out; consumers never wait for a fence."""
        parity, q, data_parity, go = U32(0), I32(0), U32(0), I32(1)
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
                        ptx.mbarrier_wait(at["item_data"] + q * 8, data_parity)
                        self.publish_w2(at, workspace, lane, slot, tile, rows, q)
                else:
                    ptx.mbarrier_arrive(at["out_free"])
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.mbarrier_arrive(at["item_free"] + q * 8)
                q, data_parity = sync.advance(q, data_parity, QUEUE_ENTRIES)
                if cutlass.const_expr(self.spec.trace):
                    if lane == 0:
                        sync.mark_item(self.spec, at, events, ItemTrace.PUBLISHED)
        if lane == 0:
            sync.mark(self.spec, events, ComputeTrace.END)

    @cute.jit
    def row_origin(self, at, q, row, rows):
        """The ``RowMeta`` of a row of the W2 item in queue entry ``q``; 0 beyond its rows."""
        meta = U32(0)
        if U32(row) < rows:
            meta = ptx.shared_load(at["row_words"] + (q * self.max_width + row) * 4)
        return meta

    @cute.jit
    def publish_w1(self, at, workspace, lane, slot, tile, width):
        """A window of ``a`` and its scales, then the two bits of the window."""
        offsets, windows = self.shape.offsets, self.w2_windows
        if lane == 0:
            window_bytes, scale_bytes = I32(width) * 128, self.scale_bytes(width)
            target = workspace + offsets["a_rows"]
            target += I64(slot) * (windows * self.max_width * 128) + I64(tile) * I64(window_bytes)
            ptx.bulk_store(target, at["stage"], window_bytes)
            target = workspace + offsets["a_scale"]
            target += I64(slot) * I64(windows * self.scale_bytes(self.max_width))
            ptx.bulk_store(target + I64(I32(tile) * scale_bytes), at["out_scale"], scale_bytes)
            ptx.bulk_commit()
            sync.complete(W1_DONE)
            sync.publish(
                W1_DONE,
                workspace + offsets["w1_bitmap"] + I64(slot) * 8,
                self.shape.bitmap.window_bits(U64(1), U64(tile)),
            )
        ptx.mbarrier_arrive(at["out_free"])

    @cute.jit
    def publish_w2(self, at, workspace, lane, slot, tile, rows, q):
        """Rows of 256 columns to the source ranks, then their arrivals, then the ring slot."""
        offsets = self.shape.offsets
        firsts = range(0, self.max_width, 32)
        metas = [self.row_origin(at, q, lane + first, rows) for first in firsts]
        for first, meta in zip(firsts, metas, strict=True):
            row = lane + first
            if U32(row) < rows:
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
        for first, meta in zip(firsts, metas, strict=True):
            self.publish_arrivals(workspace, lane, tile, rows, meta, first)
        cute.arch.sync_warp()
        if lane == 0:
            sync.publish(
                EMPTY,
                workspace + offsets["token_ring_empty"] + I64(slot) * 4,
                U32(W2_COLUMNS // UNIT_COLUMNS),
            )
        # Behind the publication, which it must not delay.
        ptx.fence("proxy.async.shared::cta", "row words read")

    @cute.jit
    def publish_arrivals(self, workspace, lane, tile, rows, meta, first: cutlass.Constexpr):
        """Add 32 rows to the arrivals of their sources, one lane per source."""
        arrivals = self.shape.arrivals
        group = arrivals.group(U32(tile), W2_COLUMNS)
        cell = self.shape.offsets["combine_arrivals"] + I64(group) * 4
        if cutlass.const_expr(self.shape.num_ranks == 1):
            if cutlass.const_expr(first == 0):
                if lane == 0:
                    sync.publish(
                        ARRIVALS,
                        workspace + cell,
                        arrivals.increment(rows, W2_COLUMNS),
                    )
        else:
            row = lane + first
            src = U32(0xFFFF)
            if U32(row) < rows:
                src = RowMeta.SRC.get(meta)
            same = ptx.match_any(src)
            earlier = same & ((U32(1) << U32(lane)) - 1)
            if (U32(row) < rows) & (earlier == U32(0)):
                sync.publish(
                    ARRIVALS,
                    self.peer(workspace, src) + cell,
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
