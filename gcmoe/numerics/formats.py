"""The three small number formats: E2M1 (weights), E4M3 (activations), UE8M0 (their scales).

Everything is plain torch and runs on the device of its argument. Codes and scale bytes are
``uint8``. Exponents are found from the bits of an fp32 number, never with ``log2``, so a kernel
that does the same integer arithmetic gets the same bytes.

========  ====================================================================================
E2M1      1 sign, 2 exponent, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
E4M3      1 sign, 4 exponent, 3 mantissa bits, bias 7, largest 448, no infinity, NaN 0x7F/0xFF
UE8M0     one byte s stands for 2^(s - 127); 255 is NaN
========  ====================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from gcmoe.errors import WeightFormatError

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of the E2M1 codes 0..7; bit 3 of a code is its sign."""

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
UE8M0_BIAS = 127
UE8M0_NAN = 255
MX_GROUP = 32
"""Columns of one MX block: 32 E2M1 weights share one UE8M0 scale."""

_INF_BITS = 0x7F800000
_ABS_MASK = 0x7FFFFFFF
# The midpoints between neighbouring E2M1 magnitudes. A tie goes to the even code, so the
# comparison is strict where the lower code is even and inclusive where the upper one is.
_E2M1_STRICT = (0.25, 1.25, 2.5, 5.0)
_E2M1_INCLUSIVE = (0.75, 1.75, 3.5)


def require_uint8(name: str, x: Tensor) -> None:
    """Raise TypeError unless ``x`` is uint8."""
    if x.dtype != torch.uint8:
        raise TypeError(f"{name} must be torch.uint8, got {x.dtype}")


def require_groups(name: str, x: Tensor, group: int) -> None:
    """Raise ValueError unless the last dimension of ``x`` is a positive multiple of ``group``."""
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % group:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: the last dimension must be a positive multiple "
            f"of {group}"
        )


def split_last(x: Tensor, *sizes: int) -> Tensor:
    """View of ``x`` with its last dimension split into ``sizes``, one of which may be -1."""
    return torch.unflatten(x, -1, sizes)


def _as_float32(name: str, x: Tensor) -> Tensor:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    return x.to(torch.float32)


# ---- powers of two ------------------------------------------------------------------------


def pow2_f32(exponent: Tensor) -> Tensor:
    """2^exponent as exact fp32, built from bits; subnormals included.

    Args:
        exponent: integer tensor with values in [-149, 127].

    Returns:
        fp32 tensor of the same shape.
    """
    e = exponent.to(torch.int32)
    normal = (e + 127) << 23
    subnormal = torch.ones_like(e) << (e + 149).clamp(0, 22)
    return torch.where(e >= -126, normal, subnormal).view(torch.float32)


def pow2_f64(exponent: Tensor) -> Tensor:
    """2^exponent as exact fp64, built from bits, for integer exponents in [-1022, 1023]."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


# ---- codes --------------------------------------------------------------------------------


def encode_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to the even code; magnitudes above 6 give 6.

    Args:
        x: float tensor without NaN.

    Returns:
        uint8 codes 0..15 of the same shape. The sign of a zero is kept (-0 is code 8).
    """
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for midpoint in _E2M1_STRICT:
        code += magnitude > midpoint
    for midpoint in _E2M1_INCLUSIVE:
        code += magnitude >= midpoint
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of uint8 E2M1 codes 0..15 (one code a byte), same shape."""
    require_uint8("codes", codes)
    table = torch.tensor(
        E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES),
        dtype=torch.float32,
        device=codes.device,
    )
    return table[codes.to(torch.int64)]


def encode_e4m3(x: Tensor) -> Tensor:
    """``rn_sat_e4m3``: round to nearest even; beyond 448, and for Inf, the result is +-448.

    Args:
        x: float tensor; NaN gives 0x7F whatever its sign bit.

    Returns:
        uint8 codes of the same shape. The sign of a zero is kept.
    """
    code = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return code.masked_fill(x.isnan(), E4M3_NAN)


def decode_e4m3(codes: Tensor) -> Tensor:
    """fp32 values of uint8 E4M3 codes, same shape; 0x7F and 0xFF give NaN."""
    require_uint8("codes", codes)
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def encode_ue8m0(exponent: Tensor) -> Tensor:
    """UE8M0 byte of 2^exponent, clamped to what a non-NaN byte can hold: [-127, 127]."""
    return (exponent.clamp(-UE8M0_BIAS, 127) + UE8M0_BIAS).to(torch.uint8)


def decode_ue8m0(scale: Tensor) -> Tensor:
    """fp32 value 2^(s - 127) of uint8 scale bytes; 255 gives NaN, 0 the subnormal 2^-127."""
    require_uint8("scale", scale)
    value = pow2_f32(scale.to(torch.int32).clamp(max=254) - UE8M0_BIAS)
    return value.masked_fill(scale == UE8M0_NAN, float("nan"))


def split_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> one code a byte, uint8 [..., K]; the low nibble is the even column."""
    require_uint8("packed", packed)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def join_nibbles(codes: Tensor) -> Tensor:
    """Inverse of :func:`split_nibbles`: uint8 codes 0..15 [..., K] -> uint8 [..., K/2]."""
    require_uint8("codes", codes)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


# ---- block formats ------------------------------------------------------------------------


