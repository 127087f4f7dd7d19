"""Dispatch for Blackwell: the same steps with the activation format of the block-scaled MMA.

A staged row is H codes in column order, then H/32 scale exponents. In the ring the scales of a row
become one word in the atom of each window, where the MMA finds them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.dispatch import DispatchKernel, Trace
from gcmoe.kernels.dispatch_memory import WARP, at
from gcmoe.kernels.dispatch_send import SendSteps, quantise
from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol import atom_word
from gcmoe.protocol.edges import EMPTY, FULL
from gcmoe.protocol.ring import WINDOW_COLUMNS
from gcmoe.protocol.workspace import MX_COLUMNS

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64

LANE_COLUMNS = 8
GROUP_LANES = MX_COLUMNS // LANE_COLUMNS
"""Lanes that hold the 32 columns of one scale."""


class SendStepsSm100(SendSteps):
    """Steps route, stage and send; only what a staged window looks like differs."""

    @cute.jit
    def stage_window(self, s: dict, turn: Any, a: Any, b: Any, c: Any, d: Any):
        """Quantise one window of each half-warp in groups of 32 columns; lane i holds the columns
        8i..8i+7 of the window, and four lanes share a scale."""
        shape = self.spec.shape
        # The condition is the warp's: all 32 lanes take part in the shuffles.
        if self.window_of(s, turn, s["warp"] * 2) < s["num_windows"]:
            first, second, scale = quantise(a, b, c, d, GROUP_LANES)
            index = self.window_of(s, turn, s["tid"] >> 4)
            if index < s["num_windows"]:
                token = index // U32(shape.num_windows)
                window = index - token * shape.num_windows
                lane = s["tid"] & U32(15)
                row = at(s["workspace"], shape.offsets["staged_x"], token, shape.row_stride)
                place = window * WINDOW_COLUMNS + lane * LANE_COLUMNS
                ptx.store_u64(row + I64(place), (U64(second) << U64(32)) | U64(first))
                if (lane & U32(GROUP_LANES - 1)) == U32(0):
                    group = window * (WINDOW_COLUMNS // MX_COLUMNS) + lane // U32(GROUP_LANES)
                    ptx.store_u8(row + I64(group + U32(shape.hidden)), scale)


class DispatchKernelSm100(DispatchKernel):
    """:class:`gcmoe.kernels.dispatch.DispatchKernel` with the activation format of Blackwell.

    Roles, barriers, edges and timeline are those of the base class.
    """

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self.sending = SendStepsSm100(spec, self.map)

    @cute.jit
    def store_row(self, s: dict, meta: Any, weight: Any, slot: Any, row: Any, rows: Any):
        """The row by a bulk copy; a scale word per window, weight and origin by plain stores.
        All of it is complete before the row is counted in ``token_ring_full``."""
        shape = self.spec.shape
        workspace, windows = s["workspace"], shape.num_windows
        buffer = s["smem"] + I32(self.map.buffers) + I32(s["warp"]) * shape.row_stride
        lane = s["lane"]
        place = slot * shape.slot_rows + row
        sync.after_observe(EMPTY)
        if lane == 0:
            target = at(workspace, shape.offsets["ring_rows"], place, shape.row_stride)
            ptx.bulk_store(target, buffer, I32(shape.row_stride))
            ptx.bulk_commit()
            ptx.store_u32(at(workspace, shape.offsets["ring_meta"], place, 4), meta)
            ptx.store_u32(at(workspace, shape.offsets["ring_weight"], place, 4), weight)
        for turn in cutlass.range_constexpr(-(-windows // WARP)):
            window = lane + U32(turn * WARP)
            if window < U32(windows):
                scales = ptx.shared_load(buffer + I32(shape.hidden) + I32(window) * 4)
                index = (slot * windows + window) * shape.scale_words + atom_word(row)
                ptx.store_u32(at(workspace, shape.offsets["ring_scale"], index, 4), scales)
        sync.proxy_release(FULL)
        if lane == 0:
            sync.complete(FULL)
        cute.arch.sync_warp()
        self.stamp(s, Trace.ROW_STORED)
        if lane == 0:
            cell = at(workspace, shape.offsets["token_ring_full"], slot, 4)
            sync.publish(FULL, cell, shape.ring.full_increment(row, rows))
