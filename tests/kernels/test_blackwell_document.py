"""docs/blackwell.md is what the code says: its table, and the names that it sends to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gcmoe.kernels import variants
from gcmoe.kernels.build import dsl_version

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "blackwell.md").read_text(encoding="utf-8")


@pytest.mark.compile
@pytest.mark.skipif(dsl_version() is None, reason="nvidia-cutlass-dsl is not installed")
def test_the_table_is_what_the_compiler_says() -> None:
    assert variants.replace(DOCUMENT, variants.table()) == DOCUMENT, "stale: run `make docs`"


def test_nothing_in_the_table_spills_and_every_target_is_in_it() -> None:
    rows = [line for line in DOCUMENT.splitlines() if " columns |" in line]
    assert len(rows) == len(variants.CAPACITIES)
    assert {row.strip("| ").rpartition("| ")[2] for row in rows} == {"0"}
    head = next(line for line in DOCUMENT.splitlines() if line.startswith("| tokens a rank"))
    assert all(f"registers {arch}" in head for arch in ("sm_100a", "sm_100f", "sm_103a"))


def test_files_and_names_exist() -> None:
    for name in re.findall(r"`((?:tests|gcmoe|bench|docs)/[\w/.]+)`", DOCUMENT):
        assert (ROOT / name).exists(), name
    kernels = [*(ROOT / "gcmoe" / "kernels").glob("*_sm100.py"), ROOT / "gcmoe/runtime/device.py"]
    text = "".join(path.read_text() for path in kernels)
    for name in re.findall(r"`([A-Z][A-Z_]{3,}|[A-Z]\w+\.\w+|swizzled_byte)`", DOCUMENT):
        last = name.rpartition(".")[2]
        assert re.search(rf"\b{last}\b", text) or last == "PeerTimeout", name
