"""Role 2: W1 and W2 items in the one global order; Role 3: sums this rank's contributions."""

from __future__ import annotations

from typing import Any

from gcmoe.protocol import Role, Word32, Word64, is_valid, ring_row
from gcmoe.sim.checks import Violation
from gcmoe.sim.common import adder, enter, publish, read_bases, spin
from gcmoe.sim.data import NAN
from gcmoe.sim.decode import decode_block, decode_meta, decode_routes
from gcmoe.sim.dispatch import fragment, full_ring
from gcmoe.sim.machine import Launch, Simulation, Wait
from gcmoe.sim.memory import Actor, Steps


def compute(sim: Simulation, launch: Launch, actor: Actor) -> Steps:
    """A persistent compute CTA."""
    if (yield from enter(sim, actor)):
        actor.cta.poisoned = not sim.variant.forget_abort
        return
    tickets = [actor.cta.index] if sim.variant.first_item_is_index else []
    while len(tickets) <= sim.config.tickets_ahead:
        tickets.append((yield from take_ticket(sim, launch, actor)))
    bases = yield from read_bases(sim, launch, actor)
    rank, wanted = actor.rank, int(bases[0])
    wait = Wait(
        "routes", (rank, "routes", 0), lambda v: v >> 32 == wanted,
        sim.variant.edges["routes"], wanted,
    )  # fmt: skip
    if not (yield from spin(sim, actor, wait, wanted)):
        return
    num_blocks = decode_routes(sim.memory.peek(actor, (rank, "routes", 0)))
    num_items = int(sim.order(rank).num_items(Word32(num_blocks)))
    if num_blocks:
        yield "block_table"
    table = []
    for index in range(num_blocks):
        table.append(decode_block(sim.memory.load(actor, (rank, "block_table", index))))
    actor.cta.num_items = num_items
    yield from count_done(sim, actor, tickets[-1])
    while tickets[0] < num_items:
        is_w2, block, tile = sim.item(rank, tickets.pop(0), num_blocks)
        sim.check.take_item(rank, is_w2, block, tile)
        run = run_w2 if is_w2 else run_w1
        ticket = yield from run(sim, launch, actor, bases, block, tile, table)
        if ticket is None:
            return
        tickets.append(ticket)


def count_done(sim: Simulation, actor: Actor, ticket: int) -> Steps:
    """Says that this CTA takes no more tickets, once it holds one beyond the last item."""
    cta, edge = actor.cta, sim.variant.edges["compute_done"]
    if cta.is_counted or cta.num_items is None or ticket < cta.num_items:
        return
    cta.is_counted = True
    yield "compute_done"
    sim.memory.prepare(actor, edge)
    publish(sim, actor, edge, actor.rank, 0, adder(Word32(1)))


def take_ticket(sim: Simulation, launch: Launch, actor: Actor) -> Steps:
    if actor.cta.is_counted:
        return actor.cta.num_items
    yield "work_ticket"
    old = sim.memory.update(
        actor, (actor.rank, "work_ticket", 0), lambda v: v + 1,
        sim.variant.lone["work_ticket"].operation,
    )  # fmt: skip
    # When the first item is the CTA index, tickets number the items after those.
    ticket = old + (launch.grids[actor.cta.role] if sim.variant.first_item_is_index else 0)
    yield from count_done(sim, actor, ticket)
    return ticket


def place_of(sim: Simulation, bases: tuple[Any, ...], block: int) -> tuple[int, Word32]:
    """Slot and epoch of a block of this replay."""
    _, epoch_base, slot_base, _ = bases
    place = sim.ring.place(slot_base, block)
    return int(sim.ring.slot(place)), sim.ring.epoch(epoch_base, place)


def wait_full(
    sim: Simulation, launch: Launch, actor: Actor, slot: int, epoch: Word32, generation: Word32
) -> Steps:
    target, reached = full_ring(sim, launch).full_target(epoch), sim.variant.reached
    addr, edge = (actor.rank, "token_ring_full", slot), sim.variant.edges["token_ring_full"]
    wait = Wait("full", addr, lambda v: reached(Word32(v), target), edge, int(target))
    return (yield from spin(sim, actor, wait, int(generation)))


