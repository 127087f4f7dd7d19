"""MXFP4 weights as FP8 ones that have the same values, for implementations without FP4."""

from __future__ import annotations

import torch
from torch import Tensor

from gcmoe.numerics import decode_e2m1
from gcmoe.numerics.formats import pow2_f32

BLOCK = 128
MX_GROUP = 32
UE8M0_BIAS = 127
TOP = 6
"""The largest scale of a block or row becomes 2^6: E2M1 reaches 6, and 6 * 64 = 384 <= 448."""
EXACT_OCTAVES = 14
"""0.5 * 2^(6 - 14) = 2^-9, the smallest E4M3."""


def _values(codes: Tensor) -> Tensor:
    """bf16 [rows, K] of codes uint8 [rows, K/2]; the low nibble is the even column."""
    table = decode_e2m1(torch.arange(16, dtype=torch.uint8, device=codes.device)).bfloat16()
    pair = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return table[pair.int()]


def _scaled(codes: Tensor, relative: Tensor) -> Tensor:
    """E4M3 [rows, K] of codes times 2^relative, which has one entry for 32 columns."""
    if int(relative.min()) < TOP - EXACT_OCTAVES:
        raise ValueError(f"scales span more than {EXACT_OCTAVES} octaves, FP8 would not be exact")
    factor = pow2_f32(relative).bfloat16().repeat_interleave(MX_GROUP, dim=-1)
    return (_values(codes) * factor).to(torch.float8_e4m3fn)


def block_scaled(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 weights with a scale for each block of 128 x 128, expert by expert.

    Args:
        codes: uint8 [E, N, K/2], two E2M1 a byte; N and K multiples of 128.
        scale: uint8 [E, N, K/32], UE8M0.

    Returns:
        E4M3 [E, N, K] and fp32 [E, N/128, K/128], whose products are the MXFP4 values exactly.

    Raises:
        ValueError: the scales of a block span more than 14 octaves.
    """
    e, n, half = codes.shape
    k = 2 * half
    weight = torch.empty((e, n, k), dtype=torch.float8_e4m3fn, device=codes.device)
    scales = torch.empty((e, n // BLOCK, k // BLOCK), device=codes.device)
    for expert in range(e):
        exponent = scale[expert].int() - UE8M0_BIAS
        top = exponent.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK // MX_GROUP).amax(dim=(1, 3))
        spread = top.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK // MX_GROUP, 1)
        weight[expert] = _scaled(codes[expert], exponent - spread + TOP)
        scales[expert] = pow2_f32(top - TOP)
    return weight, scales


def row_scaled(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 weights with a scale for each row; as :func:`block_scaled`, scales fp32 [E, N]."""
    e, n, half = codes.shape
    weight = torch.empty((e, n, 2 * half), dtype=torch.float8_e4m3fn, device=codes.device)
    scales = torch.empty((e, n), device=codes.device)
    for expert in range(e):
        exponent = scale[expert].int() - UE8M0_BIAS
        top = exponent.amax(dim=1)
        weight[expert] = _scaled(codes[expert], exponent - top[:, None] + TOP)
        scales[expert] = pow2_f32(top - TOP)
    return weight, scales
