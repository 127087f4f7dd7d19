"""What is wrong with tensors: of a call, after its cheap checks have failed, or of the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gcmoe.protocol import WorkspaceShape

ALIGNMENT = 16
MAP_ALIGNMENT = 32  # of a tensor map over 4-bit elements
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


def overlaps(first: Tensor, second: Tensor) -> bool:
    """Whether two contiguous tensors of a device share a byte."""
    a, b = first.data_ptr(), second.data_ptr()
    return a < b + second.nbytes and b < a + first.nbytes


def require_output(
    out: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    shape: tuple[int, int],
    max_tokens: int,
    device: torch.device,
) -> None:
    """``out`` fits a call whose inputs have passed; cheap comparisons, unless one fails.

    Raises:
        TypeError, ValueError: it does not; says why.
    """
    if not (
        isinstance(out, Tensor)
        and out.dtype is torch.bfloat16
        and out.shape == shape
        and out.is_contiguous()
        and out.get_device() == topk_ids.get_device()
        and not out.data_ptr() % ALIGNMENT
    ):
        raise tensor_error("out", out, BF16, shape, max_tokens, device)
    for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if overlaps(out, tensor):
            raise ValueError(f"out overlaps {name}: it may share memory with x only")


def require_weights(
    packed: Any,
    kind: type[Any],
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    shape: WorkspaceShape,
    device: torch.device,
) -> None:
    """Packed weights fit a workspace and the kernels.

    Args:
        kind: the record that ``pack`` returns for the family of the kernels.
        layout: dtype and shape, by name, of the tensors of packed weights of this workspace.

    Raises:
        TypeError: it is no such record, or a field is not a tensor.
        ValueError: they do not fit; names the field or the numbers.
    """
    arch, alignment = ("sm100", MAP_ALIGNMENT) if shape.has_atoms else ("sm90", ALIGNMENT)
    if not isinstance(packed, kind):
        raise TypeError(
            f"packed must be {kind.__name__}, as gcmoe.pack(..., arch={arch!r}) returns, got "
            f"{type(packed).__name__}"
        )
    if packed.arch != arch:
        raise ValueError(f"packed.arch is {packed.arch!r}, must be {arch!r}")
    for name, (_, wanted_shape) in layout.items():
        tensor = getattr(packed, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"packed.{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != len(wanted_shape):
            raise ValueError(
                f"packed.{name} has shape {list(tensor.shape)}, must be {list(wanted_shape)}"
            )
    found = packed.num_experts, packed.hidden, packed.intermediate
    wanted = shape.local_experts, shape.hidden, shape.intermediate
    if found != wanted:
        raise ValueError(
            f"packed weights have (EL, H, I) = {found}, this layer {wanted} on each of "
            f"{shape.num_ranks} ranks"
        )
    for name, (dtype, wanted_shape) in layout.items():
        tensor = getattr(packed, name)
        if tensor.dtype != dtype:
            raise ValueError(f"packed.{name} has dtype {tensor.dtype}, must be {dtype}")
        if tensor.shape != wanted_shape:
            raise ValueError(
                f"packed.{name} has shape {list(tensor.shape)}, must be {list(wanted_shape)}"
            )
        if tensor.device != device:
            raise ValueError(f"packed.{name} is on {tensor.device}, must be on {device}")
        if not tensor.is_contiguous() or tensor.data_ptr() % alignment:
            raise ValueError(f"packed.{name} must be contiguous and aligned to {alignment} bytes")
