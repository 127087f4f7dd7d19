"""A layer small enough for the recording driver: its weights and the inputs of a call."""

import torch

from gcmoe.config import MoEConfig
from gcmoe.numerics import pack

CONFIG = MoEConfig(256, 128, 8, 2, 16, spin_budget_s=0.5)
T, H, K = 5, CONFIG.hidden, CONFIG.top_k


def weights(config=CONFIG):
    e, h, i = config.num_experts, config.hidden, config.intermediate
    return pack(
        torch.randint(0, 256, (e, 2 * i, h // 2), dtype=torch.uint8),
        torch.full((e, 2 * i, h // 32), 120, dtype=torch.uint8),
        torch.randint(0, 256, (e, h, i // 2), dtype=torch.uint8),
        torch.full((e, h, i // 32), 120, dtype=torch.uint8),
        config,
    )


def inputs(tokens=T, id_type=torch.int64):
    x = torch.zeros(tokens, H, dtype=torch.bfloat16)
    return x, torch.zeros(tokens, K, dtype=id_type), torch.zeros(tokens, K)
