"""Token tiles of the Hopper compute kernel: what a unit of two windows loads."""

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.tokens import TokenSteps

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64


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
    def load_tokens(self, at, workspace, maps, s, slot, width, k):
        """Two windows of a ring block by one tensor load, and their scales."""
        rows, scales = self.max_width, self.max_width * 4
        full = at["full_x"] + s * 8
        sync.refill(full, I32(width) * 256 + 2 * scales)
        for i in cutlass.range_constexpr(len(self.widths)):
            if width == U32(self.widths[i]):
                ptx.tensor_load_3d(
                    at["x"] + s * (rows * 256), maps[i], I32(0), I32(slot) * rows, 2 * k, full
                )
        ptx.bulk_load(
            at["x_scale"] + s * (2 * scales),
            workspace
            + self.shape.offsets["ring_scale"]
            + (I64(slot) * self.w1_windows + 2 * k) * scales,
            2 * scales,
            full,
        )

    @cute.jit
    def load_activations(self, at, workspace, s, slot, width, k):
        """Two windows of ``a`` and their scales; the last of an odd number is loaded twice, where
        its second copy meets the zero weights of the pad block."""
        rows, scales = self.max_width, self.max_width * 4
        full = at["full_x"] + s * 8
        offsets = self.shape.offsets
        window_bytes = I32(width) * 128
        source = workspace + offsets["a_rows"] + I64(slot) * (self.w2_windows * rows * 128)
        source = source + I64(2 * k) * I64(window_bytes)
        source_scale = (
            workspace + offsets["a_scale"] + (I64(slot) * self.w2_windows + 2 * k) * scales
        )
        target = at["x"] + s * (rows * 256)
        target_scale = at["x_scale"] + s * (2 * scales)
        sync.refill(full, 2 * window_bytes + 2 * scales)
        if cutlass.const_expr(self.w2_windows % 2 == 0):
            ptx.bulk_load(target, source, 2 * window_bytes, full)
            ptx.bulk_load(target_scale, source_scale, 2 * scales, full)
        else:
            step, step_scale = I64(window_bytes), I64(scales)
            if k == self.w2_units - 1:
                step, step_scale = I64(0), I64(0)
            ptx.bulk_load(target, source, window_bytes, full)
            ptx.bulk_load(target + window_bytes, source + step, window_bytes, full)
            ptx.bulk_load(target_scale, source_scale, scales, full)
            ptx.bulk_load(target_scale + scales, source_scale + step_scale, scales, full)
