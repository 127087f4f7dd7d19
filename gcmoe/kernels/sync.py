"""The device verbs: flag operations as the edge table states them, and waits with a budget.

``publish`` and ``observe`` take an edge of ``gcmoe.protocol`` and emit its operation, order and
scope; ``before_publish`` and ``after_observe`` emit its fences. Each marks its PTX with the edge's
name, and a compile test reads the marks. ``env`` is what a wait needs to end: see :func:`wait_env`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import HEAD_WORDS, ITEM_WORDS, TRACE_ITEMS, TRACE_WORDS
from gcmoe.protocol import Cell, Edge, FaultKind, LoneOperation, Role, is_reached
from gcmoe.protocol.edges import ABORT_POLL, ABORT_SET, FAULT_CLAIM
from gcmoe.protocol.faults import NO_PEER

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64
POLLS_PER_CHECK = 32


def publish(edge: Edge, address: Any, value: Any) -> None:
    """The flag write of ``edge``: a store or a reduction with its order and scope."""
    ptx.cell_store(edge.write, f"{edge.name} write", address, value)


def observe(edge: Edge, address: Any) -> Any:
    """The flag read of ``edge``."""
    return ptx.cell_load(edge.read, f"{edge.name} read", address)


def proxy_release(edge: Edge) -> None:
    """By each thread with generic stores, before the barrier or the flag."""
    if edge.write_proxy_fence:
        ptx.fence(f"proxy.{edge.write_proxy_fence}", f"{edge.name} write")


def complete(edge: Edge) -> None:
    """By each thread with bulk stores, after its commit and before the barrier or the flag."""
    if edge.completion_wait:
        ptx.bulk_wait(f"{edge.name} write")


def release(edge: Edge) -> None:
    """By the thread that publishes a relaxed flag, right before it."""
    if edge.write_fence:
        ptx.fence(edge.write_fence, f"{edge.name} write")


def after_observe(edge: Edge) -> None:
    """By the thread that issues bulk loads, after its acquire."""
    if edge.read_proxy_fence:
        ptx.fence(f"proxy.{edge.read_proxy_fence}", f"{edge.name} read")


def atomic(lone: LoneOperation, address: Any, *values: Any) -> Any:
    """An atomic that publishes no data; returns the old value."""
    return ptx.cell_atomic(lone.operation, lone.name, address, *values)


def read_abort(env: dict[str, Any]) -> Any:
    """The sticky abort word of this rank."""
    return ptx.cell_load(ABORT_POLL.operation, ABORT_POLL.name, env["workspace"] + env["abort"])


def wait_env(
    spec: KernelSpec, workspace: Any, fault_record: Any, rank: Any, generation: Any, budget_ns: Any
) -> dict[str, Any]:
    """What a wait needs to end without its flag."""
    return {
        "workspace": workspace,
        "fault_record": fault_record,
        "rank": rank,
        "generation": generation,
        "budget_ns": budget_ns,
        "abort": spec.shape.offsets["abort"],
        "fault": spec.shape.offsets["fault"],
        "role": int(spec.role),
        "peers_symbol": spec.peers_symbol,
        "num_ranks": spec.shape.num_ranks,
    }


@cute.jit
def raise_fault(
    kind: cutlass.Constexpr,
    cell: cutlass.Constexpr,
    index: Any,
    wanted: Any,
    seen: Any,
    peer: Any,
    env: dict,
):
    """Claim the fault record if it is free, then set the sticky abort here and at all peers."""
    claimed = atomic(FAULT_CLAIM, env["workspace"] + env["fault"], U32(0), U32(1))
    if claimed == U32(0):
        record = env["fault_record"]
        words = (
            U32(env["role"]),
            U32(env["rank"]),
            U32(int(cell)),
            U32(index),
            U32(wanted),
            U32(seen),
            U32(env["generation"]),
            U32(peer),
        )
        for i in cutlass.range_constexpr(len(words)):
            ptx.store_host_u32(record + 4 * (i + 1), words[i])
        ptx.store_host_release_u32(record, U32(int(kind)))
    for r in cutlass.range(env["num_ranks"], unroll=1):
        peer_workspace = ptx.parameter_u64(env["peers_symbol"], r)
        ptx.cell_store(ABORT_SET.operation, ABORT_SET.name, peer_workspace + env["abort"], U32(1))


@cute.jit
def is_satisfied(kind: cutlass.Constexpr, value: Any, wanted: Any, odd: Any):
    """The comparison of a wait: ``reached`` (cumulative counter), ``generation`` (upper half of a
    u64), ``bits`` (all of ``wanted`` flipped in an epoch of parity ``odd``)."""
    if cutlass.const_expr(kind == "reached"):
        ok = is_reached(value, wanted)
    elif cutlass.const_expr(kind == "generation"):
        ok = U32(value >> U64(32)) == wanted
    else:
        ok = ((value ^ (odd * U64(0xFFFF_FFFF_FFFF_FFFF))) & wanted) == wanted
    return ok


@cute.jit
def poll(
    edge: cutlass.Constexpr,
    kind: cutlass.Constexpr,
    address: Any,
    wanted: Any,
    odd: Any,
    index: Any,
    peer: Any,
    env: dict,
):
    """Wait for a cell by one thread. Returns (ok, value): ok is 0 when the wait ended by abort or
    by its budget; the caller is then poisoned and publishes nothing more."""
    value = observe(edge, address)
    ok = I32(1)
    if not is_satisfied(kind, value, wanted, odd):
        start = ptx.global_timer()
        polls = I32(0)
        go = I32(1)
        while go != 0:
            value = observe(edge, address)
            if is_satisfied(kind, value, wanted, odd):
                go = I32(0)
            else:
                polls += 1
                if (polls & (POLLS_PER_CHECK - 1)) == 0:
                    if read_abort(env) != U32(0):
                        ok = I32(0)
                        go = I32(0)
                    elif ptx.global_timer() - start > env["budget_ns"]:
                        raise_fault(
                            FaultKind.TIMEOUT, edge.cell, index, U32(wanted), U32(value), peer, env
                        )
                        ok = I32(0)
                        go = I32(0)
    return ok, value


@cute.jit
def await_reached(
    edge: cutlass.Constexpr, address: Any, target: Any, index: Any, peer: Any, env: dict
):
    """Wait until a cumulative counter has passed ``target``; 0 if poisoned."""
    ok, value = poll(edge, "reached", address, target, U32(0), index, peer, env)
    return ok


@cute.jit
def await_generation(edge: cutlass.Constexpr, address: Any, env: dict):
    """Wait until a u64 carries this replay's generation; (ok, value)."""
    ok, value = poll(
        edge, "generation", address, U32(env["generation"]), U32(0), U32(0), U32(NO_PEER), env
    )
    return ok, value


