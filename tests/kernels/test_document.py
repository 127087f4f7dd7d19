"""docs/kernels.md is what the code says: every cell that needs no compiler, and some that do."""

from __future__ import annotations

from pathlib import Path

import pytest
from compiler_output import resource_usage

from gcmoe.kernels.build import compile_kernel, cubin_registers, cubin_stack, dsl_version
from gcmoe.kernels.document import (
    ARCH,
    COMPILED,
    STATIC,
    Variant,
    introduction,
    variants,
)
from gcmoe.kernels.spec import kernel_spec
from gcmoe.protocol import Role

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"
STALE = "stale: run `make docs`"
COMPUTE = 1
"""Place of compute in a cell of three."""

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(dsl_version() is None, reason="nvidia-cutlass-dsl is not installed"),
]


def committed() -> dict[tuple[str, int], list[str]]:
    """The cells of the committed table, by model and capacity."""
    lines = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == [*STATIC, *COMPILED], STALE
    return {(row[0], int(row[1])): row for row in rows[2:]}


def test_static_cells_are_what_the_code_says() -> None:
    found = committed()
    assert DOCUMENT.read_text(encoding="utf-8").startswith("\n".join(introduction())), STALE
    assert list(found) == [(v.model, v.max_tokens) for v in variants()], STALE
    for variant in variants():
        row = found[variant.model, variant.max_tokens]
        assert row[: len(STATIC)] == variant.static_cells(), STALE


def test_nothing_in_the_table_spills() -> None:
    assert {row[-1] for row in committed().values()} == {"0 / 0 / 0"}


def test_registers_of_compute_are_what_the_compiler_says(tmp_path: Path) -> None:
    """One variant of each tile plan; a compilation is a second."""
    of_tiles: dict[object, Variant] = {}
    for variant in variants():
        of_tiles.setdefault(variant.plan.tiles, variant)
    assert len(of_tiles) > 1
    for variant in of_tiles.values():
        cubin = compile_kernel(kernel_spec(variant.plan, Role.COMPUTE, ARCH)).cubin
        path = tmp_path / "kernel.cubin"
        path.write_bytes(cubin)
        usage = resource_usage(path)
        assert cubin_registers(cubin) == usage["REG"]
        assert cubin_stack(cubin) == usage["STACK"]
        row = committed()[variant.model, variant.max_tokens]
        registers, stack = (cell.split(" / ")[COMPUTE] for cell in row[-2:])
        assert (int(registers), int(stack)) == (usage["REG"], usage["STACK"]), STALE
