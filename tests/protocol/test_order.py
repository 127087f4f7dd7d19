"""The work order against a plain loop, and what makes it free of deadlock."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcmoe.protocol import Word32, WorkOrder

slots = st.integers(1, 5).map(lambda n: 1 << n)
tiles = st.integers(1, 5)
blocks = st.integers(1, 60)

W1, W2 = 0, 1


def plain_order(num_slots: int, w1_tiles: int, w2_tiles: int, num_blocks: int):
    """All items as (is_w2, block, tile), by nothing but loops."""
    size = num_blocks if num_blocks <= num_slots else num_slots // 2
    segments = [range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]
    items = [(W1, b, t) for b in segments[0] for t in range(w1_tiles)]
    for before, segment in pairwise(segments):
        items += [(W1, b, t) for b in segment for t in range(w1_tiles)]
        items += [(W2, b, t) for b in before for t in range(w2_tiles)]
    return items + [(W2, b, t) for b in segments[-1] for t in range(w2_tiles)]


def item_at(order: WorkOrder, ticket: int, num_blocks: int) -> tuple[int, int, int]:
    item = order.item(Word32(ticket), Word32(num_blocks))
    return int(item.is_w2), int(item.block), int(item.tile)


def all_items(order: WorkOrder, num_blocks: int) -> list[tuple[int, int, int]]:
    total = int(order.num_items(Word32(num_blocks)))
    return [item_at(order, ticket, num_blocks) for ticket in range(total)]


@settings(deadline=None)
@given(slots, tiles, tiles, blocks)
def test_equals_the_plain_loop(num_slots, w1_tiles, w2_tiles, num_blocks):
    order = WorkOrder(num_slots, w1_tiles, w2_tiles)
    assert all_items(order, num_blocks) == plain_order(num_slots, w1_tiles, w2_tiles, num_blocks)


def test_equals_the_plain_loop_at_every_small_size():
    for num_slots in (2, 4, 8):
        order = WorkOrder(num_slots, 2, 3)
        for num_blocks in range(1, 4 * num_slots + 2):
            assert all_items(order, num_blocks) == plain_order(num_slots, 2, 3, num_blocks)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_equals_the_plain_loop_at_production_size(data):
    """I = 2304 and H = 5120; thousands of blocks through a ring of 256, sampled tickets."""
    order = WorkOrder(256, 18, 20)
    num_blocks = data.draw(st.integers(250, 6000))
    wanted = plain_order(256, 18, 20, num_blocks)
    tickets = st.lists(st.integers(0, len(wanted) - 1), min_size=50, max_size=50)
    for ticket in data.draw(tickets):
        assert item_at(order, ticket, num_blocks) == wanted[ticket]


@settings(deadline=None)
@given(slots, tiles, tiles, blocks)
def test_each_item_once_and_w1_of_a_block_before_its_w2(num_slots, w1_tiles, w2_tiles, num_blocks):
    items = all_items(WorkOrder(num_slots, w1_tiles, w2_tiles), num_blocks)
    every = {(W1, b, t) for b in range(num_blocks) for t in range(w1_tiles)}
    every |= {(W2, b, t) for b in range(num_blocks) for t in range(w2_tiles)}
    assert len(items) == len(every)
    assert set(items) == every
    place = {item: index for index, item in enumerate(items)}
    for block in range(num_blocks):
        last_w1 = max(place[W1, block, t] for t in range(w1_tiles))
        assert last_w1 < min(place[W2, block, t] for t in range(w2_tiles))


@settings(deadline=None)
@given(slots, tiles, tiles, blocks)
def test_live_blocks_fill_the_ring_and_never_exceed_it(num_slots, w1_tiles, w2_tiles, num_blocks):
    """A block lives from its first W1 item to its last W2 item. The bound is tight: with one slot
    less the same order would put a block into a slot that is still in use."""
    order, live, most = WorkOrder(num_slots, w1_tiles, w2_tiles), set(), 0
    finished = [0] * num_blocks
    for is_w2, block, _ in all_items(order, num_blocks):
        live.add(block)
        finished[block] += is_w2
        most = max(most, len(live))
        if finished[block] == w2_tiles:
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
@given(slots, tiles, tiles, blocks)
def test_one_cta_in_ticket_order_never_waits_for_later_work(num_slots, w1, w2, num_blocks):
    """Rows of block b arrive once block b - S has left the slot, W2 needs all W1 of its block."""
    items = all_items(WorkOrder(num_slots, w1, w2), num_blocks)
    assert first_blocked(num_slots, items, w1, w2) is None
    if num_blocks >= num_slots > 1:
        blocked = first_blocked(num_slots - 1, items, w1, w2)
        assert (blocked is None) == (num_blocks < num_slots)


@settings(deadline=None)
@given(slots, tiles, tiles, blocks)
def test_all_blocks_in_the_ring_means_all_w1_then_all_w2(num_slots, w1, w2, num_blocks):
    kinds = [kind for kind, _, _ in all_items(WorkOrder(num_slots, w1, w2), num_blocks)]
    in_two_runs = kinds == sorted(kinds)
    assert in_two_runs or num_blocks > num_slots


@settings(deadline=None)
@given(slots, tiles, tiles, blocks)
def test_blocks_ascend_within_w1_and_within_w2(num_slots, w1, w2, num_blocks):
    """Tickets of one kind visit blocks in ring order, tiles ascending, whatever the lag."""
    items = all_items(WorkOrder(num_slots, w1, w2), num_blocks)
    for kind in (W1, W2):
        mine = [(block, tile) for is_w2, block, tile in items if is_w2 == kind]
        assert mine == sorted(mine)


@pytest.mark.parametrize("num_slots", [1, 0, -4])
def test_too_few_slots(num_slots):
    with pytest.raises(ValueError, match=f"num_slots = {num_slots}"):
        WorkOrder(num_slots, 1, 1)
