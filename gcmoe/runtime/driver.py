"""The CUDA driver API with errors as exceptions.

Cold paths go through :func:`call`; hot paths use ``cu`` directly and hand failures to
:func:`check`. Tests put a recording stand-in in the place of ``cu``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from cuda.bindings import driver as cu

from gcmoe.errors import GCMoEError

__all__ = ["DriverError", "call", "check", "cu", "current", "encode_tiled", "name_of", "version"]

TENSOR_MAP_BYTES = 128
BYTES = "CU_TENSOR_MAP_DATA_TYPE_UINT8"
PADDED_NIBBLES = "CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B"
"""16 elements of 4 bits become 8 bytes of shared memory and 8 that are left undefined."""


class DriverError(GCMoEError):
    """A driver call failed; ``code`` is the name of the error, ``call`` the function."""

    def __init__(self, function: str, code: str, detail: str = "") -> None:
        super().__init__(f"{function} failed with {code}" + (f": {detail}" if detail else ""))
        self.call = function
        self.code = code


def name_of(error: Any) -> str:
    """``CUDA_ERROR_...`` of a result code, known to the bindings or not."""
    name = getattr(error, "name", None)
    if name is not None:
        return str(name)
    status, text = cu.cuGetErrorName(error)
    return f"error {int(error)}" if int(status) else bytes(text).decode()


def check(result: tuple[Any, ...], function: str, detail: str = "") -> Any:
    """The values of a driver call: None, the only one, or a tuple.

    Raises:
        DriverError: the call did not return ``CUDA_SUCCESS``.
    """
    if int(result[0]):
        raise DriverError(function, name_of(result[0]), detail)
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def call(function: str, *arguments: Any, detail: str = "") -> Any:
    """Call a driver function by name and check it."""
    return check(getattr(cu, function)(*arguments), function, detail)


def version() -> int:
    """CUDA version that the driver supports: 13000 for 13.0."""
    return int(call("cuDriverGetVersion"))


@contextmanager
def current(context: Any) -> Iterator[None]:
    """Make a context current to this thread; a green context may be current to one at a time."""
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def encode_tiled(
    target: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    data_type: str = BYTES,
) -> None:
    """Encode a tensor map with 128-byte swizzle at host address ``target``.

    The driver wants the map aligned to 64 bytes, which a ``CUtensorMap`` of the bindings need not
    be, so this calls the library itself.

    Args:
        target: host address of 128 bytes, a multiple of 64.
        address: device address of the first byte, a multiple of 16.
        dims: extents in elements, the contiguous dimension first.
        strides: bytes between neighbours in dimensions 1 and up; multiples of 16.
        box: extents of one load.
        data_type: of the elements, BYTES or PADDED_NIBBLES. With nibbles address and strides are
            multiples of 32, ``dims[0]`` is one of 128 and ``box[0]`` is 128.

    Raises:
        DriverError: the driver refuses the map.
    """
    rank = len(dims)
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    status = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(target),
        ctypes.c_int(int(getattr(cu.CUtensorMapDataType, data_type))),
        u32(rank),
        ctypes.c_void_p(address),
        (u64 * rank)(*dims),
        (u64 * (rank - 1))(*strides),
        (u32 * rank)(*box),
        (u32 * rank)(*[1] * rank),
        ctypes.c_int(int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE)),
        ctypes.c_int(int(cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B)),
        ctypes.c_int(int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B)),
        ctypes.c_int(int(cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)),
    )
    if status:
        shape = f"dims {tuple(dims)}, strides {tuple(strides)}, box {tuple(box)} at {address:#x}"
        raise DriverError("cuTensorMapEncodeTiled", name_of(cu.CUresult(status)), shape)
