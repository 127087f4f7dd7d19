"""Kernel arguments: one buffer per parameter, in the order of the spec.

A node reads the buffers when it is added or updated and keeps its own copy, so a buffer may change
at once afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from gcmoe.kernels.spec import KernelSpec, Parameter
from gcmoe.protocol.ring import WINDOW_COLUMNS
from gcmoe.runtime import driver

TENSOR_MAP_ALIGN = 128
WINDOWS_PER_LOAD = {"sm90": 2, "sm100": 1}
TILE_ROWS = 256
WEIGHTS = {
    "sm90": ("w13", "w13_row_scale", "w2", "w2_row_scale"),
    "sm100": ("w13", "w13_scale", "w2", "w2_scale"),
}
"""The tensors of packed weights that compute reads, by family."""
_SCALARS = {"u64": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32}


class Arguments:
    """The arguments of one kernel launch.

    Attributes:
        fields: by parameter name, the ctypes object that holds the value: ``.value`` of a scalar,
            items of ``peers``. Tensor maps are not in it; see :meth:`encode_ring_maps` and
            :meth:`set_weights`.
        address: of the array of pointers to the values, as ``kernelParams`` wants it.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.fields: dict[str, Any] = {}
        self.map_addresses: dict[str, int] = {}
        self._keep: list[Any] = []
        pointers = [self._place(parameter) for parameter in spec.parameters]
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self._pointers)

    def _place(self, parameter: Parameter) -> int:
        """Make room for a parameter; its address."""
        if parameter.kind == "tensor_map":
            size = driver.TENSOR_MAP_BYTES + TENSOR_MAP_ALIGN
            room = (ctypes.c_uint8 * size)()
            self._keep.append(room)
            address = -(-ctypes.addressof(room) // TENSOR_MAP_ALIGN) * TENSOR_MAP_ALIGN
            self.map_addresses[parameter.name] = address
            return address
        if parameter.kind == "peers":
            field: Any = (ctypes.c_uint64 * self.spec.shape.num_ranks)()
        else:
            field = _SCALARS[parameter.kind]()
        self.fields[parameter.name] = field
        return ctypes.addressof(field)

    def set(self, **values: int) -> None:
        """Set scalars by name."""
        for name, value in values.items():
            self.fields[name].value = value

    def copy(self) -> Arguments:
        """Another block with the same values."""
        block = Arguments(self.spec)
        for name, field in self.fields.items():
            target, size = ctypes.addressof(block.fields[name]), ctypes.sizeof(field)
            ctypes.memmove(target, ctypes.addressof(field), size)
        for name, address in self.map_addresses.items():
            ctypes.memmove(block.map_addresses[name], address, driver.TENSOR_MAP_BYTES)
        return block

    def set_peers(self, addresses: Sequence[int]) -> None:
        """Set the table of workspace addresses, in rank order."""
        peers = self.fields["peers"]
        if len(addresses) != len(peers):
            raise ValueError(f"{len(addresses)} peer addresses, the kernel takes {len(peers)}")
        peers[:] = addresses

    def encode_ring_maps(self, workspace: int) -> None:
        """Encode the tensor maps ``ring_rows_N`` over the ring rows of a workspace.

        A load takes N rows of two neighbouring windows, on Blackwell of one: [2][N][128] bytes,
        each window swizzled by 128 bytes. Rows behind those of the slot are zeros.

        Args:
            workspace: device address of this rank's workspace.
        """
        shape = self.spec.shape
        base = workspace + shape.offsets["ring_rows"]
        dims, strides = shape.ring_tensor
        for name, address in self.map_addresses.items():
            if name.startswith("ring_rows_"):
                box = (128, int(name.rpartition("_")[2]), WINDOWS_PER_LOAD[self.spec.family], 1)
                driver.encode_tiled(address, base, dims, strides, box)

    def set_weights(self, addresses: Mapping[str, int]) -> None:
        """Set the weights of compute: addresses, and on Blackwell the tensor maps of the codes.

        Such a map has rows of 64 bytes, 128 codes; a load takes the 256 rows of one burst.

        Args:
            addresses: device addresses of the tensors of :data:`WEIGHTS`, by name.
        """
        shape = self.spec.shape
        windows, blocks = shape.num_windows, shape.intermediate // WINDOW_COLUMNS
        tiles = {"w13": blocks * windows, "w2": shape.hidden // TILE_ROWS * blocks}
        for name, address in addresses.items():
            target = self.map_addresses.get(f"{name}_codes")
            if target is None:
                self.fields[name].value = address
            else:
                dims = (WINDOW_COLUMNS, shape.local_experts * tiles[name] * TILE_ROWS)
                driver.encode_tiled(
                    target,
                    address,
                    dims,
                    (WINDOW_COLUMNS // 2,),
                    (WINDOW_COLUMNS, TILE_ROWS),
                    driver.PADDED_NIBBLES,
                )
