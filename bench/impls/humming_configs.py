"""What Humming is asked for, by layer, variant and rows: compiling and timing share it."""

from __future__ import annotations

from typing import Any

import torch

from bench.cases import Case

GROUPS = {"group128": 128, "per_token": 0}
"""Columns under one activation scale, by variant; 0 is a whole row."""
COMPUTE = {"gemm_type": "grouped_contiguous"}


def swiglu_text(clamp: float | None) -> str:
    """SwiGLU of gate ``a`` and up ``b`` as a C++ expression."""
    if clamp is None:
        return "a / (1.0f + __expf(-a)) * b"
    limit = f"{float(clamp)}f"
    gate, up = f"fminf(a, {limit})", f"fminf(fmaxf(b, -{limit}), {limit})"
    return f"{gate} / (1.0f + __expf(-{gate})) * {up}"


def layer_config(shape_n: int, shape_k: int, experts: int, group: int) -> Any:
    """Humming's description of one grouped GEMM: rows [n, K] times weights [experts, N, K]."""
    from humming import dtypes
    from humming.schema import HummingInputSchema
    from humming.schema.mxfp4 import Mxfp4WeightSchema
    from humming.transform import prepare_layer_config

    return prepare_layer_config(
        shape_n=shape_n,
        shape_k=shape_k,
        weight_schema=Mxfp4WeightSchema().to_humming_schema(torch.bfloat16),
        input_schema=HummingInputSchema(a_dtype=dtypes.float8e4m3, input_scale_group_size=group),
        num_experts=experts,
        torch_dtype=torch.bfloat16,
        device=torch.cuda.current_device(),
    )


def layer_configs(case: Case, variant: str) -> tuple[Any, Any]:
    """Those of W1 and of W2."""
    h, i = case.share.hidden, case.share.intermediate
    group, experts = GROUPS[variant], case.local_experts
    return layer_config(2 * i, h, experts, group), layer_config(h, i, experts, group)


def tuning(config: Any, case: Case) -> dict[str, Any]:
    """What Humming's own heuristic picks for the rows of the case."""
    from humming.tune import get_heuristics_config

    rows = case.tokens * case.share.top_k
    return dict(get_heuristics_config(config, shape_m=rows, **COMPUTE))
