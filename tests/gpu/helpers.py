"""What the GPU tests share: the table of layers, their weights, inputs and operators.

Importing this module touches no GPU. Weights, references and operators are kept for the session.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import gcmoe
from gcmoe.config import MoEConfig
from gcmoe.errors import DeviceFault
from gcmoe.kernels.build import get_kernel
from gcmoe.kernels.spec import kernel_specs
from gcmoe.numerics import ExpertWeights, PackedWeights, ReferenceTrace, moe_reference, pack
from gcmoe.plan import make_plan

ARCH = "sm_90a"
SPIN_BUDGET_S = 3.0
TOP_SCALE = 120
"""UE8M0 byte of the largest random weight scales, 2^-7."""


@dataclass(frozen=True)
class Case:
    """A layer of one rank and what its kernels are compiled for."""

    config: MoEConfig
    dispatch_sms: int | None = None
    ring_slots: int | None = None
    trace: bool = False
    jitter_ns: int = 0

    def options(self) -> dict[str, Any]:
        return {
            "dispatch_sms": self.dispatch_sms,
            "ring_slots": self.ring_slots,
            "trace": self.trace,
            "jitter_ns": self.jitter_ns,
        }


def _layer(h: int, i: int, e: int, k: int, tokens: int, clamp: float | None) -> MoEConfig:
    return MoEConfig(h, i, e, k, tokens, clamp, SPIN_BUDGET_S)


def _flash(tokens: int) -> MoEConfig:
    return _layer(4096, 2048, 32, 6, tokens, 10.0)


def _flash41(tokens: int) -> MoEConfig:
    return _layer(5120, 2304, 48, 6, tokens, 10.0)


CASES: dict[str, Case] = {
    # One rank's share of EP8 of two models; narrow tiles up to 128 tokens, wide ones at 256.
    "flash-8": Case(_flash(8)),
    "flash-64": Case(_flash(64)),
    "flash-128": Case(_flash(128)),
    "flash-256": Case(_flash(256)),
    "flash-64-trace": Case(_flash(64), trace=True),
    "flash41-64": Case(_flash41(64)),
    "flash41-256": Case(_flash41(256)),
    # Odd shapes: one window of I, an odd number of windows, one expert, odd capacities.
    "one-window": Case(_layer(256, 128, 4, 2, 64, 2.0)),
    "odd-33": Case(_layer(512, 384, 6, 3, 33, None)),
    "odd-256": Case(_layer(512, 384, 6, 3, 256, None)),
    "top-8": Case(_layer(1024, 640, 16, 8, 64, 10.0)),
    "one-expert": Case(_layer(768, 256, 1, 1, 64, 7.0), dispatch_sms=24),
    # The same layer with a ring for every block and with the smallest ring.
    "many-experts": Case(_layer(512, 384, 32, 2, 256, None)),
    "small-ring": Case(_layer(512, 384, 32, 2, 256, None), ring_slots=2),
    "odd-ring": Case(_layer(512, 384, 6, 3, 256, None), ring_slots=2),
    # CTAs that start late by random times disturb the order in which items run.
    "small-ring-jitter": Case(_layer(512, 384, 32, 2, 256, None), ring_slots=2, jitter_ns=20_000),
}
SMALL_CASES = ("one-window", "odd-33", "odd-256", "top-8", "one-expert")


def case_specs(name: str) -> tuple[Any, ...]:
    """The kernels of a case."""
    case = CASES[name]
    plan = make_plan(case.config, 1, dispatch_sms=case.dispatch_sms, ring_slots=case.ring_slots)
    return kernel_specs(plan, ARCH, trace=case.trace, jitter_ns=case.jitter_ns)


@cache
def compile_cases() -> None:
    """Compile what is missing in the kernel cache; a line per kernel."""
    print()
    for name in CASES:
        for spec in case_specs(name):
            start = time.perf_counter()
            kernel = get_kernel(spec)
            how = "cached" if kernel.from_cache else f"{time.perf_counter() - start:.1f} s"
            print(
                f"{name:<17} {spec.role.name.lower():<9} {kernel.threads:>5} threads "
                f"{kernel.registers or '?':>4} registers {kernel.smem_bytes:>7} B shared  {how}",
                flush=True,
            )


# ---------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Weights:
    """The same experts as a checkpoint has them and packed."""

    experts: ExpertWeights
    packed: PackedWeights
    octaves: int
    """Octaves that the block scales spread over."""


def random_experts(config: MoEConfig, octaves: int, seed: int) -> ExpertWeights:
    """Uniform codes, and scales over ``octaves`` octaves below 2^-7, on the GPU."""
    e, h, i = config.num_experts, config.hidden, config.intermediate
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, generator=generator, device="cuda"
        )

    scales = TOP_SCALE - octaves, TOP_SCALE + 1
    return ExpertWeights(
        draw((e, 2 * i, h // 2), 0, 256),
        draw((e, 2 * i, h // 32), *scales),
        draw((e, h, i // 2), 0, 256),
        draw((e, h, i // 32), *scales),
    )


def pack_experts(
    w: ExpertWeights, config: MoEConfig, out: PackedWeights | None = None
) -> PackedWeights:
    return pack(w.w13, w.w13_scale, w.w2, w.w2_scale, config, out=out)


@cache
def _weights(config: MoEConfig, octaves: int, seed: int) -> Weights:
    experts = random_experts(config, octaves, seed)
    return Weights(experts, pack_experts(experts, config), octaves)


def weights_of(config: MoEConfig, octaves: int = 4, seed: int = 1) -> Weights:
    """Random weights of a layer, the same for all its capacities."""
    return _weights(replace(config, max_tokens=1), octaves, seed)


# ----------------------------------------------------------------------------------------- inputs


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs of one call."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    def pick(self, tokens: Tensor | slice) -> Batch:
        return Batch(
            self.x[tokens].contiguous(),
            self.ids[tokens].contiguous(),
            self.weights[tokens].contiguous(),
        )


NEGATIVE_IDS = (-1, -2, -(2**31))
ROUTINGS = ("distinct", "single", "last", "masked", "nothing", "duplicates", "weights", "int64")


def make_batch(
    config: MoEConfig, num_tokens: int, seed: int = 0, routing: str = "distinct"
) -> Batch:
    """Random tokens on the GPU.

    Args:
        routing: ``distinct`` experts of a token differ; ``single`` all slots of all tokens choose
            one expert; ``last`` one slot, the last expert; ``masked`` negative ids in some slots
            and in all of token 0; ``nothing`` no valid id; ``duplicates`` with replacement, token
            0 chooses expert 0 k times; ``weights`` 0, negative and 1e4; ``int64`` 64-bit ids, one
            in four far below zero.
    """
    e, k = config.num_experts, config.top_k
    g = torch.Generator(device="cuda").manual_seed(1000 * seed + num_tokens)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, device="cuda")

    x = torch.randn((num_tokens, config.hidden), generator=g, device="cuda").bfloat16()
    ids = rand(num_tokens, e).topk(k, dim=1).indices.to(torch.int32)
    weights = 0.25 + rand(num_tokens, k)
    weights /= weights.sum(dim=1, keepdim=True)
    if routing == "single":
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
    elif routing == "weights":
        scale = torch.tensor([0.0, -1.0, 1.0, 1e4], device="cuda")
        weights *= scale[(rand(num_tokens, k) * 4).long()]
    elif routing == "int64":
        ids = ids.to(torch.int64)
        ids = torch.where(rand(num_tokens, k) < 0.25, ids - 2**40, ids)
    elif routing != "distinct":
        raise ValueError(routing)
    return Batch(x, ids, weights)


def reference(batch: Batch, weights: Weights, config: MoEConfig) -> ReferenceTrace:
    """The oracle on the GPU; ids of experts that do not exist count as unused."""
    ids = batch.ids.masked_fill(batch.ids >= config.num_experts, -1)
    return moe_reference(batch.x, ids, batch.weights, weights.experts, config)


# -------------------------------------------------------------------------------------- operators

_operators: dict[tuple[str, bool], gcmoe.MoE] = {}
_layers: dict[tuple[str, bool, int], Any] = {}


def operator_of(name: str, serial: bool = False) -> gcmoe.MoE:
    """The session's operator of a case, after a fault of an earlier test reset."""
    key = name, serial
    if key not in _operators:
        case = CASES[name]
        _operators[key] = gcmoe.MoE(case.config, serial=serial, **case.options())
    op = _operators[key]
    try:
        op.check(synchronize=True)
    except DeviceFault as fault:
        print(f"{name}: reset after an earlier fault: {fault}")
        op.reset()
    return op


