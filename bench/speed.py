"""Time of one MoE layer on one GPU: one rank's share of a model, inside a CUDA graph.

    python bench/speed.py --model deepseek-v4-flash --tokens 1 8 64 --out results

Layer time = (a graph of L layers with a foreign kernel before each - the same graph with the
foreign kernels only) / L. The layers have distinct weights and routings, and random data. The
results of the timed layers are checked against the oracle first. ``floor_us`` is the time that
reading the touched experts takes at the HBM read rate measured on H200.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import gcmoe
from gcmoe.config import MoEConfig
from gcmoe.kernels.build import get_kernel, source_digest
from gcmoe.kernels.spec import kernel_specs
from gcmoe.models import MODELS, share
from gcmoe.numerics import (
    BlockExceptions,
    Comparison,
    PackedWeights,
    compare,
    moe_reference,
    unpack,
)
from gcmoe.plan import make_plan

SCHEMA_VERSION = 1
READ_RATE = 4.40e12
"""Bytes a second, HBM reads by 108 to 124 SMs of an H200."""
BYTES_PER_WEIGHT = 1 / 2 + 1 / 32
CAPACITIES = (8, 64, 256, 1024, 4096)
ARCH = "sm_90a"
SUBBLOCK_WORD_BYTES = 4096
SCALE_INDICES = (11, 15)
ROW_SCALE = 2.0**-13
MAX_RELATIVE_L2, MAX_SHARE_BEYOND, WORST_RELATIVE_L2, MIN_COSINE = 1e-2, 0.05, 3e-2, 0.999
CHECK_TOKENS, SAMPLE_TOKENS = 64, 2
"""Tokens checked of the first layer, and of each other one."""
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,clocks_event_reasons.active"


@dataclass
class Inputs:
    """What one layer of the graph reads and writes."""

    source: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


# ------------------------------------------------------------------------------------- the layers


def random_packed(config: MoEConfig, generator: torch.Generator) -> PackedWeights:
    """Random packed weights, made in place: uniform codes, scales of four octaves."""
    e, h, i = config.num_experts, config.hidden, config.intermediate
    windows = 2 * -(-i // 256)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, generator=generator, device="cuda"
        )

    def blocks(*shape: int) -> Tensor:
        packed = draw(0, 256, (*shape, 4, SUBBLOCK_WORD_BYTES + 256))
        packed[..., SUBBLOCK_WORD_BYTES:] = draw(*SCALE_INDICES, (*shape, 4, 256))
        return packed

    w13 = blocks(e, i // 128, h // 128)
    w2 = blocks(e, h // 256, windows)
    # An odd number of windows has a pad block of zeros.
    w2[:, :, i // 128 :, :, :SUBBLOCK_WORD_BYTES] = 0
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    scales, codes = (torch.empty(s, dtype=torch.uint8, device="cuda") for s in ((0,), (0, 16)))
    exceptions = BlockExceptions(none, scales, none, codes)
    return PackedWeights(
        w13,
        torch.full((e, i // 128, 256), ROW_SCALE, device="cuda"),
        w2,
        torch.full((e, h // 256, 256), ROW_SCALE, device="cuda"),
        i,
        0,
        0.0,
        "sm90",
        exceptions,
        exceptions,
    )


def random_inputs(config: MoEConfig, num_tokens: int, generator: torch.Generator) -> Inputs:
    """Gaussian tokens, each with k distinct random experts."""
    shape = num_tokens, config.hidden
    source = torch.randn(shape, generator=generator, device="cuda").bfloat16()
    scores = torch.rand((num_tokens, config.num_experts), generator=generator, device="cuda")
    values, ids = scores.topk(config.top_k, dim=1)
    weights = (values / values.sum(dim=1, keepdim=True)).contiguous()
    ids = ids.to(torch.int32)
    return Inputs(source, source.clone(), ids, weights, torch.zeros_like(source))


def floor_us(config: MoEConfig, inputs: list[Inputs]) -> tuple[float, float]:
    """(microseconds to read the touched experts, touched experts), means over the layers."""
    touched = statistics.mean(len(one.ids.unique()) for one in inputs)
    weights = 3 * config.hidden * config.intermediate
    return touched * weights * BYTES_PER_WEIGHT / READ_RATE * 1e6, touched


def check_tokens(
    config: MoEConfig, packed: PackedWeights, one: Inputs, tokens: list[int]
) -> list[Comparison]:
    """Some tokens of a layer, each against the oracle, which sees their experts only."""
    ids = one.ids[tokens]
    used = ids.unique()
    experts = unpack(
        replace(
            packed,
            w13=packed.w13[used],
            w13_row_scale=packed.w13_row_scale[used],
            w2=packed.w2[used],
            w2_row_scale=packed.w2_row_scale[used],
        )
    )
    small = replace(config, num_experts=len(used))
    local = torch.searchsorted(used, ids)
    trace = moe_reference(one.source[tokens], local, one.weights[tokens], experts, small)
    y = one.y[tokens]
    return [compare(y[n : n + 1], trace.y[n : n + 1]) for n in range(len(tokens))]


def check_layers(
    config: MoEConfig, packed: list[PackedWeights], inputs: list[Inputs]
) -> dict[str, Any]:
    """Up to 64 tokens of the first layer and two of each other one.

    A token beyond 1e-2 would have to be explained by codes of ``a`` that moved, which needs the
    stages of the call: the tests do that. Here few may lie beyond, and none far.
    """
    num_tokens = len(inputs[0].ids)
    found: list[Comparison] = []
    finite = True
    for n, (weights, one) in enumerate(zip(packed, inputs, strict=True)):
        count = min(num_tokens, CHECK_TOKENS if n == 0 else SAMPLE_TOKENS)
        tokens = sorted({(n + t * num_tokens // count) % num_tokens for t in range(count)})
        found += check_tokens(config, weights, one, tokens)
        finite = finite and bool(one.y.isfinite().all())
    finite = finite and all(c.cosine == c.cosine for c in found)
    cosine = min(c.cosine for c in found)
    relative_l2 = max(c.relative_l2 for c in found)
    beyond = sum(not c.relative_l2 <= MAX_RELATIVE_L2 for c in found)
    few = beyond <= MAX_SHARE_BEYOND * len(found)
    good = few and cosine >= MIN_COSINE and relative_l2 <= WORST_RELATIVE_L2
    rule = (
        f"per token against the oracle: relative L2 above {MAX_RELATIVE_L2} in at most "
        f"{MAX_SHARE_BEYOND:.0%} of the tokens and above {WORST_RELATIVE_L2} in none, cosine at "
        f"least {MIN_COSINE}; up to {CHECK_TOKENS} tokens of the first layer, {SAMPLE_TOKENS} of "
        f"each other one"
    )
    return {
        "correct": finite and good,
        "finite": finite,
        "cosine": cosine,
        "relative_l2": relative_l2,
        "check": {"rule": rule, "tokens": len(found), "beyond": beyond},
    }


# ----------------------------------------------------------------------------------------- timing


def capture(call: Any) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graphs_of(layers: list[Any], inputs: list[Inputs]) -> dict[str, torch.cuda.CUDAGraph]:
    """Graphs with all layers and with one, each also with the foreign kernels only."""

    def foreign(one: Inputs) -> None:
        torch.mul(one.source, 1.0, out=one.x)

    def call(count: int, with_layers: bool) -> None:
        for layer, one in zip(layers[:count], inputs[:count], strict=True):
            foreign(one)
            if with_layers:
                layer(one.x, one.ids, one.weights, out=one.y)

    return {
        "layers": capture(lambda: call(len(layers), True)),
        "foreign": capture(lambda: call(len(layers), False)),
        "one_layer": capture(lambda: call(1, True)),
        "one_foreign": capture(lambda: call(1, False)),
    }


def replay_times(graphs: dict[str, torch.cuda.CUDAGraph], replays: int) -> dict[str, list[float]]:
    """Microseconds of each replay, the graphs taking turns."""
    events = {
        name: [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(replays)
        ]
        for name in graphs
    }
    for _ in range(3):
        for graph in graphs.values():
            graph.replay()
    for n in range(replays):
        for name, graph in graphs.items():
            start, stop = events[name][n]
            start.record()
            graph.replay()
            stop.record()
    torch.cuda.synchronize()
    return {
        name: [1000 * start.elapsed_time(stop) for start, stop in pairs]
        for name, pairs in events.items()
    }


def percentile(samples: list[float], percent: int) -> float:
    ordered = sorted(samples)
    return ordered[round((len(ordered) - 1) * percent / 100)]


PHASES = {
    "dispatch": {"staged": 2, "headers": 3, "binned": 4, "first_row": 5, "last_row": 6, "end": 7},
    "compute": {"routes": 2, "first_block": 3, "w1_over": 5, "end": 7},
    "finalize": {"start": 1, "arrivals": 2, "end": 3},
}
FIRST = {"first_row", "first_block", "routes", "start"}
"""Phases of which the earliest CTA counts; of the others the last one."""


def phases(op: Any, graph: torch.cuda.CUDAGraph, replays: int = 9) -> dict[str, float]:
    """Microseconds from the first CTA's start, medians over replays, of the graph's last layer."""
    found: dict[str, list[float]] = {}
    for _ in range(replays):
        graph.replay()
        records = {role.name.lower(): words for role, words in op.trace_records().items()}
        first = min(int(records[role][:, 1].min()) for role in ("dispatch", "compute"))
        for role, words in PHASES.items():
            for name, word in words.items():
                times = records[role][:, word]
                times = times[times >= first]  # others are of an earlier layer
                if len(times):
                    best = times.min() if name in FIRST else times.max()
                    found.setdefault(f"{role}.{name}", []).append((int(best) - first) / 1000)
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


# -------------------------------------------------------------------------------------- one size


def capacity_of(num_tokens: int, given: int | None) -> int:
    """The smallest usual capacity that holds the tokens."""
    return given or next(c for c in CAPACITIES if c >= num_tokens)


def measure(
    config: MoEConfig,
    num_tokens: int,
    packed: list[PackedWeights],
    ns: argparse.Namespace,
    generator: torch.Generator,
) -> dict[str, Any]:
    """One row of the record."""
    inputs = [random_inputs(config, num_tokens, generator) for _ in packed]
    options = {"dispatch_sms": ns.dispatch_sms, "ring_slots": ns.ring_slots}
    with gcmoe.MoE(config, serial=ns.serial, **options) as op:
        layers = [op.bind(weights) for weights in packed]
        for layer, one in zip(layers, inputs, strict=True):
            layer(one.x, one.ids, one.weights, out=one.y)
        op.check(synchronize=True)
        graphs = graphs_of(layers, inputs)
        for one in inputs:
            one.y.zero_()
        graphs["layers"].replay()
        op.check(synchronize=True)
        checked = check_layers(config, packed, inputs)
        times = replay_times(graphs, ns.replays)
        op.check(synchronize=True)
        plan, report = op.plan, op.report.describe()
        graphs.clear()
    count = len(packed)
    foreign = statistics.median(times["foreign"])
    alone = statistics.median(times["one_foreign"])
    samples = [(t - foreign) / count for t in times["layers"]]
    floor, touched = floor_us(config, inputs)
    row: dict[str, Any] = {
        "model": ns.model,
        "tokens_per_rank": num_tokens,
        "ranks": 1,
        "share_of": ns.ranks,
        "variant": "serial" if ns.serial else "overlapped",
        "impl": "gcmoe",
        "median_us": statistics.median(samples),
        "p10_us": percentile(samples, 10),
        "p90_us": percentile(samples, 90),
        "one_layer_us": statistics.median(times["one_layer"]) - alone,
        "floor_us": floor,
        "touched_experts": touched,
        **checked,
        "layers": count,
        "capacity": config.max_tokens,
        "config": asdict(config),
        "dispatch_sms": plan.dispatch_sms,
        "compute_sms": plan.compute_sms,
        "ring_slots": plan.workspace.num_slots,
        "tiles": asdict(plan.tiles),
        "partition": report,
        "samples": times,
    }
    if ns.trace:
        with gcmoe.MoE(config, serial=ns.serial, trace=True, **options) as op:
            layers = [op.bind(weights) for weights in packed]
            for layer, one in zip(layers, inputs, strict=True):
                layer(one.x, one.ids, one.weights, out=one.y)
            op.check(synchronize=True)
            graph = graphs_of(layers, inputs)["layers"]
            row["trace_us"] = phases(op, graph)
            del graph
    return row


# ----------------------------------------------------------------------------------------- record


def query_gpu(fields: str) -> dict[str, str]:
    """What nvidia-smi says of the GPU; empty where it is missing."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields.split(","), values, strict=False))


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def header() -> dict[str, Any]:
    """Where and with what the rows were measured."""
    return {
        "schema_version": SCHEMA_VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": os.environ.get("GCMOE_COMMIT", ""),
        "source": source_digest(),
        "gpu": torch.cuda.get_device_name(),
        "driver": query_gpu("driver_version").get("driver_version", ""),
        "versions": {
            "gcmoe": gcmoe.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cuda-bindings": version_of("cuda-bindings"),
            "python": platform.python_version(),
        },
        "clocks_before": query_gpu(CLOCKS),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'model':<22} {'T':>5} {'cap':>5} {'median':>8} {'p10':>8} {'p90':>8} {'one':>8} "
        f"{'floor':>8} {'floor/t':>7} {'cosine':>9}  correct"
    )
    for row in rows:
        print(
            f"{row['model']:<22} {row['tokens_per_rank']:>5} {row['capacity']:>5} "
            f"{row['median_us']:>8.1f} {row['p10_us']:>8.1f} {row['p90_us']:>8.1f} "
            f"{row['one_layer_us']:>8.1f} {row['floor_us']:>8.1f} "
            f"{row['floor_us'] / row['median_us']:>7.2f} {row['cosine']:>9.6f}  "
            f"{'yes' if row['correct'] else 'NO'}"
        )
        if "trace_us" in row:
            print("    " + ", ".join(f"{k} {v}" for k, v in row["trace_us"].items()))


