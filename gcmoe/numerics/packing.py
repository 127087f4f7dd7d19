"""Packing weights for the kernels of an architecture, and back."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.numerics.packing_sm90 import PackedWeights, pack_sm90, packed_layout, unpack_sm90
from gcmoe.numerics.packing_sm100 import (
    PackedWeightsSm100,
    pack_sm100,
    packed_layout_sm100,
    unpack_sm100,
)
from gcmoe.numerics.weights import ExpertWeights

ARCHS = ("sm90", "sm100")
"""Accepted values of ``arch``."""

Packed = PackedWeights | PackedWeightsSm100
"""What :func:`pack` returns."""

DEFAULT_MAX_RESCALE_ERROR = 2.0**-10


# fmt: off
@overload
def pack(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, config: MoEConfig, *,
    arch: Literal["sm90"] = ..., max_rescale_error: float = ..., out: PackedWeights | None = ...,
) -> PackedWeights: ...
@overload
def pack(
    w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, config: MoEConfig, *,
    arch: Literal["sm100"], max_rescale_error: float = ..., out: PackedWeightsSm100 | None = ...,
) -> PackedWeightsSm100: ...
# fmt: on
def pack(
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    config: MoEConfig,
    *,
    arch: str = "sm90",
    max_rescale_error: float = DEFAULT_MAX_RESCALE_ERROR,
    out: Packed | None = None,
) -> Packed:
    """Pack one rank's weights for the kernels, on the device that they are on.

    Works through the experts in steps of about 16 MiB, so temporaries stay small. It waits for
    the device and must not run inside a graph capture.

    Args:
        w13, w13_scale, w2, w2_scale: as :class:`ExpertWeights`, in any storage type that
            :meth:`ExpertWeights.from_checkpoint` accepts. EL = ``w13.shape[0]`` is free.
        config: gives H and I.
        arch: "sm90", or "sm100" for :func:`gcmoe.numerics.packing_sm100.pack_sm100`.
        max_rescale_error: bound on the error of a block below the exact range, relative to its
            row's largest magnitude; 0 means exact or an error. "sm100" is always exact.
        out: pack into this storage instead of new tensors, so that captured graphs see the new
            weights. Left untouched when an error is raised.

    Returns:
        The packed weights; with ``out``, a new record around the same four tensors.

    Raises:
        TypeError: a dtype that is not accepted, or ``out`` is of the other ``arch``.
        ValueError: ``arch`` is unknown, a shape does not fit ``config``, or ``out`` does not fit.
        WeightFormatError: a scale is NaN (255), or a block exceeds ``max_rescale_error``.
    """
    _check_arch(arch)
    if not max_rescale_error >= 0.0:
        raise ValueError(f"max_rescale_error = {max_rescale_error!r}: must be at least 0")
    weights = (w13, w13_scale, w2, w2_scale)
    if arch == "sm100":
        if isinstance(out, PackedWeights):
            raise TypeError("out must be PackedWeightsSm100 for sm100, got PackedWeights")
        return pack_sm100(*weights, config, out=out)
    if isinstance(out, PackedWeightsSm100):
        raise TypeError("out must be PackedWeights for sm90, got PackedWeightsSm100")
    return pack_sm90(*weights, config, max_rescale_error=max_rescale_error, out=out)


def packed_form(
    arch: str, experts: int, hidden: int, intermediate: int
) -> tuple[type[Packed], dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """What :func:`pack` makes for an architecture.

    Returns:
        The record's type, and dtype and shape of the tensors that kernels read, by name.

    Raises:
        ValueError: ``arch`` is unknown.
    """
    _check_arch(arch)
    if arch == "sm100":
        return PackedWeightsSm100, packed_layout_sm100(experts, hidden, intermediate)
    return PackedWeights, packed_layout(experts, hidden, intermediate)


def unpack(packed: Packed) -> ExpertWeights:
    """The checkpoint tensors that the packer was given, byte for byte, as uint8.

    Args:
        packed: result of :func:`pack` or :func:`gcmoe.numerics.packing_sm100.pack_sm100`.

    Returns:
        New tensors on the same device.
    """
    if isinstance(packed, PackedWeightsSm100):
        return unpack_sm100(packed)
    _check_arch(packed.arch)
    return unpack_sm90(packed)


def _check_arch(arch: str) -> None:
    if arch not in ARCHS:
        raise ValueError(f"arch = {arch!r}: must be one of {', '.join(map(repr, ARCHS))}")
