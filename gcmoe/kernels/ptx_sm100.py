"""The inline PTX that only Blackwell has: tensor memory, block-scaled MMA, padded FP4 loads.

Same conventions as :mod:`gcmoe.kernels.ptx`. Tensor memory addresses are 32-bit words, lane << 16 |
column. ``tcgen05`` instructions other than ``ld`` run asynchronously: copies and MMAs of one thread
stay in order among themselves, :func:`commit` tells an mbarrier when they have ended.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass.cutlass_dsl import dsl_user_op

from gcmoe.kernels.ptx import emit

U32, U64 = cutlass.Uint32, cutlass.Uint64
I32, I64, F32 = cutlass.Int32, cutlass.Int64, cutlass.Float32

ACCUMULATOR_COLUMNS = 8
"""Columns that one :func:`load_accumulators` reads of each accumulator."""

# --------------------------------------------------------------------------- tensor memory


@dsl_user_op
def tensor_memory_alloc(shared: Any, num_columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Allocate columns and store their address at ``shared``; by one whole warp, once."""
    text = (
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {num_columns};\n"
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    )
    emit(text, [], [(I32, shared)], False, loc, ip)


@dsl_user_op
def tensor_memory_free(address: Any, num_columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Give the columns back before the CTA ends; by the warp that allocated them."""
    text = f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {num_columns};"
    emit(text, [], [(U32, address)], False, loc, ip)


@dsl_user_op
def fence_before_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Orders this thread's tcgen05 instructions before a barrier or arrive that follows."""
    emit("tcgen05.fence::before_thread_sync;", [], [], False, loc, ip)


@dsl_user_op
def fence_after_sync(*, loc: Any = None, ip: Any = None) -> None:
    """Orders this thread's tcgen05 instructions after a barrier or wait that came before."""
    emit("tcgen05.fence::after_thread_sync;", [], [], False, loc, ip)


@dsl_user_op
def load_accumulators(first: Any, second: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Eight columns at each of two addresses, from this warp's 32 lanes: 16 floats.

    One text with its wait, so that nothing can use a register before the data is in it.
    """
    columns = ACCUMULATOR_COLUMNS
    lists = [", ".join(f"${at + i}" for i in range(columns)) for at in (0, columns)]
    text = "\n".join(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{names}}}, [${2 * columns + i}];"
        for i, names in enumerate(lists)
    )
    text += "\ntcgen05.wait::ld.sync.aligned;"
    return emit(text, [F32] * (2 * columns), [(U32, first), (U32, second)], False, loc, ip)


# --------------------------------------------------------------------------- MMA


@dsl_user_op
def copy_scales(address: Any, descriptor: Any, *, loc: Any = None, ip: Any = None) -> None:
    """A scale atom from shared memory to four columns, the same in each group of 32 lanes."""
    text = "tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;"
    emit(text, [], [(U32, address), (U64, descriptor)], False, loc, ip)


@dsl_user_op
def mma(
    d: Any,
    a: Any,
    b: Any,
    instruction: Any,
    scale_a: Any,
    scale_b: Any,
    accumulate: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """One K32 step: D (+)= A x B^T with a scale per row and 32 columns of both.

    Args:
        d, scale_a, scale_b: tensor memory addresses.
        a, b: shared-memory descriptors. instruction: instruction descriptor.
        accumulate: 0 overwrites D.
    """
    text = (
        "{ .reg .pred p; setp.ne.u32 p, $6, 0;\n"
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 "
        "[$0], $1, $2, $3, [$4], [$5], p; }"
    )
    arguments = [
        (U32, d),
        (U64, a),
        (U64, b),
        (U32, instruction),
        (U32, scale_a),
        (U32, scale_b),
        (U32, accumulate),
    ]
    emit(text, [], arguments, False, loc, ip)


@dsl_user_op
def commit(mbarrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive on the mbarrier when all copies and MMAs that this thread has issued have ended."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];"
    emit(text, [], [(I32, mbarrier)], False, loc, ip)


# --------------------------------------------------------------------------- loads, warp, bytes


@dsl_user_op
def tensor_load_2d_once(
    shared: Any,
    tensor_map: Any,
    c0: Any,
    c1: Any,
    mbarrier: Any,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """One box of a tensor map to shared memory, first to leave L2. Completes the bytes that it
    reads on the mbarrier: of 4-bit elements half of what it fills."""
    text = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [$0], [$1, {$2, $3}], [$4], 0x12F0000000000000;"
    )
    arguments = [(I32, shared), (I64, tensor_map), (I32, c0), (I32, c1), (I32, mbarrier)]
    emit(text, [], arguments, False, loc, ip)


@dsl_user_op
def warp_max(value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The largest of 32 lanes' words, in all lanes; all 32 take part."""
    return emit("redux.sync.max.u32 $0, $1, 0xffffffff;", [U32], [(U32, value)], False, loc, ip)


@dsl_user_op
def shared_store_u8(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    text = "st.volatile.shared::cta.u8 [$0], $1;"
    emit(text, [], [(I32, address), (U32, value)], False, loc, ip)