def wait_bits(
    sim: Simulation, actor: Actor, slot: int, epoch: Word32, window: int, generation: Word32
) -> Steps:
    """The bits of one window of ``a``, as the loop over K comes to it."""
    bits, odd = int(sim.bitmap.window_bits(Word64(1), window)), Word64(int(epoch) & 1)
    complete, addr = sim.bitmap.is_complete, (actor.rank, "w1_bitmap", slot)
    edge = sim.variant.edges["w1_bitmap"]
    wait = Wait("bits", addr, lambda v: bool(complete(Word64(v), bits, odd)), edge, bits)
    return (yield from spin(sim, actor, wait, int(generation)))


def run_w1(
    sim: Simulation,
    launch: Launch,
    actor: Actor,
    bases: tuple[Any, ...],
    block: int,
    tile: int,
    table: list[tuple[int, int]],
) -> Steps:
    """Waits for the rows of the block, stores 128 columns of ``a``, flips their bits."""
    memory, rank, pitch = sim.memory, actor.rank, launch.block_rows
    done = sim.variant.edges["w1_bitmap"]
    slot, epoch = place_of(sim, bases, block)
    if not (yield from wait_full(sim, launch, actor, slot, epoch, bases[0])):
        return None
    expert, num_rows = table[block]
    sim.check.start_w1(actor, block, num_rows)
    yield "ring_rows"
    places = [slot * pitch + ring_row(n, num_rows, pitch) for n in range(num_rows)]
    rows = [memory.load_async(actor, (rank, "ring_rows", place)) for place in places]
    yield "ring_scale"
    codes, scales = [], []
    first = rank * sim.config.local_experts
    for n in range(num_rows):
        at = fragment(n, pitch)
        row_scales = [
            memory.load_async(actor, (rank, "ring_scale", (slot * sim.windows + w) * pitch + at))
            for w in range(sim.windows)
        ]
        weight = memory.load_async(actor, (rank, "ring_weight", slot * pitch + at))
        code, scale = sim.data.w1(launch.layer, first + expert, rows[n], row_scales, weight, tile)
        codes.append(code)
        scales.append(scale)
    index = slot * sim.w1_tiles + tile
    yield "a_rows"
    memory.store_async(actor, (rank, "a_rows", index), tuple(codes))
    memory.store_async(actor, (rank, "a_scale", index), tuple(scales))
    # The next ticket is taken before the item ends, so that its weights can be on their way.
    ticket = yield from take_ticket(sim, launch, actor)
    yield "w1_bitmap"
    memory.prepare(actor, done)
    bits = int(sim.bitmap.window_bits(Word64(1), tile))
    old = sim.memory.peek(actor, (rank, "w1_bitmap", slot))
    sim.check.flip_bits(actor, old, bits, int(epoch) & 1)
    if sim.variant.set_bitmap:
        publish(sim, actor, done, rank, slot, lambda v: v | bits)
    else:
        publish(sim, actor, done, rank, slot, lambda v: v ^ bits)
    sim.check.end_w1(rank, block, tile)
    return ticket


