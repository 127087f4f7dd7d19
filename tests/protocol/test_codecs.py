"""Bit layouts: no overlap, round trips on plain integers and on words, room for every limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcmoe import config
from gcmoe.protocol import (
    CODECS,
    NUM_CALLS,
    BlockEntry,
    Entry,
    RecvHeader,
    RoutesHeader,
    RowMeta,
    Word32,
    Word64,
    header_words,
    is_valid,
)

WIDTH = {RecvHeader: 64, Entry: 64, RowMeta: 32, BlockEntry: 32, RoutesHeader: 64}
ARGUMENTS = {
    RecvHeader: ("generation", "call", "count"),
    Entry: ("routing weight, FP32 bits", "token", "slot", "local expert"),
    RowMeta: ("source rank", "token", "slot"),
    BlockEntry: ("local expert", "rows"),
    RoutesHeader: ("generation", "number of blocks"),
}


def test_every_codec_is_tested():
    assert set(CODECS) == set(WIDTH) == set(ARGUMENTS)


@pytest.mark.parametrize("codec", CODECS)
def test_fields_do_not_overlap_and_fit_the_word(codec):
    used = 0
    for field in codec.FIELDS:
        bits = (field.limit - 1) << field.shift
        assert not used & bits, field.name
        used |= bits
    assert used < 1 << WIDTH[codec]


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_round_trip_on_integers_and_words(codec, data):
    fields = {field.name: field for field in codec.FIELDS}
    values = {
        name: data.draw(st.integers(0, field.limit - 1) | st.just(field.limit - 1))
        for name, field in fields.items()
    }
    word_type = Word64 if WIDTH[codec] == 64 else Word32
    plain = codec.pack(*(values[name] for name in ARGUMENTS[codec]))
    word = codec.pack(*(word_type(values[name]) for name in ARGUMENTS[codec]))
    assert int(word) == plain
    for name, field in fields.items():
        assert field.get(plain) == values[name]
        assert field.get(word) == values[name]


def test_fields_hold_every_value_that_the_limits_allow():
    assert RecvHeader.COUNT.limit == config.MAX_ENTRIES
    assert config.MAX_TOKENS <= Entry.TOKEN.limit == RowMeta.TOKEN.limit
    assert config.MAX_TOP_K <= Entry.SLOT.limit == RowMeta.SLOT.limit
    assert config.MAX_EXPERTS <= Entry.EXPERT.limit == BlockEntry.EXPERT.limit
    assert RowMeta.SRC.limit >= config.MAX_RANKS
    assert RecvHeader.GENERATION.bits == RoutesHeader.GENERATION.bits == 32
    assert NUM_CALLS == 4096


@given(st.integers(1, 96), st.integers(1, 96))
def test_header_words_cover_all_words_of_a_source_once(grid, header_words_per_source):
    """Any grid D <= Q: the shares of its CTAs are disjoint and cover the Q words, none is empty."""
    grid = min(grid, header_words_per_source)
    shares = [header_words(cta, grid, header_words_per_source) for cta in range(grid)]
    assert sorted(word for share in shares for word in share) == list(
        range(header_words_per_source)
    )
    assert all(len(share) > 0 for share in shares)


@given(st.integers(-3, 40), st.integers(1, 32))
def test_valid_ids(expert, num_experts):
    assert is_valid(expert, num_experts) == (expert in range(num_experts))
