"""Random weights and inputs, made on the GPU. Random, never zeros: zeros run 13 % faster."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import Case
from gcmoe.config import MoEConfig
from gcmoe.numerics import BlockExceptions, Packed, PackedWeights, PackedWeightsSm100
from gcmoe.numerics.packing_sm100 import packed_layout_sm100
from gcmoe.plan.targets import Family, family_of
from gcmoe.runtime.device import TARGETS

SUBBLOCK_WORD_BYTES = 4096
SCALE_INDICES = (11, 15)
"""Scales of four octaves: exact in every format that is compared."""
ROW_SCALE = 2.0**-13
SCALE_BYTES = (117, 121)
"""The same four octaves as UE8M0 bytes."""
DEVICE = "cuda"


@dataclass
class Inputs:
    """What one layer of the graph reads and writes.

    Attributes:
        source: bf16 [T, H], which the foreign kernel copies to ``x``.
        x: bf16 [T, H].
        ids: int32 [T, k], global expert ids, distinct within a token.
        weights: fp32 [T, k], their sum is 1.
        y: bf16 [T, H].
    """

    source: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


def make_generator(*seed: int) -> torch.Generator:
    """A generator on the current GPU whose stream depends on all the numbers."""
    mixed = 0
    for number in seed:
        mixed = (mixed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator(device=DEVICE).manual_seed(mixed)


def device_arch() -> str:
    """The target of the kernels of the current GPU; Hopper's where there is none."""
    if not torch.cuda.is_available():
        return "sm_90a"
    return TARGETS[torch.cuda.get_device_capability()]


def device_family() -> Family:
    """The family of :func:`device_arch`."""
    return family_of(device_arch())


def random_packed_sm100(
    hidden: int, intermediate: int, experts: int, generator: torch.Generator
) -> PackedWeightsSm100:
    """Random weights in Blackwell's form: uniform codes, scales of four octaves."""
    layout = packed_layout_sm100(experts, hidden, intermediate)

    def draw(name: str, low: int, high: int) -> Tensor:
        _, shape = layout[name]
        return torch.randint(
            low, high, shape, dtype=torch.uint8, generator=generator, device=DEVICE
        )

    return PackedWeightsSm100(
        draw("w13", 0, 256),
        draw("w13_scale", *SCALE_BYTES),
        draw("w2", 0, 256),
        draw("w2_scale", *SCALE_BYTES),
    )


def random_packed(
    hidden: int, intermediate: int, experts: int, generator: torch.Generator
) -> PackedWeights:
    """Random packed weights, made in place: uniform codes, scales of four octaves."""
    e, h, i = experts, hidden, intermediate
    windows = 2 * -(-i // 256)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, generator=generator, device=DEVICE
        )

    def blocks(*shape: int) -> Tensor:
        packed = draw(0, 256, (*shape, 4, SUBBLOCK_WORD_BYTES + 256))
        packed[..., SUBBLOCK_WORD_BYTES:] = draw(*SCALE_INDICES, (*shape, 4, 256))
        return packed

    w13 = blocks(e, i // 128, h // 128)
    w2 = blocks(e, h // 256, windows)
    # An odd number of windows has a pad block of zeros.
    w2[:, :, i // 128 :, :, :SUBBLOCK_WORD_BYTES] = 0
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    scales, codes = (torch.empty(s, dtype=torch.uint8, device=DEVICE) for s in ((0,), (0, 16)))
    exceptions = BlockExceptions(none, scales, none, codes)
    return PackedWeights(
        w13,
        torch.full((e, i // 128, 256), ROW_SCALE, device=DEVICE),
        w2,
        torch.full((e, h // 256, 256), ROW_SCALE, device=DEVICE),
        i,
        0,
        0.0,
        "sm90",
        exceptions,
        exceptions,
    )


def share_weights(case: Case, seed: int, index: int, rank: int) -> Packed:
    """Weight set ``index`` of a rank. Any rank can make that of another one, to check results."""
    model = case.share
    generator = make_generator(seed, index, rank)
    make = random_packed_sm100 if device_family() == "sm100" else random_packed
    return make(model.hidden, model.intermediate, case.local_experts, generator)


def random_inputs(config: MoEConfig, num_tokens: int, generator: torch.Generator) -> Inputs:
    """Gaussian tokens, each with k distinct random experts."""
    shape = num_tokens, config.hidden
    source = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()
    scores = torch.rand((num_tokens, config.num_experts), generator=generator, device=DEVICE)
    values, ids = scores.topk(config.top_k, dim=1)
    weights = (values / values.sum(dim=1, keepdim=True)).contiguous()
    ids = ids.to(torch.int32)
    return Inputs(source, source.clone(), ids, weights, torch.zeros_like(source))


def case_inputs(case: Case, layers: int, seed: int, rank: int) -> list[Inputs]:
    """Fresh tokens and a fresh routing for each layer of a rank."""
    config = case.config()
    generator = make_generator(seed, 7_777, case.tokens, rank)
    return [random_inputs(config, case.tokens, generator) for _ in range(layers)]


@dataclass(frozen=True, slots=True)
class Load:
    """What a rank's experts were given: means over the layers, and the sums layer by layer."""

    touched_experts: float
    rows: list[int]
    touched: list[int]


def measure_load(case: Case, ids_by_rank: list[list[Tensor]], rank: int) -> Load:
    """Rows and touched experts of a rank.

    Args:
        ids_by_rank: ids [T, k] of each layer of each rank.
    """
    low, high = rank * case.local_experts, (rank + 1) * case.local_experts
    rows, touched = [], []
    for layer in zip(*ids_by_rank, strict=True):
        ids = torch.cat([one.flatten() for one in layer])
        mine = ids[(ids >= low) & (ids < high)]
        rows.append(len(mine))
        touched.append(len(mine.unique()))
    return Load(statistics.mean(touched), rows, touched)
