"""What a layer runs as: CTAs, tiles, ring size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gcmoe.config import MAX_TOKENS, MoEConfig
from gcmoe.plan import tiles_sm100
from gcmoe.plan.targets import Family
from gcmoe.protocol import WorkspaceShape
from gcmoe.protocol.ring import WINDOW_COLUMNS
from gcmoe.protocol.workspace import MX_COLUMNS

SM_GRANULE = 8
HEADER_WORDS = 16
ONE_PASS_TOKENS = 16
"""Up to so many tokens finalize sums all groups of columns in one pass: their sum takes a latency,
as would each further pass."""
MAX_RING_BYTES = 256 << 20
MAX_SHARE_ROWS = 8192
USUAL_CAPACITIES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""``max_tokens`` of tools that are told a number of tokens only."""


@dataclass(frozen=True, slots=True)
class SplitRow:
    """SMs of dispatch at capacities up to ``max_tokens``.

    Args:
        max_tokens: the largest capacity, in tokens of a rank, that the row is for.
        dispatch_sms: SMs.
        is_returned: compute runs on them too once dispatch has ended.
        gpu, measurement: where and how it was found.
    """

    max_tokens: int
    dispatch_sms: int
    is_returned: bool
    gpu: str
    measurement: str


SPLIT_TABLE = (
    SplitRow(
        16, 8, False, "H200",
        "dispatch alone, two ranks, to the last block, 8 against 16 SMs: 7.1 and 6.9 us at T = 1, "
        "7.9 and 7.6 at T = 8. Whole layer: returning them costs 1.4 us at T = 1, nothing at 8",
    ),
    SplitRow(
        MAX_TOKENS, 32, True, "H200",
        "whole layer, 16, 24, 32, 48, 64 and 96 SMs: 112.0, 111.1, 111.4, 111.6, 112.0, 114.6 us "
        "at T = 32; 116.8, 116.3, 116.4, 116.8, 116.9, 119.7 at 64; 131.8, 130.9, 129.8, 131.3, "
        "132.6, 134.2 at 128; 175.0, 172.6, 171.7, 171.9, 172.0, 175.4 at 256 (V4-Flash share)",
    ),
)  # fmt: skip
"""By capacity, ascending."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How compute tiles its GEMMs.

    Args:
        widths: token tile widths N in one kernel, ascending; a block uses the narrowest that fits.
        warpgroups: consumer warpgroups.
        subtiles: 64-row sub-tiles per warpgroup; ``warpgroups * subtiles == 4``.
        stages: slots of the shared-memory ring, 256 columns each.
        producer_registers, consumer_registers: per thread, after re-allocation.
    """

    widths: tuple[int, ...]
    warpgroups: int
    subtiles: int
    stages: int
    producer_registers: int
    consumer_registers: int

    def __post_init__(self) -> None:
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths = {self.widths}: ascending widths are required")

    @property
    def max_width(self) -> int:
        return self.widths[-1]


# Builds with more than 40 columns spill unless a warpgroup has two sub-tiles and 232 registers, 72
# columns need 240; 48 columns leave room for a fourth stage. See TILE_TABLE for what was measured.
NARROW_TILES = TilePlan((8, 16, 24, 32, 40), 4, 1, 4, 32, 112)
MEDIUM_TILES = TilePlan((16, 24, 32, 40, 48), 2, 2, 4, 40, 232)
WIDE_TILES = TilePlan((16, 32, 48, 56, 64), 2, 2, 3, 40, 232)
WIDEST_TILES = TilePlan((16, 48, 56, 64, 72), 2, 2, 3, 24, 240)
NARROW_MEAN_ROWS = 26
MEDIUM_MEAN_ROWS = 36
WIDE_MEAN_ROWS = 56
WIDEST_MEAN_ROWS = 72


@dataclass(frozen=True, slots=True)
class TileRow:
    """Tiles for calls that give an expert up to ``mean_rows`` rows in the mean.

    Args:
        mean_rows: the most rows per expert, if all ranks have as many tokens, that the row is for.
        tiles: token widths, warpgroups, stages, registers.
        gpu, measurement: where and how it was found; one rank's share of EP8.
    """

    mean_rows: float
    tiles: TilePlan
    gpu: str
    measurement: str


