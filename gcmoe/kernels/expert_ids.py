"""The caller's expert ids, as dispatch and finalize read them."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx

U32, U64, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int64
ALL_ONES = 0xFFFF_FFFF


@cute.jit
def load_expert_id(ids: Any, index: Any, count: Any, are_int64: Any):
    """An id as two words, the upper one 0 for a 32-bit id; -1 beyond the end. Nothing here waits
    for the load, so that others can follow it; :func:`classify_id` interprets the words."""
    low, high = U32(ALL_ONES), U32(ALL_ONES)
    if index < count:
        if are_int64 != 0:
            word = ptx.load_u64(ids + I64(index) * 8)
            low = U32(word)
            high = U32(word >> U64(32))
        else:
            low = ptx.load_u32(ids + I64(index) * 4)
            high = U32(0)
    return low, high


def classify_id(low: Any, high: Any, are_int64: Any, num_experts: int) -> tuple[Any, Any]:
    """(valid, too large): the predicate of ``protocol.is_valid``; a negative id is neither."""
    valid = (low < U32(num_experts)) & (high == U32(0))
    sign_of_32 = (low >> 31) * U32(are_int64 == 0)
    too_large = (valid == False) & (((high >> 31) | sign_of_32) == U32(0))  # noqa: E712
    return valid, too_large
