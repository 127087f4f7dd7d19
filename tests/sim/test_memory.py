"""The weak memory on its own: what each ingredient of an edge orders."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gcmoe.protocol import EDGES, Edge, Role
from gcmoe.sim.memory import Actor, Cta, Memory, WeakMemory

EDGE = {edge.name: edge for edge in EDGES}
FULL, HEADER, ARRIVALS = EDGE["token_ring_full"], EDGE["recv_header"], EDGE["combine_arrivals"]
RUNS = 300


def actor(ident: int, rank: int) -> Actor:
    return Actor(ident, str(ident), Cta(Role.COMPUTE, rank, 0, ident), iter(()))  # type: ignore[arg-type]


def pass_message(
    edge: Edge, seed: int, bulk_store: bool, bulk_load: bool, ranks: tuple[int, int], home: int
) -> Any:
    """The payload a reader sees once it has seen the flag; None if the flag never comes."""
    rng = random.Random(seed)
    memory = WeakMemory(rng)
    writer, reader = actor(0, ranks[0]), actor(1, ranks[1])
    data, flag = (home, edge.payload[0].region, 0), (home, edge.name, 0)
    for one in (writer, reader):
        memory.begin(one)
    memory.init(data, "old")
    (memory.store_async if bulk_store else memory.store)(writer, data, "new")
    memory.prepare(writer, edge)
    if edge.write.kind == "st":
        memory.store_flag(writer, flag, 1, edge.write)
    else:
        memory.update(writer, flag, lambda v: v + 1, edge.write)
    for _ in range(rng.randrange(4)):
        memory.drain_one(rng)
    for _ in range(50):
        if memory.peek(reader, flag):
            memory.observe(reader, flag, edge)
            return (memory.load_async if bulk_load else memory.load)(reader, data)
        memory.drain_one(rng)
    return None


def outcomes(edge: Edge, **options: Any) -> set[Any]:
    return {pass_message(edge, seed, **options) for seed in range(RUNS)}


LOCAL: dict[str, Any] = {"ranks": (0, 0), "home": 0}
ACROSS: dict[str, Any] = {"ranks": (0, 1), "home": 1}


@pytest.mark.parametrize(
    ("edge", "options"),
    [
        (FULL, {"bulk_store": True, "bulk_load": True, **LOCAL}),
        (FULL, {"bulk_store": False, "bulk_load": True, **LOCAL}),
        (EDGE["routes"], {"bulk_store": False, "bulk_load": False, **LOCAL}),
        (EDGE["w1_bitmap"], {"bulk_store": True, "bulk_load": True, **LOCAL}),
        (HEADER, {"bulk_store": False, "bulk_load": True, **ACROSS}),
        (HEADER, {"bulk_store": False, "bulk_load": False, **ACROSS}),
        (ARRIVALS, {"bulk_store": True, "bulk_load": False, **ACROSS}),
    ],
)
def test_edges_as_specified_pass_messages(edge: Edge, options: dict[str, Any]) -> None:
    assert outcomes(edge, **options) == {"new"}


def relaxed_write(edge: Edge) -> Edge:
    return replace(edge, write=replace(edge.write, order="relaxed"), write_fence="")


def relaxed_read(edge: Edge) -> Edge:
    return replace(edge, read=replace(edge.read, order="relaxed"))


def narrow_read(edge: Edge) -> Edge:
    return replace(edge, read=replace(edge.read, scope="gpu"))


def narrow_fence(edge: Edge) -> Edge:
    return replace(edge, write_fence="acq_rel.gpu")  # type: ignore[arg-type]


def no_completion(edge: Edge) -> Edge:
    return replace(edge, completion_wait=False)


def no_proxy_fences(edge: Edge) -> Edge:
    return replace(edge, write_proxy_fence=None, read_proxy_fence=None)


@pytest.mark.parametrize(
    ("edge", "weaken", "options"),
    [
        (FULL, relaxed_write, {"bulk_store": False, "bulk_load": False, **LOCAL}),
        (FULL, relaxed_read, {"bulk_store": False, "bulk_load": False, **LOCAL}),
        (FULL, no_completion, {"bulk_store": True, "bulk_load": True, **LOCAL}),
        (FULL, no_proxy_fences, {"bulk_store": False, "bulk_load": True, **LOCAL}),
        (HEADER, relaxed_write, {"bulk_store": False, "bulk_load": False, **ACROSS}),
        (HEADER, narrow_fence, {"bulk_store": False, "bulk_load": False, **ACROSS}),
        (HEADER, narrow_read, {"bulk_store": False, "bulk_load": False, **ACROSS}),
        (HEADER, no_proxy_fences, {"bulk_store": False, "bulk_load": True, **ACROSS}),
        (ARRIVALS, relaxed_write, {"bulk_store": True, "bulk_load": False, **ACROSS}),
        (ARRIVALS, relaxed_read, {"bulk_store": True, "bulk_load": False, **ACROSS}),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", None),
)
def test_weakened_edges_show_old_data(
    edge: Edge, weaken: Callable[[Edge], Edge], options: dict[str, Any]
) -> None:
    assert outcomes(weaken(edge), **options) == {"old", "new"}


def test_header_store_of_scope_gpu_reaches_no_other_rank() -> None:
    edge = replace(HEADER, write=replace(HEADER.write, scope="gpu"))
    assert outcomes(edge, bulk_store=False, bulk_load=False, **ACROSS) == {None}


def test_add_of_scope_gpu_loses_adds_of_another_rank() -> None:
    totals = set()
    for scope in ("gpu", "sys"):
        operation = replace(ARRIVALS.write, scope=scope)
        for seed in range(50):
            rng = random.Random(seed)
            memory, ours, theirs = WeakMemory(rng), actor(0, 0), actor(1, 1)
            memory.update(ours, (1, "combine_arrivals", 0), lambda v: v + 1, operation)
            memory.update(theirs, (1, "combine_arrivals", 0), lambda v: v + 1, operation)
            memory.end(ours)
            totals.add((scope, memory.peek(theirs, (1, "combine_arrivals", 0))))
    assert totals == {("gpu", 1), ("sys", 2)}


def test_stores_to_one_address_keep_their_order() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        memory, writer, reader = WeakMemory(rng), actor(0, 0), actor(1, 1)
        for value in range(1, 5):
            memory.store(writer, (1, "staged_x", 0), value)
        seen = []
        while memory.drain_one(rng):
            seen.append(memory.peek(reader, (1, "staged_x", 0)))
        assert seen == sorted(seen)
        assert seen[-1] == 4


def test_kernel_end_publishes_everything() -> None:
    memory, writer, reader = WeakMemory(random.Random(0)), actor(0, 0), actor(1, 1)
    memory.store_async(writer, (1, "combine", 0), "row")
    memory.store(writer, (0, "bases", 0), 7)
    memory.end(writer)
    memory.begin(reader)
    assert not memory.has_pending
    assert memory.load(reader, (1, "combine", 0)) == "row"
    assert memory.load_async(reader, (0, "bases", 0)) == 7


def test_sequential_memory_needs_no_edge() -> None:
    memory, one, two = Memory(), actor(0, 0), actor(1, 1)
    memory.store_async(one, (1, "combine", 0), "row")
    assert memory.load(two, (1, "combine", 0)) == "row"
    assert not memory.has_pending
