"""Real numerics for small layers: what a role computes, by the oracle's own stages.

Rows are computed one at a time and tile by tile, as the roles meet them, and y must equal the
oracle's bit for bit: nothing of a result may depend on how it was cut.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.numerics import (
    ExpertWeights,
    compare,
    decode_ue8m0,
    finalize,
    moe_reference,
    moe_unquantized,
    quantize_input,
    quantize_mxfp4,
    requantize,
    w1_swiglu,
    w2,
)
from gcmoe.protocol import is_valid
from gcmoe.sim.config import SimConfig, draw_problem

WINDOW = 128
MISSING = None


def make_weights(
    experts: int, hidden: int, intermediate: int, generator: torch.Generator
) -> ExpertWeights:
    """Gaussian MXFP4 experts whose outputs are of order one."""
    w13 = torch.randn(experts, 2 * intermediate, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(experts, hidden, intermediate, generator=generator) * intermediate**-0.5
    return ExpertWeights(*quantize_mxfp4(w13), *quantize_mxfp4(down))


class Numbers:
    """Inputs, weights and the oracle's results of every layer call, drawn from the seed."""

    def __init__(self, config: SimConfig, seed: int) -> None:
        self.config, self.problem = config, draw_problem(config, seed)
        self.moe = MoEConfig(
            config.hidden, config.intermediate, config.experts, config.top_k, config.tokens
        )
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(f"numbers {seed}")
        self.weights: list[ExpertWeights] = []
        self.x: list[list[Tensor]] = []
        self.staged: list[list[tuple[Tensor, Tensor]]] = []
        self.topk: list[list[Tensor]] = []
        self.oracle: list[list[Tensor]] = []
        self.unquantized: list[list[Tensor]] = []
        for layer in self.problem:
            weights = make_weights(config.experts, config.hidden, config.intermediate, generator)
            self.weights.append(weights)
            for table in (self.x, self.staged, self.topk, self.oracle, self.unquantized):
                table.append([])
            for tokens in layer:
                x = torch.randn(len(tokens), config.hidden, generator=generator)
                x = (x * 2.0 ** rng.randint(-3, 3)).to(torch.bfloat16)
                topk = torch.rand(len(tokens), config.top_k, generator=generator)
                ids = torch.tensor(
                    [[i if is_valid(i, config.experts) else -1 for i in t] for t in tokens],
                    dtype=torch.int32,
                ).reshape(len(tokens), config.top_k)
                self.x[-1].append(x)
                self.staged[-1].append(quantize_input(x))
                self.topk[-1].append(topk)
                self.oracle[-1].append(moe_reference(x, ids, topk, weights, self.moe).y)
                self.unquantized[-1].append(moe_unquantized(x, ids, topk, weights, self.moe))

    # ---- what the roles call --------------------------------------------------------------

    def weight_bits(self, layer: int, rank: int, token: int, slot: int) -> int:
        bits = self.topk[layer][rank][token, slot].view(torch.int32)
        return int(bits) & 0xFFFF_FFFF

    def stage(self, layer: int, rank: int, token: int) -> Any:
        codes, exponents = self.staged[layer][rank]
        return codes[token], exponents[token]

    def scale(self, staged: Any, window: int) -> Any:
        return decode_ue8m0(staged[1][window])

    def w1(
        self, layer: int, expert: int, row: Any, scales: list[Any], weight_bits: int, window: int
    ) -> tuple[Any, Any]:
        """128 columns of ``a``: these gate rows and the up rows that belong to them."""
        if not isinstance(row, tuple) or not all(isinstance(scale, Tensor) for scale in scales):
            return MISSING, MISSING
        weights, inner = self.weights[layer], self.config.intermediate
        first = window * WINDOW
        rows = [*range(first, first + WINDOW), *range(inner + first, inner + first + WINDOW)]
        # The scale of a window is a power of two: its exponent byte is the one that was staged.
        exponents = (torch.stack(scales).view(torch.int32) >> 23).to(torch.uint8)
        signed = weight_bits - (1 << 32) if weight_bits >> 31 else weight_bits
        topk = torch.tensor([signed], dtype=torch.int32).view(torch.float32)
        a = w1_swiglu(
            row[0][None],
            exponents[None],
            weights.w13[expert, rows],
            weights.w13_scale[expert, rows],
            topk,
        )
        codes, a_exponents = requantize(a)
        return codes[0], a_exponents[0]

    def w2(
        self, layer: int, expert: int, codes: list[Any], scales: list[Any], tile: int, columns: int
    ) -> Any:
        if not all(isinstance(part, Tensor) for part in (*codes, *scales)):
            return MISSING
        weights = self.weights[layer]
        rows = slice(tile * columns, (tile + 1) * columns)
        return w2(
            torch.cat(codes)[None],
            torch.cat(scales)[None],
            weights.w2[expert, rows],
            weights.w2_scale[expert, rows],
        )[0]

    def finish(self, slots: list[list[Any]]) -> Any:
        if not slots:
            return torch.zeros(self.config.hidden, dtype=torch.bfloat16)
        if not all(isinstance(tile, Tensor) for tiles in slots for tile in tiles):
            return MISSING
        combine = torch.stack([torch.cat(tiles) for tiles in slots])[None]
        return finalize(combine, torch.ones(1, len(slots), dtype=torch.bool))[0]

    def error(self, layer: int, rank: int, token: int, y: Any) -> str | None:
        if y is MISSING:
            return "y is the sum of rows that nobody has stored"
        wanted = self.oracle[layer][rank][token]
        if torch.equal(y.view(torch.int16), wanted.view(torch.int16)):
            return None
        cosine, relative = compare(y, wanted)
        return f"y differs from the oracle: cosine {cosine:.6f}, relative L2 {relative:.3e}"
