"""MoEConfig: each limit is an error that names the value, the limit and the reason."""

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcmoe.config import MoEConfig

FLASH = MoEConfig(hidden=5120, intermediate=2304, num_experts=384, top_k=6, max_tokens=64)

# (changes, value in the message, bound in the message, reason in the message)
LIMITS = [
    ({"hidden": 5000}, "hidden = 5000", "multiple of 256", "256 output rows"),
    ({"hidden": 0}, "hidden = 0", "positive", "counts"),
    ({"intermediate": 2300}, "intermediate = 2300", "multiple of 128", "128 columns"),
    ({"intermediate": 4224}, "intermediate = 4224", "at most 4096", "64 bits"),
    ({"intermediate": -128}, "intermediate = -128", "positive", "counts"),
    ({"num_experts": 0}, "num_experts = 0", "positive", "counts"),
    ({"num_experts": 2049}, "num_experts = 2049", "at most 2048", "11 expert bits"),
    ({"top_k": 0}, "top_k = 0", "positive", "counts"),
    ({"top_k": 33}, "top_k = 33", "at most 32", "5 slot bits"),
    ({"max_tokens": 0}, "max_tokens = 0", "positive", "counts"),
    ({"max_tokens": 65537}, "max_tokens = 65537", "at most 65536", "16 token bits"),
    (
        {"max_tokens": 65536, "top_k": 16},
        "max_tokens * top_k = 1048576",
        "below 1048576",
        "20 count bits",
    ),
    ({"clamp": 0.0}, "clamp = 0.0", "positive finite", "bounds gate"),
    ({"clamp": float("inf")}, "clamp = inf", "positive finite", "bounds gate"),
    ({"clamp": float("nan")}, "clamp = nan", "positive finite", "bounds gate"),
    ({"spin_budget_s": 0.0}, "spin_budget_s = 0.0", "(0, 60]", "lost"),
    ({"spin_budget_s": 61.0}, "spin_budget_s = 61.0", "(0, 60]", "lost"),
]


def message_of(error: pytest.ExceptionInfo[ValueError]) -> str:
    return str(error.value)


@pytest.mark.parametrize(("changes", "value", "bound", "reason"), LIMITS)
def test_limit_is_named_with_value_and_reason(changes, value, bound, reason):
    with pytest.raises(ValueError) as error:
        replace(FLASH, **changes)
    for part in (value, bound, reason, "because"):
        assert part in message_of(error)


@pytest.mark.parametrize(
    ("config", "num_ranks", "value", "bound", "reason"),
    [
        (FLASH, 0, "num_ranks = 0", "[1, 72]", "by value"),
        (FLASH, 73, "num_ranks = 73", "[1, 72]", "7 rank bits"),
        (FLASH, 7, "num_experts = 384", "multiple of the 7 ranks", "same number"),
    ],
)
def test_rank_limits(config, num_ranks, value, bound, reason):
    with pytest.raises(ValueError) as error:
        config.local_experts(num_ranks)
    for part in (value, bound, reason):
        assert part in message_of(error)


@pytest.mark.parametrize("name", ["hidden", "intermediate", "num_experts", "top_k", "max_tokens"])
@pytest.mark.parametrize("bad", [1.0, "256", True, None])
def test_sizes_are_integers(name, bad):
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        replace(FLASH, **{name: bad})


@given(
    st.integers(1, 64).map(lambda n: 256 * n),
    st.integers(1, 32).map(lambda n: 128 * n),
    st.integers(1, 72),
    st.integers(1, 28),
    st.integers(1, 32),
    st.integers(1, 65536),
)
def test_within_the_limits_all_is_accepted(hidden, intermediate, ranks, local, top_k, max_tokens):
    max_tokens = min(max_tokens, ((1 << 20) - 1) // top_k)
    config = MoEConfig(hidden, intermediate, ranks * local, top_k, max_tokens)
    assert config.local_experts(ranks) == local


def test_frozen_and_hashable():
    with pytest.raises(FrozenInstanceError):
        FLASH.hidden = 256
    assert hash(FLASH) == hash(replace(FLASH))
    assert replace(FLASH, clamp=10.0) != FLASH


def test_an_integer_clamp_is_the_same_layer_as_a_float_one():
    assert replace(FLASH, clamp=10) == replace(FLASH, clamp=10.0)
    assert repr(replace(FLASH, clamp=10).clamp) == "10.0"


@pytest.mark.parametrize("bad", ["10", True])
def test_the_clamp_is_a_number(bad):
    with pytest.raises(TypeError, match="clamp must be None or a number"):
        replace(FLASH, clamp=bad)
