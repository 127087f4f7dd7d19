"""Token tiles of the Hopper compute kernel: what a unit of two windows loads."""

from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.tokens import TokenSteps
from gcmoe.protocol import ring_row

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64


def scale_bytes(width: Any) -> Any:
    """Of the scales of one window of a tile."""
    return I32(width) * 4


class TokenFeed(TokenSteps):
    """A unit is two windows and their scales, FP32 by row."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec, windows_per_unit=2)

    @cute.jit
    def unit_bits(self, k):
        """Bits of the W1 bitmap that unit ``k`` of a W2 item reads."""
        bitmap = self.shape.bitmap
        bits = bitmap.window_bits(U64(1), U64(2 * k))
        if cutlass.const_expr(self.w2_windows % 2 == 0):
            bits = bits | bitmap.window_bits(U64(1), U64(2 * k + 1))
        elif k != self.w2_units - 1:
            bits = bits | bitmap.window_bits(U64(1), U64(2 * k + 1))
        return bits

    @cute.jit
    def load_tokens(self, at, workspace, maps, s, slot, rows, width, k):
        """Two windows of a ring block by one tensor load, and their scales."""
        full, block_rows = at["full_x"] + s * 8, self.max_width
        sync.refill(full, I32(width) * 256 + 2 * scale_bytes(width))
        first = ring_row(I32(0), I32(rows), block_rows)
        for i in cutlass.range_constexpr(len(self.widths)):
            if width == U32(self.widths[i]):
                ptx.tensor_load_4d(
                    at["x"] + s * (block_rows * 256), maps[i], I32(0), first, 2 * k, I32(slot), full
                )
        source = workspace + self.shape.offsets["ring_scale"]
        source += I64(slot) * (self.w1_windows * scale_bytes(block_rows))
        ptx.bulk_load(
            at["x_scale"] + s * (2 * scale_bytes(block_rows)),
            source + I64(2 * k * scale_bytes(width)),
            2 * scale_bytes(width),
            full,
        )

    @cute.jit
    def load_activations(self, at, workspace, s, slot, width, k):
        """Two windows of ``a`` and their scales; the last of an odd number is loaded twice, where
        its second copy meets the zero weights of the pad block."""
        full, block_rows = at["full_x"] + s * 8, self.max_width
        offsets, windows = self.shape.offsets, self.w2_windows
        window, scales = I32(width) * 128, scale_bytes(width)
        source = workspace + offsets["a_rows"] + I64(slot) * (windows * block_rows * 128)
        source += I64(2 * k) * I64(window)
        source_scale = workspace + offsets["a_scale"]
        source_scale += I64(slot) * (windows * scale_bytes(block_rows)) + I64(2 * k * scales)
        target = at["x"] + s * (block_rows * 256)
        target_scale = at["x_scale"] + s * (2 * scale_bytes(block_rows))
        sync.refill(full, 2 * window + 2 * scales)
        if cutlass.const_expr(windows % 2 == 0):
            ptx.bulk_load(target, source, 2 * window, full)
            ptx.bulk_load(target_scale, source_scale, 2 * scales, full)
        else:
            step, step_scale = I64(window), I64(scales)
            if k == self.w2_units - 1:
                step, step_scale = I64(0), I64(0)
            ptx.bulk_load(target, source, window, full)
            ptx.bulk_load(target + window, source + step, window, full)
            ptx.bulk_load(target_scale, source_scale, scales, full)
            ptx.bulk_load(target_scale + scales, source_scale + step_scale, scales, full)