TILE_TABLE = (
    TileRow(
        NARROW_MEAN_ROWS, NARROW_TILES, "H200",
        "compute alone, both Flash shares, T = 8 to 64: 96 to 102 % of the byte floor; whole "
        "layer, V4-Flash, T = 128: 123 us against 126 with two warpgroups (decision 15)",
    ),
    TileRow(
        MEDIUM_MEAN_ROWS, MEDIUM_TILES, "H200",
        "compute alone, V4.1-Flash share: 97 % of the floor at T = 128, 88 % at 256; with three "
        "stages every epilogue stops the stream (109.7 against 101.6 us, V4-Flash share, T = 64); "
        "whole layer, V4.1-Flash, T = 256: 277 us against 288 with four warpgroups (decision 15); "
        "the width 24 in place of 8: 0.8 % under sustained load (decision 19)",
    ),
    TileRow(
        WIDE_MEAN_ROWS, WIDE_TILES, "H200",
        "an expert of up to 64 rows reads its weights once; whole layer, V4-Flash, T = 256: 157 us "
        "against 166 without the width 56 (decision 15)",
    ),
    TileRow(
        WIDEST_MEAN_ROWS, WIDEST_TILES, "H200",
        "an expert of up to 72 rows reads its weights once; whole layer, GLM-5.2, T = 256: 286 and "
        "293 us against 330 and 338 with up to 64 columns (decision 16)",
    ),
    TileRow(
        float("inf"), WIDE_TILES, "H200",
        "an expert takes two blocks or more: 64 columns waste less in the last one (not measured)",
    ),
)  # fmt: skip
"""By mean rows, ascending."""


