"""The packed form of weights for the Hopper kernels.

Memory order of a packed matrix: ``[expert][tile of 256 rows][128 columns][sub-block of 64 rows]``,
each sub-block 4352 contiguous bytes (:mod:`gcmoe.numerics.layouts`), so any run of tiles is one
contiguous range of bytes. What the bytes mean: :mod:`gcmoe.numerics.rebase`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.errors import WeightFormatError
from gcmoe.numerics.formats import (
    MX_GROUP,
    UE8M0_NAN,
    split_last,
)
from gcmoe.numerics.layouts import (
    MAX_SCALE_INDEX,
    SUBBLOCK_BYTES,
    SUBBLOCK_WORDS,
    WINDOW,
)
from gcmoe.numerics.rebase import BASE_BIAS, ZERO_BLOCK_INDEX, RebasedRows, rebase_rows
from gcmoe.numerics.weights import TILE_ROWS, ExpertWeights, check_shapes, reject_nan_scales

ARCH = "sm90"

# Temporaries of one step are a small multiple of this; a step is at least one expert.
_CHUNK_BYTES = 16 << 20


# ---- packed form --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class BlockExceptions:
    """What the packed bytes of one matrix cannot say: the key to an exact :func:`unpack`.

    Attributes:
        scale_block: int64 [n], flat numbers of blocks in the checkpoint's scale tensor whose
            scale does not follow from base and index (all-zero or rescaled blocks).
        scale: uint8 [n], their scales.
        code_block: int64 [m], flat numbers of the rescaled blocks.
        codes: uint8 [m, 16], their original codes.
    """

    scale_block: Tensor
    scale: Tensor
    code_block: Tensor
    codes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """Weights of the EL local experts in the order in which the Hopper kernels stream them.

    Attributes:
        w13: uint8 [EL, I/128, H/128, 4, 4352], contiguous. Tile ``mt`` has 128 gate and 128 up
            rows, interleaved as :func:`w13_row_order` says.
        w13_row_scale: fp32 [EL, I/128, 256] in tile row order.
        w2: uint8 [EL, H/256, KB2, 4, 4352], contiguous, rows in order; KB2 is I/128 rounded up to
            even, and the pad block (if any) decodes to zeros.
        w2_row_scale: fp32 [EL, H/256, 256].
        intermediate: I, which KB2 alone does not give.
        num_rescaled_blocks: blocks below the exact range, over both matrices.
        max_rescale_error: their largest error relative to the row's largest magnitude.
        arch: the kernel family this layout is for.
        w13_exceptions, w2_exceptions: side-cars for :func:`unpack`; kernels do not read them.
    """

    w13: Tensor
    w13_row_scale: Tensor
    w2: Tensor
    w2_row_scale: Tensor
    intermediate: int
    num_rescaled_blocks: int
    max_rescale_error: float
    arch: str
    w13_exceptions: BlockExceptions
    w2_exceptions: BlockExceptions

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w13.shape[2] * WINDOW

    @property
    def nbytes(self) -> int:
        """Bytes that the kernels read: blocks and row scales of both matrices."""
        return sum(x.nbytes for x in (self.w13, self.w13_row_scale, self.w2, self.w2_row_scale))


def packed_layout(
    experts: int, hidden: int, intermediate: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of the tensors of :class:`PackedWeights` that kernels read, by name."""
    tiles, blocks = hidden // TILE_ROWS, intermediate // WINDOW
    even = blocks + blocks % 2
    return {
        "w13": (torch.uint8, (experts, blocks, hidden // WINDOW, 4, SUBBLOCK_BYTES)),
        "w13_row_scale": (torch.float32, (experts, blocks, TILE_ROWS)),
        "w2": (torch.uint8, (experts, tiles, even, 4, SUBBLOCK_BYTES)),
        "w2_row_scale": (torch.float32, (experts, tiles, TILE_ROWS)),
    }


def w13_row_order(intermediate: int, device: torch.device | str = "cpu") -> Tensor:
    """Checkpoint row of every packed W1 row.

    Row ``64s + 16w + 8h + g`` of tile ``mt`` (sub-block s, warp w, g in 0..7) is the gate row
    (h = 0) or the up row (h = 1) of feature column
    ``128 mt + 32 (2 (w % 2) + g // 4) + 8s + 4 (w // 2) + g % 4``: one thread holds gate and up
    of the same column, and a warp's results land in order for the W2 input.

    Args:
        intermediate: I, a multiple of 128.

    Returns:
        int64 [2I]: packed row ``256 mt + r`` -> row of w13.
    """
    packed = torch.arange(2 * intermediate, device=device)
    mt, s, w = packed >> 8, (packed >> 6) & 3, (packed >> 4) & 3
    h, g = (packed >> 3) & 1, packed & 7
    column = 128 * mt + 32 * (2 * (w & 1) + (g >> 2)) + 8 * s + 4 * (w >> 1) + (g & 3)
    return h * intermediate + column


def pack_sm90(
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    config: MoEConfig,
    *,
    max_rescale_error: float,
    out: PackedWeights | None = None,
) -> PackedWeights:
    """:func:`gcmoe.numerics.pack` for Hopper: same arguments, same errors."""
    if out is not None and not isinstance(out, PackedWeights):
        raise TypeError(f"out must be PackedWeights for sm90, got {type(out).__name__}")
    weights = ExpertWeights.from_checkpoint(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale)
    h, i = config.hidden, config.intermediate
    check_shapes(weights, weights.num_experts, h, i, f"hidden = {h} and intermediate = {i}")
    new = _allocate(weights) if out is None else out
    if out is not None:
        _check_out(out, weights)

    matrices = (
        ("w13", weights.w13, weights.w13_scale, new.w13, new.w13_row_scale),
        ("w2", weights.w2, weights.w2_scale, new.w2, new.w2_row_scale),
    )
    for name, _, scale, _, _ in matrices:
        reject_nan_scales(name, scale)
    if out is not None:  # find every error before the first write
        for name, codes, scale, _, _ in matrices:
            for start, rows in _rebased_chunks(codes, scale):
                _check_error(name, start, rows, max_rescale_error)

    exceptions = []
    num_rescaled, worst = 0, 0.0
    for name, codes, scale, blocks, row_scale in matrices:
        order = w13_row_order(i, codes.device) if name == "w13" else None
        found = []
        for start, rows in _rebased_chunks(codes, scale):
            worst = max(worst, _check_error(name, start, rows, max_rescale_error))
            num_rescaled += rows.rescaled.numel()
            stop = start + rows.codes.shape[0]
            found.append(_find_exceptions(start, rows, codes[start:stop], scale[start:stop]))
            _write_chunk(rows, order, blocks[start:stop], row_scale[start:stop])
        exceptions.append(_concat_exceptions(found))
    return PackedWeights(
        new.w13,
        new.w13_row_scale,
        new.w2,
        new.w2_row_scale,
        i,
        num_rescaled,
        worst,
        ARCH,
        exceptions[0],
        exceptions[1],
    )


def unpack_sm90(packed: PackedWeights) -> ExpertWeights:
    """Exact inverse of :func:`pack_sm90`: new uint8 tensors on the same device."""
    experts, h, i = packed.num_experts, packed.hidden, packed.intermediate
    order = w13_row_order(i, packed.w13.device)
    w13, w13_scale = _read(packed.w13, packed.w13_row_scale, (experts, 2 * i, h), order)
    w2, w2_scale = _read(packed.w2, packed.w2_row_scale, (experts, h, i), None)
    _apply_exceptions(packed.w13_exceptions, w13, w13_scale)
    _apply_exceptions(packed.w2_exceptions, w2, w2_scale)
    return ExpertWeights(w13, w13_scale, w2, w2_scale)


# ---- checks -------------------------------------------------------------------------------


def _check_error(name: str, start: int, rows: RebasedRows, bound: float) -> float:
    """Largest error of a chunk whose first expert is ``start``; raises above ``bound``."""
    if not rows.error.numel():
        return 0.0
    worst = float(rows.error.max())
    if worst > bound:
        _, num_rows, num_blocks = rows.scale_index.shape
        flat = int(rows.rescaled[rows.error.argmax()])
        expert, row = divmod(flat // num_blocks, num_rows)
        raise WeightFormatError(
            f"{name}: expert {start + expert}, row {row}, block {flat % num_blocks} lies more "
            f"than 2^{MAX_SCALE_INDEX} below its row's largest scale; packing it is wrong by "
            f"{worst:.3g} of the row's largest magnitude, max_rescale_error is {bound:.3g}"
        )
    return worst


def _allocate(weights: ExpertWeights) -> PackedWeights:
    layout = packed_layout(weights.num_experts, weights.hidden, weights.intermediate)
    device = weights.w13.device
    new = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (dtype, shape) in layout.items()
    }
    none = _concat_exceptions([_no_exceptions(device)])
    return PackedWeights(
        new["w13"],
        new["w13_row_scale"],
        new["w2"],
        new["w2_row_scale"],
        weights.intermediate,
        0,
        0.0,
        ARCH,
        none,
        none,
    )


def _check_out(out: PackedWeights, weights: ExpertWeights) -> None:
    layout = packed_layout(weights.num_experts, weights.hidden, weights.intermediate)
    if out.intermediate != weights.intermediate:
        raise ValueError(f"out has I = {out.intermediate}, the weights {weights.intermediate}")
    for name, (_, shape) in layout.items():
        tensor: Tensor = getattr(out, name)
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"out.{name} has shape {tuple(tensor.shape)}, these weights need a contiguous "
                f"{shape}"
            )
        if tensor.device != weights.w13.device:
            raise ValueError(
                f"out.{name} is on {tensor.device}, the weights on {weights.w13.device}"
            )


# ---- moving bytes -------------------------------------------------------------------------


def _rebased_chunks(codes: Tensor, scale: Tensor) -> Iterator[tuple[int, RebasedRows]]:
    """(first expert, rebased rows) of one step after the other."""
    step = max(1, _CHUNK_BYTES // (codes.shape[1] * codes.shape[2]))
    for start in range(0, codes.shape[0], step):
        yield start, rebase_rows(codes[start : start + step], scale[start : start + step])


def _spread(nibble_bits: Tensor) -> Tensor:
    """Bits 0, 4, 8, 12 -> bits 0, 8, 16, 24."""
    x = (nibble_bits | (nibble_bits << 8)) & 0x00110011
    return (x | (x << 4)) & 0x01010101


def _gather(byte_bits: Tensor) -> Tensor:
    """Inverse of :func:`_spread`."""
    x = (byte_bits | (byte_bits >> 4)) & 0x00110011
    return (x | (x >> 8)) & 0x1111


def _signs_to_packed(word: Tensor) -> Tensor:
    """int32 words of 8 codes: magnitudes stay, signs move to where the decode masks find them.

    The sign of value j goes from bit 4j + 3 to 8j + 7 (j < 4), that of value 4 + j to 8j + 3.
    """
    sign = (word >> 3) & 0x11111111
    low, high = _spread(sign & 0x1111), _spread(sign >> 16)
    return (word & 0x77777777) | (low << 7) | (high << 3)


def _signs_from_packed(word: Tensor) -> Tensor:
    low, high = (word >> 7) & 0x01010101, (word >> 3) & 0x01010101
    return (word & 0x77777777) | (_gather(low) << 3) | (_gather(high) << 19)


def _views(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of packed blocks [C, tile, kb, 4, 4352] in row-major checkpoint order.

    Returns:
        (words int32 [C, tile, s, w, h, g, kb, t, i], scales uint8 [C, tile, s, w, h, g, kb, t]).
    """
    words = split_last(blocks.view(torch.int32)[..., :SUBBLOCK_WORDS], 2, 4, 8, 4, 4)
    scales = split_last(blocks[..., 4 * SUBBLOCK_WORDS :], 4, 8, 4, 2)
    # words [C, tile, kb, s, h, w, g, t, i], scales [C, tile, kb, s, w, g, t, h]
    return words.permute(0, 1, 3, 5, 4, 6, 2, 7, 8), scales.permute(0, 1, 3, 4, 7, 5, 2, 6)


def _write_chunk(rows: RebasedRows, order: Tensor | None, blocks: Tensor, scales: Tensor) -> None:
    codes, index, row_scale = rows.codes, rows.scale_index, rows.row_scale
    if order is not None:
        codes, index = codes.index_select(1, order), index.index_select(1, order)
        row_scale = row_scale.index_select(1, order)
    num_blocks = index.shape[-1] * MX_GROUP // WINDOW
    blocks[:, :, num_blocks:, :, : 4 * SUBBLOCK_WORDS] = 0
    blocks[:, :, num_blocks:, :, 4 * SUBBLOCK_WORDS :] = ZERO_BLOCK_INDEX
    words, indices = _views(blocks[:, :, :num_blocks])
    if codes.storage_offset() % 4 or not codes.is_contiguous():
        codes = codes.clone(memory_format=torch.contiguous_format)
    words.copy_(_signs_to_packed(codes.view(torch.int32)).view(words.shape))
    indices.copy_(index.view(indices.shape))
    scales.copy_(row_scale.view(scales.shape))


def _read(
    blocks: Tensor, scales: Tensor, shape: tuple[int, int, int], order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(codes, scale) of one matrix, apart from its exceptions; ``shape`` is [EL, rows, K]."""
    experts, num_rows, k = shape
    codes = torch.empty((experts, num_rows, k // 2), dtype=torch.uint8, device=blocks.device)
    scale = torch.empty((experts, num_rows, k // MX_GROUP), dtype=torch.uint8, device=blocks.device)
    step = max(1, _CHUNK_BYTES // (num_rows * k // 2))
    for start in range(0, experts, step):
        part = slice(start, start + step)
        words, indices = _views(blocks[part, :, : k // WINDOW])
        chunk = _signs_from_packed(words).contiguous().view(torch.uint8)
        index = indices.reshape(-1, num_rows, k // MX_GROUP)
        read = _implied_scale(index, scales[part].reshape(-1, num_rows))
        chunk = chunk.view(-1, num_rows, k // 2)
        if order is None:
            codes[part], scale[part] = chunk, read
        else:
            codes[part, order], scale[part, order] = chunk, read
    return codes, scale


def _implied_scale(index: Tensor, row_scale: Tensor) -> Tensor:
    """UE8M0 scale that index and row scale stand for, clamped to a legal byte."""
    # frexp gives row_scale = 0.5 * 2^e, also for subnormals; the base is its log2 + 133.
    base = torch.frexp(row_scale.to(torch.float64)).exponent.to(torch.int32) - 1 + BASE_BIAS
    implied = base.unsqueeze(-1) + index.to(torch.int32) - MAX_SCALE_INDEX
    return implied.clamp(0, UE8M0_NAN - 1).to(torch.uint8)


def _no_exceptions(device: torch.device) -> BlockExceptions:
    block = torch.empty(0, dtype=torch.int64, device=device)
    return BlockExceptions(
        block,
        torch.empty(0, dtype=torch.uint8, device=device),
        block,
        torch.empty((0, MX_GROUP // 2), dtype=torch.uint8, device=device),
    )


def _find_exceptions(
    start: int, rows: RebasedRows, codes: Tensor, scale: Tensor
) -> BlockExceptions:
    implied = _implied_scale(rows.scale_index, rows.row_scale)
    scale_block = (implied != scale).flatten().nonzero().squeeze(1)
    first = start * scale.shape[1] * scale.shape[2]
    return BlockExceptions(
        scale_block + first,
        scale.flatten()[scale_block],
        rows.rescaled + first,
        codes.reshape(-1, MX_GROUP // 2)[rows.rescaled],
    )


def _concat_exceptions(parts: list[BlockExceptions]) -> BlockExceptions:
    return BlockExceptions(
        torch.cat([p.scale_block for p in parts]),
        torch.cat([p.scale for p in parts]),
        torch.cat([p.code_block for p in parts]),
        torch.cat([p.codes for p in parts]),
    )


def _apply_exceptions(exceptions: BlockExceptions, codes: Tensor, scale: Tensor) -> None:
    scale.view(-1)[exceptions.scale_block] = exceptions.scale
    codes.view(-1, MX_GROUP // 2)[exceptions.code_block] = exceptions.codes
