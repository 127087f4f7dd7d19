"""Humming's grouped W4A8 GEMMs of the package ``humming-kernels``: the GEMM-only rival.

Per layer: the grouped GEMM of W1, SwiGLU with quantisation, the grouped GEMM of W2. Rows arrive
sorted by expert and quantised; nothing is sent, nothing combined. MXFP4 weights as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case
from bench.checks import OWN_ROUNDING
from bench.data import Inputs
from bench.impls.base import Impl, LayerWeights, Session, missing_package
from bench.impls.humming_compile import compile_ahead, make_ready, require_compiled
from bench.impls.humming_configs import COMPUTE, GROUPS, layer_configs, swiglu_text, tuning
from bench.world import World

PACKAGES = {"humming-kernels": "0.1.19"}
MODULES = ("triton", "jinja2", "filelock", "packaging")
NUM_LOCKS = 2048


@dataclass
class Gemm:
    """One grouped GEMM with weights."""

    config: Any
    weight: Tensor
    weight_scale: Tensor
    weight_scale_2: Tensor | None
    locks: Tensor

    def __call__(
        self, rows: Tensor, scale: Tensor, layout: Tensor, out: Tensor, chosen: dict[str, Any]
    ) -> None:
        from humming.forward import humming_forward

        humming_forward(
            self.config,
            inputs=rows,
            weight=self.weight,
            weight_scale=self.weight_scale,
            weight_scale_2=self.weight_scale_2,
            outputs=out,
            input_scale=scale,
            expert_layout=layout,
            locks=self.locks,
            compute_config=COMPUTE,
            tuning_config=chosen,
        )


def make_gemm(config: Any, codes: Tensor, scale: Tensor) -> Gemm:
    """Transform MXFP4 weights: uint8 [E, N, K/2] and [E, N, K/32]. They are copied first."""
    from humming.transform import transform_humming_tensors

    tensors = transform_humming_tensors(
        config,
        {
            "weight": codes.clone().view(torch.int32),
            "weight_scale": scale.clone().view(torch.float8_e8m0fnu),
        },
    )
    return Gemm(
        config,
        tensors["weight"],
        tensors["weight_scale"],
        tensors.get("weight_scale_2"),
        torch.zeros(NUM_LOCKS, dtype=torch.int32, device=codes.device),
    )


@dataclass
class Rows:
    """Rows of one layer, sorted by expert, and the buffers between its kernels."""

    slot_of_row: Tensor
    layout: Tensor
    x: Tensor
    x_scale: Tensor
    gate_up: Tensor
    y: Tensor
    a: Tensor | None = None
    a_group_scale: Tensor | None = None
    a_token_scale: Tensor | None = None


class HummingSession(Session):
    """Two GEMMs and the activation between them, for each layer."""

    rule = OWN_ROUNDING

    def __init__(self, case: Case, weights: list[Any], inputs: list[Inputs]) -> None:
        self._inputs, self._weights = inputs, weights
        self._activation = swiglu_text(case.share.clamp)
        self._chosen = [tuning(gemm.config, case) for gemm in weights[0]]
        for gemm, chosen in zip(weights[0], self._chosen, strict=True):
            require_compiled(gemm.config, chosen)
        self._rows = [
            self._sort(case, one, pair[0].config) for one, pair in zip(inputs, weights, strict=True)
        ]

    def _sort(self, case: Case, one: Inputs, config: Any) -> Rows:
        from humming.forward import may_process_input

        k, h, i = case.share.top_k, case.share.hidden, case.share.intermediate
        flat = one.ids.flatten().long()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=case.local_experts)
        layout = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        rows = one.source[order // k].contiguous()
        x, group_scale, token_scale = may_process_input(config, rows)

        def empty(width: int) -> Tensor:
            return torch.empty((len(flat), width), dtype=torch.bfloat16, device=flat.device)

        scale = token_scale if group_scale is None else group_scale
        return Rows(order, layout, x, scale, empty(2 * i), empty(h))

    def layer(self, n: int) -> None:
        from humming.forward import may_process_input

        rows, (w1, w2) = self._rows[n], self._weights[n]
        w1(rows.x, rows.x_scale, rows.layout, rows.gate_up, self._chosen[0])
        rows.a, rows.a_group_scale, rows.a_token_scale = may_process_input(
            w2.config,
            rows.gate_up,
            outputs=rows.a,
            group_scales=rows.a_group_scale,
            token_scales=rows.a_token_scale,
            activation_type="binary_split",
            activation_impl=self._activation,
        )
        scale = rows.a_token_scale if rows.a_group_scale is None else rows.a_group_scale
        w2(rows.a, scale, rows.layout, rows.y, self._chosen[1])

    def result(self, n: int) -> Tensor:
        rows, one = self._rows[n], self._inputs[n]
        by_slot = torch.empty_like(rows.y)
        by_slot[rows.slot_of_row] = rows.y
        y = by_slot.view(*one.ids.shape, -1).float() * one.weights[..., None]
        return y.sum(dim=1).bfloat16()

    def clear(self) -> None:
        for rows in self._rows:
            rows.gate_up.zero_()
            rows.y.zero_()

    def facts(self) -> dict[str, Any]:
        return {"tuning": self._chosen, "covers": "GEMMs and SwiGLU only"}


class HummingW4A8(Impl):
    """Adapter of ``humming_gemm`` for rows sorted by expert."""

    name = "humming_w4a8"
    install = "pip install 'humming-kernels[cu13]==0.1.19'"
    whole_layer = False

    def absent(self) -> str:
        wrong = [missing_package(name, version) for name, version in PACKAGES.items()]
        if torch.cuda.is_available():  # it compiles without
            wrong += [f"{m} is not installed" for m in MODULES if find_spec(m) is None]
        return ", ".join(text for text in wrong if text)

    def unfit(self, case: Case, variant: str = "") -> str:
        return "it sends nothing, so it runs on one rank only" if case.ranks > 1 else ""

    def variants(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(GROUPS)

    def bytes_per_layer(self, case: Case) -> float:
        return len(GROUPS) * case.local_experts * case.expert_bytes

    def prepare(self, cases: list[Case], limit_s: float) -> str:
        return compile_ahead(cases, limit_s)

    def convert(self, case: Case, weights: LayerWeights) -> dict[str, tuple[Gemm, Gemm]]:
        make_ready()
        experts = weights.experts
        found = {}
        for variant in GROUPS:
            c1, c2 = layer_configs(case, variant)
            found[variant] = (
                make_gemm(c1, experts.w13, experts.w13_scale),
                make_gemm(c2, experts.w2, experts.w2_scale),
            )
        return found

    def open(
        self, case: Case, variant: str, weights: list[Any], inputs: list[Inputs], world: World
    ) -> HummingSession:
        return HummingSession(case, [layer[variant] for layer in weights], inputs)
