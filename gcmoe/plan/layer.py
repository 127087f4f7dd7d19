"""What a layer runs as: SM split, tiles, ring size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gcmoe.config import MoEConfig
from gcmoe.plan import tiles_sm100
from gcmoe.plan.targets import Family
from gcmoe.plan.tiles_sm100 import TilePlanSm100
from gcmoe.protocol import WorkspaceShape
from gcmoe.protocol.ring import WINDOW_COLUMNS
from gcmoe.protocol.workspace import MX_COLUMNS

SM_GRANULE = 8
NUM_WIDTHS = 4
HEADER_WORDS = 16
MAX_RING_BYTES = 256 << 20
MAX_SHARE_ROWS = 8192

# Sizes measured on H200 (132 SMs): eight dispatch SMs win up to 16 tokens, sixteen from 64 on.
SMALL_CAPACITY = 16
SMALL_DISPATCH_SMS = 8
LARGE_DISPATCH_SMS = 16


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
        if len(self.widths) != NUM_WIDTHS or list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths = {self.widths}: {NUM_WIDTHS} ascending widths")

    @property
    def max_width(self) -> int:
        return self.widths[-1]


# Rows name the machine and the measurement they come from: H200, one rank's share of EP8.
# Narrow: 96-102 % of the byte floor at 8..64 tokens. Builds with more than 40 columns spill unless
# a warpgroup has two sub-tiles and 232 registers; 48 columns leave room for a fourth stage.
NARROW_TILES = TilePlan((8, 16, 24, 32), 4, 1, 4, 32, 112)
MEDIUM_TILES = TilePlan((16, 32, 40, 48), 2, 2, 4, 40, 232)
WIDE_TILES = TilePlan((16, 32, 48, 64), 2, 2, 3, 40, 232)
NARROW_MEAN_ROWS = 20
MEDIUM_MEAN_ROWS = 36


def choose_tiles(mean_rows: float) -> TilePlan:
    """The tiles for a full batch that gives an expert ``mean_rows`` rows on average."""
    if mean_rows <= NARROW_MEAN_ROWS:
        return NARROW_TILES
    return MEDIUM_TILES if mean_rows <= MEDIUM_MEAN_ROWS else WIDE_TILES


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Everything that kernels and runtime need to know; equal on all ranks."""

    config: MoEConfig
    num_ranks: int
    num_sms: int
    dispatch_sms: int
    tiles: TilePlan | TilePlanSm100
    workspace: WorkspaceShape

    @property
    def compute_sms(self) -> int:
        return self.num_sms - self.dispatch_sms


def round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def make_plan(
    config: MoEConfig,
    num_ranks: int = 1,
    num_sms: int = 132,
    *,
    dispatch_sms: int | None = None,
    ring_slots: int | None = None,
    family: Family = "sm90",
) -> LayerPlan:
    """The plan of a layer.

    Args:
        config: the layer.
        num_ranks: R, ranks of the group.
        num_sms: SMs of the GPU.
        dispatch_sms: SMs of the dispatch partition; None takes 8 at capacities up to 16 tokens and
            16 beyond. Rounded up to a multiple of 8, as the driver does.
        ring_slots: S; None takes the power of two that holds every block, within 256 MiB.
        family: of kernels; decides tiles and the form of activation scales.

    Raises:
        ValueError: a limit of the configuration, of the partition or of dispatch is exceeded.
    """
    local_experts = config.local_experts(num_ranks)
    if dispatch_sms is None:
        small = config.max_tokens <= SMALL_CAPACITY
        dispatch_sms = SMALL_DISPATCH_SMS if small else LARGE_DISPATCH_SMS
    asked, dispatch_sms = dispatch_sms, round_up(dispatch_sms, SM_GRANULE)
    if not 0 < dispatch_sms < num_sms:
        raise ValueError(
            f"dispatch_sms = {asked}: positive and, rounded up to a multiple of {SM_GRANULE}, "
            f"below the {num_sms} SMs of the GPU"
        )
    mean_rows = config.max_tokens * num_ranks * config.top_k / config.num_experts
    tiles: TilePlan | TilePlanSm100 = choose_tiles(mean_rows)
    scale_columns = WINDOW_COLUMNS
    if family == "sm100":
        tiles, scale_columns = tiles_sm100.choose_tiles(mean_rows), MX_COLUMNS
    shape = WorkspaceShape(
        hidden=config.hidden,
        intermediate=config.intermediate,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        num_ranks=num_ranks,
        local_experts=local_experts,
        num_slots=2,
        slot_rows=tiles.max_width,
        block_rows=tiles.max_width,
        header_words=max(HEADER_WORDS, dispatch_sms),
        scale_columns=scale_columns,
    )
    slot_bytes = tiles.max_width * (shape.row_stride + config.intermediate)
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
    return LayerPlan(config, num_ranks, num_sms, dispatch_sms, tiles, shape)
