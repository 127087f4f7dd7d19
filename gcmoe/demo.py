"""``gcmoe demo``: one layer, and how close it comes to the oracle.

On a Hopper or Blackwell GPU a real layer with random MXFP4 weights; elsewhere the simulated
protocol.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.models import share
from gcmoe.numerics import (
    Comparison,
    ExpertWeights,
    compare,
    moe_reference,
    moe_unquantized,
    pack,
)

MODEL = share("deepseek-v4.1-flash", 8)
CONFIG = MODEL.config(max_tokens=64)
WARMUP_CALLS, TIMED_CALLS = 3, 100
MIN_COSINE = 0.999
SCALE_BYTES = (117, 121)
"""UE8M0 bytes of random weights, 2^-10 to 2^-7: the range is half open."""


def random_weights(config: MoEConfig, generator: torch.Generator) -> ExpertWeights:
    """MXFP4 experts of ``config``: uniform codes, scales of a few binades, on the generator's
    device."""
    e, h, i = config.num_experts, config.hidden, config.intermediate

    def draw(shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, generator=generator, device=generator.device
        )

    return ExpertWeights(
        w13=draw((e, 2 * i, h // 2), 0, 256),
        w13_scale=draw((e, 2 * i, h // 32), *SCALE_BYTES),
        w2=draw((e, h, i // 2), 0, 256),
        w2_scale=draw((e, h, i // 32), *SCALE_BYTES),
    )


def random_batch(
    config: MoEConfig, num_tokens: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """x bfloat16 [T, H], ids int32 [T, k] without repeats in a token, weights fp32 [T, k]."""
    device = generator.device
    x = torch.randn((num_tokens, config.hidden), generator=generator, device=device)
    scores = torch.rand((num_tokens, config.num_experts), generator=generator, device=device)
    values, ids = scores.topk(config.top_k, dim=1)
    weights = values / values.sum(dim=1, keepdim=True)
    return x.to(torch.bfloat16), ids.to(torch.int32), weights


def lacking_gpu() -> str:
    """Why this machine cannot run the real layer; empty if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from gcmoe.runtime import device

    found = torch.cuda.get_device_capability()
    if found not in device.TARGETS:
        return f"compute capability {found[0]}.{found[1]}, the kernels need {device.CAPABILITIES}"
    return ""


def report(name: str, found: Comparison) -> None:
    """One line, the worst token of a comparison."""
    print(f"{name:<26}cosine {found.cosine:.6f}   relative L2 {found.relative_l2:.6f}")


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank found, and what it took."""

    against_oracle: Comparison
    against_bf16: Comparison
    micros: float


def run_layer(num_tokens: int, seed: int, group: Any | None, rank: int, num_ranks: int) -> Found:
    """This rank's part of a layer, checked by itself: it knows the experts of all ranks."""
    from gcmoe.operator import MoE

    local = CONFIG.num_experts
    config = replace(CONFIG, num_experts=local * num_ranks)
    experts = random_weights(config, torch.Generator(device="cuda").manual_seed(seed))
    generator = torch.Generator(device="cuda").manual_seed(seed + 1 + rank)
    x, ids, topk_weights = random_batch(config, num_tokens, generator)
    mine = slice(rank * local, (rank + 1) * local)
    own = (experts.w13[mine], experts.w13_scale[mine], experts.w2[mine], experts.w2_scale[mine])
    with MoE(config, group) as operator:
        layer = operator.bind(pack(*own, config, arch=operator.family))
        y = layer(x, ids, topk_weights)
        micros = time_calls(lambda: layer(x, ids, topk_weights))
        operator.check(synchronize=True)
    trace = moe_reference(x, ids, topk_weights, experts, config, recipe=operator.family)
    unquantized = moe_unquantized(x, ids, topk_weights, experts, config)
    return Found(compare(y, trace.y), compare(y, unquantized), micros)


def print_found(found: list[Found], num_tokens: int) -> int:
    """The results of all ranks; 0 if all agree with the oracle, else 1."""
    num_ranks = len(found)
    print(
        f"{torch.cuda.get_device_name()}, {MODEL.name}: H = {CONFIG.hidden}, "
        f"I = {CONFIG.intermediate}, {CONFIG.num_experts * num_ranks} experts, "
        f"top {CONFIG.top_k}, {num_tokens} tokens a rank, {num_ranks} rank(s)"
    )
    for rank, one in enumerate(found):
        if num_ranks > 1:
            print(f"rank {rank}")
        report("against the oracle", one.against_oracle)
        report("against BF16 activations", one.against_bf16)
        print(f"{'time of a call':<26}{one.micros:.1f} us (mean of {TIMED_CALLS} in a CUDA graph)")
    return 0 if all(one.against_oracle.cosine >= MIN_COSINE for one in found) else 1


def run_ranks(num_tokens: int, seed: int) -> int:
    """One process of ``torchrun``: a rank of the layer; rank 0 prints for all."""
    import torch.distributed as dist

    from gcmoe.runtime.group import RankGroup

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    try:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        mine = run_layer(num_tokens, seed, dist.group.WORLD, rank, num_ranks)
        found = RankGroup(dist.group.WORLD).gather(mine)
        return print_found(found, num_tokens) if rank == 0 else 0
    finally:
        dist.destroy_process_group()


def time_calls(call: Callable[[], object]) -> float:
    """Microseconds of one call, replayed ``TIMED_CALLS`` times inside one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(TIMED_CALLS):
            call()
    graph.replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return 1000.0 * start.elapsed_time(stop) / TIMED_CALLS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=int,
        default=8,
        metavar="T",
        help=f"tokens on a GPU, 1 to {CONFIG.max_tokens} (default 8)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens (default 0)")


def run(namespace: argparse.Namespace) -> int:
    """Print cosine and relative L2 of a layer; the exit status."""
    if not 1 <= namespace.tokens <= CONFIG.max_tokens:
        raise SystemExit(f"gcmoe demo: --tokens {namespace.tokens}: 1 to {CONFIG.max_tokens}")
    fact = lacking_gpu()
    if not fact:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return run_ranks(namespace.tokens, namespace.seed)
        return print_found(
            [run_layer(namespace.tokens, namespace.seed, None, 0, 1)], namespace.tokens
        )
    from gcmoe.sim.report import demo

    print(f"{fact}: simulating the protocol instead")
    return 0 if demo()["verdict"] == "ok" else 1
