"""Descriptors, tensor memory and byte counts of the Blackwell compute kernel, as plain functions.

They are branch-free, so that one text computes with integers in a test and traces in the kernel; a
test compares every field with the documented encodings. Sources: PTX ISA 8.8, "tcgen05 instruction
descriptor" (block-scaled form), "shared memory descriptor" and "scale factor layout".

The MMA is D[128 weight rows, N tokens] += A[128, 32] x B[N, 32]^T for 32 columns of K, each operand
row times its own UE8M0 scale. Both operands are K-major rows of 128 bytes in shared memory under
the 128-byte swizzle; an E2M1 row is padded there: 8 bytes of codes, then 8 unused, per 16 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HALF_ROWS = 128
TILE_ROWS = 2 * HALF_ROWS
"""Weight rows of an item: gate and up of 128 features, or 256 output columns."""

WINDOW = 128
MMA_K = 32
STEPS = WINDOW // MMA_K
"""MMAs over a window; step k reads byte k of every scale word."""

ATOM_BYTES = 512
ATOM_COLUMNS = 4
"""Tensor memory columns of a scale atom, one per 32 operand rows."""

CODE_BYTES = TILE_ROWS * WINDOW // 2
"""Packed weights of an item and window in memory: what their tensor load counts on an mbarrier,
although it fills twice as much shared memory."""

CODE_SHARED_BYTES = TILE_ROWS * WINDOW
HALF_SHARED_BYTES = HALF_ROWS * WINDOW
SCALE_BYTES = 2 * ATOM_BYTES
"""Scale atoms of an item and window, one per half."""

WEIGHT_BYTES = CODE_BYTES + SCALE_BYTES
"""What ``full_w`` expects in a phase."""

OUTPUT_STRIDE = 2 * TILE_ROWS + 16
"""Bytes of a row of the staged W2 tile: 256 BF16 and a pad that spreads rows over the banks."""


def token_bytes(rows: Any) -> Any:
    """What ``full_x`` expects for ``rows`` token rows of a window and their scale atom."""
    return rows * WINDOW + ATOM_BYTES


# ------------------------------------------------------------------------------- descriptors

E2M1, E4M3, UE8M0 = 5, 0, 1
INSTRUCTION = E2M1 << 7 | E4M3 << 10 | UE8M0 << 23 | (HALF_ROWS >> 4) << 24
"""Instruction descriptor without N and without scale ids: A is E2M1, B is E4M3, dense, K-major,
nothing negated, UE8M0 scales, M = 128, K = 32."""

_VERSION = 1 << 46
_SWIZZLE_128B = 2 << 61
OPERAND = _SWIZZLE_128B | _VERSION | (1024 >> 4) << 32 | (16 >> 4) << 16
"""Shared-memory descriptor of an operand at address 0: 8 rows of 128 bytes every 1,024 bytes."""

SCALES = _VERSION | (128 >> 4) << 32 | (16 >> 4) << 16
"""Shared-memory descriptor of a scale atom at address 0: 8 rows of 16 bytes every 128 bytes."""


def instruction_descriptor(n: Any, step: int) -> Any:
    """The descriptor of the MMA of one K32 step.

    Args:
        n: token columns, a multiple of 8 from 8 to 256; a word in the kernel.
        step: 0..3; selects byte ``step`` of both operands' scale words.
    """
    return ((n >> 3) << 17) | (INSTRUCTION | step << 29 | step << 4)


def operand_descriptor(address: Any) -> Any:
    """An operand tile at a shared address below 2^18, a multiple of 1,024; a 64-bit word."""
    return (address >> 4) + OPERAND


def scale_descriptor(address: Any) -> Any:
    """A scale atom at a shared address below 2^18, a multiple of 16; a 64-bit word."""
    return (address >> 4) + SCALES


def advance(num_bytes: int) -> int:
    """What moves a shared-memory descriptor by ``num_bytes``, a multiple of 16."""
    return num_bytes >> 4


# --------------------------------------------------------------- the instructions of a window


@dataclass(frozen=True, slots=True)
class ScaleCopy:
    """One atom to tensor memory.

    Args:
        source: field of shared memory. source_bytes: offset in its stage.
        column: offset in the scale columns of the stage.
    """

    source: str
    source_bytes: int
    column: int


@dataclass(frozen=True, slots=True)
class Mma:
    """One K32 step of one half.

    Args:
        half: accumulator of the pair.
        step: of the window; the scale byte.
        a_bytes, b_bytes: where the step begins in the stage's weights and tokens. A step is 32
            bytes of a row, of padded E2M1 too; the hardware swizzles the sum, so a tile may be
            entered at any step.
        a_column, b_column: offsets of the scales in the scale columns of the stage.
    """

    half: int
    step: int
    a_bytes: int
    b_bytes: int
    a_column: int
    b_column: int


COPIES = (
    ScaleCopy("w_scale", 0, 0),
    ScaleCopy("w_scale", ATOM_BYTES, ATOM_COLUMNS),
    ScaleCopy("x_scale", 0, 2 * ATOM_COLUMNS),
)
MMAS = tuple(
    Mma(
        half=half,
        step=step,
        a_bytes=half * HALF_SHARED_BYTES + step * MMA_K,
        b_bytes=step * MMA_K,
        a_column=half * ATOM_COLUMNS,
        b_column=2 * ATOM_COLUMNS,
    )
    for step in range(STEPS)
    for half in range(2)
)
"""All copies of a window, then all its MMAs, in issue order. The first MMA of either half starts
the sums of an item when the window is its first."""


# ------------------------------------------------------------------------------- tensor memory


@dataclass(frozen=True, slots=True)
class TensorMemory:
    """The 512 columns of 128 lanes x 32 bits: accumulators, then scales.

    Lane = weight row of the half, column = token. Each stage of the shared-memory ring has scale
    columns of its own: they are written again only when the MMAs that read them have been seen to
    end (the ``empty`` barrier of the stage), so nothing rests on the order of a copy behind an MMA.

    Args:
        width: columns of an accumulator, the largest N.
        stages: of the shared-memory ring.
        accumulators: pairs of accumulators.
    """

    width: int
    stages: int
    accumulators: int

    @property
    def accumulator_columns(self) -> int:
        """Columns of a pair: gate and up, or the two halves of 256 output columns."""
        return 2 * self.width

    @property
    def first_scale(self) -> int:
        return self.accumulators * self.accumulator_columns

    @property
    def stage_columns(self) -> int:
        """Scale columns of a stage: two atoms of weights, one of tokens."""
        return len(COPIES) * ATOM_COLUMNS

    @property
    def columns(self) -> int:
        """Columns in use, at most 512."""
        return self.first_scale + self.stages * self.stage_columns

    @property
    def allocated(self) -> int:
        """Columns to allocate: a power of two from 32 up."""
        return max(32, 1 << (self.columns - 1).bit_length())


# ------------------------------------------------------------------------------- shared memory


def swizzled_byte(row: Any, column: Any) -> Any:
    """Byte of (row, column) in a tile of 8-bit rows of 128 bytes under the 128-byte swizzle:
    16-byte chunk c of row n lies at chunk ``c ^ (n % 8)``."""
    return row * WINDOW + (column ^ ((row & 7) << 4))
