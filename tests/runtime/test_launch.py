"""Argument packing and tensor maps."""

import ctypes
import math
import struct
from itertools import pairwise

import pytest

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import parameter_size
from gcmoe.kernels.spec import KernelSpec, kernel_spec
from gcmoe.numerics.packing_sm100 import packed_layout_sm100
from gcmoe.plan import make_plan
from gcmoe.plan.targets import family_of
from gcmoe.protocol import Role
from gcmoe.runtime import driver
from gcmoe.runtime.launch import WEIGHTS, Arguments


def spec_of(role: Role, ranks: int = 2, arch: str = "sm_90a", capacity: int = 8) -> KernelSpec:
    """Of a call of 8 tokens."""
    plan = make_plan(MoEConfig(5120, 2304, 16, 6, capacity), ranks, family=family_of(arch))
    return kernel_spec(plan.for_tokens(8), role, arch)


@pytest.mark.parametrize("role", [Role.DISPATCH, Role.COMPUTE, Role.FINALIZE])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_every_pointer_points_at_its_value(role, ranks, arch):
    spec = spec_of(role, ranks, arch)
    arguments = Arguments(spec)
    arguments.set_peers(range(0x100, 0x100 + ranks))
    scalars = [p for p in spec.parameters if p.kind in ("u64", "i64", "i32")]
    for i, parameter in enumerate(scalars):
        arguments.set(**{parameter.name: 1000 + i})
    array = (ctypes.c_void_p * len(spec.parameters)).from_address(arguments.address)
    spans = []
    for parameter, address in zip(spec.parameters, array, strict=True):
        size, align = parameter_size(parameter, ranks)
        assert address % align == 0
        spans.append((address, address + size))
        content = ctypes.string_at(address, size)
        if parameter.kind == "peers":
            assert struct.unpack(f"<{ranks}Q", content) == tuple(range(0x100, 0x100 + ranks))
        elif parameter in scalars:
            assert int.from_bytes(content, "little") == 1000 + scalars.index(parameter)
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_signs_and_widths():
    spec = spec_of(Role.FINALIZE)
    arguments = Arguments(spec)
    arguments.set(y=0xABCDEF0123456789, num_tokens=-1, spin_budget_ns=-2)
    array = (ctypes.c_void_p * len(spec.parameters)).from_address(arguments.address)
    at = {p.name: address for p, address in zip(spec.parameters, array, strict=True)}
    assert ctypes.c_uint64.from_address(at["y"]).value == 0xABCDEF0123456789
    assert ctypes.c_int32.from_address(at["num_tokens"]).value == -1
    assert ctypes.c_int64.from_address(at["spin_budget_ns"]).value == -2


def test_wrong_number_of_peers():
    with pytest.raises(ValueError, match="3 peer addresses, the kernel takes 2"):
        Arguments(spec_of(Role.DISPATCH)).set_peers([1, 2, 3])


@pytest.mark.parametrize("capacity", [8, 100])
@pytest.mark.parametrize(("arch", "windows"), [("sm_90a", 2), ("sm_100a", 1)])
def test_ring_maps(standin, arch, windows, capacity):
    spec = spec_of(Role.COMPUTE, arch=arch, capacity=capacity)
    assert (spec.shape.block_rows < spec.shape.slot_rows) == (capacity == 100)
    shape, widths = spec.shape, spec.tiles.widths
    Arguments(spec).encode_ring_maps(1 << 40)
    assert len(standin.maps) == len(widths)
    for width, (target, base, dims, strides, box) in zip(widths, standin.maps, strict=True):
        assert target % 64 == 0
        assert base == (1 << 40) + shape.offsets["ring_rows"]
        assert base % 16 == 0
        assert dims == (128, shape.block_rows, 5120 // 128, shape.num_slots)
        assert strides == (shape.row_stride, 128, shape.block_rows * shape.row_stride)
        assert all(stride % 16 == 0 for stride in strides)
        assert box == (128, width, windows, 1)
        # The last byte that a load can reach lies in the region.
        last = dims[0] + sum(
            (extent - 1) * stride for extent, stride in zip(dims[1:], strides, strict=True)
        )
        assert last <= shape.region("ring_rows").num_bytes


def test_weights_of_hopper_are_addresses(standin):
    arguments = Arguments(spec_of(Role.COMPUTE))
    arguments.set_weights({name: 640 + n for n, name in enumerate(WEIGHTS["sm90"])})
    assert [arguments.fields[name].value for name in WEIGHTS["sm90"]] == [640, 641, 642, 643]
    assert standin.maps == []


def test_weights_of_blackwell_are_maps_of_codes_and_addresses_of_scales(standin):
    arguments = Arguments(spec_of(Role.COMPUTE, 2, "sm_100a"))
    arguments.set_weights({"w13": 1 << 20, "w13_scale": 7, "w2": 1 << 30, "w2_scale": 9})
    assert (arguments.fields["w13_scale"].value, arguments.fields["w2_scale"].value) == (7, 9)
    first, second = standin.maps
    experts, items = 8, (2304 // 128, 5120 // 256)
    windows = 5120 // 128, 2304 // 128
    for n, (base, found) in enumerate(zip((1 << 20, 1 << 30), (first, second), strict=True)):
        rows = experts * items[n] * windows[n] * 256
        assert found[0] == arguments.map_addresses[("w13_codes", "w2_codes")[n]]
        assert found[1:] == (base, (128, rows), (64,), (128, 256), driver.PADDED_NIBBLES)
        # All rows are the packed bytes: a load takes 16 KiB of them.
        layout = packed_layout_sm100(experts, 5120, 2304)[("w13", "w2")[n]]
        assert rows * 64 == math.prod(layout[1])


class Library:
    """Stands in for libcuda; keeps the arguments of the one function."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cuTensorMapEncodeTiled(self, *arguments):
        self.arguments = arguments
        return self.status


def test_encode_tiled_calls_the_driver_as_its_header_says(monkeypatch):
    library = Library(0)
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver.encode_tiled(640, 4096, (128, 64, 40), (5248, 128), (128, 8, 2))
    plain = [a.value if hasattr(a, "value") else list(a) for a in library.arguments]
    u8, none, swizzle_128, promotion_256 = 0, 0, 3, 3
    assert plain == [
        *(640, u8, 3, 4096, [128, 64, 40], [5248, 128], [128, 8, 2], [1, 1, 1]),
        *(none, swizzle_128, promotion_256, none),
    ]


def test_padded_nibbles_are_the_type_that_fills_16_bytes(monkeypatch):
    library = Library(0)
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver.encode_tiled(640, 4096, (128, 512), (64,), (128, 256), driver.PADDED_NIBBLES)
    assert library.arguments[1].value == 14  # CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B of cuda.h


def test_encode_tiled_names_the_map_that_is_refused(monkeypatch):
    monkeypatch.setattr(driver, "_library", lambda: Library(1))
    with pytest.raises(driver.DriverError, match=r"CUDA_ERROR_INVALID_VALUE: dims \(128, 64, 40\)"):
        driver.encode_tiled(640, 4096, (128, 64, 40), (5248, 128), (128, 8, 2))
