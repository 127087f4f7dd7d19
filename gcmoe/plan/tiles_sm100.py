"""Tiles of the Blackwell compute kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUM_BOXES = 4
MMA_COLUMNS = 8
"""Steps of N, the token columns of one MMA."""


@dataclass(frozen=True, slots=True)
class TilePlanSm100:
    """How compute tiles its GEMMs on Blackwell. N is set at run time, in steps of 8.

    Args:
        widths: token rows that one tensor load brings, ascending; a block uses the narrowest that
            holds its N rows.
        stages: slots of the shared-memory ring, one 128-column window each.
        accumulators: pairs of accumulators in tensor memory; with two, the epilogue of an item runs
            beside the MMAs of the next.
    """

    widths: tuple[int, ...]
    stages: int
    accumulators: int

    def __post_init__(self) -> None:
        ascending = list(self.widths) == sorted(set(self.widths))
        if len(self.widths) != NUM_BOXES or not ascending:
            raise ValueError(f"widths = {self.widths}: {NUM_BOXES} ascending widths")
        if any(width % MMA_COLUMNS or not 0 < width <= 128 for width in self.widths):
            raise ValueError(f"widths = {self.widths}: multiples of {MMA_COLUMNS} up to 128")
        if self.stages < 2:
            raise ValueError(f"stages = {self.stages}: at least 2")
        if self.accumulators not in (1, 2):
            raise ValueError(f"accumulators = {self.accumulators}: 1 or 2")

    @property
    def max_width(self) -> int:
        return self.widths[-1]


# Sizes follow from shared memory (227 KB) and tensor memory (512 columns); nothing is measured.
# A stage holds 16 KiB of packed weights in 32 KiB; some 54 KB must be under way on each SM to cover
# 1 us of memory latency at 8 TB/s.
NARROW_TILES = TilePlanSm100((8, 16, 24, 32), stages=5, accumulators=2)
MEDIUM_TILES = TilePlanSm100((16, 32, 48, 64), stages=4, accumulators=2)
WIDE_TILES = TilePlanSm100((32, 64, 96, 128), stages=3, accumulators=1)

# The largest means at which a Poisson batch leaves one block, and so reads an expert's weights
# twice, in less than 1 % of the experts: 20 + 12 rows, 46 + 18 rows.
NARROW_MEAN_ROWS = 20
MEDIUM_MEAN_ROWS = 46

TILE_TABLE = (
    (NARROW_MEAN_ROWS, NARROW_TILES),
    (MEDIUM_MEAN_ROWS, MEDIUM_TILES),
    (math.inf, WIDE_TILES),
)
"""(Most rows per expert in the mean of a batch, tiles), ascending."""
