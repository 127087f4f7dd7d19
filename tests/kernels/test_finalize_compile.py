"""The finalize kernel compiles for every kind of shape, and its PTX has the edge's operations."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute

from gcmoe.config import MoEConfig
from gcmoe.kernels.finalize import SLOTS_IN_FLIGHT, FinalizeKernel
from gcmoe.kernels.spec import KernelSpec, kernel_spec
from gcmoe.plan import make_plan
from gcmoe.protocol import Role
from gcmoe.protocol.edges import ABORT_POLL, ABORT_SET, ARRIVALS, DONE, FAULT_CLAIM

pytestmark = pytest.mark.compile

SHAPES = {
    "v4_flash_share": (MoEConfig(4096, 2048, 32, 6, 64), 1),
    "v41_flash_ep8": (MoEConfig(5120, 2304, 384, 6, 256), 8),
    "small_odd": (MoEConfig(512, 384, 6, 3, 33), 2),
    "many_experts": (MoEConfig(1024, 512, 2048, 8, 64), 1),
    "many_slots": (MoEConfig(1024, 512, 64, 32, 16), 2),
}
KIND_TYPES = {"u64": ".u64", "i64": ".u64", "i32": ".u32"}


def spec_of(shape: str, trace: bool = False) -> KernelSpec:
    config, num_ranks = SHAPES[shape]
    return kernel_spec(make_plan(config, num_ranks), Role.FINALIZE, "sm_90a", trace=trace)


@cache
def compiled(shape: str, folder: Path, trace: bool = False) -> tuple[str, bytes]:
    """PTX and cubin."""
    kernel = FinalizeKernel(spec_of(shape, trace))
    options = f"--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {folder}"
    result = cute.compile(kernel, *kernel.example_arguments(), options=options)
    return result.__ptx__, result.__cubin__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finalize")


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ptx(shape: str, folder: Path) -> str:
    return compiled(shape, folder)[0]


def entry_parameters(ptx: str) -> list[str]:
    """The kernel's parameters as ``.type`` or ``.b8[n]``."""
    text = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    found = re.findall(r"\.param (?:\.align \d+ )?(\.\w+) \w+(\[\d+\])?", text)
    return [kind + size for kind, size in found]


def marked_lines(ptx: str, mark: str) -> list[str]:
    """The instructions that carry a mark, in order."""
    return [line.strip() for line in ptx.splitlines() if line.endswith(f"// gcmoe {mark}")]


def test_the_parameters_are_those_of_the_spec(shape: str, ptx: str) -> None:
    spec = spec_of(shape)
    peers = f".b8[{8 * spec.shape.num_ranks}]"
    expected = [peers if p.kind == "peers" else KIND_TYPES[p.kind] for p in spec.parameters]
    assert f".entry {spec.symbol}(" in ptx
    assert entry_parameters(ptx) == expected
    assert f".reqntid {FinalizeKernel.threads}" in ptx


def cuobjdump() -> Path:
    """The disassembler of the package ``nvidia-cuda-cuobjdump``."""
    nvidia = pytest.importorskip("nvidia")
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/cuobjdump")]
    if not found:
        pytest.skip("nvidia-cuda-cuobjdump is not installed")
    return found[0]


def test_no_local_memory(shape: str, folder: Path, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(shape, folder)[1])
    command = [cuobjdump(), "-res-usage", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    assert int(usage["REG"]) <= 128, "512 threads share 65,536 registers"
    assert usage["STACK"] == usage["LOCAL"] == "0"


def test_workspace_data_never_goes_through_the_read_only_cache(ptx: str) -> None:
    assert not re.search(r"ld\.global\S*\.nc", ptx)


def test_arrivals_are_acquired(ptx: str) -> None:
    lines = marked_lines(ptx, f"{ARRIVALS.name} read")
    assert lines
    assert all(line.startswith(ARRIVALS.read.ptx) for line in lines)


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


def test_timestamps_cost_nothing_when_off(folder: Path) -> None:
    timers = [
        compiled("small_odd", folder, trace)[0].count("%globaltimer") for trace in (False, True)
    ]
    assert timers[0] < timers[1]
    assert "%smid" not in compiled("small_odd", folder)[0]
