"""The plan of a layer: partitions, tiles and ring, and the errors of what cannot be planned."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcmoe.config import MoEConfig
from gcmoe.plan import make_plan, tiles_sm100
from gcmoe.plan.layer import (
    MAX_RING_BYTES,
    MAX_SHARE_ROWS,
    NARROW_TILES,
    SM_GRANULE,
    WIDE_TILES,
    WIDEST_TILES,
    next_power_of_two,
    round_up,
)
from gcmoe.plan.targets import family_of
from gcmoe.plan.tiles_sm100 import TilePlanSm100
from gcmoe.protocol import WorkOrder
from gcmoe.protocol.document import EXAMPLE

FLASH = MoEConfig(hidden=5120, intermediate=2304, num_experts=384, top_k=6, max_tokens=64)

configs = st.builds(
    MoEConfig,
    hidden=st.integers(1, 28).map(lambda n: 256 * n),
    intermediate=st.integers(1, 32).map(lambda n: 128 * n),
    num_experts=st.integers(1, 64).map(lambda n: 8 * n),
    top_k=st.integers(1, 16),
    max_tokens=st.integers(1, 512),
)
ranks = st.sampled_from([1, 2, 4, 8])


@given(configs, ranks)
def test_every_plan_keeps_the_constraints(config, num_ranks):
    plan = make_plan(config, num_ranks)
    shape = plan.workspace
    assert plan.dispatch_sms % SM_GRANULE == 0
    assert plan.dispatch_sms + plan.compute_sms == plan.num_sms
    assert plan.compute_sms > 0
    assert shape.header_words >= plan.dispatch_sms
    assert shape.local_experts * num_ranks == config.num_experts
    assert (shape.hidden, shape.intermediate) == (config.hidden, config.intermediate)
    widths = [each.tiles.max_width for each in plan.classes]
    assert shape.slot_rows == max(widths)
    assert shape.block_rows == plan.tiles.max_width
    assert shape.least_block_rows == min(widths)
    assert shape.num_slots >= 2
    assert shape.num_slots & (shape.num_slots - 1) == 0
    slot_bytes = shape.slot_rows * (shape.row_stride + config.intermediate)
    assert shape.num_slots == 2 or shape.num_slots * slot_bytes <= MAX_RING_BYTES
    groups = shape.arrivals.groups
    WorkOrder(shape.num_slots, config.intermediate // 128, config.hidden // 256, groups)


@given(configs, ranks)
def test_the_ring_holds_every_block_unless_memory_ends_first(config, num_ranks):
    shape = make_plan(config, num_ranks).workspace
    slot_bytes = shape.slot_rows * (shape.row_stride + config.intermediate)
    assert shape.num_slots >= shape.max_blocks or 2 * shape.num_slots * slot_bytes > MAX_RING_BYTES


@given(configs, ranks)
def test_equal_arguments_give_equal_plans(config, num_ranks):
    """Ranks plan on their own and must agree."""
    assert make_plan(config, num_ranks) == make_plan(replace(config), num_ranks)


@pytest.mark.parametrize("tiles", [NARROW_TILES, WIDE_TILES])
def test_tile_tables(tiles):
    assert list(tiles.widths) == sorted(set(tiles.widths))
    assert all(width % 8 == 0 for width in tiles.widths)
    assert tiles.warpgroups * tiles.subtiles == 4
    # One producer warpgroup besides the consumers, 64 Ki registers on an SM.
    registers = 128 * (tiles.producer_registers + tiles.warpgroups * tiles.consumer_registers)
    assert registers <= 65536
    assert tiles.producer_registers % 8 == tiles.consumer_registers % 8 == 0


def test_capacity_decides_split_and_tiles():
    small = make_plan(replace(FLASH, max_tokens=16), 8)
    large = make_plan(replace(FLASH, max_tokens=512), 8)
    assert (small.dispatch_sms, small.tiles) == (8, NARROW_TILES)
    assert (large.dispatch_sms, large.tiles) == (32, WIDEST_TILES)
    assert make_plan(replace(FLASH, max_tokens=400), 8).tiles == WIDE_TILES
    assert make_plan(replace(FLASH, max_tokens=640), 8).tiles == WIDE_TILES


@given(configs, ranks, st.sampled_from(["sm90", "sm100"]), st.data())
def test_a_call_runs_with_the_tiles_of_its_own_size(config, num_ranks, family, data):
    """As in an operator of that capacity, in the workspace of the larger one."""
    plan = make_plan(config, num_ranks, family=family)
    num_tokens = data.draw(st.integers(1, config.max_tokens))
    call = plan.for_tokens(num_tokens)
    own = make_plan(replace(config, max_tokens=num_tokens), num_ranks, family=family)
    assert call.tiles == own.tiles
    assert call.workspace.block_rows == own.workspace.block_rows <= plan.workspace.slot_rows
    assert call.workspace.offsets == plan.workspace.offsets
    assert call.workspace.max_blocks <= call.workspace.region("block_table").count
    assert call in plan.classes
    assert plan.for_tokens(config.max_tokens) == plan
    assert plan.for_tokens(0) == plan.classes[0]
    for wrong in (-1, config.max_tokens + 1):
        with pytest.raises(ValueError, match=f"tokens = {wrong}: from 0 to max_tokens"):
            plan.for_tokens(wrong)


def test_the_documented_example_is_the_plan():
    assert make_plan(FLASH, 8).workspace == EXAMPLE


def test_explicit_values_win():
    plan = make_plan(FLASH, 8, dispatch_sms=20, ring_slots=16)
    assert plan.dispatch_sms == 24
    assert plan.workspace.num_slots == 16
    assert plan.workspace.header_words == 24


@pytest.mark.parametrize("dispatch_sms", [0, -8, 132, 200])
def test_the_partition_must_leave_compute(dispatch_sms):
    message = f"dispatch_sms = {dispatch_sms}: positive and, .* below the 132 SMs"
    with pytest.raises(ValueError, match=message):
        make_plan(FLASH, 8, dispatch_sms=dispatch_sms)


@pytest.mark.parametrize("ring_slots", [0, 1, 3, -2, 48, 1 << 24])
def test_ring_slots_is_a_power_of_two_within_bounds(ring_slots):
    with pytest.raises(ValueError, match=f"ring_slots = {ring_slots}: a power of two from 2 to"):
        make_plan(FLASH, 8, ring_slots=ring_slots)


def test_a_row_too_wide_for_two_slots_is_refused():
    with pytest.raises(ValueError, match="hidden = 16777216: two ring slots"):
        make_plan(MoEConfig(256 * 65536, 128, 8, 1, 1))


def test_a_share_of_rows_must_fit_shared_memory():
    limit = MAX_SHARE_ROWS * 32
    make_plan(replace(FLASH, max_tokens=limit // (8 * 8), top_k=8), 8)
    with pytest.raises(ValueError) as error:
        make_plan(replace(FLASH, max_tokens=limit // (8 * 8) + 1, top_k=8), 8)
    for part in (f"= {limit + 64}", f"at most {limit}", "32 dispatch CTAs", "shared memory"):
        assert part in str(error.value)


def test_limits_of_the_configuration_are_checked():
    with pytest.raises(ValueError, match="num_ranks = 73"):
        make_plan(FLASH, 73)


@given(st.integers(0, 1 << 20), st.integers(1, 64))
def test_rounding(value, granule):
    rounded = round_up(value, granule)
    assert rounded % granule == 0
    assert value <= rounded < value + granule
    power = next_power_of_two(value)
    assert power & (power - 1) == 0
    assert value <= power
    assert power == 1 or power < 2 * value


# ---- Blackwell -------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "width"), [(8, 32), (64, 32), (256, 64), (512, 128)])
def test_blackwell_tiles_follow_the_mean_rows_of_an_expert(max_tokens: int, width: int) -> None:
    plan = make_plan(replace(FLASH, max_tokens=max_tokens), 8, 148, family="sm100")
    assert isinstance(plan.tiles, TilePlanSm100)
    assert plan.tiles.max_width == width == plan.workspace.slot_rows == plan.workspace.block_rows
    assert plan.workspace.has_atoms
    assert plan.compute_sms == 148 - plan.dispatch_sms
    assert plan.workspace.num_slots * width * plan.workspace.row_stride <= 256 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": (8, 16, 32)}, "4 ascending widths"),
        ({"widths": (8, 16, 16, 32)}, "4 ascending widths"),
        ({"widths": (8, 12, 16, 32)}, "multiples of 8 up to 128"),
        ({"widths": (32, 64, 96, 136)}, "multiples of 8 up to 128"),
        ({"stages": 1}, "stages = 1: at least 2"),
        ({"accumulators": 3}, "accumulators = 3: 1 or 2"),
    ],
)
def test_blackwell_tiles_check_themselves(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(tiles_sm100.NARROW_TILES, **change)


def test_targets_have_families() -> None:
    assert family_of("sm_90a") == "sm90"
    assert {family_of(arch) for arch in ("sm_100a", "sm_100f", "sm_103a")} == {"sm100"}
    with pytest.raises(ValueError, match="arch = 'sm_120a': one of sm_90a, sm_100a"):
        family_of("sm_120a")
