"""A compiled compute kernel, and what its PTX must hold whatever the architecture."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from compiler_output import compile_kernel, cuda_tool, output, resource_usage

from gcmoe.kernels.build import kernel_class
from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol.edges import ARRIVALS, COMPUTE_DONE, EMPTY, FULL, ROUTES, TICKET, W1_DONE

Mark = tuple[str, str]
"""(name, operation without its operands)."""

COMPLETION = "cp.async.bulk.wait_group 0"
OPERATIONS: dict[str, set[str]] = {
    "routes read": {ROUTES.read.ptx},
    "token_ring_full read": {FULL.read.ptx, f"fence.proxy.{FULL.read_proxy_fence}"},
    "w1_bitmap write": {W1_DONE.write.ptx, COMPLETION},
    "w1_bitmap read": {W1_DONE.read.ptx, f"fence.proxy.{W1_DONE.read_proxy_fence}"},
    "combine_arrivals write": {ARRIVALS.write.ptx, f"fence.{ARRIVALS.write_fence}", COMPLETION},
    "token_ring_empty write": {EMPTY.write.ptx},
    "compute_done write": {COMPUTE_DONE.write.ptx},
    "work_ticket": {TICKET.operation.ptx},
    "stage write": {"fence.proxy.async.shared::cta"},
    # The publisher has read the origins of rows; a bulk load fills their queue entry again.
    "row words read": {"fence.proxy.async.shared::cta"},
}
PUBLICATION: tuple[Mark, ...] = (
    ("w1_bitmap write", COMPLETION),
    ("w1_bitmap write", W1_DONE.write.ptx),
    ("combine_arrivals write", COMPLETION),
    ("combine_arrivals write", f"fence.{ARRIVALS.write_fence}"),
    ("combine_arrivals write", ARRIVALS.write.ptx),
    ("token_ring_empty write", EMPTY.write.ptx),
)


@dataclass(frozen=True)
class Build:
    """One compiled kernel and its two texts."""

    spec: KernelSpec
    threads: int
    smem_bytes: int
    ptx: str
    sass: str
    usage: dict[str, int]

    @classmethod
    def of(cls, spec: KernelSpec) -> Self:
        kernel = kernel_class(spec.role, spec.family)(spec)
        ptx, code = compile_kernel(kernel, spec.arch)
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(code)
            usage = resource_usage(cubin)
            sass = output(cuda_tool("nvdisasm"), "-c", str(cubin))
        return cls(spec, kernel.threads, kernel.smem_bytes, ptx, sass, usage)

    def marks(self) -> list[Mark]:
        """(mark, operation without its operands) of every marked PTX line, in text order."""
        found = re.findall(r"^\s*([\w.:]+(?: 0)?)[^\n]*// gcmoe (.+?)\s*$", self.ptx, re.MULTILINE)
        return [(mark, operation) for operation, mark in found]

    def operations(self, mark: str) -> set[str]:
        return {operation for name, operation in self.marks() if name == mark}


def assert_publication_keeps_its_order(marks: list[Mark]) -> None:
    """Completion, then fence, then the flag; the ring slot is given back last."""
    for edge in ("w1_bitmap write", "combine_arrivals write"):
        of_edge = [entry for entry in PUBLICATION if entry[0] == edge]
        first = [marks.index(entry) for entry in of_edge]
        assert first == sorted(first), [m for m in marks if m[0] == edge]
    last_arrival = max(n for n, m in enumerate(marks) if m == PUBLICATION[4])
    assert marks.index(PUBLICATION[5]) > last_arrival


def assert_no_read_only_loads_and_no_weak_completion(ptx: str) -> None:
    assert re.findall(r"\bld\.global[\w.]*\.nc\b.*", ptx) == []
    assert re.findall(r".*wait_group\.read.*", ptx) == []
    # The bare form compiles to a fence of the whole GPU.
    assert re.findall(r"fence\.proxy\.async\s*;", ptx) == []
