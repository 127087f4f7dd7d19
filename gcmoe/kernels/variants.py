"""The variants of the Blackwell compute kernel and what each takes, as a table of a document.

``python -m gcmoe.kernels.variants docs/blackwell.md`` compiles them and puts the table between the
marks of the document. Needs the kernel language, no GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gcmoe.kernels.build import DSL_PACKAGE, compile_kernel, cubin_stack, dsl_version
from gcmoe.kernels.layout_sm100 import WEIGHT_BYTES, TensorMemory
from gcmoe.kernels.spec import kernel_spec
from gcmoe.models import get_model
from gcmoe.plan import make_plan
from gcmoe.plan.targets import FAMILIES, USUAL_SMS
from gcmoe.protocol import Role
from gcmoe.protocol.document import table as markdown_table

BEGIN = "<!-- variants: made by python -m gcmoe.kernels.variants docs/blackwell.md -->"
END = "<!-- end of variants -->"
MODEL, RANKS = "deepseek-v4.1-flash", 8
CAPACITIES = (64, 256, 512)
"""Tokens a rank, one for each tile plan."""
ARCHS = tuple(arch for arch, family in FAMILIES.items() if family == "sm100")
HEAD = (
    "tokens a rank",
    "N up to",
    "token boxes",
    "stages",
    "packed weights in flight",
    "accumulator pairs",
    "tensor memory, used of allocated",
    "shared memory",
    "threads",
    *(f"registers {arch}" for arch in ARCHS),
    "stack",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One row; registers by target, in the order of :data:`ARCHS`; the largest stack of them."""

    tokens: int
    widths: tuple[int, ...]
    stages: int
    accumulators: int
    memory: TensorMemory
    smem_bytes: int
    threads: int
    registers: tuple[int | None, ...]
    stack: int

    def cells(self) -> list[str]:
        return [
            str(self.tokens),
            str(self.widths[-1]),
            ", ".join(map(str, self.widths)),
            str(self.stages),
            f"{self.stages * WEIGHT_BYTES:,} B",
            str(self.accumulators),
            f"{self.memory.columns} of {self.memory.allocated} columns",
            f"{self.smem_bytes:,} B",
            str(self.threads),
            *(str(count) for count in self.registers),
            str(self.stack),
        ]


def make_variant(tokens: int) -> Variant:
    """Compile the kernel of one capacity for all targets."""
    config = get_model(MODEL).config(tokens)
    plan = make_plan(config, RANKS, USUAL_SMS["sm100"], family="sm100")
    kernels = [compile_kernel(kernel_spec(plan, Role.COMPUTE, arch)) for arch in ARCHS]
    tiles = kernel_spec(plan, Role.COMPUTE, ARCHS[0]).tiles
    return Variant(
        tokens,
        tiles.widths,
        tiles.stages,
        tiles.accumulators,
        TensorMemory(tiles.max_width, tiles.stages, tiles.accumulators),
        kernels[0].smem_bytes,
        kernels[0].threads,
        tuple(kernel.registers for kernel in kernels),
        max(cubin_stack(kernel.cubin) or 0 for kernel in kernels),
    )


def table() -> str:
    """The table in Markdown, with the model and the compiler that it is of."""
    lines = markdown_table(list(HEAD), [make_variant(tokens).cells() for tokens in CAPACITIES])
    what = f"{MODEL} on {RANKS} ranks, {DSL_PACKAGE} {dsl_version()}."
    return "\n".join([what, "", *lines])


def replace(text: str, content: str) -> str:
    """``text`` with ``content`` between its marks.

    Raises:
        ValueError: the marks are missing.
    """
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n\n{content}\n\n{text[end:]}"


def main(path: str) -> None:
    """Rewrite the table of a document."""
    document = Path(path)
    document.write_text(replace(document.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
