"""Dispatch for Blackwell: the same steps with the activation format of the block-scaled MMA.

A staged row is H codes in column order, then H/32 scale exponents. In the ring the scales of a row
become one word in the atom of each window, where the MMA finds them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx
from gcmoe.kernels.dispatch import DispatchKernel
from gcmoe.kernels.dispatch_memory import at
from gcmoe.kernels.dispatch_send import SendSteps, quantise
from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol import atom_word
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

    def weight_row(self, row: Any) -> Any:
        """Where the routing weight of a row lies among those of its slot."""
        return row

    def window_scale(self, buffer: Any, slot: Any, window: Any, row: Any) -> tuple[Any, Any]:
        """(word, index) in ``ring_scale`` of a row's four scales in a window; from the row in
        ``buffer``."""
        shape = self.spec.shape
        scales = ptx.shared_load(buffer + I32(shape.hidden) + I32(window) * 4)
        index = (slot * shape.num_windows + window) * shape.scale_words + atom_word(row)
        return scales, index
