"""Four and eight ranks: on as many GPUs, or sharing fewer."""

from __future__ import annotations

import time
from typing import Any

import torch
from pair import Pair, differences, expect, fault_of
from pair_cases import CASES
from pair_oracle import Problems, check_layer
from scenarios_layers import call

from gcmoe.errors import DeviceFault, PeerTimeout

REPLAYS = 40
BUDGET_S = 6.0
GRACE_S = 6.0


def name_of(pair: Pair) -> str:
    return f"ranks-{pair.world.size}"


def tokens_of(pair: Pair, most: int) -> list[tuple[str, int, str]]:
    """(what, tokens of this rank, routing) of each call."""
    rank, last = pair.rank, pair.world.size - 1
    same = ("distinct", "single", "last", "masked", "nothing", "duplicates", "int64")
    return [
        *((f"all {routing}", most, routing) for routing in same),
        ("one token", 1, "distinct"),
        ("ragged", (5 * rank + 3) % (most + 1), "distinct"),
        ("one rank has tokens", most if rank == last else 0, "distinct"),
        ("one rank has none", 0 if rank == 1 else most, "distinct"),
        ("all empty", 0, "distinct"),
        ("mixed", rank + 1, ("masked", "duplicates", "single")[rank % 3]),
    ]


def many_ranks(pair: Pair) -> dict[str, Any]:
    """Every kind of routing against the oracle."""
    name = name_of(pair)
    config, layer = CASES[name].config, pair.layer(name)
    experts, _ = pair.weights(name)
    problems = Problems()
    calls = tokens_of(pair, config.max_tokens)
    for n, (what, num_tokens, routing) in enumerate(calls):
        batch = pair.batch(name, num_tokens, routing, n)
        check_layer(problems, f"{name} {what}", call(layer, batch), batch, experts, config)
    problems.finish()
    return {"calls": len(calls), "GPUs": torch.cuda.device_count()}


def many_ranks_in_a_graph(pair: Pair) -> dict[str, Any]:
    """Replays and eager calls in turn, bit for bit."""
    name = name_of(pair)
    config, layer = CASES[name].config, pair.layer(name)
    most = config.max_tokens
    counts = [(3 * pair.rank + t) % (most + 1) for t in (0, 7, most)]
    batches = [pair.batch(name, count, "distinct", 50 + n) for n, count in enumerate(counts)]
    wanted = [call(layer, batch).clone() for batch in batches]
    outputs = [torch.empty_like(batch.x) for batch in batches]
    graphs = [
        pair.capture(lambda b=b, y=y: layer(b.x, b.ids, b.weights, out=y))
        for b, y in zip(batches, outputs, strict=True)
    ]
    found = []
    for n in range(REPLAYS):
        which = (7 * n + n // 5) % len(graphs)
        outputs[which].zero_()
        graphs[which].replay()
        found.append(differences(outputs[which], wanted[which]))
        if n % 5 == 0:
            batch = batches[which - 1]
            found.append(differences(layer(batch.x, batch.ids, batch.weights), wanted[which - 1]))
    layer.op.check(synchronize=True)
    wrong = int((torch.stack(found) != 0).sum())
    expect(wrong == 0, f"{wrong} of {len(found)} results differ")
    return {"replays": len(found)}


def many_ranks_skip(pair: Pair) -> dict[str, Any]:
    """The last rank makes one call less: a fault on every rank that made it, in time; then on."""
    name = name_of(pair)
    layer = pair.layer(name, BUDGET_S)
    batch = pair.batch(name, CASES[name].config.max_tokens, "distinct", 90)
    wanted = call(layer, batch).clone()
    last = pair.world.size - 1
    pair.meet("skip")
    start = time.monotonic()
    fault = fault_of(lambda: call(layer, batch))[0] if pair.rank != last else None
    seconds = time.monotonic() - start
    if pair.rank != last:
        expect(isinstance(fault, DeviceFault), "no fault on this rank")
        expect(seconds < BUDGET_S + GRACE_S, f"raised after {seconds:.1f} s")
    names = pair.ranks.gather(type(fault).__name__)
    expect(PeerTimeout.__name__ in names, f"nobody says who was late: {names}")
    layer.op.reset()
    for _ in range(3):
        y = call(layer, batch)
        expect(int(differences(y, wanted)) == 0, "wrong after reset()")
    return {"faults": names, "seconds": round(seconds, 2)}
