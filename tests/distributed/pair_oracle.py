"""Inputs of a rank, and y against the oracle.

The one-GPU suite judges the numerics. Here a wide bound is enough: a row that is lost, misplaced or
of another replay misses it by far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.numerics import ExpertWeights, moe_reference

TOP_SCALE, OCTAVES = 120, 4
NEGATIVE_IDS = (-1, -2, -(2**31))
MAX_RELATIVE_L2, MIN_COSINE = 0.1, 0.995
MAX_RMS, RMS_TOKENS = 3e-2, 32


def random_experts(h: int, i: int, e: int, seed: int) -> ExpertWeights:
    """Uniform codes, and scales over four octaves below 2^-7, on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, generator=generator, device="cuda"
        )

    scales = TOP_SCALE - OCTAVES, TOP_SCALE + 1
    return ExpertWeights(
        draw((e, 2 * i, h // 2), 0, 256),
        draw((e, 2 * i, h // 32), *scales),
        draw((e, h, i // 2), 0, 256),
        draw((e, h, i // 32), *scales),
    )


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs of one call."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]


def make_batch(config: MoEConfig, num_tokens: int, seed: int, routing: str) -> Batch:
    """Random tokens on the GPU.

    Args:
        routing: ``distinct`` experts of a token differ; ``rank0`` and ``rank1`` all go to that of
            two ranks; ``single`` all slots choose one expert; ``last`` one slot, the last expert;
            ``masked`` negative ids in some slots and in all of token 0; ``nothing`` no valid id;
            ``duplicates`` with replacement, token 0 chooses expert 0 k times; ``int64`` 64-bit
            ids, one in four far below zero.
    """
    e, k = config.num_experts, config.top_k
    g = torch.Generator(device="cuda").manual_seed(1000 * seed + num_tokens)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, device="cuda")

    x = torch.randn((num_tokens, config.hidden), generator=g, device="cuda").bfloat16()
    ids = rand(num_tokens, e).topk(k, dim=1).indices.to(torch.int32)
    weights = 0.25 + rand(num_tokens, k)
    weights /= weights.sum(dim=1, keepdim=True)
    if routing in ("rank0", "rank1"):
        ids = ids % (e // 2) + (e // 2 if routing == "rank1" else 0)
    elif routing == "single":
        ids.fill_(e // 2)
    elif routing == "last":
        ids.fill_(-1)
        ids[:, k - 1] = e - 1
    elif routing == "masked":
        negative = torch.tensor(NEGATIVE_IDS, dtype=torch.int32, device="cuda")
        choice = negative[(rand(num_tokens, k) * len(NEGATIVE_IDS)).long()]
        ids = torch.where(rand(num_tokens, k) < 0.4, choice, ids)
        ids[:1] = -1
    elif routing == "nothing":
        ids.fill_(-1)
    elif routing == "duplicates":
        ids = (rand(num_tokens, k) * e).to(torch.int32)
        ids[:1] = 0
    elif routing == "int64":
        ids = ids.to(torch.int64)
        ids = torch.where(rand(num_tokens, k) < 0.25, ids - 2**40, ids)
    elif routing != "distinct":
        raise ValueError(routing)
    return Batch(x, ids.contiguous(), weights)


class Problems:
    """Collects what went wrong, so that one run tells all of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def expect_equal(self, what: str, found: Tensor, wanted: Tensor) -> None:
        """BF16 tensors of equal bits, NaN included."""
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            self.add(f"{what}: {found.dtype} {found.shape}, wanted {wanted.dtype} {wanted.shape}")
            return
        wrong = found.view(torch.int16) != wanted.view(torch.int16)
        count = int(wrong.sum())
        if count:
            rows = wrong.any(dim=1).nonzero().flatten().tolist()
            nans = int(found.isnan().sum())
            self.add(
                f"{what}: {count} of {wrong.numel()} differ, in {len(rows)} of {len(found)} rows, "
                f"first {rows[:8]}; {nans} NaN"
            )

    def finish(self) -> None:
        """Fail with everything that was collected."""
        if self.lines:
            raise AssertionError("\n".join(self.lines[:30]))


def check_layer(
    problems: Problems,
    what: str,
    y: Tensor,
    batch: Batch,
    experts: ExpertWeights,
    config: MoEConfig,
) -> None:
    """y against the oracle, token by token; tokens without an expert are zero."""
    trace = moe_reference(batch.x, batch.ids, batch.weights, experts, config)
    if y.shape != trace.y.shape or y.dtype != torch.bfloat16:
        problems.add(f"{what}: y is {y.dtype} {tuple(y.shape)}, wanted {tuple(trace.y.shape)}")
        return
    if not len(y):
        return
    unused = ~trace.valid.any(dim=1)
    problems.expect_equal(f"{what}: unused", y[unused], torch.zeros_like(y[unused]))
    a, b = y.double(), trace.y.double()
    norm_a, norm_b = a.norm(dim=1), b.norm(dim=1)
    both_zero = (norm_a == 0) & (norm_b == 0)
    relative = ((a - b).norm(dim=1) / norm_b).masked_fill(both_zero, 0.0)
    cosine = ((a / norm_a[:, None]) * (b / norm_b[:, None])).sum(dim=1)
    cosine = cosine.masked_fill(both_zero, 1.0)
    rms = float(relative.square().mean().sqrt())
    print(
        f"{what}: relative L2 worst {float(relative.max()):.5f} rms {rms:.5f}, "
        f"cosine {float(cosine.min()):.6f}"
    )
    bad = ~((relative <= MAX_RELATIVE_L2) & (cosine >= MIN_COSINE))
    for token in bad.nonzero().flatten()[:4].tolist():
        problems.add(
            f"{what}: token {token} relative L2 {float(relative[token]):.5f}, cosine "
            f"{float(cosine[token]):.6f}; ids {batch.ids[token].tolist()}, norm "
            f"{float(norm_a[token]):.4g} against {float(norm_b[token]):.4g}"
        )
    if bool(bad.any()):
        problems.add(f"{what}: {int(bad.sum())} of {len(y)} tokens are wrong")
    if len(y) >= RMS_TOKENS and not rms <= MAX_RMS:
        problems.add(f"{what}: rms of the relative L2 {rms:.5f}, at most {MAX_RMS}")
