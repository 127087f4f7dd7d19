"""Weight rows without block scales: one base a row, one small index a block.

A WGMMA has no block scales, so the Hopper form splits each UE8M0 scale into a base per weight row
(a power of two applied in FP32 after the product) and a small relative exponent per block, which
the decode folds into the E4M3 code. E4M3 holds ``E2M1 x 2^(index - 8)`` exactly for an index of
0..14: a block may lie up to 2^14 below the largest block of its row and stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gcmoe.numerics.formats import (
    E2M1_MAGNITUDES,
    MX_GROUP,
    UE8M0_BIAS,
    encode_e2m1,
    join_nibbles,
    pow2_f32,
    pow2_f64,
    require_uint8,
    split_last,
    split_nibbles,
)
from gcmoe.numerics.layouts import MAX_SCALE_INDEX, SCALE_INDEX_BIAS

BASE_BIAS = UE8M0_BIAS + MAX_SCALE_INDEX - SCALE_INDEX_BIAS
"""A row whose largest scale byte is b has the row scale 2^(b - 133)."""

ZERO_BLOCK_INDEX = SCALE_INDEX_BIAS


@dataclass(frozen=True, slots=True, eq=False)
class RebasedRows:
    """Weight rows as the Hopper kernels see them: one base a row, one small index a block.

    A weight is ``E2M1(codes) * 2^(scale_index - 8) * row_scale``.

    Attributes:
        codes: uint8 [..., K/2]; differs from the input only in rescaled blocks.
        scale_index: uint8 [..., K/32], 0..14.
        row_scale: fp32 [...], the power of two 2^(b - 133); 1.0 for an all-zero row.
        rescaled: int64 [n], flat block numbers (row-major over the scale tensor) of the blocks
            below the exact range, ascending.
        error: fp64 [n], each such block's largest error relative to its row's largest magnitude.
    """

    codes: Tensor
    scale_index: Tensor
    row_scale: Tensor
    rescaled: Tensor
    error: Tensor


def rebase_rows(codes: Tensor, scale: Tensor) -> RebasedRows:
    """Split block scales into a base per row and a relative exponent per block.

    The base ``b`` of a row is the largest scale byte among its blocks that are not all zero; a
    block gets index ``14 + s - b``. An all-zero block has no say and gets index 8. A block with
    ``s - b < -14`` gets index 0 and its codes are rounded to the nearest E2M1 code, ties to even.

    Args:
        codes: uint8 [..., K/2].
        scale: uint8 [..., K/32], without 255 in it.
    """
    require_uint8("codes", codes)
    require_uint8("scale", scale)
    blocks = split_last(codes, -1, MX_GROUP // 2)
    live = ((blocks & 0x77) != 0).any(dim=-1)
    s = scale.to(torch.int32)
    base = torch.where(live, s, -1).amax(dim=-1)
    base = torch.where(base < 0, BASE_BIAS, base)
    relative = s - base.unsqueeze(-1)
    index = torch.where(live, (relative + MAX_SCALE_INDEX).clamp(min=0), ZERO_BLOCK_INDEX)
    rescaled = (live & (relative < -MAX_SCALE_INDEX)).flatten().nonzero().squeeze(1)
    error = torch.zeros(0, dtype=torch.float64, device=codes.device)
    if rescaled.numel():
        codes, error = _round_blocks(blocks, torch.where(live, relative, -1024), rescaled)
    return RebasedRows(codes, index.to(torch.uint8), pow2_f32(base - BASE_BIAS), rescaled, error)


def _magnitudes(codes: Tensor) -> Tensor:
    table = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device=codes.device)
    return table[(codes & 0x7).to(torch.int64)]


def _round_blocks(blocks: Tensor, relative: Tensor, rescaled: Tensor) -> tuple[Tensor, Tensor]:
    """Round the codes of ``rescaled`` blocks to index 0; returns (all codes, relative errors).

    ``relative`` is at most 0, and -1024 for an all-zero block.
    """
    num_blocks = relative.shape[-1]
    row = rescaled // num_blocks
    touched = torch.zeros(relative.numel() // num_blocks, dtype=torch.bool, device=blocks.device)
    touched[row] = True
    rows, row_of = touched.nonzero().squeeze(1), touched.cumsum(0)[row] - 1
    row_blocks = blocks.reshape(-1, num_blocks, MX_GROUP // 2)[rows]
    block_max = _magnitudes(split_nibbles(row_blocks).bitwise_and(0x7).amax(dim=-1))
    row_relative = relative.reshape(-1, num_blocks)[rows]
    row_max = (block_max * pow2_f64(row_relative.clamp(min=-1000))).amax(dim=-1)

    flat = blocks.reshape(-1, MX_GROUP // 2).clone()
    old = split_nibbles(flat[rescaled])
    shift = relative.flatten()[rescaled] + MAX_SCALE_INDEX
    exact = _magnitudes(old) * pow2_f64(shift).unsqueeze(-1)
    new = encode_e2m1(exact)
    flat[rescaled] = join_nibbles(new | (old & 0x8))
    worst = (exact - _magnitudes(new)).abs().amax(dim=-1) * 2.0**-MAX_SCALE_INDEX
    return flat.view(*blocks.shape[:-2], -1), worst / row_max[row_of]
