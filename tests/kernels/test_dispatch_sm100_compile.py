"""Dispatch and finalize compile for the Blackwell targets and write the format of these."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from compiler_output import (
    compile_kernel,
    entry_parameters,
    marked_lines,
    resource_usage,
    wanted_parameters,
)

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import kernel_class
from gcmoe.kernels.dispatch import DispatchKernel
from gcmoe.kernels.dispatch_memory import SHARED_LIMIT
from gcmoe.kernels.dispatch_send import SendSteps
from gcmoe.kernels.dispatch_sm100 import DispatchKernelSm100, SendStepsSm100
from gcmoe.kernels.spec import KernelSpec, kernel_spec
from gcmoe.plan import make_plan
from gcmoe.plan.targets import FAMILIES
from gcmoe.protocol import Edge, Role
from gcmoe.protocol.edges import ARRIVALS, DONE, EMPTY, FULL, HEADER, ROUTES

pytestmark = pytest.mark.compile

ARCHS = [arch for arch, family in FAMILIES.items() if family == "sm100"]
LAYERS = {
    "flash-ep8": (MoEConfig(5120, 2304, 384, 6, 64, 10.0), 8),
    "odd-windows-ep2": (MoEConfig(512, 384, 6, 3, 33, None), 2),
    "wide-ep1": (MoEConfig(7168, 3072, 48, 6, 512, None), 1),
}


def spec_of(layer: str, role: Role, arch: str) -> KernelSpec:
    config, ranks = LAYERS[layer]
    return kernel_spec(make_plan(config, ranks, 148, family="sm100"), role, arch)


@cache
def compiled(layer: str, role: Role, arch: str) -> tuple[str, bytes]:
    """PTX and cubin."""
    spec = spec_of(layer, role, arch)
    return compile_kernel(kernel_class(role, spec.family)(spec), arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("role", [Role.DISPATCH, Role.FINALIZE])
@pytest.mark.parametrize("layer", LAYERS)
def test_it_compiles_and_fits(layer: str, role: Role, arch: str, tmp_path: Path) -> None:
    spec = spec_of(layer, role, arch)
    ptx, cubin = compiled(layer, role, arch)
    assert re.findall(r"^\.target (\w+)", ptx, re.MULTILINE) == [arch]
    assert entry_parameters(ptx) == wanted_parameters(spec)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    usage = resource_usage(path)
    kernel = kernel_class(role, spec.family)(spec)
    assert usage["STACK"] == usage["LOCAL"] == 0, usage
    assert usage["REG"] * kernel.threads <= 65_536
    assert kernel.smem_bytes <= SHARED_LIMIT


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("edge", [HEADER, ROUTES, FULL, EMPTY], ids=lambda edge: edge.name)
def test_dispatch_has_the_operations_of_the_table(edge: Edge, arch: str) -> None:
    ptx, _ = compiled("flash-ep8", Role.DISPATCH, arch)
    written = marked_lines(ptx, f"{edge.name} write")
    read = marked_lines(ptx, f"{edge.name} read")
    if edge.writer == Role.DISPATCH:
        assert any(line.startswith(edge.write.ptx) for line in written)
        if edge.completion_wait:
            assert any(line.startswith("cp.async.bulk.wait_group 0") for line in written)
        if edge.write_proxy_fence:
            assert any(line.startswith(f"fence.proxy.{edge.write_proxy_fence}") for line in written)
    if edge.reader == Role.DISPATCH:
        assert any(line.startswith(edge.read.ptx) for line in read)
        if edge.read_proxy_fence:
            assert any(line.startswith(f"fence.proxy.{edge.read_proxy_fence}") for line in read)


def test_finalize_has_the_operations_of_the_table() -> None:
    ptx, _ = compiled("flash-ep8", Role.FINALIZE, "sm_103a")
    assert any(
        line.startswith(ARRIVALS.read.ptx) for line in marked_lines(ptx, "combine_arrivals read")
    )
    assert any(line.startswith(DONE.operation.ptx) for line in marked_lines(ptx, DONE.name))


def test_the_methods_of_the_format_replace_those_of_hopper() -> None:
    """A base method that is renamed would leave its successor unused."""
    pairs = (
        (SendStepsSm100, SendSteps, "load_columns"),
        (DispatchKernelSm100, DispatchKernel, "weight_row"),
        (DispatchKernelSm100, DispatchKernel, "window_scale"),
    )
    for derived, base, name in pairs:
        assert name in vars(derived)
        assert name in vars(base)


def test_rows_are_staged_in_column_order_with_a_scale_per_32() -> None:
    """16 codes a lane by one store; a byte of scale for every second lane, not for one of eight."""
    ptx, _ = compiled("flash-ep8", Role.DISPATCH, "sm_103a")
    hopper = make_plan(*LAYERS["flash-ep8"])
    other, _ = compile_kernel(
        DispatchKernel(kernel_spec(hopper, Role.DISPATCH, "sm_90a")), "sm_90a"
    )
    # Two windows of eight lanes under way.
    assert len(re.findall(r"st\.global\.u8", ptx)) == len(re.findall(r"st\.global\.u8", other)) == 2
    # Amax over 2 lanes takes an exchange a window, over 8 lanes three.
    found, wanted = (len(re.findall(r"shfl\.sync\.bfly", text)) for text in (ptx, other))
    assert wanted - found == 2 * 2


def test_scale_words_go_into_atoms_as_they_are() -> None:
    """Hopper expands a scale byte to FP32 by a shift of 23; here no word is shifted."""
    ptx, _ = compiled("flash-ep8", Role.DISPATCH, "sm_103a")
    stores = list(re.finditer(r"st\.global\.b32 \[%rd\d+\], (%r\d+);", ptx))
    loads = set(re.findall(r"ld\.volatile\.shared::cta\.u32 (%r\d+),", ptx))
    windows = 5120 // 128
    from_shared = [match for match in stores if match[1] in loads]
    # One per 32 windows, beside origin and routing weight of the row.
    assert len(from_shared) >= -(-windows // 32) + 2
    assert spec_of("flash-ep8", Role.DISPATCH, "sm_103a").shape.scale_words == 128
