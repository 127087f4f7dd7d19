"""From accumulators to the staging buffer: epilogues of the Hopper compute kernel."""

from enum import IntEnum

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx
from gcmoe.kernels.spec import KernelSpec

U8, U32, U64 = cutlass.Uint8, cutlass.Uint32, cutlass.Uint64
I32, I64, F32, BF16 = cutlass.Int32, cutlass.Int64, cutlass.Float32, cutlass.BFloat16

TILE_ROWS = 256
STAGE_STRIDE = 528
LOG2_E = 1.4426950408889634


class NamedBarrier(IntEnum):
    """Barriers beside ``sync_threads``."""

    CONSUMERS = 1


class TileOutput:
    """Epilogues, run by the consumer warps: they leave one finished tile in the staging buffer and
    a record of it; the publisher takes it from there."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.max_width = spec.tiles.max_width
        self.subtiles = spec.tiles.subtiles
        self.consumer_threads = spec.tiles.warpgroups * 128

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
        group = width // 4
        weights = cute.make_tensor(
            cute.recast_ptr(pointers["row_words"], dtype=F32) + q * self.max_width + t4 * group,
            cute.make_layout((2, width // 8), stride=(1, 2)),
        )
        amax = at["amax"] + (I32(phases[2]) * self.max_width + t4 * group) * 4
        largest = cute.make_rmem_tensor(cute.make_layout(group), U32)
        largest.fill(U32(0))
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
                    largest[2 * j + c] = ptx.umax(largest[2 * j + c], magnitude)
        for i in cutlass.range_constexpr(group):
            for distance in (4, 8, 16):
                other = cute.arch.shuffle_sync_bfly(largest[i], distance)
                largest[i] = ptx.umax(largest[i], other)
        if g == 0:
            for i in cutlass.range_constexpr(group):
                ptx.shared_max(amax + i * 4, largest[i])
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
