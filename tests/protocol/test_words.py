"""Wrapping words: arithmetic modulo 2^BITS, no mixing of widths."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcmoe.protocol import Word, Word32, Word64

WIDTHS = (Word32, Word64)
widths = st.sampled_from(WIDTHS)
values = st.one_of(
    st.integers(0, 1 << 70),
    st.integers((1 << 32) - 3, (1 << 32) + 3),
    st.integers((1 << 64) - 3, (1 << 64) + 3),
)
BINARY = (operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor)


@given(widths, values, values, st.sampled_from(BINARY))
def test_arithmetic_is_modular_on_either_side(width, a, b, function):
    wanted = function(a, b) % (1 << width.BITS)
    results = [function(width(a), width(b)), function(width(a), b), function(a, width(b))]
    assert all(type(result) is width for result in results)
    assert [int(result) for result in results] == [wanted] * 3


@given(widths, values, st.integers(0, 31))
def test_shifts_drop_what_leaves_the_word(width, a, shift):
    limit = 1 << width.BITS
    assert int(width(a) << shift) == (a << shift) % limit
    assert int(width(a) >> shift) == (a % limit) >> shift
    assert width(a) >> width(shift) == width(a) >> shift


@given(widths, values, st.integers(1, 1 << 32 - 1))
def test_division_floors(width, a, b):
    assert int(width(a) // b) == (a % (1 << width.BITS)) // b


@given(widths, values)
def test_equal_words_hash_alike_and_index(width, a):
    assert width(a) == width(a + (1 << width.BITS))
    assert hash(width(a)) == hash(width(a + (1 << width.BITS)))
    assert [10, 20, 30][width(1)] == 20
    assert width(width(a)) == a


@given(widths, values, values)
def test_comparisons_are_unsigned(width, a, b):
    a, b = a % (1 << width.BITS), b % (1 << width.BITS)
    for function in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq):
        assert function(width(a), width(b)) == function(a, b)


@pytest.mark.parametrize("function", [*BINARY, operator.lt, operator.eq, operator.lshift])
def test_widths_do_not_mix(function):
    with pytest.raises(TypeError, match="mixed word widths"):
        function(Word32(1), Word64(1))


@pytest.mark.parametrize("bad", [1.0, True, "1", None])
def test_only_integers_are_words(bad):
    with pytest.raises(TypeError):
        Word32(1) + bad


def test_repr_names_the_width():
    assert repr(Word32(255)) == "Word32(0xff)"
    assert issubclass(Word64, Word)
