"""The dispatch kernel compiles for every kind of shape, and its PTX has the edges' operations."""

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
from gcmoe.kernels.dispatch import DispatchKernel
from gcmoe.kernels.dispatch_memory import SHARED_LIMIT
from gcmoe.kernels.spec import KernelSpec, kernel_spec
from gcmoe.plan import make_plan
from gcmoe.protocol import Edge, Operation, Role
from gcmoe.protocol.edges import (
    ABORT_POLL,
    ABORT_SET,
    CLAIM,
    EMPTY,
    FAULT_CLAIM,
    FULL,
    HEADER,
    ROUTES,
)

pytestmark = pytest.mark.compile

SHAPES = {
    "v4_flash_share": (MoEConfig(4096, 2048, 32, 6, 64), 1),
    "v41_flash_ep8": (MoEConfig(5120, 2304, 384, 6, 256), 8),
    "small_odd": (MoEConfig(512, 384, 6, 3, 33), 2),
    "many_experts": (MoEConfig(1024, 512, 2048, 8, 64), 1),
    "many_ranks": (MoEConfig(7168, 3072, 288, 8, 16), 72),
}


def spec_of(shape: str, trace: bool = False) -> KernelSpec:
    config, num_ranks = SHAPES[shape]
    return kernel_spec(make_plan(config, num_ranks), Role.DISPATCH, "sm_90a", trace=trace)


@cache
def compiled(shape: str, trace: bool = False) -> tuple[str, bytes]:
    """PTX and cubin."""
    return compile_kernel(DispatchKernel(spec_of(shape, trace)), "sm_90a")


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ptx(shape: str) -> str:
    return compiled(shape)[0]


def has(lines: list[str], operation: Operation | str) -> bool:
    text = operation if isinstance(operation, str) else operation.ptx
    return any(line.startswith(text) for line in lines)


def test_the_parameters_are_those_of_the_spec(shape: str, ptx: str) -> None:
    spec = spec_of(shape)
    assert f".entry {spec.symbol}(" in ptx
    assert entry_parameters(ptx) == wanted_parameters(spec)
    assert f".reqntid {DispatchKernel.threads}" in ptx


def test_shared_memory_fits(shape: str) -> None:
    kernel = DispatchKernel(spec_of(shape))
    assert kernel.map.num_bytes < kernel.smem_bytes <= SHARED_LIMIT


def test_no_local_memory(shape: str, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(shape)[1])
    usage = resource_usage(cubin)
    assert usage["REG"] <= 64, "1024 threads share 65,536 registers"
    assert usage["STACK"] == usage["LOCAL"] == 0


def test_workspace_data_never_goes_through_the_read_only_cache(ptx: str) -> None:
    assert not re.search(r"ld\.global\S*\.nc", ptx)


@pytest.mark.parametrize("edge", [HEADER, ROUTES, FULL], ids=lambda edge: edge.name)
def test_written_edges(ptx: str, edge: Edge) -> None:
    lines = marked_lines(ptx, f"{edge.name} write")
    assert has(lines, edge.write)
    if edge.write_fence:
        assert has(lines, f"fence.{edge.write_fence}")
    if edge.write_proxy_fence:
        assert has(lines, f"fence.proxy.{edge.write_proxy_fence}")
    assert has(lines, "cp.async.bulk.wait_group 0") == edge.completion_wait


@pytest.mark.parametrize("edge", [HEADER, EMPTY], ids=lambda edge: edge.name)
def test_read_edges(ptx: str, edge: Edge) -> None:
    lines = marked_lines(ptx, f"{edge.name} read")
    assert has(lines, edge.read)
    if edge.read_proxy_fence:
        assert has(lines, f"fence.proxy.{edge.read_proxy_fence}")


def test_compute_is_released_before_anything_else(ptx: str) -> None:
    """A CTA that waited for something first would keep compute away, or worse, half of it."""
    assert ptx.count("griddepcontrol.launch_dependents;") == 1
    body = ptx[ptx.index("{", ptx.index(".entry")) : ptx.index("griddepcontrol.launch_dependents;")]
    for text in ("global", "bar", "bra", "shared::"):
        assert text not in body, text


def test_full_is_counted_after_the_waits_of_its_writers(ptx: str) -> None:
    lines = marked_lines(ptx, f"{FULL.name} write")
    assert [line.split()[0].rstrip(";") for line in lines] == [
        f"fence.proxy.{FULL.write_proxy_fence}",
        "cp.async.bulk.wait_group",
        FULL.write.ptx,
    ]
    assert "wait_group.read" not in ptx


def test_a_row_buffer_is_passed_to_the_next_load(ptx: str) -> None:
    assert has(marked_lines(ptx, "row_buffer read"), "fence.proxy.async.shared::cta")


@pytest.mark.parametrize("lone", [CLAIM, ABORT_SET, ABORT_POLL, FAULT_CLAIM])
def test_lone_operations(ptx: str, lone: object) -> None:
    assert has(marked_lines(ptx, lone.name), lone.operation)  # type: ignore[attr-defined]


def test_no_fence_is_of_the_bare_async_form(ptx: str) -> None:
    assert not re.search(r"fence\.proxy\.async\s*;", ptx)


def test_warp_collectives_are_not_duplicated(shape: str, ptx: str) -> None:
    """The compiler does not know that they are convergent: a copy in both arms of a branch would
    run them at two places. One place each in the source; a round of headers has three votes."""
    spec = spec_of(shape)
    ranks, words = spec.shape.num_ranks, spec.shape.num_ranks * spec.shape.header_words
    turns = -(-words // 1024)
    assert ptx.count("match.any.sync") == (1 if ranks == 1 else 2)
    assert ptx.count("vote.sync.ballot") == 2 + 3 * turns + (1 if ranks == 1 else 0)


def test_timestamps_cost_nothing_when_off() -> None:
    timers = [compiled("small_odd", trace)[0].count("%globaltimer") for trace in (False, True)]
    assert timers[0] < timers[1]
    assert "%smid" not in compiled("small_odd")[0]
    assert entry_parameters(compiled("small_odd")[0]) == entry_parameters(
        compiled("small_odd", True)[0]
    )
