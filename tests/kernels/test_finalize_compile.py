"""The finalize kernel compiles for every kind of shape, and its PTX has the edge's operations."""

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
from gcmoe.kernels.finalize import SLOTS_IN_FLIGHT, FinalizeKernel
from gcmoe.kernels.spec import KernelSpec, kernel_spec
from gcmoe.plan import make_plan
from gcmoe.protocol import Edge, Role
from gcmoe.protocol.edges import (
    ABORT_POLL,
    ABORT_SET,
    ARRIVALS,
    COMPUTE_DONE,
    DONE,
    FAULT_CLAIM,
)

pytestmark = pytest.mark.compile

SHAPES = {
    "v4_flash_share": (MoEConfig(4096, 2048, 32, 6, 64), 1),
    "v41_flash_ep8": (MoEConfig(5120, 2304, 384, 6, 256), 8),
    "small_odd": (MoEConfig(512, 384, 6, 3, 33), 2),
    "many_experts": (MoEConfig(1024, 512, 2048, 8, 64), 1),
    "many_slots": (MoEConfig(1024, 512, 64, 32, 16), 2),
}


def spec_of(shape: str, trace: bool = False) -> KernelSpec:
    config, num_ranks = SHAPES[shape]
    return kernel_spec(make_plan(config, num_ranks), Role.FINALIZE, "sm_90a", trace=trace)


@cache
def compiled(shape: str, trace: bool = False) -> tuple[str, bytes]:
    """PTX and cubin."""
    return compile_kernel(FinalizeKernel(spec_of(shape, trace)), "sm_90a")


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ptx(shape: str) -> str:
    return compiled(shape)[0]


def test_the_parameters_are_those_of_the_spec(shape: str, ptx: str) -> None:
    spec = spec_of(shape)
    assert f".entry {spec.symbol}(" in ptx
    assert entry_parameters(ptx) == wanted_parameters(spec)
    assert f".reqntid {FinalizeKernel.threads}" in ptx


def test_no_local_memory(shape: str, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(shape)[1])
    usage = resource_usage(cubin)
    assert usage["REG"] <= 128, "512 threads share 65,536 registers"
    assert usage["STACK"] == usage["LOCAL"] == 0


def test_workspace_data_never_goes_through_the_read_only_cache(ptx: str) -> None:
    assert not re.search(r"ld\.global\S*\.nc", ptx)


@pytest.mark.parametrize("edge", [ARRIVALS, COMPUTE_DONE], ids=lambda edge: edge.name)
def test_what_finalize_waits_for_is_acquired(ptx: str, edge: Edge) -> None:
    lines = marked_lines(ptx, f"{edge.name} read")
    assert lines
    assert all(line.startswith(edge.read.ptx) for line in lines)


def test_it_waits_for_the_end_of_compute_before_it_advances(ptx: str) -> None:
    """PTX demands the wait of a kernel behind a programmatic edge; once, by the last CTA."""
    assert ptx.count("griddepcontrol.wait;") == 1
    counted = ptx.rindex(f"// gcmoe {COMPUTE_DONE.name} read")
    assert counted < ptx.index("griddepcontrol.wait;") < ptx.rindex("st.global.v4.b32")


@pytest.mark.parametrize("lone", [DONE, ABORT_SET, ABORT_POLL, FAULT_CLAIM])
def test_lone_operations(ptx: str, lone: object) -> None:
    lines = marked_lines(ptx, lone.name)  # type: ignore[attr-defined]
    assert any(line.startswith(lone.operation.ptx) for line in lines)  # type: ignore[attr-defined]


def test_all_slots_are_loaded_before_the_sum(shape: str, ptx: str) -> None:
    loads, sums = ptx.count("ld.global.v4.b32"), ptx.count("add.f32")
    together = min(spec_of(shape).shape.top_k, SLOTS_IN_FLIGHT)
    assert loads >= together
    assert sums == 8 * together
    assert ptx[: ptx.index("add.f32")].count("ld.global.v4.b32") >= together


def test_timestamps_cost_nothing_when_off() -> None:
    timers = [compiled("small_odd", trace)[0].count("%globaltimer") for trace in (False, True)]
    assert timers[0] < timers[1]
    assert "%smid" not in compiled("small_odd")[0]
