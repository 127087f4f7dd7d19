"""Cases, variants, presets, statistics and estimates."""

import statistics
from dataclasses import replace

import pytest
import torch
from on_cpu import OracleImpl

from bench import dry_run, stats
from bench.bank import count_sets
from bench.cases import MODELS, PRESETS, TOKENS, VARIANTS, Case, make_cases
from bench.checks import sampled_tokens
from bench.data import measure_load
from bench.impls import IMPLS
from bench.runner import Options
from gcmoe.plan import make_plan

FLOORS = {
    "deepseek-v4-flash": (18, 33, 55, 79, 94, 97, 97),
    "deepseek-v4.1-flash": (26, 48, 85, 135, 181, 202, 205),
    "glm-5.2": (37, 64, 100, 131, 144, 146, 146),
    "deepseek-v4-pro": (48, 90, 158, 251, 338, 378, 383),
}
"""Microseconds at 1, 2, 4, ... 64 tokens with distinct random routing, at 4.40 TB/s."""


@pytest.mark.parametrize("model", MODELS)
def test_floors_are_the_known_ones(model):
    for n, wanted in enumerate(FLOORS[model]):
        case = Case(model, 2**n)
        assert case.floor_us(case.expected_touched) == pytest.approx(wanted, abs=0.6)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_rows_per_expert_do_not_depend_on_the_ranks(ranks):
    case = Case("glm-5.2", 16, ranks)
    config = case.config()
    assert config.num_experts == ranks * 32
    assert 16 * ranks * config.top_k / config.num_experts == 16 * 8 / 32


def test_expected_touched_is_what_random_routing_gives():
    case = Case("deepseek-v4-flash", 4)
    generator = torch.Generator().manual_seed(0)
    found = [
        len(torch.rand((4, 32), generator=generator).topk(6, dim=1).indices.unique())
        for _ in range(2000)
    ]
    assert statistics.mean(found) == pytest.approx(case.expected_touched, rel=0.01)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_plan_or_say_why_not(name):
    impl = IMPLS["gcmoe"]
    for tokens in TOKENS:
        case = Case("deepseek-v4-flash", tokens)
        assert impl.unfit(case, name) == ""
        plan = make_plan(VARIANTS[name].config(case))
        assert plan.config.max_tokens >= tokens
    far = impl.unfit(Case("deepseek-v4-flash", 4096), name)
    assert ("max_tokens" in far) == (name == "capacity-64x")


def test_presets_name_what_exists():
    for preset in PRESETS.values():
        assert set(preset.impls) <= IMPLS.keys()
        assert set(preset.variants) <= VARIANTS.keys()
        assert make_cases(preset.models, preset.tokens, 1)


@pytest.mark.parametrize("tokens", [0, 4097])
def test_tokens_have_bounds(tokens):
    with pytest.raises(ValueError, match=f"tokens = {tokens}"):
        make_cases(MODELS, (tokens,), 1)
    with pytest.raises(ValueError, match="gpt-2"):
        make_cases(("gpt-2",), (1,), 1)


def test_statistics():
    samples = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0, 9.0, 8.0, 7.0, 10.0, 11.0]
    assert stats.summarize(samples) == stats.Summary(6.0, 2.0, 10.0)
    assert stats.slowest([[1, 5, 2], [3, 4, 2]]) == [3, 5, 2]
    with pytest.raises(ValueError, match="shorter"):
        stats.slowest([[1, 2], [1]])
    assert stats.layer_times([110, 130], [10, 10, 90], 10) == [10, 12]
    with pytest.raises(ValueError, match="no samples"):
        stats.percentile([], 50)


def test_load_counts_rows_and_experts_of_a_rank():
    case = replace(Case("deepseek-v4-flash", 2, 2))
    first, second = torch.tensor([[0, 31], [32, 63]]), torch.tensor([[32, 33], [32, 1]])
    load = measure_load(case, [[first], [second]], 1)
    assert load.rows == [5]
    assert load.touched == [3]


def test_checked_tokens_lie_in_the_batch():
    for tokens in (1, 3, 64, 256):
        for layer in range(20):
            found = sampled_tokens(layer, tokens)
            assert found == sorted(set(found))
            assert 0 <= found[0] <= found[-1] < tokens
        assert len(sampled_tokens(0, tokens)) == min(tokens, 64)
    assert len({tuple(sampled_tokens(n, 256)) for n in range(20)}) == 20


def test_weight_sets_fit_or_are_refused():
    assert count_sets(20, 100.0, 1.0) == 20
    assert count_sets(20, 10.0, 1.0) == 8
    with pytest.raises(MemoryError, match="do not fit"):
        count_sets(20, 4.0, 1.0)


def test_estimates_grow_with_the_work():
    usable = [OracleImpl()]
    small = make_cases(MODELS[:1], (1,), 1)
    large = make_cases(MODELS[:1], TOKENS, 1)
    options = Options()
    assert dry_run.estimate_seconds(small, usable, options) < dry_run.estimate_seconds(
        large, usable, options
    )
    assert dry_run.session_seconds(small[0], Options(sustained_s=2)) == pytest.approx(
        dry_run.session_seconds(small[0], options) + 2
    )
    assert make_cases(MODELS[:1], (9,), 1)[0].config().max_tokens == 16
