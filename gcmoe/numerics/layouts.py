"""Where bytes lie: the K order of a 128-column window, its swizzle, and the register decode.

All functions are plain torch. ``decode_words`` and ``decode_subblock`` do, instruction by
instruction, what a consumer warp does with a packed weight block; tests use them to prove that
the packed bits mean the right E4M3 code at the right row and column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gcmoe.numerics.formats import (
    E2M1_MAGNITUDES,
    E4M3_NAN,
    require_groups,
    require_uint8,
    split_last,
)

WINDOW = 128
"""Columns of K under one activation scale on Hopper, and of one weight block."""

SUBBLOCK_ROWS = 64
SUBBLOCK_WORDS = 1024
SUBBLOCK_SCALES = 256
SUBBLOCK_BYTES = 4 * SUBBLOCK_WORDS + SUBBLOCK_SCALES
"""Bytes of a weight sub-block of 64 rows x 128 columns: nibble words, then scale bytes."""

MAX_SCALE_INDEX = 14
"""Largest scale byte of a packed block; byte n means E2M1 x 2^(n - 8), exact in E4M3."""

SCALE_INDEX_BIAS = 8


# ---- K order ------------------------------------------------------------------------------


def permute_window(x: Tensor) -> Tensor:
    """Put the columns of every 128-column window into the order in which the MMA reads them.

    Position ``p = 32i + 16q + 4t + b`` of the result holds column ``k = 32t + 8i + 4q + b`` of the
    same window (i, t in 0..3, q in 0..1, b in 0..3).

    Args:
        x: [..., K] of any dtype, K a multiple of 128.

    Returns:
        Contiguous tensor of the same shape and dtype.

    Raises:
        ValueError: K is no multiple of 128.
    """
    require_groups("x", x, WINDOW)
    k_order = split_last(x, -1, 4, 4, 2, 4)  # [..., window, t, i, q, b]
    return k_order.movedim(-4, -2).contiguous().flatten(-5)


def unpermute_window(x: Tensor) -> Tensor:
    """Inverse of :func:`permute_window`, with the same shapes and errors."""
    require_groups("x", x, WINDOW)
    p_order = split_last(x, -1, 4, 2, 4, 4)  # [..., window, i, q, t, b]
    return p_order.movedim(-2, -4).contiguous().flatten(-5)


def swizzle128(rows: Tensor) -> Tensor:
    """The 128-byte shared-memory swizzle: 16-byte chunk c of row n goes to chunk ``c ^ (n % 8)``.

    Args:
        rows: uint8 [..., N, 128].

    Returns:
        uint8 [..., N, 128], contiguous.

    Raises:
        TypeError: not uint8. ValueError: rows are not 128 bytes.
    """
    require_uint8("rows", rows)
    if rows.dim() < 2 or rows.shape[-1] != 128:
        raise ValueError(f"rows must have shape [..., N, 128], got {tuple(rows.shape)}")
    chunks = split_last(rows, 8, 16)
    n = torch.arange(rows.shape[-2], device=rows.device).unsqueeze(-1)
    source = torch.arange(8, device=rows.device) ^ (n % 8)  # [N, 8]; the xor is its own inverse
    return chunks.gather(-2, source.unsqueeze(-1).expand(chunks.shape)).flatten(-2)


def unswizzle128(rows: Tensor) -> Tensor:
    """Inverse of :func:`swizzle128`, which is its own inverse."""
    return swizzle128(rows)


# ---- register decode ----------------------------------------------------------------------


def _positive_e4m3(value: float) -> int:
    """Code of a non-negative number that E4M3 holds exactly; ``value`` = n * 2^-9."""
    n = round(value * 512)
    if n < 8:
        return n
    exponent = n.bit_length() - 4  # n = 1mmm (binary) * 2^exponent
    return ((exponent + 1) << 3) | ((n >> exponent) & 7)


def _lut_entry(index: int) -> tuple[int, int]:
    if index > MAX_SCALE_INDEX:  # no packed block has it; a corrupt byte shows as NaN
        word = int.from_bytes(bytes([E4M3_NAN] * 4), "little")
        return word, word
    codes = bytes(_positive_e4m3(m * 2.0 ** (index - SCALE_INDEX_BIAS)) for m in E2M1_MAGNITUDES)
    return int.from_bytes(codes[:4], "little"), int.from_bytes(codes[4:], "little")


DECODE_LUT: tuple[tuple[int, int], ...] = tuple(_lut_entry(n) for n in range(16))
"""(low, high) 32-bit words by scale byte; byte m of the pair is the E4M3 code of magnitude m."""


def _permute_bytes(table: Tensor, selector: Tensor) -> Tensor:
    """PRMT without sign replication: 4 bytes of the 64-bit ``table``, by 4 selector nibbles."""
    out = torch.zeros((), dtype=torch.int64, device=table.device)
    for lane in range(4):
        choice = (selector >> (4 * lane)) & 0x7
        out = out | (((table >> (8 * choice)) & 0xFF) << (8 * lane))
    return out


def decode_words(words: Tensor, scale_index: Tensor) -> tuple[Tensor, Tensor]:
    """Decode packed words of 8 weights each into two words of 4 E4M3 codes each.

    Per word ``w``, with (lo, hi) = ``DECODE_LUT[scale_index]``::

        m = w & 0x77777777
        first  = prmt(lo, hi, m)       | ( w       & 0x80808080)     # values 0..3
        second = prmt(lo, hi, m >> 16) | ((w << 4) & 0x80808080)     # values 4..7

    Args:
        words: int32 [...].
        scale_index: uint8, broadcastable to ``words``; the block's scale byte, 0..15.

    Returns:
        (first, second): int32 tensors of the broadcast shape; byte j holds value j, or 4 + j.
    """
    require_uint8("scale_index", scale_index)
    if words.dtype != torch.int32:
        raise TypeError(f"words must be torch.int32, got {words.dtype}")
    # A high word above 2^31 would need the sign bit; the largest code 0x7F keeps it clear.
    lut = torch.tensor(
        [lo | (hi << 32) for lo, hi in DECODE_LUT], dtype=torch.int64, device=words.device
    )
    word = words.to(torch.int64) & 0xFFFFFFFF
    table = lut[scale_index.to(torch.int64)]
    magnitude = word & 0x77777777
    first = _permute_bytes(table, magnitude) | (word & 0x80808080)
    second = _permute_bytes(table, magnitude >> 16) | ((word << 4) & 0x80808080)
    # Back to the signed 32-bit range before narrowing, which need not wrap.
    return _narrow(first), _narrow(second)


def _narrow(word: Tensor) -> Tensor:
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def decode_subblock(block: Tensor) -> Tensor:
    """E4M3 codes of packed sub-blocks, by row and column.

    Args:
        block: uint8 [..., 4352]: words [h][thread][i], then scale bytes [warp][lane][h].

    Returns:
        uint8 [..., 64, 128]: row ``16 * warp + g + 8h``, column ``32t + 8i + value``, where
        ``thread = 32 * warp + lane`` and ``lane = 4g + t``.

    Raises:
        TypeError: not uint8. ValueError: the last dimension is not 4352.
    """
    require_uint8("block", block)
    if block.shape[-1] != SUBBLOCK_BYTES:
        raise ValueError(f"block must have shape [..., 4352], got {tuple(block.shape)}")
    words = block[..., : 4 * SUBBLOCK_WORDS].contiguous().view(torch.int32)
    words = split_last(words, 2, 4, 8, 4, 4)  # [h, warp, g, t, i]
    index = split_last(block[..., 4 * SUBBLOCK_WORDS :], 4, 8, 4, 2)  # [warp, g, t, h]
    first, second = decode_words(words, index.movedim(-1, -4).unsqueeze(-1))
    pair = torch.stack((first, second), dim=-1).contiguous().view(torch.uint8)  # values 0..7
    return pair.movedim(-6, -5).contiguous().flatten(-6, -4).flatten(-3)
