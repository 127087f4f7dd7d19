"""The region list: disjoint, aligned, complete; the worst case of blocks; the fresh state."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcmoe.protocol import (
    BASES_WORDS,
    EDGES,
    FIRST_GENERATION,
    LONE_OPERATIONS,
    Cell,
    Word32,
    Word64,
    WorkspaceShape,
    atom_word,
    fragment_position,
    is_reached,
    ring_row,
    tile_width,
)
from gcmoe.protocol.document import CELL_REGIONS, EXAMPLE
from gcmoe.protocol.workspace import LINE


@st.composite
def shapes(draw) -> WorkspaceShape:
    slot_rows = draw(st.sampled_from([8, 16, 32, 48, 64]))
    block_rows = draw(st.integers(1, slot_rows))
    return WorkspaceShape(
        hidden=256 * draw(st.integers(1, 28)),
        intermediate=128 * draw(st.integers(1, 32)),
        top_k=draw(st.integers(1, 32)),
        max_tokens=draw(st.integers(1, 512)),
        num_ranks=draw(st.integers(1, 72)),
        local_experts=draw(st.integers(1, 300)),
        num_slots=1 << draw(st.integers(1, 9)),
        slot_rows=slot_rows,
        block_rows=block_rows,
        header_words=draw(st.integers(1, 64)),
        least_block_rows=draw(st.none() | st.integers(1, block_rows)),
    )


@given(shapes())
def test_regions_are_disjoint_aligned_and_ascending(shape):
    end = 0
    for region in shape.regions:
        assert region.offset % LINE == 0
        assert region.offset >= end, region.name
        assert region.num_bytes > 0
        end = region.offset + region.num_bytes
    assert end <= shape.num_bytes < end + LINE
    assert len(shape.offsets) == len(shape.regions)


@given(shapes())
def test_cells_lie_before_all_data(shape):
    """Zeroing one prefix clears every cell."""
    kinds = [region.is_cell for region in shape.regions]
    assert kinds == sorted(kinds, reverse=True)


@given(shapes())
def test_sizes_follow_the_symbolic_shapes(shape):
    names = {
        "R": shape.num_ranks,
        "Q": shape.header_words,
        "S": shape.num_slots,
        "U": shape.slot_rows,
        "H": shape.hidden,
        "I": shape.intermediate,
        "EL": shape.local_experts,
        "k": shape.top_k,
        "cap": shape.entry_capacity,
        "max_tokens": shape.max_tokens,
        "table_blocks": shape.table_blocks,
        "row_stride": shape.row_stride,
        "groups": shape.arrivals.groups,
    }
    widths = {"u8": 1, "bf16": 2, "u32": 4, "f32": 4, "u64": 8}
    for region in shape.regions:
        *dimensions, dtype = region.shape.replace("][", "] [").split(" ")
        # "[EL + 1] u64" holds blanks inside brackets
        text = " ".join(dimensions).replace("] [", "]*[").replace("[", "(").replace("]", ")")
        expected = eval(text.replace("/", "//") or "1", {}, names) * widths[dtype]
        assert region.num_bytes == expected, region.name


@given(shapes())
def test_every_cell_and_payload_has_a_region(shape):
    regions = {region.name: region for region in shape.regions}
    for cell in Cell:
        assert regions[CELL_REGIONS[cell]].is_cell
    for edge in EDGES:
        region = regions[CELL_REGIONS[edge.cell]]
        width = 8 if edge.write.dtype == "b64" else 4
        assert region.item_bytes == width
        assert region.is_remote == edge.crosses_ranks, edge.name
        for payload in edge.payload:
            assert not regions[payload.region].is_cell
            if edge.crosses_ranks:
                assert regions[payload.region].is_remote
    for operation in LONE_OPERATIONS:
        width = 8 if operation.operation.dtype == "b64" else 4
        assert regions[CELL_REGIONS[operation.cell]].item_bytes == width


def test_all_data_is_covered_by_a_flag(example):
    covered = {payload.region for edge in EDGES for payload in edge.payload}
    assert covered == {region.name for region in example.regions if not region.is_cell}


@given(shapes(), st.data())
def test_no_routing_makes_more_blocks_than_the_table_holds(shape, data):
    """Entries of one replay spread over experts by few weights, so that extremes occur."""
    entries = shape.num_ranks * shape.entry_capacity
    counts = [0] * shape.local_experts
    left = entries
    for expert in range(shape.local_experts):
        counts[expert] = data.draw(st.sampled_from([0, 1, 1, shape.block_rows + 1]))
        counts[expert] = min(counts[expert], left)
        left -= counts[expert]
    counts[0] += left
    blocks = sum(-(-n // shape.block_rows) for n in counts)
    assert blocks <= shape.max_blocks
    region = shape.region("block_table")
    assert region.count == shape.table_blocks >= shape.max_blocks


def test_fresh_state_is_zero_but_for_the_generation(example):
    regions = {region.name: region for region in example.regions}
    state = example.initial_cells()
    assert FIRST_GENERATION == 1
    for name, values in state.items():
        assert regions[name].is_cell
        assert len(values) == regions[name].count
        wanted = [0] * len(values)
        if name == "bases":
            wanted[BASES_WORDS.index("generation")] = FIRST_GENERATION
        assert values == wanted


@given(shapes(), st.integers(-5, 5).map(lambda n: n % (1 << 32)), st.integers(0, (1 << 32) - 1))
def test_a_continued_history_meets_the_targets_of_its_epoch(shape, epoch, arrivals):
    state = shape.initial_cells(7, epoch, arrivals)
    e, ring = Word32(epoch), shape.ring
    full, empty = Word32(state["token_ring_full"][0]), Word32(state["token_ring_empty"][0])
    assert is_reached(empty, ring.empty_target(e))
    assert not is_reached(empty, ring.empty_target(e + 1))
    assert not is_reached(full, ring.full_target(e))
    assert is_reached(full + shape.slot_rows, ring.full_target(e))
    bitmap, odd = Word64(state["w1_bitmap"][0]), Word64(epoch & 1)
    one = Word64(1)
    assert not shape.bitmap.is_complete(bitmap, shape.bitmap.window_bits(one, 0), odd)
    assert shape.bitmap.is_complete(bitmap ^ shape.bitmap.mask, Word64(shape.bitmap.mask), odd)
    base = Word32(state["bases"][BASES_WORDS.index("arrivals_base")])
    assert len(state["combine_arrivals"]) == shape.arrivals.groups
    for seen in state["combine_arrivals"]:
        assert Word32(seen) == shape.arrivals.target(base, Word32(0))


@given(st.sets(st.integers(1, 16), min_size=1).map(lambda ns: sorted(8 * n for n in ns)), st.data())
def test_tile_width_is_the_narrowest_that_holds_the_rows(widths, data):
    rows = data.draw(st.integers(1, widths[-1]))
    assert int(tile_width(widths, Word32(rows))) == min(w for w in widths if w >= rows)


@given(st.integers(1, 128), st.data())
def test_rows_of_a_block_end_with_the_slot_in_their_order(block_rows, data):
    rows = data.draw(st.integers(1, block_rows))
    places = [int(ring_row(Word32(row), Word32(rows), block_rows)) for row in range(rows)]
    assert places == list(range(block_rows))[-rows:]


@given(st.integers(1, 16).map(lambda n: 8 * n))
def test_fragment_order_is_a_permutation_in_accumulator_order(slot_rows):
    places = [fragment_position(row, slot_rows) for row in range(slot_rows)]
    assert sorted(places) == list(range(slot_rows))
    wanted = [8 * j + 2 * t + c for t in range(4) for j in range(slot_rows // 8) for c in range(2)]
    assert [places.index(n) for n in range(slot_rows)] == wanted


def test_region_by_name(example):
    assert example.region("combine").is_remote
    with pytest.raises(KeyError):
        example.region("nothing")


@pytest.mark.parametrize("block_rows", [0, -8, 33, 64])
def test_block_rows_fit_a_slot(example, block_rows):
    with pytest.raises(ValueError, match=f"block_rows = {block_rows}"):
        WorkspaceShape(**{**vars_of(example), "slot_rows": 32, "block_rows": block_rows})


def vars_of(shape: WorkspaceShape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in WorkspaceShape.__dataclass_fields__}


@pytest.fixture
def example() -> WorkspaceShape:
    return WorkspaceShape(1024, 512, 4, 16, 2, 8, 16, 32, 32, 16)


# ---- one scale per 32 columns --------------------------------------------------------------


def atoms_of(shape: WorkspaceShape) -> WorkspaceShape:
    return replace(shape, scale_columns=32)


def test_atoms_keep_all_cells_in_their_place() -> None:
    """Only data regions depend on the form of activation scales."""
    shape, other = EXAMPLE, atoms_of(EXAMPLE)
    for a, b in zip(shape.regions, other.regions, strict=True):
        assert (a.name, a.is_cell, a.is_remote) == (b.name, b.is_cell, b.is_remote)
        if a.is_cell:
            assert a == b
    assert not shape.has_atoms
    assert other.has_atoms


def test_scale_regions_hold_an_atom_per_slot_and_window() -> None:
    shape = atoms_of(EXAMPLE)
    windows, a_windows = shape.hidden // 128, shape.intermediate // 128
    assert shape.region("ring_scale").num_bytes == shape.num_slots * windows * 512
    assert shape.region("a_scale").num_bytes == shape.num_slots * a_windows * 512
    assert shape.row_stride >= shape.hidden + shape.hidden // 32
    assert shape.row_stride % 128 == 0
    for region in shape.regions:
        assert region.offset % 128 == 0
    places = [atom_word(row) for row in range(128)]
    assert sorted(places) == list(range(128))


def test_forms_of_scales_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="scale_columns = 64: 128 or 32"):
        replace(EXAMPLE, scale_columns=64)
    with pytest.raises(ValueError, match="slot_rows = 136: at most 128, the rows of a scale atom"):
        replace(EXAMPLE, slot_rows=136, scale_columns=32)
