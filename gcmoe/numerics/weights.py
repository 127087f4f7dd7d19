"""Weights of experts as a checkpoint holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gcmoe.errors import WeightFormatError
from gcmoe.numerics.formats import MX_GROUP, UE8M0_NAN, require_uint8

TILE_ROWS = 256
"""Rows of a tile of packed weights, on every architecture."""


def _as_bytes(name: str, x: Tensor, accepted: tuple[torch.dtype, ...]) -> Tensor:
    if x.dtype not in accepted:
        names = ", ".join(str(d) for d in accepted)
        raise TypeError(f"{name} has dtype {x.dtype}, accepted are {names}")
    return x if x.dtype == torch.uint8 else x.view(torch.uint8)


def _code_bytes(name: str, x: Tensor) -> Tensor:
    return _as_bytes(name, x, (torch.uint8, torch.int8, torch.float4_e2m1fn_x2))


def _scale_bytes(name: str, x: Tensor) -> Tensor:
    return _as_bytes(name, x, (torch.uint8, torch.float8_e8m0fnu))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """MXFP4 weights of E experts (all of them, or one rank's) as a checkpoint holds them.

    Args:
        w13: uint8 [E, 2I, H/2], gate rows 0..I-1, then up rows; two E2M1 codes a byte, the low
            nibble is the even column.
        w13_scale: uint8 [E, 2I, H/32], UE8M0.
        w2: uint8 [E, H, I/2].
        w2_scale: uint8 [E, H, I/32], UE8M0.

    Raises:
        TypeError: a tensor is not uint8 (:meth:`from_checkpoint` accepts more).
        ValueError: shapes or devices do not belong together.
    """

    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor

    def __post_init__(self) -> None:
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            tensor = getattr(self, name)
            require_uint8(name, tensor)
            if tensor.dim() != 3:
                raise ValueError(f"{name} must have 3 dimensions, got shape {tuple(tensor.shape)}")
            if tensor.device != self.w13.device:
                raise ValueError(f"{name} is on {tensor.device}, w13 on {self.w13.device}")
        experts, h, i = self.num_experts, self.hidden, self.intermediate
        check_shapes(self, experts, h, i, f"H = {h} and I = {i} (from w2)")

    @property
    def num_experts(self) -> int:
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    @property
    def intermediate(self) -> int:
        return 2 * self.w2.shape[2]

    @classmethod
    def from_checkpoint(
        cls,
        *,
        w2: Tensor,
        w2_scale: Tensor,
        w13: Tensor | None = None,
        w13_scale: Tensor | None = None,
        w1: Tensor | None = None,
        w1_scale: Tensor | None = None,
        w3: Tensor | None = None,
        w3_scale: Tensor | None = None,
    ) -> ExpertWeights:
        """Build from the storage types that checkpoints use; bytes are never converted.

        Give either ``w13`` and ``w13_scale``, or ``w1`` (gate, [E, I, H/2]) and ``w3`` (up) with
        their scales, which are then concatenated along the rows (a copy).

        Args:
            w2, w13, w1, w3: uint8, int8 or float4_e2m1fn_x2, two codes a byte.
            w2_scale, w13_scale, w1_scale, w3_scale: uint8 or float8_e8m0fnu.

        Raises:
            TypeError: another dtype, or neither or both of the two forms.
            ValueError: shapes do not belong together.
        """
        fused = (w13, w13_scale)
        split = (w1, w1_scale, w3, w3_scale)
        if w13 is not None and w13_scale is not None and all(x is None for x in split):
            codes = _code_bytes("w13", w13)
            scale = _scale_bytes("w13_scale", w13_scale)
        elif (
            w1 is not None
            and w1_scale is not None
            and w3 is not None
            and w3_scale is not None
            and all(x is None for x in fused)
        ):
            if w1.shape != w3.shape or w1_scale.shape != w3_scale.shape:
                raise ValueError(
                    f"w1 {tuple(w1.shape)} and w3 {tuple(w3.shape)}, and their scales "
                    f"{tuple(w1_scale.shape)} and {tuple(w3_scale.shape)}, must have equal shapes"
                )
            codes = torch.cat((_code_bytes("w1", w1), _code_bytes("w3", w3)), dim=1)
            scale = torch.cat(
                (_scale_bytes("w1_scale", w1_scale), _scale_bytes("w3_scale", w3_scale)), dim=1
            )
        else:
            raise TypeError("give either w13 and w13_scale, or w1, w1_scale, w3 and w3_scale")
        return cls(codes, scale, _code_bytes("w2", w2), _scale_bytes("w2_scale", w2_scale))


def check_shapes(weights: ExpertWeights, experts: int, h: int, i: int, source: str) -> None:
    expected = {
        "w13": (experts, 2 * i, h // 2),
        "w13_scale": (experts, 2 * i, h // MX_GROUP),
        "w2": (experts, h, i // 2),
        "w2_scale": (experts, h, i // MX_GROUP),
    }
    for name, shape in expected.items():
        found = tuple(getattr(weights, name).shape)
        if found != shape:
            raise ValueError(f"{name} has shape {found}, but {source} require {shape}")
    if experts < 1:
        raise ValueError(f"the weights hold {experts} experts, at least 1 is required")


def reject_nan_scales(name: str, scale: Tensor) -> None:
    nan = scale == UE8M0_NAN
    if bool(nan.any()):
        expert, row, block = (int(n) for n in nan.nonzero()[0])
        raise WeightFormatError(
            f"{name}_scale: {int(nan.sum())} scales are 255 (NaN), first at expert {expert}, "
            f"row {row}, block {block} (columns {MX_GROUP * block}..{MX_GROUP * block + 31})"
        )
