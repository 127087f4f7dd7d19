"""Packed weights for the Blackwell kernels: a permutation of the checkpoint's bytes.

The block-scaled MMA (``kind::mxf8f6f4``) takes E2M1 codes and UE8M0 scales as a checkpoint holds
them, so nothing is converted and nothing can be lost. The weights are the M operand, 128 rows at a
time; a work item has two such halves:

======  ==========================================  ===============================
matrix  item                                        halves
======  ==========================================  ===============================
w13     feature block fb: features 128fb..128fb+127  their gate rows, their up rows
w2      output rows 256n..256n+255                  the lower 128, the upper 128
======  ==========================================  ===============================

Per expert, item and window of 128 columns there are two contiguous pieces:

* codes, 16,384 bytes: ``[row of the item, 256][64 bytes]``, the low nibble is the even column. This
  is one box [128 columns, 256 rows] of a 2-D tensor map over 4-bit elements with rows of 64 bytes,
  which unpacks 16 codes to 16 bytes of shared memory.
* scales, 1,024 bytes: one atom of 512 bytes per half. Byte ``16 (r % 32) + 4 (r // 32) + k`` is the
  scale of row r of the half in columns 32k..32k+31 of the window, which is what a copy of
  32 x 128 bits brings to lane ``r % 32``, column ``r // 32``, byte k of tensor memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.numerics.formats import MX_GROUP, split_last
from gcmoe.numerics.layouts import WINDOW
from gcmoe.numerics.weights import TILE_ROWS, ExpertWeights, check_shapes, reject_nan_scales

ARCH = "sm100"

HALF_ROWS = 128
"""Weight rows of one MMA, two of which make an item."""

BURST_BYTES = TILE_ROWS * WINDOW // 2
"""Bytes of the codes of one item and window."""

ATOM_BYTES = HALF_ROWS * WINDOW // MX_GROUP
"""Bytes of the scales of one half and window."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeightsSm100:
    """Weights of the EL local experts in the order in which the Blackwell kernels stream them.

    What the bytes mean: :mod:`gcmoe.numerics.packing_sm100`. All tensors are contiguous.

    Attributes:
        w13: uint8 [EL, I/128, H/128, 16384], codes.
        w13_scale: uint8 [EL, I/128, H/128, 2, 512], UE8M0; half 0 is gate, half 1 is up.
        w2: uint8 [EL, H/256, I/128, 16384], codes.
        w2_scale: uint8 [EL, H/256, I/128, 2, 512], UE8M0.
        arch: the kernel family this layout is for.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    arch: str = ARCH

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w13.shape[2] * WINDOW

    @property
    def intermediate(self) -> int:
        return self.w13.shape[1] * HALF_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes that the kernels read: codes and scales of both matrices."""
        return sum(x.nbytes for x in (self.w13, self.w13_scale, self.w2, self.w2_scale))


