"""Creation: what the ranks compare, process groups, the probe."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pair import Pair, expect
from pair_cases import CASES
from scenarios_layers import call

import gcmoe
from gcmoe.errors import GCMoEError, UnsupportedConcurrency
from gcmoe.protocol import Role
from gcmoe.runtime import driver, memory
from gcmoe.runtime.graph import LayerGraph

NAME = "tiny"


def refusal(pair: Pair, create: Any) -> Exception:
    """What creating an operator raises on this rank."""
    pair.meet("create")
    try:
        op = create()
    except (GCMoEError, ValueError, TypeError) as error:
        return error
    op.close()
    raise AssertionError("an operator was created")


def create_and_call(pair: Pair, group: Any = None) -> torch.Tensor:
    """A sound operator, and one call."""
    layer = pair.operator(NAME, group=group).bind(pair.weights(NAME)[1])
    return call(layer, pair.batch(NAME, 9, "distinct", 3)).clone()


def unequal_arguments(pair: Pair) -> dict[str, Any]:
    """Raised on every rank, naming both values, before any kernel is looked for."""
    config = CASES[NAME].config
    differing: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "max_tokens": (64, 32, {}),
        "hidden": (256, 512, {}),
        "top_k": (2, 3, {}),
        "clamp": (2.0, 3.0, {}),
        "spin_budget_s": (3.0, 4.0, {}),
    }
    texts = []
    for field, (first, second, options) in differing.items():
        mine = replace(config, **{field: (first, second)[pair.rank]})
        error = refusal(pair, lambda c=mine, o=options: gcmoe.MoE(c, pair.group, **o))
        expect(type(error) is ValueError, f"{field}: {type(error).__name__}: {error}")
        for word in (field, f"rank 0 has {first}", f"rank 1 has {second}"):
            expect(word in str(error), f"{field}: {word!r} is not in: {error}")
        texts.append(str(error))
    ring = (None, 4)[pair.rank]
    error = refusal(pair, lambda: gcmoe.MoE(config, pair.group, ring_slots=ring))
    expect("ring_slots differs" in str(error), str(error))
    create_and_call(pair)
    return {"refusals": [*texts, str(error)]}


def a_rank_fails(pair: Pair) -> dict[str, Any]:
    """A bad argument on one rank only."""
    config = CASES[NAME].config
    ring = (None, 3)[pair.rank]
    error = refusal(pair, lambda: gcmoe.MoE(config, pair.group, ring_slots=ring))
    if pair.rank == 1:
        expect(type(error) is ValueError and "power of two" in str(error), str(error))
    else:
        expect(type(error) is GCMoEError and "failed on rank 1" in str(error), str(error))
    create_and_call(pair)
    return {"error": str(error)}


def world_and_subgroup(pair: Pair) -> dict[str, Any]:
    """WORLD of one backend, a second group of another, both in turn with equal bits."""
    world = dist.group.WORLD
    wanted = create_and_call(pair, world)
    other = dist.new_group([1, 0], backend="gloo")
    y = create_and_call(pair, other)
    expect(torch.equal(y.view(torch.int16), wanted.view(torch.int16)), "the groups differ")
    return {"world": dist.get_backend(world), "other": dist.get_backend(other)}


def rendezvous_counts(pair: Pair) -> dict[str, Any]:
    """One rank has made more rendezvous: all ranks are told, none waits."""
    start = time.monotonic()
    made = memory.rendezvous_count.made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.rendezvous_count, "made", made + 2 * pair.rank)
        error = refusal(pair, lambda: gcmoe.MoE(CASES[NAME].config, pair.group))
    for word in (f"rank 0 has made {made}", f"rank 1 {made + 2}", "same order"):
        expect(word in str(error), f"{word!r} is not in: {error}")
    seconds = time.monotonic() - start
    expect(seconds < 5, f"took {seconds:.1f} s")
    create_and_call(pair)
    return {"error": str(error)}


def probe_in_wrong_order(pair: Pair) -> dict[str, Any]:
    """On rank 1 compute runs to its end before dispatch begins: refused on both ranks."""
    instantiate = LayerGraph.instantiate

    def in_wrong_order(graph: LayerGraph) -> None:
        nodes = graph._nodes
        driver.call(
            "cuGraphAddDependencies",
            graph._graph,
            [nodes[Role.COMPUTE]],
            [nodes[Role.DISPATCH]],
            None,
            1,
        )
        instantiate(graph)

    with pytest.MonkeyPatch.context() as patch:
        if pair.rank == 1:
            patch.setattr(LayerGraph, "instantiate", in_wrong_order)
        error = refusal(
            pair, lambda: gcmoe.MoE(CASES[NAME].config, pair.group, green_contexts=True)
        )
    expect(type(error) is UnsupportedConcurrency, f"{type(error).__name__}: {error}")
    expect("rank 1" in str(error) and "Likely cause" in str(error), str(error))
    create_and_call(pair)
    return {"error": str(error)}


def foreign_rendezvous(pair: Pair) -> dict[str, Any]:
    """Another package has made a rendezvous on rank 0 only: an error, after the store's time-out.

    That the other rank catches up afterwards is looked at, not demanded: it is torch's business.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    alone = [dist.new_group([rank], backend="gloo") for rank in (0, 1)]
    kept = []

    def one_more() -> None:
        tensor = symmetric_memory.empty(1 << 20, dtype=torch.uint8, device=pair.device)
        kept.append((tensor, symmetric_memory.rendezvous(tensor, group=alone[pair.rank])))

    if pair.rank == 0:
        one_more()
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "RENDEZVOUS_LIMIT_S", 4.0)
        error = refusal(pair, lambda: gcmoe.MoE(CASES[NAME].config, pair.group))
    seconds = time.monotonic() - start
    expect("rendezvous" in str(error), f"{type(error).__name__}: {error}")
    after = "works after the other rank has caught up"
    try:
        if pair.rank == 1:
            one_more()
        pair.meet("caught up")
        create_and_call(pair)
    except (GCMoEError, RuntimeError) as failure:
        after = f"{type(failure).__name__}: {failure}"
    return {"seconds": round(seconds, 1), "error": str(error)[:300], "after": after[:300]}