def choose_split(max_tokens: int) -> SplitRow:
    """The split of the SMs at a capacity."""
    return next(row for row in SPLIT_TABLE if max_tokens <= row.max_tokens)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Everything that kernels and runtime need to know; equal on all ranks.

    ``tiles`` is a :class:`TilePlan`, or a ``TilePlanSm100`` where the family is sm100. A plan of
    :func:`make_plan` has the tiles of a full batch.
    """

    config: MoEConfig
    num_ranks: int
    num_sms: int
    dispatch_sms: int
    late_ctas: int
    """CTAs of compute that run on the SMs of dispatch once it has left them."""
    tiles: Any
    workspace: WorkspaceShape
    tile_classes: tuple[tuple[int, Any], ...]
    """(most tokens, tiles) of the kernels that an operator has, ascending; a call uses the first
    that its own number of tokens does not exceed."""

    def for_tokens(self, num_tokens: int) -> LayerPlan:
        """How a call of ``num_tokens`` tokens runs: tiles and block rows by its size, all else by
        the capacity.

        Blocks are the receiving rank's own matter, so ranks may choose differently, and more rows
        than expected only take more blocks.

        Raises:
            ValueError: ``num_tokens`` is not in [0, max_tokens].
        """
        if not 0 <= num_tokens <= self.config.max_tokens:
            raise ValueError(
                f"tokens = {num_tokens}: from 0 to max_tokens = {self.config.max_tokens}"
            )
        tiles = next(tiles for most, tiles in self.tile_classes if num_tokens <= most)
        workspace = replace(self.workspace, block_rows=tiles.max_width)
        return replace(self, tiles=tiles, workspace=workspace)

    def with_tiles(self, tiles: Any) -> LayerPlan:
        """The plan of an operator that has these tiles for calls of all sizes."""
        rows = dict.fromkeys(("slot_rows", "block_rows", "least_block_rows"), tiles.max_width)
        workspace = replace(self.workspace, **rows)
        classes = ((self.config.max_tokens, tiles),)
        return replace(self, tiles=tiles, workspace=workspace, tile_classes=classes)

    @property
    def classes(self) -> tuple[LayerPlan, ...]:
        """The plans that :meth:`for_tokens` may return, each once."""
        return tuple(dict.fromkeys(self.for_tokens(most) for most, _ in self.tile_classes))

    @property
    def compute_sms(self) -> int:
        """SMs that compute has from the start."""
        return self.num_sms - self.dispatch_sms

    @property
    def compute_ctas(self) -> int:
        """All CTAs of compute."""
        return self.compute_sms + self.late_ctas


def round_width(tiles: TilePlan, rows: int) -> int:
    """The token tile width of a block of ``rows`` rows: the narrowest that holds them."""
    return next((width for width in tiles.widths if rows <= width), tiles.max_width)


def capacity_for(num_tokens: int) -> int:
    """The smallest usual capacity that holds ``num_tokens`` tokens.

    Raises:
        ValueError: there is none.
    """
    for capacity in USUAL_CAPACITIES:
        if num_tokens <= capacity:
            return capacity
    raise ValueError(f"tokens = {num_tokens}: at most {USUAL_CAPACITIES[-1]}")


def round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def tile_classes(
    config: MoEConfig, num_ranks: int, table: Sequence[tuple[float, Any]]
) -> tuple[tuple[int, Any], ...]:
    """(most tokens, tiles) up to the capacity, ascending.

    Args:
        config, num_ranks: the layer.
        table: (most rows per expert in the mean, tiles), ascending.
    """
    classes: list[tuple[int, Any]] = []
    for mean_rows, tiles in table:
        most = mean_rows * config.num_experts / (num_ranks * config.top_k)
        most = int(min(config.max_tokens, most))
        if most > (classes[-1][0] if classes else 0):
            classes.append((most, tiles))
    return tuple(classes)


def make_plan(
    config: MoEConfig,
    num_ranks: int = 1,
    num_sms: int = 132,
    *,
    dispatch_sms: int | None = None,
    ring_slots: int | None = None,
    late_compute: bool | None = None,
    family: Family = "sm90",
) -> LayerPlan:
    """The plan of a layer.

    Args:
        config: the layer.
        num_ranks: R, ranks of the group.
        num_sms: SMs of the GPU.
        dispatch_sms: SMs of dispatch; None takes them from :data:`SPLIT_TABLE`. Rounded up to a
            multiple of 8, as the driver does for green contexts.
        ring_slots: S; None takes the power of two that holds every block of a full batch, within
            256 MiB. A small call that gets many rows from other ranks may have more blocks: its
            slots recur.
        late_compute: whether compute runs on the dispatch SMs too once dispatch has ended; None
            takes it from :data:`SPLIT_TABLE`.
        family: of kernels; decides tiles and the form of activation scales.

    Raises:
        ValueError: a limit of the configuration, of the SMs or of dispatch is exceeded.
    """
    local_experts = config.local_experts(num_ranks)
    split = choose_split(config.max_tokens)
    if dispatch_sms is None:
        dispatch_sms = split.dispatch_sms
    if late_compute is None:
        late_compute = split.is_returned
    asked, dispatch_sms = dispatch_sms, round_up(dispatch_sms, SM_GRANULE)
    if not 0 < dispatch_sms < num_sms:
        raise ValueError(
            f"dispatch_sms = {asked}: positive and, rounded up to a multiple of {SM_GRANULE}, "
            f"below the {num_sms} SMs of the GPU"
        )
    table: Sequence[tuple[float, Any]] = [(row.mean_rows, row.tiles) for row in TILE_TABLE]
    scale_columns = WINDOW_COLUMNS
    if family == "sm100":
        table, scale_columns = tiles_sm100.TILE_TABLE, MX_COLUMNS
    classes = tile_classes(config, num_ranks, table)
    tiles = classes[-1][1]
    widths = [tiles.max_width for _, tiles in classes]
    shape = WorkspaceShape(
        hidden=config.hidden,
        intermediate=config.intermediate,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        num_ranks=num_ranks,
        local_experts=local_experts,
        num_slots=2,
        slot_rows=max(widths),
        block_rows=tiles.max_width,
        least_block_rows=min(widths),
        header_words=max(HEADER_WORDS, dispatch_sms),
        scale_columns=scale_columns,
    )
    slot_bytes = shape.slot_rows * (shape.row_stride + config.intermediate)
    most_slots = MAX_RING_BYTES // slot_bytes
    if most_slots < 2:
        raise ValueError(
            f"hidden = {config.hidden}: two ring slots of {slot_bytes} bytes exceed "
            f"{MAX_RING_BYTES} bytes"
        )
    if ring_slots is None:
        largest = 1 << (most_slots.bit_length() - 1)
        ring_slots = max(2, min(next_power_of_two(shape.max_blocks), largest))
    if ring_slots & (ring_slots - 1) or not 2 <= ring_slots <= most_slots:
        raise ValueError(
            f"ring_slots = {ring_slots}: a power of two from 2 to {most_slots}, because the ring "
            f"is kept within {MAX_RING_BYTES} bytes"
        )
    share = round_up(num_ranks * shape.entry_capacity, dispatch_sms) // dispatch_sms
    if share > MAX_SHARE_ROWS:
        raise ValueError(
            f"num_ranks * max_tokens * top_k = {num_ranks * shape.entry_capacity}: at most "
            f"{MAX_SHARE_ROWS * dispatch_sms}, because each of the {dispatch_sms} dispatch CTAs "
            f"keeps its share of the rows in shared memory"
        )
    shape = replace(shape, num_slots=ring_slots)
    late_ctas = dispatch_sms if late_compute else 0
    return LayerPlan(config, num_ranks, num_sms, dispatch_sms, late_ctas, tiles, shape, classes)
