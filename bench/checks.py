"""Results of the timed layers against the oracle, before any time counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case
from bench.data import Inputs, device_family
from gcmoe.numerics import ExpertWeights, Packed, compare, moe_reference, unpack
from gcmoe.runtime.launch import WEIGHTS

CHECK_TOKENS, SAMPLE_TOKENS = 64, 1
"""Tokens checked of the first layer, and of each other one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a result counts as right, token by token against the oracle.

    Args:
        relative_l2: bound that few tokens may exceed.
        share_beyond: share of the tokens that may exceed it.
        worst_relative_l2: bound that none may exceed.
        cosine: smallest cosine.
    """

    relative_l2: float
    share_beyond: float
    worst_relative_l2: float
    cosine: float

    def __str__(self) -> str:
        return (
            f"per token against the oracle: relative L2 above {self.relative_l2} in at most "
            f"{self.share_beyond:.0%} of the tokens and above {self.worst_relative_l2} in none, "
            f"cosine at least {self.cosine}; up to {CHECK_TOKENS} tokens of the first layer, "
            f"{SAMPLE_TOKENS} of each other one"
        )


SAME_ROUNDING = Rule(1e-2, 0.05, 3e-2, 0.999)
"""The oracle's rounding steps. A token beyond 1e-2 would have to be explained by codes that moved,
which needs the stages of the call: the tests do that. Here few may lie beyond, and none far."""
OWN_ROUNDING = Rule(0.1, 0.0, 0.1, 0.99)
"""FP8 activations rounded by scales of its own: each side errs by about 0.043."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The oracle's rows of one layer.

    Attributes:
        layer: number in the graph.
        tokens: their numbers.
        y: bf16 [len(tokens), H].
    """

    layer: int
    tokens: list[int]
    y: Tensor


def sampled_tokens(layer: int, num_tokens: int) -> list[int]:
    """Up to 64 tokens of the first layer and one of each other one, spread over the batch."""
    count = min(num_tokens, CHECK_TOKENS if layer == 0 else SAMPLE_TOKENS)
    return sorted({(layer + t * num_tokens // count) % num_tokens for t in range(count)})


def used_experts(case: Case, used: Tensor, packed_of: Callable[[int], Packed]) -> ExpertWeights:
    """The experts with these global ids, ascending, from the ranks that own them.

    Args:
        packed_of: weights of the layer by rank.
    """
    parts = []
    for rank in sorted(set((used // case.local_experts).tolist())):
        packed = packed_of(rank)
        local = used[used // case.local_experts == rank] - rank * case.local_experts
        tensors = {name: getattr(packed, name)[local] for name in WEIGHTS[packed.arch]}
        parts.append(unpack(replace(packed, **tensors)))
    names = ("w13", "w13_scale", "w2", "w2_scale")
    return ExpertWeights(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def make_references(
    case: Case, inputs: list[Inputs], packed_of: Callable[[int, int], Packed]
) -> list[Reference]:
    """The oracle on sampled tokens of every layer; it sees their experts only.

    Args:
        packed_of: weights by layer and rank.
    """
    found = []
    for n, one in enumerate(inputs):
        tokens = sampled_tokens(n, len(one.ids))
        ids = one.ids[tokens].long()
        used = ids.unique()
        experts = used_experts(case, used, partial(packed_of, n))
        small = replace(case.config(), num_experts=max(len(used), 1))
        local = torch.searchsorted(used, ids)
        routing = local, one.weights[tokens]
        trace = moe_reference(one.source[tokens], *routing, experts, small, device_family())
        found.append(Reference(n, tokens, trace.y))
    return found


def judge(
    references: list[Reference], result: Callable[[int], Tensor], rule: Rule
) -> dict[str, Any]:
    """The columns of a row that say whether the results are right.

    Args:
        result: y, bf16 [T, H], of a layer.
    """
    found = []
    finite = True
    for reference in references:
        y = result(reference.layer)
        finite = finite and bool(y.isfinite().all())
        rows = y[reference.tokens]
        found += [
            compare(rows[t : t + 1], reference.y[t : t + 1]) for t in range(len(reference.tokens))
        ]
    cosines, errors = [c.cosine for c in found], [c.relative_l2 for c in found]
    finite = finite and all(c == c for c in cosines)
    beyond = sum(not e <= rule.relative_l2 for e in errors)
    good = (
        beyond <= rule.share_beyond * len(found)
        and all(c >= rule.cosine for c in cosines)
        and all(e <= rule.worst_relative_l2 for e in errors)
    )
    return {
        "correct": finite and good,
        "finite": finite,
        "cosine": min(cosines) if finite else None,
        "relative_l2": max(errors) if finite else None,
        "check": {"rule": str(rule), "tokens": len(found), "beyond": beyond},
    }