def layer_of(name: str, octaves: int = 4, serial: bool = False) -> tuple[Any, Weights]:
    """A layer of the session's operator, and its weights."""
    op = operator_of(name, serial)
    weights = weights_of(CASES[name].config, octaves)
    key = name, serial, octaves
    if key not in _layers:
        _layers[key] = op.bind(weights.packed)
    return _layers[key], weights


@contextmanager
def fresh_operator(name: str, **options: Any) -> Iterator[gcmoe.MoE]:
    """An operator of its own, closed at the end."""
    case = CASES[name]
    op = gcmoe.MoE(case.config, **(case.options() | options))
    try:
        yield op
    finally:
        op.close()


def close_operators() -> None:
    _layers.clear()
    while _operators:
        _, op = _operators.popitem()
        try:
            op.close()
        except Exception as error:
            print(f"closing an operator failed: {error}")


def run(layer: Any, batch: Batch) -> Tensor:
    """One eager call, its fault raised."""
    y = layer(batch.x, batch.ids, batch.weights)
    layer.op.check(synchronize=True)
    return y


# --------------------------------------------------------------------------------------- problems


class Problems:
    """Collects what went wrong, so that one run tells all of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def expect_equal(self, what: str, found: Tensor, wanted: Tensor, context: str = "") -> None:
        """Bitwise, NaN included; names how many differ and the first ones."""
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            self.add(
                f"{what}: {found.dtype} {tuple(found.shape)}, wanted {wanted.dtype} "
                f"{tuple(wanted.shape)} {context}"
            )
            return
        size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        integer = size[found.element_size()]
        a, b = found.contiguous().view(integer), wanted.contiguous().view(integer)
        wrong = (a != b).nonzero()
        if len(wrong):
            places = [tuple(int(n) for n in place) for place in wrong[:4]]
            pairs = ", ".join(f"{p}: {found[p].item()} != {wanted[p].item()}" for p in places)
            rows = len(wrong[:, 0].unique()) if wrong.shape[1] else 1
            self.add(
                f"{what}: {len(wrong)} of {a.numel()} differ, in {rows} of {a.shape[:1]} rows; "
                f"{pairs} {context}"
            )

    def finish(self) -> None:
        if self.lines:
            pytest.fail("\n".join(["", *self.lines]), pytrace=False)


# ----------------------------------------------------------------------------------------- graphs


def capture(call: Any) -> torch.cuda.CUDAGraph:
    """A graph of what ``call`` enqueues."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def replay_times(graphs: list[torch.cuda.CUDAGraph], rounds: int) -> list[list[float]]:
    """Microseconds of each replay, the graphs taking turns."""
    events = [
        [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for _ in graphs
    ]
    for graph in graphs:
        graph.replay()
    for n in range(rounds):
        for graph, pairs in zip(graphs, events, strict=True):
            pairs[n][0].record()
            graph.replay()
            pairs[n][1].record()
    torch.cuda.synchronize()
    return [[1000 * a.elapsed_time(b) for a, b in pairs] for pairs in events]