@cute.jit
def await_bits(edge: cutlass.Constexpr, address: Any, bits: Any, odd: Any, index: Any, env: dict):
    """Wait until all of ``bits`` were flipped in this epoch; (ok, value)."""
    ok, value = poll(edge, "bits", address, bits, odd, index, U32(NO_PEER), env)
    return ok, value


@cute.jit
def refill(mbarrier: Any, num_bytes: Any):
    """Expect ``num_bytes`` in a stage whose readers, ordinary loads among them, this thread has
    awaited."""
    ptx.fence("proxy.async.shared::cta", "stage read")
    ptx.mbarrier_expect(mbarrier, num_bytes)


@cute.jit
def advance(index: Any, parity: Any, depth: cutlass.Constexpr):
    """The next of ``depth`` places of a shared ring, and the parity of its phase there."""
    index += 1
    if index == depth:
        index = I32(0)
        parity ^= 1
    return index, parity


@cute.jit
def jitter(spec: cutlass.Constexpr, tid: Any, cta: Any):
    """Hold this CTA back for a pseudo-random time below ``spec.jitter_ns``; nothing when 0.

    For tests; the first step of a kernel, by all its threads."""
    if cutlass.const_expr(spec.jitter_ns > 0):
        if tid == 0:
            start = ptx.global_timer()
            bits = U32(start >> 5) ^ (U32(cta) * U32(0x9E37_79B9) + U32(int(spec.role)))
            bits = (bits ^ (bits >> 16)) * U32(0x7FEB_352D)
            bits = (bits ^ (bits >> 15)) * U32(0x846C_A68B)
            bits = bits ^ (bits >> 16)
            delay = I64((U64(bits) * U64(spec.jitter_ns)) >> 32)
            waited = I64(0)
            while waited < delay:
                waited = ptx.global_timer() - start
        cute.arch.sync_threads()


@cute.jit
def mark(spec: cutlass.Constexpr, events: Any, word: cutlass.Constexpr):
    """Record the time as one word of this CTA's trace; by one thread, nothing when off."""
    if cutlass.const_expr(spec.trace):
        ptx.store_u64(events + word * 8, U64(ptx.global_timer()))


@cute.jit
def stamp(spec: cutlass.Constexpr, s: dict, word: cutlass.Constexpr):
    """Record the time as one word of the trace of CTA ``s["cta"]``; called by all its threads."""
    if cutlass.const_expr(spec.trace):
        if s["tid"] == 0:
            mark(spec, s["trace"] + I64(s["cta"]) * (8 * TRACE_WORDS), word)


@cute.jit
def record_item(
    spec: cutlass.Constexpr, at: dict, events: Any, word: cutlass.Constexpr, value: Any
):
    """Record one word of the CTA's next item for which it was not recorded yet; by one thread."""
    if cutlass.const_expr(spec.trace):
        counter = at["traced"] + 4 * int(word)
        index = ptx.shared_load(counter)
        if index < U32(TRACE_ITEMS):
            item = events + 8 * HEAD_WORDS + I64(index) * (8 * ITEM_WORDS)
            ptx.store_u64(item + 8 * int(word), value)
        ptx.shared_store(counter, index + U32(1))


@cute.jit
def mark_item(spec: cutlass.Constexpr, at: dict, events: Any, word: cutlass.Constexpr):
    """Record the time as one word of an item, as :func:`record_item` does."""
    if cutlass.const_expr(spec.trace):
        record_item(spec, at, events, word, U64(ptx.global_timer()))


__all__ = [
    "Cell",
    "Role",
    "after_observe",
    "atomic",
    "await_bits",
    "await_generation",
    "await_reached",
    "complete",
    "jitter",
    "mark",
    "mark_item",
    "observe",
    "poll",
    "proxy_release",
    "publish",
    "raise_fault",
    "read_abort",
    "record_item",
    "release",
    "wait_env",
]
