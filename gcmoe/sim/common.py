"""What all roles do: enter, read the bases, spin, publish, report a fault."""

from __future__ import annotations

from collections.abc import Callable

from gcmoe.protocol import Cell, Edge, FaultKind, FaultRecord, Word32
from gcmoe.protocol.edges import ABORT_SET, FAULT_CLAIM
from gcmoe.sim.machine import EXPIRED, READY, Launch, Simulation, Wait
from gcmoe.sim.memory import Actor, Steps


def enter(sim: Simulation, actor: Actor) -> Steps:
    """Reads abort before anything else; true if the role must do nothing."""
    yield "abort"
    if not sim.memory.peek(actor, (actor.rank, "abort", 0)):
        return False
    actor.cta.entered_aborted = True
    return not sim.variant.forget_abort


def read_bases(sim: Simulation, launch: Launch, actor: Actor) -> Steps:
    """(generation, epoch_base, slot_base, arrivals_base) as words."""
    yield "bases"
    load, rank = sim.memory.load, actor.rank
    bases = tuple(Word32(load(actor, (rank, "bases", index))) for index in range(4))
    sim.check.read_generation(actor, int(bases[0]), launch.generation)
    return bases


def spin(sim: Simulation, actor: Actor, wait: Wait, generation: int) -> Steps:
    """Waits; false if the CTA is poisoned and must publish nothing any more."""
    outcome = yield wait
    if outcome is READY:
        return True
    if outcome is EXPIRED:
        seen = sim.memory.peek(actor, wait.addr)
        yield from raise_fault(
            sim,
            actor,
            FaultRecord(
                FaultKind.TIMEOUT,
                actor.cta.role,
                actor.rank,
                wait.cell,
                wait.addr[2],
                wait.wanted,
                seen & 0xFFFF_FFFF,
                generation,
                wait.peer,
            ),
        )
    actor.cta.poisoned = True
    return sim.variant.publish_after_abort


def raise_fault(sim: Simulation, actor: Actor, record: FaultRecord) -> Steps:
    """The first claims the record; everybody sets abort here and at the peers."""
    yield "fault"
    old = sim.memory.update(
        actor, (actor.rank, "fault", 0), lambda value: value or 1, FAULT_CLAIM.operation
    )
    if not old:
        sim.faults.append(record)
    peers = range(sim.config.ranks) if sim.config.broadcast else (actor.rank,)
    for rank in sorted(peers, key=lambda peer: peer != actor.rank):
        yield "abort"
        sim.check.aborted[rank] = True
        sim.memory.store_flag(actor, (rank, "abort", 0), 1, ABORT_SET.operation)


def fault(
    sim: Simulation,
    actor: Actor,
    kind: FaultKind,
    cell: Cell,
    index: int,
    wanted: int,
    seen: int,
    generation: int,
    peer: int | None,
) -> Steps:
    """A fault other than a time-out poisons the CTA that finds it."""
    record = FaultRecord(
        kind, actor.cta.role, actor.rank, cell, index, wanted, seen, generation, peer
    )
    yield from raise_fault(sim, actor, record)
    actor.cta.poisoned = True


def publish(
    sim: Simulation,
    actor: Actor,
    edge: Edge,
    rank: int,
    index: int,
    function: Callable[[int], int],
) -> int:
    """One read-modify-write of a flag, prepared by the caller; returns the new value."""
    region = edge.name
    sim.check.publish(actor, f"{region}[{index}] at rank {rank}")
    return function(sim.memory.update(actor, (rank, region, index), function, edge.write))


def is_poisoned(sim: Simulation, actor: Actor) -> bool:
    """Another warp of this CTA was aborted."""
    return actor.cta.poisoned and not sim.variant.publish_after_abort


def adder(amount: Word32) -> Callable[[int], int]:
    """Adds ``amount`` modulo 2^32."""
    return lambda value: int(Word32(value) + amount)
