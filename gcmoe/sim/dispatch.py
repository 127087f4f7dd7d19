"""Role 1: tells every peer what it routes there, and pulls the rows routed here into the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gcmoe.protocol import (
    BlockEntry,
    Cell,
    Edge,
    Entry,
    FaultKind,
    RecvHeader,
    RoutesHeader,
    RowMeta,
    TokenRing,
    Word32,
    Word64,
    fragment_position,
    header_words,
    is_valid,
    ring_row,
)
from gcmoe.protocol.edges import CLAIM
from gcmoe.sim.checks import Violation
from gcmoe.sim.common import adder, enter, fault, is_poisoned, publish, read_bases, spin
from gcmoe.sim.decode import decode_entry, decode_header
from gcmoe.sim.machine import Launch, Simulation, Wait
from gcmoe.sim.memory import Actor, Steps


@dataclass(slots=True)
class Row:
    """One row routed here and its place in the ring."""

    src: int
    token: int
    slot: int
    expert: int
    weight: int
    block: int = 0
    row: int = 0
    rows: int = 0


def fragment(row: int, block_rows: int) -> int:
    """``fragment_position``; blocks below 8 rows exist in simulations only and keep row order."""
    return fragment_position(row, block_rows) if block_rows >= 8 else row


def parity_of(sim: Simulation, generation: Word32) -> int:
    return 0 if sim.variant.one_parity else int(generation) & 1


def header_index(sim: Simulation, parity: int, src: int, word: int) -> int:
    return (parity * sim.config.ranks + src) * sim.config.header_words + word


def dispatch(sim: Simulation, launch: Launch, actor: Actor) -> Steps:
    """A dispatch CTA."""
    if (yield from enter(sim, actor)):
        actor.cta.poisoned = not sim.variant.forget_abort
        return
    bases = yield from read_bases(sim, launch, actor)
    generation = bases[0]
    if actor.cta.index == 0:
        yield "in_flight"
        old = sim.memory.update(
            actor,
            (actor.rank, "in_flight", 0),
            lambda value: value or int(generation) | 1,
            CLAIM.operation,
        )
        if old:
            yield from fault(
                sim, actor, FaultKind.OVERLAPPING_REPLAYS, Cell.IN_FLIGHT, 0, 0, old,
                int(generation), None,
            )  # fmt: skip
            return
    yield from send(sim, launch, actor, generation)
    received = yield from receive(sim, launch, actor, generation)
    if received is None:
        return
    if sim.variant.reread_generation:
        bases = yield from read_bases(sim, launch, actor)
    blocks, rows = bin_rows(sim, launch, received)
    if actor.cta.index == 0:
        yield from write_routes(sim, launch, actor, generation, blocks)
    warps = sim.config.warps
    step = warps * launch.grids[actor.cta.role]
    first = actor.cta.index * warps
    for warp in range(1, warps):
        mine = rows[first + warp :: step]

        def steps(child: Actor, mine: list[Row] = mine) -> Steps:
            return pull_rows(sim, launch, child, bases, mine)

        sim.start_warp(launch, actor, warp, steps)
    yield from pull_rows(sim, launch, actor, bases, rows[first::step])


# ---- sending ------------------------------------------------------------------------------


def send(sim: Simulation, launch: Launch, actor: Actor, generation: Word32) -> Steps:
    """This CTA's share of entries and staged rows, then its header words at every rank."""
    rank, config, memory = actor.rank, sim.config, sim.memory
    edge = sim.variant.edges["recv_header"]
    tokens = sim.problem[launch.layer][rank]
    grid, parity = launch.grids[actor.cta.role], parity_of(sim, generation)
    counts = [0] * config.ranks
    for token, ids in enumerate(tokens):
        share = token % grid == actor.cta.index
        for slot, expert_id in enumerate(ids):
            if not is_valid(expert_id, config.experts):
                continue
            dst, expert = divmod(expert_id, config.local_experts)
            if share:
                weight = sim.data.weight_bits(launch.layer, rank, token, slot)
                word = Entry.pack(Word64(weight), Word64(token), Word64(slot), Word64(expert))
                place = (parity * config.ranks + rank) * config.shape.entry_capacity + counts[dst]
                yield "recv_entries"
                sim.check.publish(actor, "an entry")
                memory.store(actor, (dst, "recv_entries", place), int(word))
            counts[dst] += 1
        if share:
            yield "staged_x"
            sim.check.publish(actor, "staged x")
            sim.check.stage(rank, token, ids)
            memory.store(
                actor, (rank, "staged_x", token), sim.data.stage(launch.layer, rank, token)
            )
    yield "recv_header"
    memory.prepare(actor, edge)
    call = launch.layer % RecvHeader.CALL.limit
    for offset in range(config.ranks):
        dst = (rank + offset) % config.ranks
        if sim.variant.skip_zero_header and not counts[dst]:
            continue
        word = RecvHeader.pack(Word64(int(generation)), Word64(call), Word64(counts[dst]))
        for index in header_words(actor.cta.index, grid, config.header_words):
            yield "recv_header"
            sim.check.publish(actor, f"header word {index} at rank {dst}")
            readers = config.grid(config.dispatch_ctas, dst, launch.replay)
            sim.check.send_header(dst, parity, rank, index, readers)
            addr = (dst, "recv_header", header_index(sim, parity, rank, index))
            memory.store_flag(actor, addr, int(word), edge.write)


