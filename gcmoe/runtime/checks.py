"""What is wrong with tensors: of a call, after its cheap checks have failed, or of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gcmoe.protocol import WorkspaceShape

ALIGNMENT = 16
BF16 = (torch.bfloat16,)
INTEGERS = (torch.int32, torch.int64)
FP32 = (torch.float32,)


def tensor_error(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, int],
    max_tokens: int,
    device: torch.device,
) -> Exception:
    """Why a tensor of a call does not fit; an error with an empty text if it does.

    Args:
        shape: rows and columns; rows None for any number up to ``max_tokens``.
    """
    if not isinstance(tensor, Tensor):
        return TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        return TypeError(f"{name} has dtype {tensor.dtype}, must be {allowed}")
    rows, columns = shape
    wanted = f"[{'T' if rows is None else rows}, {columns}]"
    if tensor.dim() != 2 or tensor.shape[1] != columns or rows not in (None, tensor.shape[0]):
        return ValueError(f"{name} has shape {list(tensor.shape)}, must be {wanted}")
    if tensor.shape[0] > max_tokens:
        return ValueError(f"{name} has {tensor.shape[0]} tokens, at most max_tokens = {max_tokens}")
    if tensor.device != device:
        return ValueError(f"{name} is on {tensor.device}, must be on {device}")
    if not tensor.is_contiguous():
        return ValueError(
            f"{name} has strides {tuple(tensor.stride())}, must be contiguous: call .contiguous()"
        )
    if dtypes == BF16 and tensor.data_ptr() % ALIGNMENT:
        return ValueError(f"{name} lies at {tensor.data_ptr():#x}, not a multiple of {ALIGNMENT}")
    return ValueError("")


def argument_error(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    hidden: int,
    top_k: int,
    max_tokens: int,
    device: torch.device,
) -> Exception:
    """The first thing wrong with the inputs of a call."""
    error = tensor_error("x", x, BF16, (None, hidden), max_tokens, device)
    if str(error):
        return error
    shape = (x.shape[0], top_k)
    error = tensor_error("topk_ids", topk_ids, INTEGERS, shape, max_tokens, device)
    if str(error):
        return error
    return tensor_error("topk_weights", topk_weights, FP32, shape, max_tokens, device)


def require_weights(packed: Any, shape: WorkspaceShape, device: torch.device) -> None:
    """Packed weights fit a workspace and the kernels.

    Raises:
        ValueError: they do not; names the tensor or the numbers.
    """
    found = packed.num_experts, packed.hidden, packed.intermediate
    wanted = shape.local_experts, shape.hidden, shape.intermediate
    if found != wanted:
        raise ValueError(
            f"packed weights have (EL, H, I) = {found}, this layer {wanted} on each of "
            f"{shape.num_ranks} ranks"
        )
    for name in ("w13", "w13_row_scale", "w2", "w2_row_scale"):
        tensor: Tensor = getattr(packed, name)
        if tensor.device != device:
            raise ValueError(f"packed.{name} is on {tensor.device}, must be on {device}")
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"packed.{name} must be contiguous and aligned to 16 bytes")
