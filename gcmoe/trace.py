"""``gcmoe trace``: one replay of a layer with in-kernel timestamps, as a trace and as a picture.

    gcmoe trace --model deepseek-v4-flash --tokens 64 --out trace.json --png trace.png
    torchrun --nproc-per-node 2 -m gcmoe trace --tokens 64 --out trace.json
    gcmoe trace --from trace.json --png trace.png       # draws again; needs no GPU

The layer runs as in a model: several layers in one CUDA graph, a foreign kernel between them; the
last layer's records are kept. Of several replays the one of median length is written.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcmoe.config import MoEConfig
from gcmoe.kernels.records import Kind
from gcmoe.kernels.trace_words import (
    TRACE_ITEMS,
    ComputeTrace,
    DispatchTrace,
    FinalizeTrace,
    ItemTrace,
    item_word,
    unpack_item,
)
from gcmoe.models import MODELS, Model, get_model, share
from gcmoe.plan import LayerPlan
from gcmoe.plan.layer import capacity_for, round_width
from gcmoe.protocol import Role
from gcmoe.timeline import Span, Timeline, read_chrome, write

Record = list[int]
"""The words of one CTA."""
Records = dict[Role, list[Record]]

DISPATCH_STEPS = (
    ("stage", DispatchTrace.STAGED),
    ("headers", DispatchTrace.HEADERS),
    ("sort", DispatchTrace.BINNED),
    ("pull", DispatchTrace.LAST_ROW),
    ("close", DispatchTrace.END),
)
FINALIZE_STEPS = (("arrivals", FinalizeTrace.ARRIVED), ("sum", FinalizeTrace.END))
TIMED_WORDS = {
    Role.DISPATCH: (DispatchTrace.START, DispatchTrace.END),
    Role.COMPUTE: (ComputeTrace.START, ComputeTrace.END),
    Role.FINALIZE: (FinalizeTrace.START, FinalizeTrace.END),
}
"""Where a CTA's record holds its begin and its end."""


# ------------------------------------------------------------------------------ records to spans


def chain(
    role: Role, steps: Sequence[tuple[str, int]], rank: int, cta: int, words: Record, zero: int
) -> list[Span]:
    """Steps that follow each other; a step that did not happen in this replay is left out."""
    sm, begin = words[0], words[1]
    spans, last = [], begin
    for name, word in steps:
        if words[word] >= last:
            times = (last - zero) / 1000, (words[word] - zero) / 1000
            spans.append(Span(name, role.name.lower(), rank, sm, cta, *times))
            last = words[word]
    return spans


def item_spans(
    plan: LayerPlan, rank: int, cta: int, words: Record, n: int, zero: int
) -> list[Span]:
    """The ``n``-th item of a compute CTA, and what it waited for before."""
    what, start, fed, end, published = (words[item_word(n, word)] for word in ItemTrace)
    kind, rows, tile, slot = unpack_item(what)
    name = "W1" if kind == Kind.W1 else "W2"
    begin = max(start, fed)
    place = ("compute", rank, words[ComputeTrace.SM], cta)
    detail: dict[str, Any] = {
        "rows": rows,
        "width": round_width(plan.tiles, rows),
        "tile": tile,
        "slot": slot,
        "item": n,
    }
    if published >= end:
        detail["published_us"] = (published - zero) / 1000
    spans = []
    if begin > start:
        spans.append(Span("wait", *place, (start - zero) / 1000, (begin - zero) / 1000))
    spans.append(Span(name, *place, (begin - zero) / 1000, (end - zero) / 1000, detail))
    return spans


def compute_spans(plan: LayerPlan, rank: int, cta: int, words: Record, zero: int) -> list[Span]:
    """The wait for the routes, then the items of one compute CTA."""
    spans = chain(Role.COMPUTE, (("routes", ComputeTrace.ROUTES),), rank, cta, words, zero)
    if words[ComputeTrace.END] >= words[ComputeTrace.START]:
        for n in range(min(words[ComputeTrace.ITEMS], TRACE_ITEMS)):
            spans += item_spans(plan, rank, cta, words, n, zero)
    return spans


def spans_of(plan: LayerPlan, records: Records, rank: int, zero: int) -> list[Span]:
    """All spans of a rank.

    Args:
        zero: nanoseconds of this rank's clock at time 0.
    """
    spans: list[Span] = []
    for cta, words in enumerate(records[Role.DISPATCH]):
        spans += chain(Role.DISPATCH, DISPATCH_STEPS, rank, cta, words, zero)
    for cta, words in enumerate(records[Role.COMPUTE]):
        spans += compute_spans(plan, rank, cta, words, zero)
    for cta, words in enumerate(records[Role.FINALIZE]):
        spans += chain(Role.FINALIZE, FINALIZE_STEPS, rank, cta, words, zero)
    return spans