# ---- receiving ----------------------------------------------------------------------------


def awaited_words(sim: Simulation, launch: Launch, actor: Actor) -> list[tuple[int, int]]:
    """(source, word) of the header words to wait for: all of them, unless a mutant forgets some."""
    config, variant, rank = sim.config, sim.variant, actor.rank
    words = range(config.header_words)
    if variant.assume_own_grid:
        words = range(launch.grids[actor.cta.role])
    sources = list(range(config.ranks))
    if variant.skip_own_headers:
        sources.remove(rank)
    if variant.skip_header_wait_without_tokens and not sim.problem[launch.layer][rank]:
        sources = [rank]
    return [(src, word) for src in sources for word in words]


def receive(sim: Simulation, launch: Launch, actor: Actor, generation: Word32) -> Steps:
    """Waits for all header words and reads the entries; None if the CTA is poisoned."""
    edge = sim.variant.edges["recv_header"]
    config, rank = sim.config, actor.rank
    parity, wanted = parity_of(sim, generation), int(generation)
    counts: list[list[int]] = [[] for _ in range(config.ranks)]
    for src, word in awaited_words(sim, launch, actor):
        addr = (rank, "recv_header", header_index(sim, parity, src, word))
        wait = Wait("header", addr, lambda v: v >> 32 == wanted, edge, wanted, src)
        if not (yield from spin(sim, actor, wait, wanted)):
            return None
        found, call, count = decode_header(sim.memory.peek(actor, addr))
        if found == wanted:
            sim.check.read_header(rank, parity, src, word)
        mine = launch.layer % RecvHeader.CALL.limit
        if call != mine and not sim.variant.ignore_call:
            yield from fault(
                sim, actor, FaultKind.CALL_MISMATCH, Cell.RECV_HEADER, addr[2], mine, call,
                wanted, src,
            )  # fmt: skip
            return None
        if count > config.shape.entry_capacity:
            yield from fault(
                sim, actor, FaultKind.BAD_COUNT, Cell.RECV_HEADER, addr[2],
                config.shape.entry_capacity, count, wanted, src,
            )  # fmt: skip
            return None
        counts[src].append(count)
    if sim.variant.skip_own_headers:
        # The count of the own rank is then whatever word 0 holds.
        own = sim.memory.peek(actor, (rank, "recv_header", header_index(sim, parity, rank, 0)))
        counts[rank].append(decode_header(own)[2])
    return (yield from read_entries(sim, actor, parity, counts, wanted))


def read_entries(
    sim: Simulation, actor: Actor, parity: int, counts: list[list[int]], generation: int
) -> Steps:
    """The rows that every source routes here, bound-checked."""
    config, rank, rows = sim.config, actor.rank, []
    for src, words in enumerate(counts):
        count = sum(words) if sim.variant.sum_counts else max(words, default=0)
        if len(set(words)) > 1:
            raise Violation("malformed", f"{actor.name}: words of rank {src} differ: {words}")
        first = (parity * config.ranks + src) * config.shape.entry_capacity
        if count:
            yield "recv_entries"
        for index in range(count):
            word = sim.memory.load(actor, (rank, "recv_entries", first + index))
            row = Row(src, *decode_entry(word))
            if row.token >= config.tokens or row.slot >= config.top_k or (
                row.expert >= config.local_experts
            ):  # fmt: skip
                yield from fault(
                    sim, actor, FaultKind.BAD_COUNT, Cell.RECV_HEADER, index, config.tokens,
                    row.token, generation, src,
                )  # fmt: skip
                return None
            rows.append(row)
    return rows


def bin_rows(
    sim: Simulation, launch: Launch, received: list[Row]
) -> tuple[list[tuple[int, int]], list[Row]]:
    """Blocks (expert, rows) in ring order, and the rows in (expert, source, token, slot) order."""
    full = launch.block_rows
    blocks: list[tuple[int, int]] = []
    ordered: list[Row] = []
    for expert in range(sim.config.local_experts):
        rows = [row for row in received if row.expert == expert]
        for first in range(0, len(rows), full):
            part = rows[first : first + full]
            for place, row in enumerate(part):
                row.block, row.row, row.rows = len(blocks), place, len(part)
            blocks.append((expert, len(part)))
            ordered += part
        if not rows and sim.variant.empty_blocks:
            blocks.append((expert, 0))
    return blocks, ordered


