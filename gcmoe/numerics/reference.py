"""The oracle: one MoE layer, every rounding step spelled out in plain torch.

Kernels, the simulator and all tests compare with :func:`moe_reference`. A recipe names the two
choices that differ between GPU families:

======  ====================  =================================================================
recipe  activation scales     weights
======  ====================  =================================================================
sm90    one per 128 columns   rebased per row (:func:`gcmoe.numerics.rebase.rebase_rows`), so a
                              block below the exact range is rounded as the packed form does it
sm100   one per 32 columns    used as they are
======  ====================  =================================================================

Where the layer computes "in FP32" the oracle computes in fp64 and rounds to fp32 once. A product
over one window of 128 (32) columns is exact: E4M3 values are multiples of 2^-9 below 2^9, so are
the decoded weights, and a sum of 128 products needs 43 bits of fp64's 53. Windows are added in
ascending order, element by element. So a row's accumulators do not depend on which other rows are
in the batch, on T, or on the order in which a matrix library adds. The activation is evaluated
in fp64 and rounded once, which hides the last bit of ``exp``.

All functions run on the device of their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.numerics.formats import (
    E4M3_NAN,
    MX_GROUP,
    UE8M0_BIAS,
    UE8M0_NAN,
    decode_e2m1,
    decode_e4m3,
    dequantize_mxfp4,
    encode_e4m3,
    pow2_f32,
    pow2_f64,
    quantize_e4m3,
    require_groups,
    require_uint8,
    split_last,
    split_nibbles,
)
from gcmoe.numerics.layouts import SCALE_INDEX_BIAS, WINDOW
from gcmoe.numerics.rebase import rebase_rows
from gcmoe.numerics.weights import ExpertWeights

RECIPES = {"sm90": WINDOW, "sm100": MX_GROUP}
"""Columns under one activation scale, by recipe."""


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceTrace:
    """Every stage of one layer call. G is 128 (sm90) or 32 (sm100).

    Entries of unused slots (``valid`` False) are zero.

    Attributes:
        xq_codes: E4M3 uint8 [T, H], the quantised input.
        xq_exponents: UE8M0 uint8 [T, H/G].
        valid: bool [T, k], slots with an expert.
        a: fp32 [T, k, I], activation times routing weight, before re-quantisation.
        a_codes: E4M3 uint8 [T, k, I].
        a_exponents: UE8M0 uint8 [T, k, I/G].
        combine: bf16 [T, k, H], one W2 row per slot.
        y: bf16 [T, H], the layer's result.
    """

    xq_codes: Tensor
    xq_exponents: Tensor
    valid: Tensor
    a: Tensor
    a_codes: Tensor
    a_exponents: Tensor
    combine: Tensor
    y: Tensor


class Comparison(NamedTuple):
    """Worst token of a comparison; NaN if any compared token holds NaN or Inf."""

    cosine: float
    relative_l2: float


def recipe_group(recipe: str) -> int:
    """Columns under one activation scale.

    Raises:
        ValueError: unknown recipe.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe = {recipe!r}: must be one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[recipe]


# ---- stages -------------------------------------------------------------------------------


def quantize_input(x: Tensor, recipe: str = "sm90") -> tuple[Tensor, Tensor]:
    """Step 1: quantise the input per 128 (sm90) or 32 (sm100) columns.

    Args:
        x: bfloat16 [T, H].

    Returns:
        (E4M3 codes uint8 [T, H], UE8M0 exponents uint8 [T, H/128 or H/32]).
    """
    return quantize_e4m3(x, recipe_group(recipe))


