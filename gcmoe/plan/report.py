"""``gcmoe plan``: how a layer would run on a GPU, and how long it should take; needs no GPU.

gcmoe plan --model glm-5.2 --gpu h200 --ranks 8 --tokens 1 8 64
gcmoe plan --records bench/results/*.json     # against measurements
gcmoe plan --published                        # against what others published
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from gcmoe.models import MODELS, Model, get_model, share
from gcmoe.plan.fit import Measured, read_record
from gcmoe.plan.fitted import CONSTANTS, RECORDS
from gcmoe.plan.gpus import GPUS, Gpu, get_gpu
from gcmoe.plan.layer import SPLIT_TABLE, TILE_TABLE, LayerPlan, capacity_for, make_plan
from gcmoe.plan.predict import Prediction, predict
from gcmoe.plan.published import PUBLISHED, Published, find_published

DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLUMNS = (
    ("T", 5), ("experts", 8), ("rows", 8), ("width", 6), ("MB read", 8), ("floor", 7), ("edges", 7),
    ("dispatch", 9), ("memory", 7), ("consumer", 9), ("stream", 7), ("hop", 5), ("link", 5),
    ("tail", 5), ("finalize", 9), ("time", 8), ("floor/t", 8),
)  # fmt: skip
HEAD = "".join(f"{name:>{width}}" for name, width in COLUMNS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gcmoe plan``."""
    parser.add_argument("--model", choices=sorted(MODELS), default="deepseek-v4-flash")
    parser.add_argument("--gpu", type=str.lower, choices=sorted(GPUS), default="h200")
    parser.add_argument("--ranks", type=int, default=8, metavar="R", help="of the group (8)")
    parser.add_argument(
        "--share", action="store_true", help="the share of one of R ranks, as a one-GPU layer"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(DEFAULT_TOKENS), metavar="T", help="of a rank"
    )
    parser.add_argument("--capacity", type=int, metavar="N", help="max_tokens; by T if left out")
    parser.add_argument("--dispatch-sms", type=int, metavar="N")
    parser.add_argument("--ring-slots", type=int, metavar="S")
    parser.add_argument(
        "--records", nargs="+", type=Path, metavar="FILE", help="compare with these"
    )
    parser.add_argument("--published", action="store_true", help="compare with published times")


# ------------------------------------------------------------------------------------- one layer


def describe_plan(plan: LayerPlan, num_tokens: int) -> list[str]:
    """Partition, tiles of calls of ``num_tokens`` tokens, ring and workspace, and what the choices
    rest on."""
    plan = plan.for_tokens(num_tokens)
    tiles, shape, config = plan.tiles, plan.workspace, plan.config
    most = next(most for most, _ in plan.tile_classes if num_tokens <= most)
    lines = [
        f"capacity {config.max_tokens}: {plan.dispatch_sms} SMs dispatch, {plan.compute_sms} SMs "
        f"compute; calls to {most} tokens: token tiles {' '.join(map(str, tiles.widths))}, "
        f"{tiles.warpgroups} consumer warpgroups x {tiles.subtiles} sub-tiles, {tiles.stages} "
        "stages",
        f"    ring of {shape.num_slots} slots x {shape.slot_rows} rows, workspace "
        f"{shape.num_bytes:,} bytes; at most {shape.max_blocks} blocks",
    ]
    for split in SPLIT_TABLE:
        if split.dispatch_sms == plan.dispatch_sms and config.max_tokens <= split.max_tokens:
            lines.append(f"    split, {split.gpu}: {split.measurement}")
            break
    mean_rows = num_tokens * plan.num_ranks * config.top_k / config.num_experts
    row = next(row for row in TILE_TABLE if mean_rows <= row.mean_rows)
    lines.append(f"    tiles, {row.gpu}: {row.measurement}")
    return lines


def describe_time(num_tokens: int, found: Prediction) -> str:
    """One line of the table under :data:`HEAD`."""
    routing = found.routing
    values = (
        num_tokens, routing.touched, routing.rows, routing.mean_width, found.weight_bytes / 1e6,
        found.floor_us, found.edges_us, found.dispatch_us, found.memory_us, found.consumer_us,
        found.stream_us, found.hop_us, found.link_us, found.tail_us, found.finalize_us,
        found.total_us,
    )  # fmt: skip
    cells = [
        f"{value:>{width}}" if isinstance(value, int) else f"{value:>{width}.1f}"
        for value, (_, width) in zip(values, COLUMNS, strict=False)
    ]
    return "".join(cells) + f"{found.floor_us / found.total_us:>{COLUMNS[-1][1]}.2f}"


