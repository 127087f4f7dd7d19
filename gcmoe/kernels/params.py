"""Kernel arguments that the DSL has no type for."""

from __future__ import annotations

import ctypes
from typing import Any, Self

from cutlass._mlir import ir


class PeerTable:
    """R workspace addresses, passed by value as one aggregate parameter.

    A kernel reads entry ``i`` with ``ptx.parameter_u64(spec.peers_symbol, i)``; the trace itself
    never touches the value.
    """

    def __init__(self, num_ranks: int) -> None:
        self._buffer = (ctypes.c_uint64 * num_ranks)()
        self._value: Any = None

    def __c_pointers__(self) -> list[int]:
        return [ctypes.addressof(self._buffer)]

    def __get_mlir_types__(self) -> list[Any]:
        return [ir.Type.parse(f"!llvm.struct<(array<{len(self._buffer)} x i64>)>")]

    def __new_from_mlir_values__(self, values: list[Any]) -> Self:
        copy = type(self)(len(self._buffer))
        copy._value = values[0]
        return copy

    def __extract_mlir_values__(self) -> list[Any]:
        return [self._value]
