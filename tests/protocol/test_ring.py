"""Ring, bitmap and arrival arithmetic over histories that cross 2^32."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gcmoe.protocol import Arrivals, TokenRing, W1Bitmap, Word32, Word64, is_less, is_reached
from gcmoe.protocol.ring import smaller

WRAP = 1 << 32
near_wrap = st.one_of(st.integers(-40, 40), st.integers(0, WRAP - 1)).map(lambda n: n % WRAP)
rings = st.builds(
    TokenRing,
    num_slots=st.integers(1, 5).map(lambda n: 1 << n),
    slot_rows=st.sampled_from([8, 16, 24, 32, 48, 64]),
    hidden=st.integers(1, 24).map(lambda n: 64 * n),
)


class Slots:
    """Cells of a ring whose slots have all been used ``epoch`` times."""

    def __init__(self, ring: TokenRing, epoch: int) -> None:
        self.full = [Word32(epoch * ring.slot_rows) for _ in range(ring.num_slots)]
        self.empty = [Word32(epoch * ring.empty_units) for _ in range(ring.num_slots)]


@settings(max_examples=60, deadline=None)
@given(rings, near_wrap, st.lists(st.integers(0, 40), max_size=4), st.randoms())
def test_counters_reach_their_targets_exactly_when_a_block_is_done(ring, epoch, replays, rng):
    """Every block of every replay, in ring order, one slot use after the other."""
    cells, epoch_base, slot_base = Slots(ring, epoch), Word32(epoch), Word32(0)
    uses = [0] * ring.num_slots
    for num_blocks in replays:
        for block in range(num_blocks):
            place = ring.place(slot_base, Word32(block))
            slot, e = int(ring.slot(place)), ring.epoch(epoch_base, place)
            assert e == epoch + uses[slot]
            assert is_reached(cells.empty[slot], ring.empty_target(e))
            assert not is_reached(cells.empty[slot], ring.empty_target(e + 1))
            fill_and_drain(ring, cells, slot, e, rng)
            uses[slot] += 1
        n = Word32(num_blocks)
        epoch_base, slot_base = (
            ring.next_epoch_base(epoch_base, slot_base, n),
            ring.next_slot_base(slot_base, n),
        )
        assert 0 <= int(slot_base) < ring.num_slots


def fill_and_drain(ring, cells, slot, epoch, rng: random.Random) -> None:
    rows = rng.randint(1, ring.slot_rows)
    target = ring.full_target(epoch)
    for row in rng.sample(range(rows), rows):
        assert not is_reached(cells.full[slot], target)
        cells.full[slot] += ring.full_increment(Word32(row), Word32(rows))
    assert is_reached(cells.full[slot], target)
    assert cells.full[slot] == target
    left = ring.empty_units
    while left:
        assert not is_reached(cells.empty[slot], ring.empty_target(epoch + 1))
        part = rng.choice([n for n in (1, 2, 4) if n <= left])
        cells.empty[slot] += part
        left -= part
    assert is_reached(cells.empty[slot], ring.empty_target(epoch + 1))


@given(rings, near_wrap, st.integers(0, 200), st.integers(0, 200))
def test_bases_of_two_replays_are_those_of_one_long_replay(ring, epoch, first, second):
    a, b = Word32(first), Word32(second)
    base = (Word32(epoch), Word32(0))
    middle = (ring.next_epoch_base(*base, a), ring.next_slot_base(base[1], a))
    two = (ring.next_epoch_base(*middle, b), ring.next_slot_base(middle[1], b))
    assert two == (ring.next_epoch_base(*base, a + b), ring.next_slot_base(base[1], a + b))


@given(st.integers(1, 32), near_wrap, st.randoms())
def test_bitmap_completes_once_per_epoch(windows, epoch, rng):
    bitmap = W1Bitmap(128 * windows)
    word = Word64(bitmap.mask if epoch & 1 else 0)
    assert bitmap.num_windows == windows
    assert bitmap.mask.bit_count() == 2 * windows
    for e in (Word32(epoch), Word32(epoch + 1), Word32(epoch + 2)):
        odd = Word64(int(e & 1))
        done = set()
        for window in rng.sample(range(windows), windows):
            for other in range(windows):
                bits = bitmap.window_bits(Word64(1), other)
                assert bitmap.is_complete(word, bits, odd) == (other in done)
            assert not bitmap.is_complete(word, Word64(bitmap.mask), odd)
            word ^= bitmap.window_bits(Word64(1), window)
            done.add(window)
        assert bitmap.is_complete(word, Word64(bitmap.mask), odd)
        assert word == (0 if int(odd) else bitmap.mask)


def test_windows_partition_the_mask():
    for intermediate in range(128, 4097, 128):
        bitmap = W1Bitmap(intermediate)
        union = 0
        for window in range(bitmap.num_windows):
            bits = int(bitmap.window_bits(Word64(1), window))
            assert not union & bits
            union |= bits
        assert union == bitmap.mask


@given(
    st.integers(1, 28).map(lambda n: 256 * n),
    st.integers(1, 4),
    near_wrap,
    st.lists(st.integers(1, 64), max_size=12),
    st.sampled_from([64, 128, 256]),
)
def test_arrivals_reach_the_target_with_the_last_tile_only(columns, groups, base, blocks, tile):
    arrivals = Arrivals(columns * groups, groups)
    assert arrivals.columns == columns
    seen, target = Word32(base), arrivals.target(Word32(base), Word32(sum(blocks)))
    for rows in blocks:
        for _ in range(columns // tile):
            assert not is_reached(seen, target)
            seen += arrivals.increment(Word32(rows), tile)
    assert is_reached(seen, target)
    assert seen == target


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_tiles_of_a_group_lie_in_its_columns(groups, tile):
    arrivals = Arrivals(512 * groups, groups)
    for n in range(arrivals.hidden // tile):
        group = int(arrivals.group(Word32(n), tile))
        assert group * arrivals.columns <= n * tile
        assert (n + 1) * tile <= (group + 1) * arrivals.columns


@given(near_wrap, st.integers(0, (1 << 31) - 1))
def test_is_reached_for_any_distance_below_2_31(target, distance):
    assert is_reached(Word32(target + distance), Word32(target))
    assert is_reached(Word32(target), Word32(target + distance)) == (distance == 0)


@given(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 31) - 1))
def test_less_and_smaller(a, b):
    assert is_less(Word32(a), Word32(b)) == int(a < b)
    assert smaller(Word32(a), Word32(b)) == min(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 32, 256), "num_slots = 0"),
        ((6, 32, 256), "num_slots = 6: must be a power of two"),
        ((4, 0, 256), "slot_rows = 0"),
        ((4, 32, 100), "hidden = 100: must be a multiple of 64"),
    ],
)
def test_ring_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenRing(*arguments)


@pytest.mark.parametrize("intermediate", [0, -128, 64, 200, 4224])
def test_bitmap_errors(intermediate):
    with pytest.raises(ValueError, match=f"intermediate = {intermediate}"):
        W1Bitmap(intermediate)