def difference(predicted: float, other: float) -> str:
    return f"{100 * (predicted / other - 1):+.1f} %"


def report_layer(model: Model, gpu: Gpu, ranks: int, ns: argparse.Namespace) -> list[str]:
    """The plan and the prediction of one model, capacity by capacity."""
    lines = [
        f"{model.name} on {gpu.name}, R = {ranks}: H = {model.hidden}, I = {model.intermediate}, "
        f"{model.num_experts // ranks} of {model.num_experts} experts a rank, top {model.top_k}",
        f"    {gpu.name}: {gpu.sms} SMs, reads {gpu.read_rate / 1e12:.2f} TB/s; {gpu.sources}",
    ]
    if not gpu.decodes:
        lines.append("    memory bounds the stream alone: its tensor cores read MXFP4 themselves")
    shown: list[str] = []
    for num_tokens in ns.tokens:
        config = model.config(ns.capacity or capacity_for(num_tokens))
        plan = make_plan(
            config, ranks, gpu.sms, dispatch_sms=ns.dispatch_sms, ring_slots=ns.ring_slots
        )
        found = predict(plan, gpu, num_tokens, CONSTANTS)
        described = describe_plan(plan, num_tokens)
        if described != shown:
            lines += ["", *described, HEAD]
            shown = described
        line = describe_time(num_tokens, found)
        point = find_published(gpu.name, ns.model, ranks, num_tokens)
        if point:
            line += f"  published {point.time_us} ({difference(found.total_us, point.time_us)})"
        lines.append(line)
    lines += [
        "",
        "microseconds; experts: touched; rows: arriving; width: mean token tile; stream: of memory "
        "and consumer",
        f"constants from {', '.join(RECORDS)}",
    ]
    return lines


# ----------------------------------------------------------------------------------- comparisons


def compare_published(points: Iterable[Published] = PUBLISHED) -> list[str]:
    """Each published time beside the prediction for its machine."""
    lines = [
        f"{'GPU':<6}{'model':<22}{'R':>3}{'T':>5}{'published':>11}{'predicted':>11}  difference"
    ]
    for point in points:
        gpu = get_gpu(point.gpu)
        config = get_model(point.model).config(capacity_for(point.num_tokens))
        plan = make_plan(config, point.ranks, gpu.sms)
        time = predict(plan, gpu, point.num_tokens, CONSTANTS).total_us
        off = difference(time, point.time_us)
        lines.append(
            f"{gpu.name:<6}{point.model:<22}{point.ranks:>3}{point.num_tokens:>5}"
            f"{point.time_us:>11.1f}{time:>11.1f}  {off:<9} {point.source}"
        )
    return lines


def compare_measured(rows: Sequence[Measured]) -> list[str]:
    """Each measured time of H200 beside its prediction."""
    gpu = get_gpu("H200")
    lines = [f"{'model':<22}{'R':>3}{'T':>5}{'measured':>10}{'predicted':>11}  difference  record"]
    for row in rows:
        time = predict(row.plan, gpu, row.num_tokens, CONSTANTS).total_us
        lines.append(
            f"{row.model:<22}{row.plan.num_ranks:>3}{row.num_tokens:>5}{row.median_us:>10.1f}"
            f"{time:>11.1f}  {difference(time, row.median_us):>10}  {row.record}"
        )
    return lines


def main(ns: argparse.Namespace) -> int:
    """Print; 0, or 2 when the options name no layer."""
    try:
        if ns.published:
            print("\n".join(compare_published()))
        if ns.records:
            rows = [row for path in ns.records for row in read_record(path)]
            print("\n".join(compare_measured(rows)))
        if ns.published or ns.records:
            return 0
        model = share(ns.model, ns.ranks) if ns.share else get_model(ns.model)
        ranks = 1 if ns.share else ns.ranks
        print("\n".join(report_layer(model, get_gpu(ns.gpu), ranks, ns)))
    except ValueError as error:
        print(f"gcmoe plan: {error}")
        return 2
    return 0