def packed_layout_sm100(
    experts: int, hidden: int, intermediate: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of the tensors of :class:`PackedWeightsSm100`, by name."""
    w13 = (experts, intermediate // HALF_ROWS, hidden // WINDOW)
    w2 = (experts, hidden // TILE_ROWS, intermediate // WINDOW)
    return {
        "w13": (torch.uint8, (*w13, BURST_BYTES)),
        "w13_scale": (torch.uint8, (*w13, 2, ATOM_BYTES)),
        "w2": (torch.uint8, (*w2, BURST_BYTES)),
        "w2_scale": (torch.uint8, (*w2, 2, ATOM_BYTES)),
    }


def pack_sm100(
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    config: MoEConfig,
    *,
    out: PackedWeightsSm100 | None = None,
) -> PackedWeightsSm100:
    """Pack one rank's weights for the Blackwell kernels, on the device that they are on.

    It waits for the device and must not run inside a graph capture.

    Args:
        w13, w13_scale, w2, w2_scale: as :class:`ExpertWeights`, in any storage type that
            :meth:`ExpertWeights.from_checkpoint` accepts. EL = ``w13.shape[0]`` is free.
        config: gives H and I.
        out: pack into this storage instead of new tensors, so that captured graphs see the new
            weights. It must not share memory with the weights. Left untouched when an error is
            raised.

    Returns:
        The packed weights; with ``out``, a new record around the same four tensors.

    Raises:
        TypeError: a dtype that is not accepted, or ``out`` is no PackedWeightsSm100.
        ValueError: a shape does not fit ``config``, or ``out`` does not fit.
        WeightFormatError: a scale is NaN (255); names matrix, expert, row and block.
    """
    weights = ExpertWeights.from_checkpoint(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale)
    h, i = config.hidden, config.intermediate
    check_shapes(weights, weights.num_experts, h, i, f"hidden = {h} and intermediate = {i}")
    if out is not None and not isinstance(out, PackedWeightsSm100):
        raise TypeError(f"out must be PackedWeightsSm100 for sm100, got {type(out).__name__}")
    if out is not None:
        _check_out(out, weights)
    reject_nan_scales("w13", weights.w13_scale)
    reject_nan_scales("w2", weights.w2_scale)

    if out is None:
        device = weights.w13.device
        shapes = _packed_shapes(weights).values()
        new = tuple(torch.empty(shape, dtype=torch.uint8, device=device) for shape in shapes)
    else:
        new = (out.w13, out.w13_scale, out.w2, out.w2_scale)
    packed = PackedWeightsSm100(new[0], new[1], new[2], new[3])
    for target, source in _pairs(packed, weights):
        target.copy_(source)
    return packed


def unpack_sm100(packed: PackedWeightsSm100) -> ExpertWeights:
    """The checkpoint tensors that :func:`pack_sm100` was given, byte for byte, as uint8.

    Args:
        packed: result of :func:`pack_sm100`.

    Returns:
        New tensors on the same device.
    """
    experts, h, i = packed.num_experts, packed.hidden, packed.intermediate

    def empty(rows: int, last: int) -> Tensor:
        return torch.empty((experts, rows, last), dtype=torch.uint8, device=packed.w13.device)

    weights = ExpertWeights(
        empty(2 * i, h // 2), empty(2 * i, h // MX_GROUP), empty(h, i // 2), empty(h, i // MX_GROUP)
    )
    for source, target in _pairs(packed, weights):
        target.copy_(source)
    return weights


# ---- layout -------------------------------------------------------------------------------


def _pairs(packed: PackedWeightsSm100, weights: ExpertWeights) -> list[tuple[Tensor, Tensor]]:
    """(view of packed bytes, view of checkpoint bytes) of equal shapes, for all four tensors.

    Codes are [EL, item, window, half, 128 rows, 64], scales
    [EL, item, window, half, row % 32, row // 32, 4].
    """
    pairs = []
    for name in ("w13", "w2"):
        codes = _by_half(name, getattr(weights, name))
        scale = _by_half(name, getattr(weights, f"{name}_scale"))
        codes = split_last(codes, -1, WINDOW // 2).permute(0, 1, 4, 2, 3, 5)
        scale = torch.unflatten(split_last(scale, -1, WINDOW // MX_GROUP), 3, (4, 32))
        scale = scale.permute(0, 1, 5, 2, 4, 3, 6)
        burst, atoms = getattr(packed, name), getattr(packed, f"{name}_scale")
        pairs.append((split_last(burst, 2, HALF_ROWS, WINDOW // 2), codes))
        pairs.append((split_last(atoms, 32, 4, WINDOW // MX_GROUP), scale))
    return pairs


def _by_half(name: str, x: Tensor) -> Tensor:
    """View [EL, item, half, 128 rows, columns] of a checkpoint tensor [EL, rows, columns]."""
    if name == "w13":  # the gate rows of all items, then their up rows
        return torch.unflatten(x, 1, (2, -1, HALF_ROWS)).transpose(1, 2)
    return torch.unflatten(x, 1, (-1, 2, HALF_ROWS))


def _packed_shapes(weights: ExpertWeights) -> dict[str, tuple[int, ...]]:
    """Shapes of the four tensors, in the order of the record's attributes."""
    layout = packed_layout_sm100(weights.num_experts, weights.hidden, weights.intermediate)
    return {name: shape for name, (_, shape) in layout.items()}


def _check_out(out: PackedWeightsSm100, weights: ExpertWeights) -> None:
    for name, shape in _packed_shapes(weights).items():
        tensor: Tensor = getattr(out, name)
        if tensor.dtype != torch.uint8:
            raise TypeError(f"out.{name} must be torch.uint8, got {tensor.dtype}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"out.{name} has shape {tuple(tensor.shape)}, these weights need a contiguous "
                f"{shape}"
            )
        if tensor.device != weights.w13.device:
            raise ValueError(
                f"out.{name} is on {tensor.device}, the weights on {weights.w13.device}"
            )
