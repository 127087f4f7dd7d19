"""``gcmoe tile`` on the PTX machine: what it prints when all is well, and what when it is not."""

from __future__ import annotations

import re

import blackwell_layer as layers
import numpy as np
import ptx_blackwell
import pytest
import torch
from ptx_machine import Cta, Deadlock, Launch, Machine, TensorMap
from torch import Tensor

from gcmoe import cli, tile
from gcmoe.kernels import layout_sm100 as layout
from gcmoe.kernels.build import dsl_version
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import TRACE_WORDS
from gcmoe.numerics import PackedWeightsSm100

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(dsl_version() is None, reason="nvidia-cutlass-dsl is not installed"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


def run_on_machine(spec: KernelSpec, workspace: Tensor, packed: PackedWeightsSm100) -> Tensor:
    """A backend of the program: the compiled kernel on the CPU."""
    machine, memory = Machine(1), workspace.numpy().copy()
    base, shape = machine.memory.map(memory), spec.shape
    trace = np.zeros(2 * TRACE_WORDS * 8, dtype=np.uint8)
    fault = np.zeros(64, dtype=np.uint8)
    values = {
        "peers": [base],
        "workspace": base,
        "fault_record": machine.memory.map(fault),
        "trace": machine.memory.map(trace),
        "rank": 0,
        "spin_budget_ns": layers.SPIN_BUDGET,
        "w13_scale": machine.memory.map(layers.flat(packed.w13_scale)),
        "w2_scale": machine.memory.map(layers.flat(packed.w2_scale)),
    }
    for name in ("w13", "w2"):
        codes = getattr(packed, name)
        values[f"{name}_codes"] = TensorMap(
            machine.memory.map(layers.flat(codes)),
            (128, codes.numel() // 64),
            (64,),
            (128, 256),
            nibbles=True,
        )
    for width in spec.tiles.widths:
        values[f"ring_rows_{width}"] = TensorMap(
            base + shape.offsets["ring_rows"],
            *shape.ring_tensor,
            (128, width, 1, 1),
            nibbles=False,
        )
    program, threads, shared_bytes = layers.compiled(spec)
    arguments = [values[parameter.name] for parameter in spec.parameters]
    try:
        machine.run(Launch(program, 2, threads, shared_bytes, arguments))
    except Deadlock as error:
        marks = torch.from_numpy(trace.view("<i8").copy()).view(2, TRACE_WORDS)
        raise tile.Hang(tile.reached(marks)) from error
    assert not fault.any()
    return torch.from_numpy(memory)


def test_all_cases_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert tile.climb(tile.make_spec("sm_103a"), run_on_machine) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(tile.make_cases()) * len(tile.ROWS) + 1
    assert all(line.endswith("   ok") for line in lines[:-1])
    assert lines[-1] == "the compute kernel agrees with the oracle"


def test_the_cases_depend_on_what_they_are_about() -> None:
    """Rows, columns and tokens of the stages differ, so that a wrong place shows."""
    for case in tile.make_cases():
        codes, exponents = tile.quantize_input(case.x, "sm100")
        a = tile.w1_swiglu(
            codes,
            exponents,
            case.experts.w13[0],
            case.experts.w13_scale[0],
            torch.ones(len(codes)),
            None,
            "sm100",
        )
        assert a.isfinite().all()
        assert len(a[:, 0].unique()) > 8, case.name
        if case.name != "sums":
            rows = a.unique(dim=1).shape[1]
            assert rows > 8 or case.name == "token scales", case.name
    scales = {case.name: case.experts.w13_scale.unique().numel() for case in tile.make_cases()}
    assert scales["weight scales"] > 4
    assert scales["sums"] == scales["columns"] == 1


def test_what_a_tile_has_beyond_its_block_is_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of older replays lie around the block; with them y would be right too, at more power."""
    rows, loaded = 5, []
    plain = ptx_blackwell.fill

    def watched(cta: Cta, tensor_map: TensorMap, at: list[int], to: int) -> int:
        count = plain(cta, tensor_map, at, to)
        if not tensor_map.nibbles:
            loaded.append(cta.shared[to : to + count].reshape(-1, 128).any(axis=1).tolist())
        return count

    def run(spec: KernelSpec, workspace: Tensor, packed: PackedWeightsSm100) -> Tensor:
        ring = tile.view(workspace, spec.shape, "ring_rows").view(-1, spec.shape.row_stride)
        ring[(ring == 0).all(dim=1)] = 0x38
        return run_on_machine(spec, workspace, packed)

    monkeypatch.setattr(ptx_blackwell, "fill", watched)
    spec = tile.make_spec("sm_103a")
    assert tile.examine(tile.make_cases()[-1], rows, spec, run).is_right
    width = min(spec.tiles.widths)
    assert width > rows
    assert loaded == [[row < rows for row in range(width)]] * len(loaded) != []


# Name -> (pattern in the PTX, replacement, first case that fails, what is said of it).
BROKEN = {
    "transaction bytes": (r"\b17408\b", "17424", "sums", "HANGS"),
    "scale ids": (
        rf"\b{layout.instruction_descriptor(0, 2)}\b",
        str(layout.instruction_descriptor(0, 1)),
        "weight scales",
        "W1 scales",
    ),
    "staged codes": (r"(st\.volatile\.shared::cta\.u8 \[%r\d+)\]", r"\1+16]", "sums", "W1"),
    "second projection": (
        r"(st\.volatile\.shared::cta\.u16 \[%r\d+)\]",
        r"\1+528]",
        "sums",
        "W2 rows",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_failure_is_located(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern, replacement, case, text = BROKEN[name]
    plain = layers.compile_kernel

    def changed(kernel: object, arch: str) -> tuple[str, bytes]:
        ptx, _ = plain(kernel, arch)
        result = re.sub(pattern, replacement, ptx)
        assert result != ptx
        return result, b""

    monkeypatch.setattr(layers, "compile_kernel", changed)
    monkeypatch.setattr("ptx_machine.PATIENCE", 3000)
    layers.compiled.cache_clear()
    try:
        assert tile.climb(tile.make_spec("sm_103a"), run_on_machine) == 1
    finally:
        layers.compiled.cache_clear()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("look at: ")
    failing = [line for line in lines if not line.endswith("   ok")]
    assert failing[0].startswith(case)
    assert text in "\n".join(failing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch.cuda.is_available() is True")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tile"]) == 2
    assert "found none" in capsys.readouterr().out
