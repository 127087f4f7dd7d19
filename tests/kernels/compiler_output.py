"""Compiling a kernel for a test, and reading what the compiler wrote."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gcmoe.kernels.spec import KernelSpec

KIND_TYPES = {"u64": ".u64", "i64": ".u64", "i32": ".u32"}


def compile_kernel(kernel: Any, arch: str) -> tuple[str, bytes]:
    """PTX and cubin."""
    import cutlass.cute as cute

    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        result = cute.compile(kernel, *kernel.example_arguments(), options=options)
        return result.__ptx__, bytes(result.__cubin__)


def cuda_tool(name: str) -> str:
    """A program of the CUDA tool packages in this environment."""
    for root in (Path(folder) for folder in sys.path if folder.endswith("site-packages")):
        for path in sorted(root.glob(f"nvidia/*/bin/{name}")):
            return str(path)
    pytest.skip(f"{name} is in no nvidia/*/bin of this environment")


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resource_usage(cubin: Path) -> dict[str, int]:
    """What ``cuobjdump -res-usage`` says: REG, STACK, LOCAL and the like."""
    usage = output(cuda_tool("cuobjdump"), "-res-usage", str(cubin))
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", usage)}


def wanted_parameters(spec: KernelSpec) -> list[str]:
    """The parameters of a spec, as :func:`entry_parameters` writes them."""
    peers = f".b8[{8 * spec.shape.num_ranks}]"
    return [peers if p.kind == "peers" else KIND_TYPES[p.kind] for p in spec.parameters]


def entry_parameters(ptx: str) -> list[str]:
    """The kernel's parameters as ``.type`` or ``.b8[n]``."""
    text = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    found = re.findall(r"\.param (?:\.align \d+ )?(\.\w+) \w+(\[\d+\])?", text)
    return [kind + size for kind, size in found]


def marked_lines(ptx: str, mark: str) -> list[str]:
    """The instructions that carry a mark, in order."""
    return [line.strip() for line in ptx.splitlines() if line.endswith(f"// gcmoe {mark}")]
