"""The work order against a plain loop, and what makes it free of deadlock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcmoe.protocol import Word32, WorkOrder
from gcmoe.protocol.order import column_groups

slots = st.integers(1, 5).map(lambda n: 1 << n)
tiles = st.integers(1, 5)
blocks = st.integers(1, 60)
grouped = st.tuples(st.integers(1, 3), st.integers(1, 4))
"""(W2 tiles of a group, groups)."""

W1, W2 = 0, 1


def plain_order(num_slots: int, w1_tiles: int, columns: tuple[int, int], num_blocks: int):
    """All items as (is_w2, block, tile), by nothing but loops."""
    size = num_blocks if num_blocks <= num_slots else num_slots // 2
    segments = [range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]
    per_group, groups = columns
    w1 = [[(W1, b, t) for b in segment for t in range(w1_tiles)] for segment in segments]
    items = list(w1[0])
    for n in range(1, len(segments) - 1):
        items += w1[n] + [(W2, b, t) for b in segments[n - 1] for t in range(per_group * groups)]
    if len(segments) > 1:
        items += w1[-1]
    # Nothing lies between W2 of the last two segments.
    return items + [
        (W2, b, group * per_group + t)
        for group in range(groups)
        for segment in segments[-2:]
        for b in segment
        for t in range(per_group)
    ]


def make(num_slots: int, w1_tiles: int, columns: tuple[int, int]) -> WorkOrder:
    return WorkOrder(num_slots, w1_tiles, columns[0] * columns[1], columns[1])


def item_at(order: WorkOrder, ticket: int, num_blocks: int) -> tuple[int, int, int]:
    item = order.item(Word32(ticket), Word32(num_blocks))
    return int(item.is_w2), int(item.block), int(item.tile)


def all_items(order: WorkOrder, num_blocks: int) -> list[tuple[int, int, int]]:
    total = int(order.num_items(Word32(num_blocks)))
    return [item_at(order, ticket, num_blocks) for ticket in range(total)]


@settings(deadline=None)
@given(slots, tiles, grouped, blocks)
def test_equals_the_plain_loop(num_slots, w1_tiles, columns, num_blocks):
    order = make(num_slots, w1_tiles, columns)
    assert all_items(order, num_blocks) == plain_order(num_slots, w1_tiles, columns, num_blocks)


@pytest.mark.parametrize("columns", [(3, 1), (1, 3), (2, 2)])
def test_equals_the_plain_loop_at_every_small_size(columns):
    for num_slots in (2, 4, 8):
        order = make(num_slots, 2, columns)
        for num_blocks in range(1, 4 * num_slots + 2):
            assert all_items(order, num_blocks) == plain_order(num_slots, 2, columns, num_blocks)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_equals_the_plain_loop_at_production_size(data):
    """I = 2304 and H = 5120; thousands of blocks through a ring of 256, sampled tickets."""
    groups = column_groups(5120)
    order, columns = WorkOrder(256, 18, 20, groups), (20 // groups, groups)
    num_blocks = data.draw(st.integers(250, 6000))
    wanted = plain_order(256, 18, columns, num_blocks)
    tickets = st.lists(st.integers(0, len(wanted) - 1), min_size=50, max_size=50)
    for ticket in data.draw(tickets):
        assert item_at(order, ticket, num_blocks) == wanted[ticket]


@settings(deadline=None)
@given(slots, tiles, grouped, blocks)
def test_each_item_once_and_w1_of_a_block_before_its_w2(num_slots, w1_tiles, columns, num_blocks):
    order = make(num_slots, w1_tiles, columns)
    items, w2_tiles = all_items(order, num_blocks), order.w2_tiles
    every = {(W1, b, t) for b in range(num_blocks) for t in range(w1_tiles)}
    every |= {(W2, b, t) for b in range(num_blocks) for t in range(w2_tiles)}
    assert len(items) == len(every)
    assert set(items) == every
    place = {item: index for index, item in enumerate(items)}
    for block in range(num_blocks):
        last_w1 = max(place[W1, block, t] for t in range(w1_tiles))
        assert last_w1 < min(place[W2, block, t] for t in range(w2_tiles))


@settings(deadline=None)
@given(slots, tiles, grouped, blocks)
def test_live_blocks_fill_the_ring_and_never_exceed_it(num_slots, w1_tiles, columns, num_blocks):
    """A block lives from its first W1 item to its last W2 item. The bound is tight: with one slot
    less the same order would put a block into a slot that is still in use."""
    order, live, most = make(num_slots, w1_tiles, columns), set(), 0
    finished = [0] * num_blocks
    for is_w2, block, _ in all_items(order, num_blocks):
        live.add(block)
        finished[block] += is_w2
        most = max(most, len(live))
        if finished[block] == order.w2_tiles:
            live.remove(block)
    assert not live
    assert most == min(num_slots, num_blocks)


def first_blocked(num_slots: int, items: list[tuple[int, int, int]], w1: int, w2: int):
    """The first item that one CTA could not run in this order, through a ring of ``num_slots``."""
    done_w1: dict[int, int] = {}
    done_w2: dict[int, int] = {}
    for item in items:
        is_w2, block, _ = item
        earlier = block - num_slots
        if earlier >= 0 and done_w2.get(earlier, 0) < w2:
            return item
        if is_w2 and done_w1.get(block, 0) < w1:
            return item
        done = done_w2 if is_w2 else done_w1
        done[block] = done.get(block, 0) + 1
    return None


@settings(deadline=None)
@given(slots, tiles, grouped, blocks)
def test_one_cta_in_ticket_order_never_waits_for_later_work(num_slots, w1, columns, num_blocks):
    """Rows of block b arrive once block b - S has left the slot, W2 needs all W1 of its block."""
    order = make(num_slots, w1, columns)
    items, w2 = all_items(order, num_blocks), order.w2_tiles
    assert first_blocked(num_slots, items, w1, w2) is None
    if num_blocks >= num_slots > 1:
        blocked = first_blocked(num_slots - 1, items, w1, w2)
        assert (blocked is None) == (num_blocks < num_slots)


@settings(deadline=None)
@given(slots, tiles, grouped, blocks)
def test_all_blocks_in_the_ring_means_all_w1_then_all_w2(num_slots, w1, columns, num_blocks):
    kinds = [kind for kind, _, _ in all_items(make(num_slots, w1, columns), num_blocks)]
    in_two_runs = kinds == sorted(kinds)
    assert in_two_runs or num_blocks > num_slots


@settings(deadline=None)
@given(slots, tiles, grouped, blocks)
def test_blocks_ascend_within_w1_and_within_a_group_of_w2(num_slots, w1, columns, num_blocks):
    """Tickets of W1, and of each group of columns, visit blocks in ring order, tiles ascending,
    whatever the lag."""
    items = all_items(make(num_slots, w1, columns), num_blocks)
    mine = [(block, tile) for is_w2, block, tile in items if not is_w2]
    assert mine == sorted(mine)
    for group in range(columns[1]):
        mine = [(b, t) for is_w2, b, t in items if is_w2 and t // columns[0] == group]
        assert mine == sorted(mine)


@settings(deadline=None)
@given(slots, tiles, grouped, blocks)
def test_the_last_group_of_columns_comes_last(num_slots, w1, columns, num_blocks):
    """All blocks in the ring: when the last group begins, no other has an item left."""
    groups = [
        tile // columns[0]
        for is_w2, _, tile in all_items(make(num_slots, w1, columns), num_blocks)
        if is_w2
    ]
    assert groups == sorted(groups) or num_blocks > num_slots


def test_groups_are_of_equally_many_whole_tiles():
    for tiles_of_w2 in range(1, 60):
        groups = column_groups(256 * tiles_of_w2)
        assert tiles_of_w2 % groups == 0
        assert groups == max(n for n in (1, 2, 3, 4) if tiles_of_w2 % n == 0)
    assert [column_groups(hidden) for hidden in (128, 384, 4096, 5120, 7168)] == [1, 1, 4, 4, 4]


def test_groups_that_cut_no_tile():
    with pytest.raises(ValueError, match="groups = 2: must divide the 3 W2 tiles"):
        WorkOrder(4, 1, 3, 2)


@pytest.mark.parametrize("num_slots", [1, 0, -4])
def test_too_few_slots(num_slots):
    with pytest.raises(ValueError, match=f"num_slots = {num_slots}"):
        WorkOrder(num_slots, 1, 1, 1)