def run_w2(
    sim: Simulation,
    launch: Launch,
    actor: Actor,
    bases: tuple[Any, ...],
    block: int,
    tile: int,
    table: list[tuple[int, int]],
) -> Steps:
    """Waits for ``a``, scatters rows to their source ranks, adds arrivals, frees the slot."""
    memory, rank, pitch = sim.memory, actor.rank, launch.block_rows
    slot, epoch = place_of(sim, bases, block)
    # Bits tell even from odd epochs only. When the ring is reused within a replay, the bits of two
    # epochs ago would pass for those of this one; rows in the slot mean that the epoch before is
    # over. Between replays finalize sees to that.
    is_reused = len(table) > sim.config.num_slots
    if (is_reused and not sim.variant.skip_full_before_bits) and not (
        yield from wait_full(sim, launch, actor, slot, epoch, bases[0])
    ):
        return None
    expert, num_rows = table[block]
    edges = sim.variant.edges
    # Loads that neither flag orders may be late, which is as if the slot were freed before them.
    free_first = sim.variant.empty_before_read or not (
        memory.orders_loads(edges["combine_arrivals"])
        or memory.orders_loads(edges["token_ring_empty"])
    )
    if free_first:
        yield from free_slot(sim, launch, actor, slot, epoch)
    origins = [(rank, "ring_meta", slot * pitch + n) for n in range(num_rows)]
    if sim.variant.add_before_scatter:
        metas = [memory.load_async(actor, cell) for cell in origins]
        yield from add_arrivals(sim, launch, actor, metas, tile)
    codes, scales = [], []
    for window in range(sim.w1_tiles):
        if not (yield from wait_bits(sim, actor, slot, epoch, window, bases[0])):
            return None
        sim.check.read_activations(actor, block, window)
        if window == 0:
            yield "ring_meta"
            metas = [memory.load_async(actor, cell) for cell in origins]
            sim.check.read_slot(rank, slot, block)
        yield "a_rows"
        index = slot * sim.w1_tiles + window
        codes.append(memory.load_async(actor, (rank, "a_rows", index)))
        scales.append(memory.load_async(actor, (rank, "a_scale", index)))
    columns, base = sim.w2_columns(rank), rank * sim.config.local_experts
    for n, word in enumerate(metas):
        src, token, k = decode_meta(word)
        if src >= sim.config.ranks or token >= sim.config.tokens or k >= sim.config.top_k:
            raise Violation("malformed", f"{actor.name} reads row metadata {word:#x}")
        part_codes = [block_codes[n] if block_codes else 0 for block_codes in codes]
        part_scales = [block_scales[n] if block_scales else 0 for block_scales in scales]
        value = sim.data.w2(launch.layer, base + expert, part_codes, part_scales, tile, columns)
        yield "combine"
        sim.check.publish(actor, "a combine slot")
        sim.check.scatter(rank, src, launch.replay)
        index = (token * sim.config.top_k + k) * sim.ring.empty_units + tile * columns // 64
        memory.store_async(actor, (src, "combine", index), value)
    ticket = yield from take_ticket(sim, launch, actor)
    if not sim.variant.add_before_scatter:
        yield from add_arrivals(sim, launch, actor, metas, tile)
    if not free_first:
        yield from free_slot(sim, launch, actor, slot, epoch)
    return ticket


def add_arrivals(
    sim: Simulation, launch: Launch, actor: Actor, metas: list[int], tile: int
) -> Steps:
    """One add per source rank, after one fence."""
    edge, rank = sim.variant.edges["combine_arrivals"], actor.rank
    columns = sim.w2_columns(rank)
    group = sim.arrivals.group(tile, columns)
    counts: dict[int, int] = {}
    for word in metas:
        src = decode_meta(word)[0]
        counts[src] = counts.get(src, 0) + 1
    yield "combine_arrivals"
    sim.memory.prepare(actor, edge)
    for src in sorted(counts):
        amount = sim.arrivals.increment(Word32(counts[src]), columns)
        if sim.variant.count_tiles:
            amount = Word32(counts[src])
        if sim.variant.short_arrivals and src == rank:
            amount = amount - 1
        yield "combine_arrivals"
        value = publish(sim, actor, edge, src, group, adder(amount))
        if sim.check.ranks[src].finished == launch.replay and not sim.variant.count_tiles:
            sim.check.arrive(actor, src, value, sim.check.ranks[src].arrival_target)


def free_slot(sim: Simulation, launch: Launch, actor: Actor, slot: int, epoch: Word32) -> Steps:
    edge, amount = sim.variant.edges["token_ring_empty"], sim.w2_columns(actor.rank) // 64
    yield "token_ring_empty"
    sim.memory.prepare(actor, edge)
    value = publish(sim, actor, edge, actor.rank, slot, adder(Word32(amount)))
    target = int(sim.ring.empty_target(epoch + 1))
    sim.check.count(f"token_ring_empty[{slot}]", actor, value, target)


# ---- finalize -----------------------------------------------------------------------------