def _group_amax_bits(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Bits of each group's largest finite magnitude, and the mask of NaN and Inf elements."""
    bits = x.contiguous().view(torch.int32) & _ABS_MASK
    special = bits >= _INF_BITS
    # Non-negative floats compare like their bits, so an integer maximum is exact.
    amax = split_last(bits.masked_fill(special, 0), -1, group).amax(dim=-1)
    return amax, special


def quantize_e4m3(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise to E4M3 with one power-of-two scale per ``group`` consecutive columns.

    The exponent of a group is ``e = ceil(log2(amax / 448))``, found from the bits of amax::

        t = max((bits(amax) + 0x1FFFFF) >> 23, 9)     # 448 = 1.75 * 2^8 has mantissa 0x600000
        e = t - 8 - 127                               # scale byte: t - 8, in 1..247

    so amax exactly 448 * 2^n gives n and the next fp32 above it gives n + 1. The floor 9 clamps
    e to -126, because 2^-127 is subnormal; a group with amax 0 gets e = -126 (byte 1). The upper
    limit 127 is never reached: the largest fp32 gives e = 120. Codes are
    ``rn_sat_e4m3(x * 2^-e)``.

    NaN and Inf elements are left out of amax and written as the NaN code 0x7F.

    Args:
        x: bfloat16, float16 or float32 [..., K].
        group: columns under one scale; divides K.

    Returns:
        (codes uint8 [..., K], exponents UE8M0 uint8 [..., K/group]).

    Raises:
        TypeError: another dtype. ValueError: ``group`` does not divide K.
    """
    require_groups("x", x, group)
    x = _as_float32("x", x)
    amax, special = _group_amax_bits(x, group)
    biased = ((amax + 0x1FFFFF) >> 23).clamp(min=9) - 8
    inverse = pow2_f32(UE8M0_BIAS - biased).repeat_interleave(group, dim=-1)
    codes = encode_e4m3(x * inverse).masked_fill(special, E4M3_NAN)
    return codes, biased.to(torch.uint8)


def dequantize_e4m3(codes: Tensor, exponents: Tensor) -> Tensor:
    """fp32 values of :func:`quantize_e4m3`'s result.

    Args:
        codes: uint8 [..., K].
        exponents: UE8M0 uint8 [..., K/group]; the group follows from the two shapes.

    Returns:
        fp32 [..., K]. NaN codes and NaN scales give NaN.

    Raises:
        TypeError: not uint8. ValueError: the shapes do not belong together.
    """
    require_uint8("exponents", exponents)
    if (
        codes.dim() != exponents.dim()
        or codes.shape[:-1] != exponents.shape[:-1]
        or exponents.shape[-1] == 0
        or codes.shape[-1] % exponents.shape[-1]
    ):
        raise ValueError(
            f"exponents of shape {tuple(exponents.shape)} do not fit codes of shape "
            f"{tuple(codes.shape)}: the leading dimensions must be equal and the last must divide"
        )
    group = codes.shape[-1] // exponents.shape[-1]
    return decode_e4m3(codes) * decode_ue8m0(exponents).repeat_interleave(group, dim=-1)


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights to MXFP4: E2M1 codes with one UE8M0 scale per 32 consecutive columns.

    The scale of a block is 2^ceil(log2(amax / 6)), found from the bits of amax and not below
    2^-127 (byte 0, which is also what an all-zero block gets); codes are rounded to nearest even.

    Args:
        w: bfloat16, float16 or float32 [..., K], K a multiple of 32.

    Returns:
        (packed uint8 [..., K/2] with the even column in the low nibble, scale uint8 [..., K/32]).

    Raises:
        TypeError: another dtype. ValueError: K is no multiple of 32.
        WeightFormatError: ``w`` holds NaN or Inf.
    """
    require_groups("w", w, MX_GROUP)
    w = _as_float32("w", w)
    amax, special = _group_amax_bits(w, MX_GROUP)
    if bool(special.any()):
        where = tuple(int(n) for n in special.nonzero()[0])
        raise WeightFormatError(f"w holds NaN or Inf, first at index {where}: MXFP4 has neither")
    # 6 = 1.5 * 2^2 has mantissa 0x400000 and biased exponent 129; the scale byte of 2^0 is 127.
    biased = (((amax + 0x3FFFFF) >> 23) - 2).clamp(min=0)
    inverse = pow2_f32(UE8M0_BIAS - biased).repeat_interleave(MX_GROUP, dim=-1)
    return join_nibbles(encode_e2m1(w * inverse)), biased.to(torch.uint8)


def dequantize_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 values of MXFP4 weights; exact wherever fp32 can hold the value.

    Args:
        packed: uint8 [..., K/2], low nibble = even column.
        scale: UE8M0 uint8 [..., K/32]; 255 gives NaN. Values of 2^128 and more
            give Inf.

    Returns:
        fp32 [..., K].

    Raises:
        TypeError: not uint8. ValueError: the shapes do not belong together.
    """
    require_uint8("scale", scale)
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] != 16 * scale.shape[-1]:
        raise ValueError(
            f"scale of shape {tuple(scale.shape)} does not fit packed of shape "
            f"{tuple(packed.shape)}: one scale belongs to 16 bytes"
        )
    values = split_last(decode_e2m1(split_nibbles(packed)), -1, MX_GROUP)
    return (values * decode_ue8m0(scale).unsqueeze(-1)).flatten(-2)
