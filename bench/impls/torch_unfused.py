"""The unfused chain, from parts that torch has: what one writes without this package.

Under one graph: quantise by token, gather all ranks' tokens (NCCL), sort rows by expert, grouped
FP8 GEMM, SwiGLU and quantisation, grouped FP8 GEMM, sum of a token's experts, reduce-scatter
(NCCL). With few ranks nearly every token has an expert on each of them, so the gather moves what an
all-to-all would. Weights are FP8 with one scale a row, made of the same MXFP4 weights exactly.

Variant ``eager`` runs the parts as they are; ``compiled`` lets torch.compile fuse what surrounds
the GEMMs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import Case
from bench.checks import OWN_ROUNDING
from bench.data import Inputs
from bench.impls.base import Impl, LayerWeights, Session
from bench.impls.fp8 import row_scaled
from bench.world import World

E4M3_MAX = 448.0
TINY = 1e-12
VARIANTS = ("eager", "compiled")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [n, K] and fp32 [n, 1]: one scale a row, of its largest magnitude."""
    scale = x.abs().amax(dim=1, keepdim=True).float().clamp(min=TINY) / E4M3_MAX
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@dataclass(frozen=True)
class Routing:
    """Rows sorted by local expert; rows of other ranks' experts come last.

    Attributes:
        order: int64 [n * k], the flat slot of each row.
        offsets: int32 [EL], where the rows of each expert end.
        is_local: bool [n, k].
    """

    order: Tensor
    offsets: Tensor
    is_local: Tensor


def route(ids: Tensor, first: int, experts: int) -> Routing:
    """Sort slots by expert.

    Args:
        ids: int32 [n, k], global.
        first: global id of the first local expert.
        experts: EL.
    """
    local = ids - first
    is_local = (local >= 0) & (local < experts)
    keys = torch.where(is_local, local, experts).flatten()
    ordered, order = keys.sort(stable=True)
    numbers = torch.arange(experts, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return Routing(order, ends, is_local)


def activate(gate_up: Tensor, weights: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """SwiGLU times the routing weight, quantised.

    Args:
        gate_up: bf16 [n, 2I].
        weights: fp32 [n].
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return quantize_rows(torch.nn.functional.silu(gate) * up * weights[:, None])


def combine(rows: Tensor, order: Tensor, is_local: Tensor | None, top_k: int, out: Tensor) -> None:
    """out = the sum over the slots of each token whose expert is local, added in FP32.

    Args:
        rows: bf16 [n * k, H], as sorted.
        order: the flat slot of each row.
        is_local: bool [n, k]; None if all are.
        out: bf16 [n, H].
    """
    by_slot = torch.empty_like(rows)
    by_slot[order] = rows
    slots = by_slot.view(-1, top_k, rows.shape[1])
    if is_local is not None:
        # Rows of other ranks' experts were never written.
        slots = slots.masked_fill(~is_local[..., None], 0.0)
    torch.sum(slots, dim=1, out=out)


def grouped(rows: Tensor, scale: Tensor, weights: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    """bf16 [n, N]: rows [n, K] times the [N, K] weights of their expert."""
    codes, row_scale = weights
    return torch._scaled_grouped_mm(
        rows,
        codes.transpose(-2, -1),
        scale.flatten(),
        row_scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class TorchSession(Session):
    """The chain for each layer."""

    rule = OWN_ROUNDING

    def __init__(
        self, case: Case, variant: str, weights: list[Any], inputs: list[Inputs], world: World
    ) -> None:
        self._case, self._weights, self._inputs, self._world = case, weights, inputs, world
        self._first = world.rank * case.local_experts
        fuse: Callable[[Any], Any] = torch.compile if variant == "compiled" else lambda part: part
        self._quantize = fuse(quantize_rows)
        self._activate, self._combine = fuse(activate), fuse(combine)

    def _gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, rank by rank."""
        if self._world.group is None:
            return part
        whole = part.new_empty((self._world.size * part.shape[0], *part.shape[1:]))
        # NCCL knows no FP8: bytes are bytes.
        raw = part.dtype if part.dtype != torch.float8_e4m3fn else torch.uint8
        dist.all_gather_into_tensor(whole.view(raw), part.view(raw), group=self._world.group)
        return whole

    def layer(self, n: int) -> None:
        one, case = self._inputs[n], self._case
        codes, scale = (self._gather(part) for part in self._quantize(one.x))
        ids, weights = self._gather(one.ids), self._gather(one.weights)
        routing = route(ids, self._first, case.local_experts)
        token = routing.order // case.share.top_k
        w13, w2 = self._weights[n]
        gate_up = grouped(codes[token], scale[token], w13, routing.offsets)
        a, a_scale = self._activate(gate_up, weights.flatten()[routing.order], case.share.clamp)
        rows = grouped(a, a_scale, w2, routing.offsets)
        k, is_local = case.share.top_k, routing.is_local
        if self._world.group is None:
            self._combine(rows, routing.order, is_local if case.ranks > 1 else None, k, one.y)
        else:
            y = one.y.new_empty((len(ids), one.y.shape[1]))
            self._combine(rows, routing.order, is_local, k, y)
            dist.reduce_scatter_tensor(one.y, y, group=self._world.group)

    def result(self, n: int) -> Tensor:
        return self._inputs[n].y

    def clear(self) -> None:
        for one in self._inputs:
            one.y.zero_()


class TorchUnfused(Impl):
    """Adapter of the chain."""

    name = "torch_unfused"
    install = "needs torch only"

    def absent(self) -> str:
        has = hasattr(torch, "_scaled_grouped_mm")
        return "" if has else f"torch {torch.__version__} has no grouped FP8 GEMM"

    def unfit(self, case: Case, variant: str = "") -> str:
        return ""

    def variants(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        return VARIANTS

    def bytes_per_layer(self, case: Case) -> float:
        return case.local_experts * 3 * case.share.hidden * case.share.intermediate

    def convert(self, case: Case, weights: LayerWeights) -> Any:
        experts = weights.experts
        return (
            row_scaled(experts.w13, experts.w13_scale),
            row_scaled(experts.w2, experts.w2_scale),
        )

    def open(
        self, case: Case, variant: str, weights: list[Any], inputs: list[Inputs], world: World
    ) -> TorchSession:
        return TorchSession(case, variant, weights, inputs, world)

    def release(self) -> None:
        """Forget what was compiled for this model's shapes: the compiler gives up after a few."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