def lost_items(records: Records) -> int:
    """Items that found no room in the records."""
    return sum(max(0, words[ComputeTrace.ITEMS] - TRACE_ITEMS) for words in records[Role.COMPUTE])


def bounds(records: Records) -> tuple[int, int]:
    """(first begin, last end) of a rank's CTAs, nanoseconds of its clock."""
    begins = [w[TIMED_WORDS[role][0]] for role, ctas in records.items() for w in ctas]
    ends = [w[TIMED_WORDS[role][1]] for role, ctas in records.items() for w in ctas]
    return min(begins), max(ends)


def headers_seen(records: Records) -> int:
    """When the first dispatch CTA had seen the header words of all ranks."""
    return min(words[DispatchTrace.HEADERS] for words in records[Role.DISPATCH])


def clock_offsets(seen: list[list[int]]) -> list[int]:
    """How far each rank's clock is ahead of rank 0's, in nanoseconds.

    The last rank's header words reach all ranks at the same moment, up to the difference between
    a store to itself and one over the wire (about 1 us on H200 over NVLink), so the moments at
    which ranks have seen all headers are taken as one; median over replays.

    Args:
        seen: :func:`headers_seen` by rank, then by replay.
    """
    return [
        round(statistics.median(mine - first for mine, first in zip(rank, seen[0], strict=True)))
        for rank in seen
    ]


def timeline_of(
    plan: LayerPlan, by_rank: list[Records], offsets: list[int], title: str, facts: dict[str, Any]
) -> Timeline:
    """One timeline of all ranks; 0 is when the first CTA started."""
    zero = min(bounds(r)[0] - offset for r, offset in zip(by_rank, offsets, strict=True))
    spans: list[Span] = []
    for rank, (records, offset) in enumerate(zip(by_rank, offsets, strict=True)):
        spans += spans_of(plan, records, rank, zero + offset)
    return Timeline(title, tuple(spans), facts)