def finalize(sim: Simulation, launch: Launch, actor: Actor) -> Steps:
    """A finalize CTA: its static share of y, and its count behind the last wait; the last one
    advances."""
    rank, grid = actor.rank, launch.grids[actor.cta.role]
    aborted = yield from enter(sim, actor)
    poisoned = aborted
    bases = yield from read_bases(sim, launch, actor)
    valid = sim.valid_slots(launch.layer, rank)
    target = sim.arrivals.target(bases[3], Word32(valid))
    if sim.variant.count_tiles:
        target = bases[3] + valid * (sim.w2_tiles(rank) // sim.arrivals.groups)
    share = range(actor.cta.index, len(sim.problem[launch.layer][rank]), grid)
    parts: dict[int, list[list[Any]]] = {token: [] for token in share}
    for group in range(sim.arrivals.groups):
        if not poisoned and not (group and sim.variant.wait_for_one_group):
            poisoned = not (yield from wait_arrivals(sim, actor, group, target, int(bases[0])))
        actor.cta.poisoned = actor.cta.poisoned or poisoned
        if group == sim.arrivals.groups - 1:
            yield from end_waits(sim, launch, actor, bases, target)
        if not poisoned:
            for token in share:
                yield "combine"
                parts[token].append(load_group(sim, launch, actor, token, group))
    for token in share:
        if poisoned and sim.variant.keep_poisoned_y:
            continue
        yield "combine"
        sim.written[rank].add(token)
        sim.y[rank][token] = NAN if poisoned else sim.data.finish(join(parts[token]))


def end_waits(
    sim: Simulation, launch: Launch, actor: Actor, bases: tuple[Any, ...], target: Word32
) -> Steps:
    """The CTA has read the bases and waits for nothing any more; sums may follow."""
    grid = launch.grids[actor.cta.role]
    yield "finalize_done"
    old = sim.memory.update(
        actor, (actor.rank, "finalize_done", 0), lambda v: 0 if v >= grid - 1 else v + 1,
        sim.variant.lone["finalize_done"].operation,
    )  # fmt: skip
    last = old == grid - 1
    if (old == 0) if sim.variant.first_cta_advances else last:
        yield from advance(sim, launch, actor, bases, target, last)


def wait_arrivals(
    sim: Simulation, actor: Actor, group: int, target: Word32, generation: int
) -> Steps:
    """Until all rows of a group of columns lie in the combine slots."""
    reached = sim.variant.reached
    wait = Wait(
        "arrivals", (actor.rank, "combine_arrivals", group), lambda v: reached(Word32(v), target),
        sim.variant.edges["combine_arrivals"], int(target),
    )  # fmt: skip
    return (yield from spin(sim, actor, wait, generation))


def load_group(
    sim: Simulation, launch: Launch, actor: Actor, token: int, group: int
) -> list[list[Any]]:
    """One group of columns of the valid slots of a token, in ascending order."""
    slots, units = [], sim.ring.empty_units
    part = sim.arrivals.columns // 64
    for slot, expert_id in enumerate(sim.problem[launch.layer][actor.rank][token]):
        if not is_valid(expert_id, sim.config.experts):
            continue
        columns = sim.w2_columns(expert_id // sim.config.local_experts)
        first = (token * sim.config.top_k + slot) * units
        slots.append(
            [
                sim.memory.load(actor, (actor.rank, "combine", first + unit))
                for unit in range(group * part, (group + 1) * part, columns // 64)
            ]
        )
    return slots


def join(groups: list[list[list[Any]]]) -> list[list[Any]]:
    """The groups of columns of each slot, one behind the other."""
    return [[piece for part in slot for piece in part] for slot in zip(*groups, strict=True)]


def advance(
    sim: Simulation,
    launch: Launch,
    actor: Actor,
    bases: tuple[Any, ...],
    target: Word32,
    is_last: bool,
) -> Steps:
    """The bases of the next replay, unless abort is set, once compute takes no more tickets."""
    rank, memory = actor.rank, sim.memory
    ctas = launch.grids[Role.COMPUTE]
    wait = Wait(
        "compute_done", (rank, "compute_done", 0), lambda v: v >= ctas,
        sim.variant.edges["compute_done"], ctas,
    )  # fmt: skip
    if not sim.variant.skip_compute_done and not (yield from spin(sim, actor, wait, int(bases[0]))):
        return
    yield "abort"
    if memory.peek(actor, (rank, "abort", 0)) and not sim.variant.advance_after_abort:
        return
    generation, epoch_base, slot_base, _ = bases
    num_blocks = Word32(decode_routes(memory.load(actor, (rank, "routes", 0))))
    yield "bases"
    sim.check.advance(actor, is_last)
    following = (
        generation + 1,
        sim.ring.next_epoch_base(epoch_base, slot_base, num_blocks),
        sim.ring.next_slot_base(slot_base, num_blocks),
        target,
    )
    for index, value in enumerate(following):
        memory.store(actor, (rank, "bases", index), int(value))
    if not sim.variant.skip_ticket_reset:
        memory.store(actor, (rank, "work_ticket", 0), 0)
    memory.store(actor, (rank, "compute_done", 0), 0)
    memory.store(actor, (rank, "in_flight", 0), 0)
