"""The oracle, stage by stage, against direct fp64 arithmetic; its promises about bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.numerics import (
    ExpertWeights,
    ReferenceTrace,
    compare,
    decode_e4m3,
    decode_ue8m0,
    dequantize_e4m3,
    dequantize_mxfp4,
    finalize,
    moe_reference,
    moe_unquantized,
    pack,
    quantize_e4m3,
    quantize_input,
    quantize_mxfp4,
    rebase_to_window,
    requantize,
    swiglu,
    unpack,
    w1_swiglu,
    w2,
)

few = settings(max_examples=15, deadline=None, derandomize=True)
E, H, INTER, K = 4, 256, 128, 3
CONFIG = MoEConfig(hidden=H, intermediate=INTER, num_experts=E, top_k=K, max_tokens=64)
RECIPES = ("sm90", "sm100")


def gaussian_weights(cfg: MoEConfig, seed: int = 0) -> ExpertWeights:
    g = torch.Generator().manual_seed(seed)
    h, i, e = cfg.hidden, cfg.intermediate, cfg.num_experts
    w13 = torch.randn(e, 2 * i, h, generator=g) / math.sqrt(h)
    down = torch.randn(e, h, i, generator=g) / math.sqrt(i)
    return ExpertWeights(*quantize_mxfp4(w13), *quantize_mxfp4(down))


WEIGHTS = gaussian_weights(CONFIG)


def inputs(
    num_tokens: int, seed: int = 0, cfg: MoEConfig = CONFIG
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, cfg.hidden, generator=g).bfloat16()
    ids = torch.randint(-1, cfg.num_experts, (num_tokens, cfg.top_k), generator=g)
    weights = torch.rand(num_tokens, cfg.top_k, generator=g) * 2 - 0.5
    return x, ids, weights


def tokens_of(t: ReferenceTrace, pick: Tensor) -> list[Tensor]:
    """All stages of the picked tokens as bytes: NaNs compare too."""
    stages = (t.xq_codes, t.xq_exponents, t.a, t.a_codes, t.a_exponents, t.combine, t.y)
    return [s[pick].contiguous().view(torch.uint8) for s in stages]


def same_bits(a: ReferenceTrace, pick_a: Tensor, b: ReferenceTrace, pick_b: Tensor) -> bool:
    pairs = zip(tokens_of(a, pick_a), tokens_of(b, pick_b), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


# ---- stages -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_w1_is_the_exact_product(recipe: str) -> None:
    x, _, _ = inputs(7)
    codes, exponents = quantize_input(x, recipe)
    assert exponents.shape == (7, H // (128 if recipe == "sm90" else 32))
    w13, scale = WEIGHTS.w13[1], WEIGHTS.w13_scale[1]
    weight = torch.linspace(-1, 2, 7)
    a = w1_swiglu(codes, exponents, w13, scale, weight, None, recipe)
    # These scales are close together, so a plain fp64 product is exact as well.
    dense = dequantize_mxfp4(w13, scale).double()
    product = (dequantize_e4m3(codes, exponents).double() @ dense.T).float()
    gate, up = product[:, :INTER], product[:, INTER:]
    assert torch.equal(a, swiglu(gate, up, weight))
    expected = torch.nn.functional.silu(gate) * up * weight[:, None]
    torch.testing.assert_close(a, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("recipe", RECIPES)
def test_w2_is_the_exact_product(recipe: str) -> None:
    g = torch.Generator().manual_seed(5)
    codes, exponents = requantize(torch.randn(4, INTER, generator=g), recipe)
    out = w2(codes, exponents, WEIGHTS.w2[2], WEIGHTS.w2_scale[2], recipe)
    dense = dequantize_mxfp4(WEIGHTS.w2[2], WEIGHTS.w2_scale[2]).double()
    product = dequantize_e4m3(codes, exponents).double() @ dense.T
    assert torch.equal(out, product.float().bfloat16())


def test_clamp_passes_nan() -> None:
    nan, inf = math.nan, math.inf
    gate = torch.tensor([[-20.0, 3.0, 7.0, nan, inf, 1.0]])
    up = torch.tensor([[-9.0, 9.0, 2.0, 1.0, -inf, nan]])
    out = swiglu(gate, up, torch.ones(1), 5.0)[0]

    def silu(v: float) -> float:
        return v / (1 + math.exp(-v))

    expected = [-5 * silu(-20), 5 * silu(3), 2 * silu(5), nan, -5 * silu(5), nan]
    torch.testing.assert_close(out, torch.tensor(expected), equal_nan=True)
    wide = swiglu(gate, up, torch.ones(1))[0]
    assert float(wide[0]) == pytest.approx(-9 * silu(-20))


def test_clamp_reaches_the_layer() -> None:
    x, ids, weights = inputs(5)
    tight = MoEConfig(H, INTER, E, K, 64, clamp=0.25)
    plain, clamped = (moe_reference(x, ids, weights, WEIGHTS, c) for c in (CONFIG, tight))
    bound = weights.abs()[..., None] * 0.25 * 0.25
    assert (clamped.a.abs() <= torch.maximum(bound, weights.abs()[..., None] * 0.28 * 0.25)).all()
    assert not torch.equal(plain.y, clamped.y)


@pytest.mark.parametrize("recipe", RECIPES)
def test_requantize_is_the_rule_of_the_input(recipe: str) -> None:
    a = torch.randn(3, INTER, generator=torch.Generator().manual_seed(9))
    a[1] = 0
    codes, exponents = requantize(a, recipe)
    expected = quantize_e4m3(a, 128 if recipe == "sm90" else 32)
    assert torch.equal(codes, expected[0])
    assert torch.equal(exponents, expected[1])
    assert (exponents[1] == 1).all()


def test_finalize_order_and_rounding() -> None:
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-8]]).bfloat16()[None]
    valid = torch.ones(1, 3, dtype=torch.bool)
    assert float(finalize(rows, valid)) == 1 + 2.0**-7  # BF16 between the slots would give 1
    big = torch.tensor([[2.0**25], [1.0], [-(2.0**25)]]).bfloat16()[None]
    assert float(finalize(big, valid)) == 0.0  # ascending order, in FP32
    assert float(finalize(big[:, [0, 2, 1]], valid)) == 1.0
    nan = torch.tensor([[math.nan], [3.0], [math.inf]]).bfloat16()[None]
    assert float(finalize(nan, torch.tensor([[False, True, False]]))) == 3.0


# ---- input that is already quantised ------------------------------------------------------


@few
@given(seed=st.integers(0, 2**31), octaves=st.integers(0, 40))
def test_rebase_to_window(seed: int, octaves: int) -> None:
    g = torch.Generator().manual_seed(seed)
    size = torch.exp2(-octaves * torch.rand(3, 8, 1, generator=g))
    x = (torch.randn(3, 8, 32, generator=g) * size).flatten(1)
    q, e32 = quantize_e4m3(x, 32)
    codes, window = rebase_to_window(q, e32)
    assert torch.equal(window, e32.view(3, 2, 4).amax(-1))
    old = dequantize_e4m3(q, e32).double()
    scale = decode_ue8m0(window).double().repeat_interleave(128, -1)
    error = (decode_e4m3(codes).double() - old / scale).abs()
    assert (error <= torch.maximum(old.abs() / scale * 2.0**-4, torch.tensor(2.0**-10))).all()
    largest = (e32.view(3, 2, 4, 1) == window.view(3, 2, 1, 1)).expand(3, 2, 4, 32).flatten(1)
    assert torch.equal(codes[largest], q[largest])  # the largest group keeps its codes


def test_rebase_marks_nan_and_keeps_ends() -> None:
    q = torch.full((1, 128), 0x38, dtype=torch.uint8)  # 1.0
    q[0, 5] = 0x7F
    codes, window = rebase_to_window(q, torch.tensor([[10, 7, 254, 255]], dtype=torch.uint8))
    assert window.tolist() == [[254]]
    assert codes[0, 5] == 0x7F
    assert (codes[0, 64:96] == 0x38).all()
    assert (codes[0, 96:] == 0x7F).all()
    assert codes[0, :64].tolist() == [0x7F if n == 5 else 0 for n in range(64)]
    codes, window = rebase_to_window(q, torch.tensor([[127, 126, 121, 118]], dtype=torch.uint8))
    values = decode_e4m3(codes)[0, 31::32].tolist()
    assert values == [1.0, 0.5, 2.0**-6, 2.0**-9]
    with pytest.raises(ValueError, match="does not fit"):
        rebase_to_window(q, torch.zeros(1, 8, dtype=torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_takes_quantised_input(recipe: str) -> None:
    x, ids, weights = inputs(6)
    q, e32 = quantize_e4m3(x, 32)
    trace = moe_reference((q, e32), ids, weights, WEIGHTS, CONFIG, recipe)
    if recipe == "sm90":
        expected = rebase_to_window(q, e32)
    else:
        expected = (q, e32)
        plain = moe_reference(x, ids, weights, WEIGHTS, CONFIG, recipe)
        assert torch.equal(trace.y, plain.y)
    assert torch.equal(trace.xq_codes, expected[0])
    assert torch.equal(trace.xq_exponents, expected[1])


# ---- the layer ----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_trace_agrees_with_its_stages(recipe: str) -> None:
    x, ids, weights = inputs(6, seed=3)
    t = moe_reference(x, ids, weights, WEIGHTS, CONFIG, recipe)
    assert torch.equal(t.valid, ids >= 0)
    for token in range(6):
        total = torch.zeros(H)
        for slot in range(K):
            expert = int(ids[token, slot])
            if expert < 0:
                assert not t.a[token, slot].any()
                assert not t.combine[token, slot].any()
                continue
            a = w1_swiglu(
                t.xq_codes[token : token + 1],
                t.xq_exponents[token : token + 1],
                WEIGHTS.w13[expert],
                WEIGHTS.w13_scale[expert],
                weights[token, slot : slot + 1],
                None,
                recipe,
            )
            codes, exponents = requantize(a, recipe)
            row = w2(codes, exponents, WEIGHTS.w2[expert], WEIGHTS.w2_scale[expert], recipe)
            assert torch.equal(t.a[token, slot], a[0])
            assert torch.equal(t.a_codes[token, slot], codes[0])
            assert torch.equal(t.a_exponents[token, slot], exponents[0])
            assert torch.equal(t.combine[token, slot], row[0])
            total += row[0].float()
        assert torch.equal(t.y[token], total.bfloat16())


@few
@given(seed=st.integers(0, 2**31), recipe=st.sampled_from(RECIPES))
def test_companions_do_not_change_bits(seed: int, recipe: str) -> None:
    g = torch.Generator().manual_seed(seed)
    x, ids, weights = inputs(9, seed)
    whole = moe_reference(x, ids, weights, WEIGHTS, CONFIG, recipe)
    order = torch.randperm(9, generator=g)
    pick = order[: 1 + seed % 8]
    part = moe_reference(x[pick], ids[pick], weights[pick], WEIGHTS, CONFIG, recipe)
    assert same_bits(whole, pick, part, torch.arange(len(pick)))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_stays_in_its_token(recipe: str, bad: float) -> None:
    x, ids, weights = inputs(6, seed=11)
    ids[2] = torch.tensor([0, 1, 2])
    clean = moe_reference(x, ids, weights, WEIGHTS, CONFIG, recipe)
    x[2, 77] = bad
    dirty = moe_reference(x, ids, weights, WEIGHTS, CONFIG, recipe)
    others = torch.tensor([0, 1, 3, 4, 5])
    assert same_bits(clean, others, dirty, others)
    assert dirty.y[2].isnan().all()


def test_nan_survives_the_clamp_of_the_layer() -> None:
    x, ids, weights = inputs(2)
    ids[:] = 1
    x[1, 0] = math.nan
    cfg = MoEConfig(H, INTER, E, K, 64, clamp=7.0)
    t = moe_reference(x, ids, weights, WEIGHTS, cfg)
    assert t.a[1].isnan().all()
    assert (t.a_codes[1] == 0x7F).all()
    assert t.y[1].isnan().all()
    assert t.y[0].isfinite().all()


def test_routing_weights() -> None:
    x, _, _ = inputs(1)
    ids = torch.tensor([[0, -1, -1]])

    def run(weight: float) -> ReferenceTrace:
        return moe_reference(x, ids, torch.tensor([[weight, 9.0, math.nan]]), WEIGHTS, CONFIG)

    one = run(1.0)
    zero = run(0.0)
    assert not (zero.a_codes & 0x7F).any()  # zeros of either sign
    assert (zero.a_exponents[0, 0] == 1).all()
    assert torch.equal(zero.y, torch.zeros_like(zero.y))
    assert torch.equal(run(-1.0).y, -one.y)
    for factor in (2.0, 8.0, -4.0):  # a power of two only moves the scale
        scaled = run(factor)
        assert torch.equal(scaled.y, one.y * factor)
        assert torch.equal(scaled.a_codes & 0x7F, one.a_codes & 0x7F)


def test_unused_slots_and_duplicates() -> None:
    x, _, _ = inputs(4)
    ids = torch.tensor([[1, -1, -1], [1, 1, -1], [-1, -7, -1], [-1, -1, 1]], dtype=torch.int32)
    x[:] = x[0]
    t = moe_reference(x, ids, torch.full((4, K), 0.5), WEIGHTS, CONFIG)
    assert torch.equal(t.y[2].view(torch.int16), torch.zeros(H, dtype=torch.int16))  # +0.0
    assert torch.equal(t.y[0], t.y[3])
    assert torch.equal(t.y[1], (2 * t.combine[0, 0].float()).bfloat16())


def test_no_tokens() -> None:
    x, ids, weights = inputs(0)
    for recipe in RECIPES:
        t = moe_reference(x, ids, weights, WEIGHTS, CONFIG, recipe)
        assert t.y.shape == (0, H)
        assert compare(t.y, moe_unquantized(x, ids, weights, WEIGHTS, CONFIG)) == (1.0, 0.0)


def test_rejects() -> None:
    x, ids, weights = inputs(3)
    for expert in (E, 2**31 - 1):
        bad = ids.clone()
        bad[1, 2] = expert
        with pytest.raises(ValueError, match=rf"topk_ids\[1, 2\] = {expert}.*below the 4"):
            moe_reference(x, bad, weights, WEIGHTS, CONFIG)
        with pytest.raises(ValueError, match="topk_ids"):
            moe_unquantized(x, bad, weights, WEIGHTS, CONFIG)
    with pytest.raises(ValueError, match=r"'sm80'.*'sm90', 'sm100'"):
        moe_reference(x, ids, weights, WEIGHTS, CONFIG, "sm80")
    with pytest.raises(TypeError, match="bfloat16"):
        moe_reference(x.float(), ids, weights, WEIGHTS, CONFIG)
    with pytest.raises(TypeError, match="float32"):
        moe_reference(x, ids, weights.double(), WEIGHTS, CONFIG)
    with pytest.raises(TypeError, match="int32 or int64"):
        moe_reference(x, ids.float(), weights, WEIGHTS, CONFIG)
    with pytest.raises(ValueError, match=r"\[T, k\]"):
        moe_reference(x, ids[:2], weights, WEIGHTS, CONFIG)
    with pytest.raises(ValueError, match="weights have"):
        moe_reference(x, ids, weights, WEIGHTS, MoEConfig(H, INTER, E + 1, K, 64))


# ---- weights ------------------------------------------------------------------------------


def test_sm90_sees_the_packed_weights() -> None:
    """A block past the exact range enters the oracle as the packed form rounds it."""
    ones = quantize_mxfp4(torch.ones(E, H, INTER))
    w = ExpertWeights(WEIGHTS.w13, WEIGHTS.w13_scale, *ones)
    w.w2_scale[:] = 127
    w.w2_scale[:, :, 1] = 127 - 15
    w.w2[:, :, 16:32] = 0x11  # 0.5 * 2^-15: half of the smallest code at index 0, a tie to zero
    codes = torch.zeros(1, INTER, dtype=torch.uint8)
    codes[0, 32:64] = 0x7E
    exponents = torch.full((1, 1), 127, dtype=torch.uint8)
    assert not w2(codes, exponents, w.w2[0], w.w2_scale[0], "sm90").any()
    wide = torch.full((1, 4), 127, dtype=torch.uint8)
    exact = w2(codes, wide, w.w2[0], w.w2_scale[0], "sm100")
    assert (exact == 448 * 32 * 0.5 * 2.0**-15).all()
    assert torch.equal(unpack(pack(w.w13, w.w13_scale, w.w2, w.w2_scale, CONFIG)).w2, w.w2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_extreme_weight_scales(recipe: str) -> None:
    """Scale bytes of 1 and of 240 cancel between the two projections of one element."""
    codes = torch.full((1, 128), 0x38, dtype=torch.uint8)
    packed = torch.full((256, 64), 0x22, dtype=torch.uint8)
    for weight, act in ((1, 240), (240, 1), (0, 254)):
        scale = torch.full((256, 4), weight, dtype=torch.uint8)
        groups = 1 if recipe == "sm90" else 4
        exponents = torch.full((1, groups), act, dtype=torch.uint8)
        out = w2(codes, exponents, packed, scale, recipe)
        assert (out == 128 * 2.0 ** (weight + act - 254)).all()


# ---- quality ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_cosine_to_the_unquantised_layer(recipe: str) -> None:
    cfg = MoEConfig(hidden=512, intermediate=384, num_experts=4, top_k=2, max_tokens=64)
    weights = gaussian_weights(cfg, 4)
    x, ids, topk_weights = inputs(12, 2, cfg)
    ids.clamp_(min=0)
    t = moe_reference(x, ids, topk_weights, weights, cfg, recipe)
    plain = moe_unquantized(x, ids, topk_weights, weights, cfg)
    result = compare(t.y, plain)
    assert result.cosine >= 0.99
    assert result.relative_l2 <= 0.1
    dense = (
        dequantize_mxfp4(weights.w13, weights.w13_scale),
        dequantize_mxfp4(weights.w2, weights.w2_scale),
    )
    assert torch.equal(moe_unquantized(x, ids, topk_weights, dense, cfg), plain)


def test_compare() -> None:
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    assert compare(a, a) == pytest.approx((1.0, 0.0))
    b = a.clone()
    b[2] = torch.tensor([0.0, 1.0])
    assert compare(b, a) == pytest.approx((0.0, math.sqrt(2)))
    b[1, 0] = 1e-20
    assert compare(b, a).relative_l2 == math.inf
    b[0, 0] = math.nan
    assert all(math.isnan(v) for v in compare(b, a))
    with pytest.raises(ValueError, match="shape"):
        compare(a, a[:2])