def rebase_to_window(q: Tensor, e32: Tensor) -> tuple[Tensor, Tensor]:
    """Bring input with one scale per 32 columns to one scale per 128 columns.

    The window's exponent is the largest of its four groups'; codes become
    ``rn_e4m3(q * 2^(e_group - e_window))``. NaN codes stay 0x7F. A NaN scale (255) turns its group
    into NaN codes and has no say in the window's exponent.

    Args:
        q: E4M3 codes uint8 [..., K], K a multiple of 128.
        e32: UE8M0 uint8 [..., K/32].

    Returns:
        (codes uint8 [..., K], exponents uint8 [..., K/128]).

    Raises:
        TypeError: not uint8. ValueError: shapes do not belong together.
    """
    require_uint8("e32", e32)
    require_groups("q", q, WINDOW)
    if e32.shape != (*q.shape[:-1], q.shape[-1] // MX_GROUP):
        raise ValueError(f"e32 of shape {tuple(e32.shape)} does not fit q of {tuple(q.shape)}")
    nan = e32 == UE8M0_NAN
    group = split_last(e32.to(torch.int32).masked_fill(nan, 0), -1, WINDOW // MX_GROUP)
    window = group.amax(dim=-1)
    # A group more than 2^20 below is zero in any case; the bound keeps the factor normal.
    shift = (group - window.unsqueeze(-1)).clamp(min=-64).flatten(-2)
    value = decode_e4m3(q) * pow2_f32(shift).repeat_interleave(MX_GROUP, dim=-1)
    codes = encode_e4m3(value).masked_fill(nan.repeat_interleave(MX_GROUP, dim=-1), E4M3_NAN)
    return codes, window.to(torch.uint8)


def _product(
    codes: Tensor, exponents: Tensor, weight: Tensor, weight_scale: Tensor, recipe: str
) -> Tensor:
    """fp32 [n, rows]: exact window products, added in fp64 in ascending order, rounded once.

    Args:
        codes, exponents: E4M3 uint8 [n, K], UE8M0 uint8 [n, K/G].
        weight, weight_scale: MXFP4 uint8 [rows, K/2], [rows, K/32].
    """
    group = recipe_group(recipe)
    x_scale = pow2_f64(exponents.to(torch.int32) - UE8M0_BIAS)
    if recipe == "sm90":
        rebased = rebase_rows(weight, weight_scale)
        weight = rebased.codes
        # The factor that the decode folds into the E4M3 code.
        folded = pow2_f64(rebased.scale_index.to(torch.int32) - SCALE_INDEX_BIAS)
        row_scale = rebased.row_scale.to(torch.float64)
    else:
        window_scale = pow2_f64(weight_scale.to(torch.int32) - UE8M0_BIAS)
        window_scale = window_scale.masked_fill(weight_scale == UE8M0_NAN, float("nan"))
    total = torch.zeros((codes.shape[0], weight.shape[0]), dtype=torch.float64, device=codes.device)
    for n in range(codes.shape[1] // group):
        x = decode_e4m3(codes[:, n * group : (n + 1) * group]).to(torch.float64)
        w = decode_e2m1(split_nibbles(weight[:, n * group // 2 : (n + 1) * group // 2]))
        w = w.to(torch.float64)
        if recipe == "sm90":
            blocks = slice(n * group // MX_GROUP, (n + 1) * group // MX_GROUP)
            w = (split_last(w, -1, MX_GROUP) * folded[:, blocks, None]).flatten(1)
            total += (x @ w.T) * x_scale[:, n, None]
        else:
            total += (x @ w.T) * x_scale[:, n, None] * window_scale[:, n]
    if recipe == "sm90":
        total *= row_scale
    return total.to(torch.float32)


def swiglu(gate: Tensor, up: Tensor, topk_weight: Tensor, clamp: float | None = None) -> Tensor:
    """Steps 3 and 4: ``silu(min(gate, L)) * clamp(up, -L, L) * topk_weight``; NaN passes through.

    Args:
        gate, up: fp32 [n, I].
        topk_weight: fp32 [n]; any finite value, also 0 and negative.
        clamp: limit L, None for none.

    Returns:
        fp32 [n, I], evaluated in fp64 and rounded once.
    """
    if clamp is not None:
        limit = torch.tensor(clamp, dtype=torch.float32, device=gate.device)
        gate, up = torch.minimum(gate, limit), torch.minimum(torch.maximum(up, -limit), limit)
    g = gate.to(torch.float64)
    a = g / (1.0 + torch.exp(-g)) * up.to(torch.float64) * topk_weight.to(torch.float64)[:, None]
    return a.to(torch.float32)


def w1_swiglu(
    x_codes: Tensor,
    x_exponents: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    topk_weight: Tensor,
    clamp: float | None = None,
    recipe: str = "sm90",
) -> Tensor:
    """Steps 2 to 4 for n rows of one expert.

    Args:
        x_codes, x_exponents: E4M3 uint8 [n, H], UE8M0 uint8 [n, H/G].
        w13, w13_scale: uint8 [2I, H/2], [2I, H/32].
        topk_weight: fp32 [n].
        clamp: limit L of gate and up, None for none.

    Returns:
        a, fp32 [n, I].
    """
    gate, up = _product(x_codes, x_exponents, w13, w13_scale, recipe).chunk(2, dim=1)
    return swiglu(gate, up, topk_weight, clamp)


def requantize(a: Tensor, recipe: str = "sm90") -> tuple[Tensor, Tensor]:
    """Step 5: quantise fp32 [n, I] by the rule of step 1."""
    return quantize_e4m3(a, recipe_group(recipe))


def w2(
    a_codes: Tensor,
    a_exponents: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    recipe: str = "sm90",
) -> Tensor:
    """Step 6 for n rows of one expert: the down projection in FP32, rounded to BF16.

    Args:
        a_codes, a_exponents: E4M3 uint8 [n, I], UE8M0 uint8 [n, I/G].
        weight, weight_scale: uint8 [H, I/2], [H, I/32].

    Returns:
        bf16 [n, H].
    """
    return _product(a_codes, a_exponents, weight, weight_scale, recipe).to(torch.bfloat16)


def finalize(combine: Tensor, valid: Tensor) -> Tensor:
    """Step 7: FP32 sum over valid slots in ascending slot order, one rounding to BF16.

    Args:
        combine: bf16 [T, k, H].
        valid: bool [T, k].

    Returns:
        bf16 [T, H]; exact zeros for a token without a valid slot.
    """
    total = torch.zeros(
        (combine.shape[0], combine.shape[2]), dtype=torch.float32, device=combine.device
    )
    for slot in range(combine.shape[1]):
        total = torch.where(valid[:, slot, None], total + combine[:, slot].float(), total)
    return total.to(torch.bfloat16)


# ---- the layer ----------------------------------------------------------------------------


def _check_routing(
    num_tokens: int, topk_ids: Tensor, topk_weights: Tensor, config: MoEConfig
) -> Tensor:
    """Validity mask bool [T, k]; raises on shapes and ids that are not legal."""
    shape = (num_tokens, config.top_k)
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if topk_weights.dtype != torch.float32:
        raise TypeError(f"topk_weights must be float32, got {topk_weights.dtype}")
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be [T, k] = {shape}")
    bad = topk_ids >= config.num_experts
    if bool(bad.any()):
        token, slot = (int(n) for n in bad.nonzero()[0])
        raise ValueError(
            f"topk_ids[{token}, {slot}] = {int(topk_ids[token, slot])}: must be below the "
            f"{config.num_experts} experts (negative means an unused slot)"
        )
    return topk_ids >= 0


def _check_experts(weights: ExpertWeights, config: MoEConfig) -> None:
    found = (weights.num_experts, weights.hidden, weights.intermediate)
    expected = (config.num_experts, config.hidden, config.intermediate)
    if found != expected:
        raise ValueError(f"weights have (E, H, I) = {found}, config says {expected}")


def _quantized_input(
    x: Tensor | tuple[Tensor, Tensor], config: MoEConfig, recipe: str
) -> tuple[Tensor, Tensor]:
    h = config.hidden
    if isinstance(x, Tensor):
        if x.dtype != torch.bfloat16:
            raise TypeError(f"x must be bfloat16, got {x.dtype}")
        if x.dim() != 2 or x.shape[1] != h:
            raise ValueError(f"x has shape {tuple(x.shape)}, must be [T, {h}]")
        return quantize_input(x, recipe)
    codes, e32 = x
    require_uint8("x codes", codes)
    require_uint8("x exponents", e32)
    if codes.dim() != 2 or codes.shape[1] != h or e32.shape != (codes.shape[0], h // MX_GROUP):
        raise ValueError(
            f"x has codes {tuple(codes.shape)} and exponents {tuple(e32.shape)}, must be "
            f"[T, {h}] and [T, {h // MX_GROUP}]"
        )
    return rebase_to_window(codes, e32) if recipe == "sm90" else (codes, e32)


def moe_reference(
    x: Tensor | tuple[Tensor, Tensor],
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    config: MoEConfig,
    recipe: str = "sm90",
) -> ReferenceTrace:
    """One MoE layer over all experts, without any notion of ranks.

    Args:
        x: bfloat16 [T, H], or already quantised (E4M3 codes uint8 [T, H], UE8M0 uint8 [T, H/32]),
            which "sm90" rebases with :func:`rebase_to_window`. T may be 0.
        topk_ids: int32 or int64 [T, k]; a negative id is an unused slot, duplicates count twice.
        topk_weights: fp32 [T, k]; ignored in unused slots.
        weights: all E experts, without NaN scales (255).
        config: shapes and clamp; ``max_tokens`` does not matter here.
        recipe: "sm90" or "sm100".

    Returns:
        Every stage, see :class:`ReferenceTrace`.

    Raises:
        TypeError: a dtype is not the one above.
        ValueError: an id >= E, an unknown recipe, or shapes that do not fit ``config``.
    """
    group = recipe_group(recipe)
    _check_experts(weights, config)
    xq_codes, xq_exponents = _quantized_input(x, config, recipe)
    num_tokens, k, i = xq_codes.shape[0], config.top_k, config.intermediate
    valid = _check_routing(num_tokens, topk_ids, topk_weights, config)

    def zeros(last: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((num_tokens, k, last), dtype=dtype, device=xq_codes.device)

    a, a_codes = zeros(i, torch.float32), zeros(i, torch.uint8)
    a_exponents = zeros(i // group, torch.uint8)
    combine = zeros(config.hidden, torch.bfloat16)
    for expert in sorted(set(topk_ids[valid].tolist())):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        rows = w1_swiglu(
            xq_codes[token],
            xq_exponents[token],
            weights.w13[expert],
            weights.w13_scale[expert],
            topk_weights[token, slot],
            config.clamp,
            recipe,
        )
        codes, exponents = requantize(rows, recipe)
        a[token, slot], a_codes[token, slot], a_exponents[token, slot] = rows, codes, exponents
        combine[token, slot] = w2(
            codes, exponents, weights.w2[expert], weights.w2_scale[expert], recipe
        )
    y = finalize(combine, valid)
    return ReferenceTrace(xq_codes, xq_exponents, valid, a, a_codes, a_exponents, combine, y)


def moe_unquantized(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights | tuple[Tensor, Tensor],
    config: MoEConfig,
) -> Tensor:
    """The layer with BF16 activations and no activation quantisation: what quality is held to.

    Products and sums are fp64; ``a`` is rounded to BF16 between the two projections.

    Args:
        x: bfloat16 [T, H].
        topk_ids, topk_weights: as in :func:`moe_reference`.
        weights: MXFP4 experts, or dense (w13 [E, 2I, H], w2 [E, H, I]) of any float dtype.
        config: shapes and clamp.

    Returns:
        fp32 [T, H], not rounded to BF16.

    Raises:
        TypeError, ValueError: as :func:`moe_reference`.
    """
    h, i, e = config.hidden, config.intermediate, config.num_experts
    if isinstance(weights, ExpertWeights):
        _check_experts(weights, config)
    elif weights[0].shape != (e, 2 * i, h) or weights[1].shape != (e, h, i):
        raise ValueError(
            f"weights have shapes {tuple(weights[0].shape)} and {tuple(weights[1].shape)}, must "
            f"be {(e, 2 * i, h)} and {(e, h, i)}"
        )
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x must be bfloat16, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] != h:
        raise ValueError(f"x has shape {tuple(x.shape)}, must be [T, {h}]")
    valid = _check_routing(x.shape[0], topk_ids, topk_weights, config)
    y = torch.zeros((x.shape[0], h), dtype=torch.float64, device=x.device)
    for expert in sorted(set(topk_ids[valid].tolist())):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        if isinstance(weights, ExpertWeights):
            dense1 = dequantize_mxfp4(weights.w13[expert], weights.w13_scale[expert])
            dense2 = dequantize_mxfp4(weights.w2[expert], weights.w2_scale[expert])
        else:
            dense1, dense2 = weights[0][expert], weights[1][expert]
        gate, up = (x[token].double() @ dense1.double().T).float().chunk(2, dim=1)
        a = swiglu(gate, up, topk_weights[token, slot], config.clamp).to(torch.bfloat16)
        y.index_add_(0, token, a.double() @ dense2.double().T)
    return y.to(torch.float32)


def compare(y: Tensor, ref: Tensor) -> Comparison:
    """Worst token of ``y`` against ``ref``.

    Args:
        y, ref: any float dtype, [..., H]; the last dimension is one token.

    Returns:
        (smallest cosine, largest relative L2 error) over tokens. Two all-zero rows count as
        (1, 0); a non-zero row against an all-zero one as (0, inf). Without tokens (1, 0).

    Raises:
        ValueError: different shapes.
    """
    if y.shape != ref.shape:
        raise ValueError(f"y has shape {tuple(y.shape)}, ref {tuple(ref.shape)}")
    if y.numel() == 0:
        return Comparison(1.0, 0.0)
    a, b = y.double().reshape(-1, y.shape[-1]), ref.double().reshape(-1, y.shape[-1])
    norm_a, norm_b = a.norm(dim=-1), b.norm(dim=-1)
    both_zero = (norm_a == 0) & (norm_b == 0)
    one_zero = ((norm_a == 0) | (norm_b == 0)) & ~both_zero
    cosine = (a / norm_a[:, None] * (b / norm_b[:, None])).sum(dim=-1).clamp(max=1.0)
    cosine = cosine.masked_fill(both_zero, 1.0).masked_fill(one_zero, 0.0)
    relative = ((a - b).norm(dim=-1) / norm_b).masked_fill(both_zero, 0.0)
    return Comparison(float(cosine.min()), float(relative.max()))
