"""The MMA warp of the Blackwell compute kernel: block-scaled MMAs on stages that others fill."""

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels import ptx_sm100 as ptx100
from gcmoe.kernels.layout_sm100 import (
    ATOM_BYTES,
    CODE_SHARED_BYTES,
    COPIES,
    MMAS,
    SCALE_BYTES,
    WINDOW,
    TensorMemory,
    advance,
    instruction_descriptor,
    operand_descriptor,
    scale_descriptor,
)
from gcmoe.kernels.records import QUEUE_ENTRIES, RECORD_WORDS, Kind, Word
from gcmoe.kernels.spec import KernelSpec

U32, U64, I32 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32


class MmaIssuer:
    """One thread copies scales and issues MMAs; it touches no data itself.

    An item is two accumulators over the same tokens. A window of it is three scale copies and,
    for each K32 step, an MMA of each half.
    """

    def __init__(self, spec: KernelSpec, memory: TensorMemory) -> None:
        self.spec, self.shape, self.memory = spec, spec.shape, memory
        self.stages, self.max_width = spec.tiles.stages, spec.tiles.max_width
        self.w1_windows = spec.shape.hidden // WINDOW
        self.w2_windows = spec.shape.intermediate // WINDOW

    @cute.jit
    def mma_warp(self, at, columns):
        """Items in queue order; ``columns`` is the first allocated column."""
        with cute.arch.elect_one():
            q, item_parity, s, parity, go = I32(0), U32(0), I32(0), U32(0), I32(1)
            b, free_parity = I32(0), U32(1)
            while go != 0:
                ptx.mbarrier_wait(at["item"] + q * 8, item_parity)
                record = at["records"] + q * (RECORD_WORDS * 4)
                kind = ptx.shared_load(record + int(Word.KIND) * 4)
                n = ptx.shared_load(record + int(Word.WIDTH) * 4)
                if kind == U32(int(Kind.STOP)):
                    go = I32(0)
                else:
                    windows = I32(self.w1_windows)
                    if kind == U32(int(Kind.W2)):
                        windows = I32(self.w2_windows)
                    # The fence behind the waits of the first window covers this one.
                    ptx.mbarrier_wait(at["acc_free"] + b * 8, free_parity)
                    d = columns + U32(b) * self.memory.accumulator_columns
                    s, parity = self.item(at, columns, d, n, windows, s, parity)
                    ptx100.commit(at["acc_full"] + b * 8)
                    # The commit speaks for the tensor core only. This arrival hands on what this
                    # thread has seen of other warps, the poison flag among it.
                    ptx.mbarrier_arrive(at["acc_full"] + b * 8)
                    b, free_parity = sync.advance(b, free_parity, self.memory.accumulators)
                q, item_parity = sync.advance(q, item_parity, QUEUE_ENTRIES)

    @cute.jit
    def item(self, at, columns, d, n, windows, s, parity):
        """All windows of an item into the accumulators at ``d``; the next stage and its parity."""
        for k in cutlass.range(windows, unroll=1):
            ptx.mbarrier_wait(at["full_w"] + s * 8, parity)
            ptx.mbarrier_wait(at["full_x"] + s * 8, parity)
            ptx100.fence_after_sync()
            scales = columns + U32(s) * self.memory.stage_columns + self.memory.first_scale
            self.window(at, d, scales, n, U32(k), s)
            ptx100.commit(at["empty"] + s * 8)
            s, parity = sync.advance(s, parity, self.stages)
        return s, parity

    @cute.jit
    def window(self, at, d, scales, n, k, s):
        """One 128-column window of stage ``s``; window 0 of an item starts its sums."""
        weights = operand_descriptor(U64(at["w"] + s * CODE_SHARED_BYTES))
        tokens = operand_descriptor(U64(at["x"] + s * (self.max_width * WINDOW)))
        atoms = {
            "w_scale": scale_descriptor(U64(at["w_scale"] + s * SCALE_BYTES)),
            "x_scale": scale_descriptor(U64(at["x_scale"] + s * ATOM_BYTES)),
        }
        for i in cutlass.range_constexpr(len(COPIES)):
            copy = COPIES[i]
            ptx100.copy_scales(
                scales + copy.column, atoms[copy.source] + advance(copy.source_bytes)
            )
        for i in cutlass.range_constexpr(len(MMAS)):
            mma = MMAS[i]
            accumulate = U32(1)
            if cutlass.const_expr(mma.step == 0):
                accumulate = k
            ptx100.mma(
                d + mma.half * self.max_width,
                weights + advance(mma.a_bytes),
                tokens + advance(mma.b_bytes),
                instruction_descriptor(n, mma.step),
                scales + mma.a_column,
                scales + mma.b_column,
                accumulate,
            )