def write_routes(
    sim: Simulation, launch: Launch, actor: Actor, generation: Word32, blocks: list[tuple[int, int]]
) -> Steps:
    """The block table, then the routes word that publishes it."""
    edge, rank, memory = sim.variant.edges["routes"], actor.rank, sim.memory
    if sim.config.calls is None and not sim.variant.empty_blocks:
        wanted = sim.expected_blocks(rank, launch.replay, launch.layer)
        if blocks != wanted:
            raise Violation("routes_right", f"{actor.name}: {blocks}, expected {wanted}")
    if blocks:
        yield "block_table"
    for index, (expert, rows) in enumerate(blocks):
        word = BlockEntry.pack(Word32(expert), Word32(rows))
        memory.store(actor, (rank, "block_table", index), int(word))
    yield "routes"
    sim.check.publish(actor, "routes")
    memory.prepare(actor, edge)
    header = RoutesHeader.pack(Word64(int(generation)), Word64(len(blocks)))
    memory.store_flag(actor, (rank, "routes", 0), int(header), edge.write)


# ---- pulling ------------------------------------------------------------------------------


def full_ring(sim: Simulation, launch: Launch) -> TokenRing:
    """The ring whose row unit the full counter counts in: U, unless a mutant counts in BM."""
    if sim.variant.count_block_rows:
        return TokenRing(sim.config.num_slots, launch.block_rows, sim.config.hidden)
    return sim.ring


def pull_rows(
    sim: Simulation, launch: Launch, actor: Actor, bases: tuple[Any, ...], rows: list[Row]
) -> Steps:
    """One warp's rows in ring order, a few loads in flight at a time."""
    memory, variant = sim.memory, sim.variant
    empty, batch = variant.edges["token_ring_empty"], sim.config.rows_in_flight
    generation, epoch_base, slot_base, _ = bases
    free_block = -1
    stored: list[tuple[Row, int, Word32]] = []
    for first in range(0, len(rows), batch):
        loaded = []
        for row in rows[first : first + batch]:
            yield "staged_x"
            loaded.append((row, memory.load_async(actor, (row.src, "staged_x", row.token))))
            sim.check.pull(row.src, row.token)
        for row, staged in loaded:
            place = sim.ring.place(slot_base, row.block)
            slot, epoch = int(sim.ring.slot(place)), sim.ring.epoch(epoch_base, place)
            store = (sim, launch, actor, row, staged, slot)
            early = set()
            if row.block != free_block:
                if not variant.wait_before_publishing:
                    yield from publish_rows(sim, launch, actor, stored)
                # Stores that the wait does not order may happen before it.
                early = {p for p in ("generic", "async") if not memory.orders_stores(empty, p)}
                yield from store_row(*store, early)
                if not (yield from wait_empty(sim, actor, empty, slot, epoch, generation)):
                    return
                free_block = row.block
            if is_poisoned(sim, actor):
                return
            yield from store_row(*store, {"generic", "async"} - early)
            stored.append((row, slot, epoch))
        yield from publish_rows(sim, launch, actor, stored)


def wait_empty(
    sim: Simulation, actor: Actor, edge: Edge, slot: int, epoch: Word32, generation: Word32
) -> Steps:
    target, reached = sim.ring.empty_target(epoch), sim.variant.reached
    addr = (actor.rank, "token_ring_empty", slot)
    wait = Wait("empty", addr, lambda v: reached(Word32(v), target), edge, int(target))
    return (yield from spin(sim, actor, wait, int(generation)))


def store_row(
    sim: Simulation,
    launch: Launch,
    actor: Actor,
    row: Row,
    staged: Any,
    slot: int,
    proxies: set[str],
) -> Steps:
    """Row by a bulk store; scales, weight and metadata by ordinary stores."""
    memory, rank, pitch = sim.memory, actor.rank, launch.block_rows
    if not proxies:
        return
    if "async" in proxies:
        yield "ring_rows"
        sim.check.store_row(rank, slot, launch.replay, row.block, sim.w2_tiles(rank))
        index = slot * pitch + ring_row(row.row, row.rows, pitch)
        memory.store_async(actor, (rank, "ring_rows", index), staged)
    if "generic" in proxies:
        yield "ring_meta"
        sim.check.store_row(rank, slot, launch.replay, row.block, sim.w2_tiles(rank))
        place = fragment(row.row, pitch)
        for window in range(sim.windows):
            index = (slot * sim.windows + window) * pitch + place
            memory.store(actor, (rank, "ring_scale", index), sim.data.scale(staged, window))
        memory.store(actor, (rank, "ring_weight", slot * pitch + place), row.weight)
        meta = RowMeta.pack(Word32(row.src), Word32(row.token), Word32(row.slot))
        memory.store(actor, (rank, "ring_meta", slot * pitch + row.row), int(meta))


def publish_rows(
    sim: Simulation, launch: Launch, actor: Actor, stored: list[tuple[Row, int, Word32]]
) -> Steps:
    """Adds every stored row to its slot's full counter."""
    edge, ring = sim.variant.edges["token_ring_full"], full_ring(sim, launch)
    for row, slot, epoch in stored:
        yield "token_ring_full"
        if is_poisoned(sim, actor):
            return
        sim.memory.prepare(actor, edge)
        amount = ring.full_increment(Word32(row.row), Word32(row.rows))
        value = publish(sim, actor, edge, actor.rank, slot, adder(amount))
        target = int(ring.full_target(epoch))
        sim.check.publish_row(actor.rank, row.block)
        sim.check.count(f"token_ring_full[{slot}]", actor, value, target)
    stored.clear()