def compile_kernels(configs: list[MoEConfig], ns: argparse.Namespace) -> None:
    """Fill the kernel cache for these layers; needs no GPU."""
    for config in configs:
        plan = make_plan(config, 1, dispatch_sms=ns.dispatch_sms, ring_slots=ns.ring_slots)
        for trace in (False, True) if ns.trace else (False,):
            for spec in kernel_specs(plan, ARCH, trace=trace):
                start = time.perf_counter()
                kernel = get_kernel(spec)
                how = "cached" if kernel.from_cache else f"{time.perf_counter() - start:.1f} s"
                name = spec.role.name.lower() + (" with trace" if trace else "")
                print(f"{ns.model} {config.max_tokens:>5} {name:<20} {how}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="deepseek-v4-flash")
    parser.add_argument("--ranks", type=int, default=8, help="the share of one of R ranks (8)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64], metavar="T")
    parser.add_argument("--layers", type=int, default=20, metavar="L")
    parser.add_argument("--replays", type=int, default=30, metavar="N", help="at least 20")
    parser.add_argument("--capacity", type=int, metavar="N", help="max_tokens; by T if left out")
    parser.add_argument("--dispatch-sms", type=int, metavar="N")
    parser.add_argument("--ring-slots", type=int, metavar="S")
    parser.add_argument("--serial", action="store_true", help="dispatch, then compute")
    parser.add_argument("--trace", action="store_true", help="also phases by role")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="DIR", help="folder of the JSON record")
    parser.add_argument("--compile-only", action="store_true", help="fill the kernel cache")
    ns = parser.parse_args(arguments)
    most = ns.capacity or CAPACITIES[-1]
    if min(ns.tokens) < 1 or max(ns.tokens) > most:
        parser.error(f"--tokens: from 1 to {most}")
    if ns.layers < 1 or ns.replays < 20:
        parser.error("--layers must be positive, --replays at least 20")
    return ns


def write_record(record: dict[str, Any], folder: str, model: str) -> Path:
    directory = Path(folder)
    directory.mkdir(parents=True, exist_ok=True)
    stamp = record["created"].replace(":", "").replace("-", "")
    path = directory / f"speed-{model}-{stamp}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def main(arguments: list[str] | None = None) -> int:
    ns = parse(arguments)
    model = share(ns.model, ns.ranks)
    configs = {t: model.config(capacity_of(t, ns.capacity)) for t in ns.tokens}
    if ns.compile_only:
        compile_kernels(list({c.max_tokens: c for c in configs.values()}.values()), ns)
        return 0
    record = header()
    generator = torch.Generator(device="cuda").manual_seed(ns.seed)
    packed = [random_packed(configs[ns.tokens[0]], generator) for _ in range(ns.layers)]
    rows = []
    for num_tokens in ns.tokens:
        row = measure(configs[num_tokens], num_tokens, packed, ns, generator)
        rows.append(row)
        print(
            f"T = {num_tokens}: {row['median_us']:.1f} us, floor {row['floor_us']:.1f} us",
            flush=True,
        )
    record |= {"clocks_after": query_gpu(CLOCKS), "rows": rows}
    if ns.out:
        print(write_record(record, ns.out, ns.model))
    print_table(rows)
    return 0 if all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
