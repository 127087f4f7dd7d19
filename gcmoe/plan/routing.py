"""What random routing with distinct experts gives a rank, computed, not sampled.

Each token chooses k of E experts, all sets alike and independently of other tokens, so the rows of
one expert are binomial: T * R tokens, each with probability k / E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gcmoe.config import MoEConfig
from gcmoe.plan.layer import LayerPlan, round_width

NEGLIGIBLE = 1e-12


def binomial(trials: int, chance: float) -> list[float]:
    """P(n) for n = 0 .. trials."""
    if chance >= 1:
        return [0.0] * trials + [1.0]
    log_yes, log_no = math.log(chance), math.log1p(-chance)
    total = math.lgamma(trials + 1)
    return [
        math.exp(
            total
            - math.lgamma(n + 1)
            - math.lgamma(trials - n + 1)
            + n * log_yes
            + (trials - n) * log_no
        )
        for n in range(trials + 1)
    ]


@dataclass(frozen=True, slots=True)
class Routing:
    """Expected load of one rank.

    Args:
        rows: (token, expert) pairs that arrive.
        touched: experts with at least one row.
        blocks: expected blocks by token tile width.
        one_block: probability that an expert has exactly one block.
    """

    rows: float
    touched: float
    blocks: dict[int, float]
    one_block: float

    @property
    def num_blocks(self) -> float:
        return sum(self.blocks.values())

    @property
    def mean_width(self) -> float:
        """Columns of a block's tile, in the mean."""
        return sum(w * n for w, n in self.blocks.items()) / self.num_blocks


def expected_routing(plan: LayerPlan, num_tokens: int) -> Routing:
    """The load of a rank of an operator when every rank passes ``num_tokens`` tokens.

    Raises:
        ValueError: no tokens, or more than the capacity.
    """
    config: MoEConfig = plan.config
    if not 1 <= num_tokens <= config.max_tokens:
        raise ValueError(f"tokens = {num_tokens}: from 1 to max_tokens = {config.max_tokens}")
    experts, tiles = plan.workspace.local_experts, plan.for_tokens(num_tokens).tiles
    trials, chance = num_tokens * plan.num_ranks, config.top_k / config.num_experts
    most = tiles.max_width
    chances = binomial(trials, chance)
    blocks = dict.fromkeys(tiles.widths, 0.0)
    for rows, probability in enumerate(chances):
        if rows == 0 or probability < NEGLIGIBLE:
            continue
        full, rest = divmod(rows, most)
        blocks[most] += experts * probability * full
        if rest:
            blocks[round_width(tiles, rest)] += experts * probability
    return Routing(
        rows=experts * trials * chance,
        touched=experts * (1 - chances[0]),
        blocks={width: count for width, count in blocks.items() if count > 0},
        one_block=sum(chances[1 : most + 1]),
    )
