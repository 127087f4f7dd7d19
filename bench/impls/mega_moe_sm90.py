"""Mega MoE for SM90 of the wheel ``sgl-deep-gemm``: FP8 weights, whole layer in two launches.

Its weights are made of the same MXFP4 weights: a block of 128 x 128 gets one power-of-two scale,
and E2M1 times the rest of a scale is an exact E4M3 for scales within 14 octaves. BF16 tokens go
through its own pre-dispatch kernel, as in the serving engine that ships it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bench.cases import Case
from bench.checks import OWN_ROUNDING
from bench.data import Inputs
from bench.impls.base import Impl, LayerWeights, Session, missing_package
from bench.impls.fp8 import block_scaled
from bench.world import World, group_of_one

PACKAGES = {"sgl-deep-gemm": "0.1.5.post1", "apache-tvm-ffi": "0.1.11"}
VARIANT = "layer"
TOKEN_GRANULE = 384
"""It rounds a capacity up to a multiple of this: smaller ones give the same kernels."""


class MegaSession(Session):
    """The layers of a case over one symmetric buffer."""

    rule = OWN_ROUNDING

    def __init__(self, case: Case, weights: list[Any], inputs: list[Inputs], buffer: Any) -> None:
        self._weights, self._inputs, self._buffer = weights, inputs, buffer
        self._tokens = case.tokens
        self._clamp = case.share.clamp

    def layer(self, n: int) -> None:
        import deep_gemm

        one, buffer, t = self._inputs[n], self._buffer, self._tokens
        deep_gemm.mega_moe_pre_dispatch_sm90(
            one.x,
            one.ids,
            one.weights,
            buffer.x,
            buffer.x_sf,
            buffer.topk_idx,
            buffer.topk_weights,
            t,
        )
        l1, l2 = self._weights[n]
        deep_gemm.fp8_mega_moe(one.y, l1, l2, buffer, activation_clamp=self._clamp)

    def result(self, n: int) -> Tensor:
        return self._inputs[n].y

    def clear(self) -> None:
        for one in self._inputs:
            one.y.zero_()

    def facts(self) -> dict[str, Any]:
        return {"capacity": self._buffer.num_max_tokens_per_rank}


class MegaMoESm90(Impl):
    """Adapter of ``deep_gemm.fp8_mega_moe``."""

    name = "mega_moe_sm90"
    install = "pip install " + " ".join(f"{name}=={v}" for name, v in PACKAGES.items())

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Any] = {}

    def absent(self) -> str:
        wrong = [missing_package(name, version) for name, version in PACKAGES.items()]
        return ", ".join(text for text in wrong if text)

    def unfit(self, case: Case, variant: str = "") -> str:
        return ""

    def variants(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        return (VARIANT,)

    def bytes_per_layer(self, case: Case) -> float:
        return case.local_experts * 3 * case.share.hidden * case.share.intermediate

    def convert(self, case: Case, weights: LayerWeights) -> Any:
        import deep_gemm

        experts = weights.experts
        return deep_gemm.transform_weights_for_mega_moe_sm90(
            block_scaled(experts.w13, experts.w13_scale),
            block_scaled(experts.w2, experts.w2_scale),
        )

    def open(
        self, case: Case, variant: str, weights: list[Any], inputs: list[Inputs], world: World
    ) -> MegaSession:
        import deep_gemm

        capacity = -(-case.tokens // TOKEN_GRANULE) * TOKEN_GRANULE
        key = case.model, capacity
        if key not in self._buffers:
            config = case.config()
            self._buffers[key] = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
                world.group or group_of_one(),
                config.num_experts,
                capacity,
                config.top_k,
                config.hidden,
                config.intermediate,
            )
        return MegaSession(case, weights, inputs, self._buffers[key])

    def release(self) -> None:
        for buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()