def summary(timeline: Timeline) -> str:
    """A table: for each kind of span how many, when the first begins, when they end, how long."""
    groups: dict[tuple[int, str, str], list[Span]] = {}
    for span in timeline.spans:
        width = f" N={span.detail['width']}" if "width" in span.detail else ""
        groups.setdefault((span.rank, span.role, span.name + width), []).append(span)
    lines = [
        f"{'rank':<5}{'role':<10}{'what':<10}{'spans':>6}{'begin':>8}"
        f"{'end: first':>12}{'median':>8}{'last':>8}{'each: median':>14}{'mean':>8}"
    ]
    for (rank, role, what), spans in groups.items():
        ends = sorted(span.end for span in spans)
        lengths = [span.end - span.start for span in spans]
        lines.append(
            f"{rank:<5}{role:<10}{what:<10}{len(spans):>6}{min(s.start for s in spans):>8.1f}"
            f"{ends[0]:>12.1f}{statistics.median(ends):>8.1f}{ends[-1]:>8.1f}"
            f"{statistics.median(lengths):>14.2f}{statistics.mean(lengths):>8.2f}"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- running it


def replay_records(
    config: MoEConfig, ns: argparse.Namespace, group: Any, rank: int, ranks: int
) -> tuple[LayerPlan, list[Records]]:
    """The records of the last layer of each of ``ns.replays`` replays of this rank."""
    import torch

    import gcmoe
    from gcmoe.demo import random_batch, random_weights

    generator = torch.Generator(device="cuda").manual_seed(ns.seed + rank)
    local = config.num_experts // ranks
    experts = random_weights(
        MoEConfig(config.hidden, config.intermediate, local, min(config.top_k, local), 1), generator
    )
    tensors = experts.w13, experts.w13_scale, experts.w2, experts.w2_scale
    batches = [random_batch(config, ns.tokens, generator) for _ in range(ns.layers)]
    options = {"serial": ns.serial, "dispatch_sms": ns.dispatch_sms}
    with gcmoe.MoE(config, group, trace=True, **options) as op:
        packed = gcmoe.pack(*tensors, config, arch=op.family)
        del experts, tensors
        layers = [op.bind(packed) for _ in batches]
        inputs = [(x, x.clone(), ids, weights, torch.empty_like(x)) for x, ids, weights in batches]
        for layer, (_, x, ids, weights, y) in zip(layers, inputs, strict=True):
            layer(x, ids, weights, out=y)
        op.check(synchronize=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer, (source, x, ids, weights, y) in zip(layers, inputs, strict=True):
                torch.mul(source, 1.0, out=x)
                layer(x, ids, weights, out=y)
            torch.mul(inputs[0][0], 1.0, out=inputs[0][1])
        found = []
        for _ in range(ns.replays):
            graph.replay()
            found.append({role: words.tolist() for role, words in op.trace_records().items()})
        op.check(synchronize=True)
        plan = op.plan.for_tokens(ns.tokens)
        del graph
    return plan, found


def facts_of(ns: argparse.Namespace, plan: LayerPlan, ranks: int, replay: int) -> dict[str, Any]:
    """What the trace says about itself."""
    import torch

    from gcmoe import __version__
    from gcmoe.kernels.build import source_digest

    return {
        "model": ns.model,
        "share_of": ns.ranks,
        "ranks": ranks,
        "tokens_per_rank": ns.tokens,
        "capacity": plan.config.max_tokens,
        "gpu": torch.cuda.get_device_name(),
        "dispatch_sms": plan.dispatch_sms,
        "compute_sms": plan.compute_sms,
        "widths": list(plan.tiles.widths),
        "serial": ns.serial,
        "layers": ns.layers,
        "replays": ns.replays,
        "replay": replay,
        "seed": ns.seed,
        "torch": torch.__version__,
        "gcmoe": __version__,
        "source": source_digest(),
    }


def trace_layer(
    model: Model, ns: argparse.Namespace, group: Any, rank: int, ranks: int
) -> Timeline | None:
    """Run the layer on this rank; the timeline on rank 0, None on the others."""
    from gcmoe.runtime.group import RankGroup

    gather = RankGroup(group).gather
    config = model.config(ns.capacity or capacity_for(ns.tokens))
    plan, found = replay_records(config, ns, group, rank, ranks)
    lengths = gather([end - begin for begin, end in map(bounds, found)])
    slowest = [max(of_replay) for of_replay in zip(*lengths, strict=True)]
    chosen = slowest.index(statistics.median_low(slowest))
    seen = gather([headers_seen(records) for records in found])
    by_rank = gather(found[chosen])
    if rank:
        return None
    facts = facts_of(ns, plan, ranks, chosen)
    if lost := sum(map(lost_items, by_rank)):
        facts["items_not_recorded"] = lost
    title = (
        f"{ns.model}, share of one of {ns.ranks} ranks, {ranks} x {facts['gpu']}, {ns.tokens} "
        f"tokens a rank: {slowest[chosen] / 1000:.1f} us from the first CTA's start to the last end"
    )
    return timeline_of(plan, by_rank, clock_offsets(seen), title, facts)


def run_ranks(model: Model, ns: argparse.Namespace) -> Timeline | None:
    """One process of ``torchrun``, a GPU each; or the only process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return trace_layer(model, ns, None, 0, 1)
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    try:
        # Every rank owns a share's experts: rows per expert stay those of the share.
        model = replace(model, num_experts=model.num_experts * world)
        return trace_layer(model, ns, dist.group.WORLD, dist.get_rank(), world)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gcmoe trace``."""
    parser.add_argument("--model", choices=sorted(MODELS), default="deepseek-v4-flash")
    parser.add_argument("--ranks", type=int, default=8, help="the share of one of R ranks (8)")
    parser.add_argument("--tokens", type=int, default=64, metavar="T", help="of a rank (64)")
    parser.add_argument("--capacity", type=int, metavar="N", help="max_tokens; by T if left out")
    parser.add_argument("--dispatch-sms", type=int, metavar="N")
    parser.add_argument("--layers", type=int, default=4, metavar="L", help="of the graph (4)")
    parser.add_argument("--replays", type=int, default=21, metavar="N", help="to choose from (21)")
    parser.add_argument("--serial", action="store_true", help="dispatch, then compute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--from", dest="source", metavar="FILE", help="a trace; needs no GPU")
    parser.add_argument("--out", metavar="FILE", help="the trace, for ui.perfetto.dev")
    parser.add_argument("--png", metavar="FILE", help="the picture; needs matplotlib")


def main(ns: argparse.Namespace) -> int:
    """Trace a layer, or read a trace; print a table and write what was asked for."""
    if ns.source:
        timeline: Timeline | None = read_chrome(Path(ns.source))
    else:
        try:
            if min(ns.tokens, ns.layers, ns.replays) < 1:
                raise ValueError("--tokens, --layers and --replays must be positive")
            model = share(get_model(ns.model), ns.ranks)
            model.config(ns.capacity or capacity_for(ns.tokens))
        except ValueError as error:
            print(f"gcmoe trace: {error}")
            return 2
        timeline = run_ranks(model, ns)
    if timeline is None:
        return 0
    print(timeline.title)
    if timeline.unit == "us":
        print(summary(timeline))
    for path in (ns.out, ns.png):
        if path:
            write(timeline, path)
            print(f"wrote {path}")
    return 0
