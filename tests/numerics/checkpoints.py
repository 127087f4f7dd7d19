"""Random weights as a checkpoint holds them."""

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.numerics import ExpertWeights


def random_weights(
    cfg: MoEConfig, experts: int, seed: int = 0, low: int = 113, high: int = 127
) -> ExpertWeights:
    """Random codes; scale bytes uniform in [low, high]: the default spans the exact range."""
    g = torch.Generator().manual_seed(seed)
    h, i = cfg.hidden, cfg.intermediate

    def draw(lo: int, hi: int, *shape: int) -> Tensor:
        return torch.randint(lo, hi + 1, shape, generator=g, dtype=torch.uint8)

    return ExpertWeights(
        draw(0, 255, experts, 2 * i, h // 2),
        draw(low, high, experts, 2 * i, h // 32),
        draw(0, 255, experts, h, i // 2),
        draw(low, high, experts, h, i // 32),
    )
