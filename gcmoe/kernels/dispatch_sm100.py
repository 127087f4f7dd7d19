"""Dispatch for Blackwell: the same steps with the activation format of the block-scaled MMA.

A staged row is H codes in column order, then H/32 scale exponents. In the ring the scales of a row
become one word in the atom of each window, where the MMA finds them.
"""

from __future__ import annotations

from typing import Any

import cutlass

from gcmoe.kernels import ptx
from gcmoe.kernels.dispatch import DispatchKernel
from gcmoe.kernels.dispatch_send import LANE_COLUMNS, SendSteps
from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol import atom_word
from gcmoe.protocol.workspace import MX_COLUMNS

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64


class SendStepsSm100(SendSteps):
    """Steps route, stage and send; only what a staged window looks like differs."""

    scale_lanes = MX_COLUMNS // LANE_COLUMNS

    def load_columns(self, window: Any, lane: Any) -> list[Any]:
        """A lane's columns of the window at address ``window``: 16 consecutive ones."""
        address = window + I64(lane) * (2 * LANE_COLUMNS)
        return [*ptx.load_u32x4(address), *ptx.load_u32x4(address + 16)]


class DispatchKernelSm100(DispatchKernel):
    """:class:`gcmoe.kernels.dispatch.DispatchKernel` with the activation format of Blackwell.

    Roles, barriers, edges and timeline are those of the base class.
    """

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self.sending = SendStepsSm100(spec, self.map)

    def weight_row(self, row: Any, rows: Any) -> Any:
        """Where the routing weight of row ``row`` of ``rows`` lies among those of its slot."""
        return row

    def window_scale(
        self, buffer: Any, slot: Any, window: Any, row: Any, rows: Any
    ) -> tuple[Any, Any]:
        """(word, index) in ``ring_scale`` of a row's four scales in a window; from the row in
        ``buffer``."""
        shape = self.spec.shape
        scales = ptx.shared_load(buffer + I32(shape.hidden) + I32(window) * 4)
        index = (slot * shape.num_windows + window) * shape.scale_words + atom_word(row)
        return scales, index
