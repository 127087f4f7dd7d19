"""R ranks in one process: actors, the memory they share, and the loop that steps them."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from gcmoe.protocol import (
    FIRST_GENERATION,
    Cell,
    Edge,
    FaultRecord,
    Role,
    TokenRing,
    W1Bitmap,
    Word32,
    WorkOrder,
    is_valid,
)
from gcmoe.sim.checks import Checker, Violation
from gcmoe.sim.config import SimConfig, draw_problem
from gcmoe.sim.data import NAN, DataMode, Tags
from gcmoe.sim.memory import Actor, Addr, Cta, Memory, Steps, WeakMemory
from gcmoe.sim.schedule import make_policy
from gcmoe.sim.variant import SPECIFIED, Variant, work_order

READY, EXPIRED, ABORTED = "ready", "expired", "aborted"
MAX_STEPS = 400_000
MASK_64 = (1 << 64) - 1


class Wait:
    """A spin on one cell. ``edge`` is None for waits of the host."""

    __slots__ = ("addr", "cell", "edge", "kind", "peer", "ready", "wanted")

    def __init__(
        self,
        kind: str,
        addr: Addr,
        ready: Callable[[int], bool],
        edge: Edge | None = None,
        wanted: int = 0,
        peer: int | None = None,
    ) -> None:
        self.kind, self.addr, self.ready, self.edge = kind, addr, ready, edge
        self.wanted, self.peer = wanted, peer
        self.cell = edge.cell if edge is not None else Cell.GENERATION


@dataclass
class Launch:
    """One replay on one rank."""

    rank: int
    replay: int
    layer: int
    grids: dict[Role, int]
    block_rows: int
    num_blocks: int
    after_reset: bool
    generation: int
    left: dict[Role, int] = field(default_factory=dict)
    is_over: bool = False
    queue: list[int] = field(default_factory=list)
    late: list[Callable[[], None]] = field(default_factory=list)
    """What starts the compute CTAs behind dispatch."""

    def ended(self, role: Role) -> bool:
        return self.left.get(role, -1) == 0


@dataclass(frozen=True, slots=True)
class Event:
    """A CTA of a role started or ended at a step; for the timeline."""

    step: int
    rank: int
    role: Role
    replay: int
    cta: int
    what: str


RoleSteps = Callable[["Simulation", Launch, Actor], Steps]


@lru_cache(maxsize=1 << 16)
def item_of(order: WorkOrder, ticket: int, num_blocks: int) -> tuple[bool, int, int]:
    """(is W2, block, tile) of a ticket; the order's text runs on words once per argument."""
    item = order.item(Word32(ticket), Word32(num_blocks))
    return bool(int(item.is_w2)), int(item.block), int(item.tile)


class Simulation:
    """State of one run."""

    def __init__(
        self,
        config: SimConfig,
        seed: int,
        schedule: str,
        variant: Variant = SPECIFIED,
        data: DataMode | None = None,
    ) -> None:
        self.config, self.variant, self.seed = config, variant, seed
        self.rng = random.Random(f"schedule {seed} {schedule}")
        self.problem = draw_problem(config, seed)
        self.memory: Memory = WeakMemory(self.rng) if config.weak else Memory()
        self.memory.wake = self.wake
        self.check = Checker(config, self.problem)
        self.data: DataMode = data or Tags(config, self.problem)
        self.policy = make_policy(schedule, self.rng, config)
        self.drain_rate = self.rng.choice((0.02, 0.1, 0.3)) if config.weak else 0.0

        self.ring = TokenRing(config.num_slots, config.slot_rows, config.hidden)
        self.bitmap = W1Bitmap(config.intermediate)
        self.arrivals = config.shape.arrivals
        self.w1_tiles = config.intermediate // 128
        self.windows = config.hidden // 128
        self._orders = [
            work_order(
                variant,
                config.num_slots,
                self.w1_tiles,
                self.w2_tiles(rank),
                self.arrivals.groups,
            )
            for rank in range(config.ranks)
        ]

        self.runnable: list[Actor] = []
        self.blocked: dict[Actor, None] = {}
        self.actors = 0
        self.steps = 0
        # Runs of different configurations are different traces.
        self.trace = zlib.crc32(repr(config).encode())
        self.blocked_waits: Counter[str] = Counter()
        self.events: list[Event] = []
        self.faults: list[FaultRecord] = []
        self.expiries_left = config.expiries
        self.expiry_rate = self.rng.choice((0.001, 0.003, 0.01)) if config.expiries else 0.0
        self.barriers: Counter[int] = Counter()
        self.launches: list[list[Launch]] = [[] for _ in range(config.ranks)]
        self.y: list[dict[int, Any]] = [{} for _ in range(config.ranks)]
        self.written: list[set[int]] = [set() for _ in range(config.ranks)]
        self.most_blocks = 0
        self._init_cells()

    # ---- sizes ----------------------------------------------------------------------------

    def w2_columns(self, rank: int) -> int:
        columns = self.config.w2_columns
        return columns[rank % len(columns)]

    def w2_tiles(self, rank: int) -> int:
        return self.config.hidden // self.w2_columns(rank)

    def order(self, rank: int) -> WorkOrder:
        return self._orders[rank]

    def item(self, rank: int, ticket: int, num_blocks: int) -> tuple[bool, int, int]:
        return item_of(self._orders[rank], ticket, num_blocks)

    def valid_slots(self, layer: int, rank: int) -> int:
        experts = self.config.experts
        return sum(is_valid(i, experts) for ids in self.problem[layer][rank] for i in ids)

    def expected_blocks(self, rank: int, replay: int, layer: int) -> list[tuple[int, int]]:
        """(local expert, rows) of every block, from the routing of all ranks."""
        config, local = self.config, self.config.local_experts
        rows = [0] * local
        for source in self.problem[layer]:
            for ids in source:
                for i in ids:
                    if is_valid(i, config.experts) and i // local == rank:
                        rows[i % local] += 1
        full = config.grid(config.block_rows, rank, replay)
        return [
            (expert, min(full, count - first))
            for expert, count in enumerate(rows)
            for first in range(0, count, full)
        ]

    # ---- start and reset ------------------------------------------------------------------

    def _init_cells(self) -> None:
        config = self.config
        rng = random.Random(f"start {self.seed}")
        units = self.ring.empty_units
        self.start_generation, epoch, slot_base, arrived = FIRST_GENERATION, 0, 0, 0
        if config.start == "wrap":
            self.start_generation = (1 << 32) - rng.randint(1, 3)
            epoch = rng.choice(
                ((1 << 32) // config.slot_rows - 1, (1 << 32) // units - 1, (1 << 32) - 1)
            )
            slot_base = rng.randrange(config.num_slots)
            arrived = (1 << 32) - rng.randint(1, 2 * units)
        self.start_bases = (self.start_generation, epoch, slot_base, arrived)
        for rank in range(config.ranks):
            self.check.ranks[rank].arrival_target = arrived
            self._init_rank(rank)

    def _init_rank(self, rank: int) -> None:
        config, init = self.config, self.memory.init
        generation, epoch, slot_base, arrived = self.start_bases
        # The cells are what the replays before this one left behind: slots below slot_base have
        # been used once more than the others.
        cells = config.shape.initial_cells(generation, epoch, arrived)
        once_more = config.shape.initial_cells(generation, epoch + 1, arrived)
        for region, values in cells.items():
            for index, value in enumerate(values):
                is_used = len(values) == config.num_slots and region != "bases"
                init(
                    (rank, region, index),
                    once_more[region][index] if is_used and index < slot_base else value,
                )
        init((rank, "bases", 2), slot_base)
        if generation != FIRST_GENERATION:
            init((rank, "routes", 0), ((generation - 1) & 0xFFFF_FFFF) << 32)
            for back in (1, 2):
                old = (generation - back) & 0xFFFF_FFFF
                first = (old & 1) * config.ranks * config.header_words
                for index in range(first, first + config.ranks * config.header_words):
                    init((rank, "recv_header", index), old << 32)
        self.memory.waiters.setdefault((rank, "abort", 0), [])

    def reset_rank(self, rank: int) -> None:
        """Zeroes the cells of ``rank``; generation is the first again."""
        self.memory.clear(rank)
        self.memory.init((rank, "bases", 0), FIRST_GENERATION)
        self.check.reset(rank)
        self.check.ranks[rank].arrival_target = 0

    def generation_of(self, replay: int) -> int:
        """The generation of a replay that no fault has kept back."""
        reset = self.config.reset_after
        if reset is not None and replay >= reset:
            return FIRST_GENERATION + replay - reset
        return (self.start_generation + replay) & 0xFFFF_FFFF

    # ---- actors ---------------------------------------------------------------------------

    def spawn(self, name: str, cta: Cta, steps: Callable[[Actor], Steps]) -> Actor:
        actor = Actor(self.actors, name, cta, iter(()))  # type: ignore[arg-type]
        actor.steps = steps(actor)
        actor.priority = self.rng.random()
        self.actors += 1
        self.memory.begin(actor)
        self.runnable.append(actor)
        return actor

    def start_role(self, launch: Launch, role: Role, steps: RoleSteps) -> None:
        grid = launch.grids[role]
        launch.left[role] = grid
        first = grid
        if role is Role.COMPUTE:
            grid -= self.config.grid(self.config.late_ctas, launch.rank, launch.replay)
            late = range(grid, launch.grids[role])
            launch.late = [partial(self.start_cta, launch, role, index, steps) for index in late]
            first = min(grid, self.config.resident or grid)
            launch.queue = list(range(first, grid))
        for index in range(first):
            self.start_cta(launch, role, index, steps)
        if launch.ended(Role.DISPATCH):
            self.start_late(launch)

    def start_late(self, launch: Launch) -> None:
        """Dispatch has ended and left its SMs to compute."""
        for start in launch.late:
            start()
        launch.late = []

    def start_cta(self, launch: Launch, role: Role, index: int, steps: RoleSteps) -> None:
        cta = Cta(role, launch.rank, launch.replay, index)
        name = f"rank {launch.rank} replay {launch.replay} {role.name.lower()} CTA {index}"
        self.events.append(Event(self.steps, launch.rank, role, launch.replay, index, "start"))

        def whole(actor: Actor) -> Steps:
            yield from steps(self, launch, actor)
            if launch.queue and role is Role.COMPUTE:
                self.start_cta(launch, role, launch.queue.pop(0), steps)

        self.spawn(name, cta, whole)

    def start_warp(
        self, launch: Launch, parent: Actor, warp: int, steps: Callable[[Actor], Steps]
    ) -> None:
        """Another warp of the parent's CTA, from a barrier on."""
        launch.left[parent.cta.role] += 1
        child = self.spawn(f"{parent.name} warp {warp}", parent.cta, steps)
        self.memory.fork(child, parent)

    def _finish(self, actor: Actor) -> None:
        self.memory.end(actor)
        cta = actor.cta
        if cta.role is Role.HOST:
            return
        self.events.append(Event(self.steps, cta.rank, cta.role, cta.replay, cta.index, "end"))
        launch = self.launches[cta.rank][cta.replay]
        launch.left[cta.role] -= 1
        if launch.left[cta.role] == 0:
            if cta.role is Role.DISPATCH:
                self.start_late(launch)
            if launch.ended(Role.COMPUTE) and launch.ended(Role.FINALIZE) and not launch.is_over:
                launch.is_over = True
                self._end_replay(launch)
            self.wake((cta.rank, "@kernels", 0))

    # ---- the end of a replay --------------------------------------------------------------

    def _end_replay(self, launch: Launch) -> None:
        rank, aborted = launch.rank, self.check.aborted[launch.rank]
        where = f"rank {rank} replay {launch.replay}"
        for token in range(len(self.problem[launch.layer][rank])):
            if token not in self.written[rank]:
                raise Violation("y_written", f"{where}: y[{token}] keeps what it held before")
            y = self.y[rank][token]
            if y is NAN:
                if not aborted or launch.after_reset:
                    raise Violation("y_right", f"{where}: y[{token}] is NaN without an abort")
                continue
            error = self.data.error(launch.layer, rank, token, y)
            if error:
                raise Violation("y_right", f"{where} token {token}: {error}")
        self.written[rank].clear()
        # A base counted in tiles is consistent in itself; what it does to y has to show it.
        if not aborted and self.config.calls is None and not self.variant.count_tiles:
            self._check_bases(launch, where)
        self.check.end_replay(rank)

    def _check_bases(self, launch: Launch, where: str) -> None:
        rank, first = launch.rank, 0
        _, epoch, slot_base, _ = self.start_bases
        if launch.after_reset:
            first = self.config.reset_after or 0
            epoch, slot_base = 0, 0
        place = epoch * self.config.num_slots + slot_base
        place += sum(one.num_blocks for one in self.launches[rank][first : launch.replay + 1])
        wanted = (
            (launch.generation + 1) & 0xFFFF_FFFF,
            (place // self.config.num_slots) & 0xFFFF_FFFF,
            place % self.config.num_slots,
            self.check.ranks[rank].arrival_target & 0xFFFF_FFFF,
        )
        host = Actor(-1, "check", Cta(Role.HOST, rank, 0, 0), iter(()))  # type: ignore[arg-type]
        found = tuple(self.memory.peek(host, (rank, "bases", index)) for index in range(4))
        if found != wanted:
            raise Violation("bases_right", f"{where}: bases are {found}, expected {wanted}")

    # ---- waits ----------------------------------------------------------------------------

    def wake(self, addr: Addr) -> None:
        """A cell changed: whoever waits for it looks again."""
        if addr[1] == "abort" and self.memory.peek(self._anyone(addr[0]), addr):
            for actor in [a for a in self.blocked if a.rank == addr[0]]:
                if actor.wait.edge is not None:
                    actor.aborted = True
                    self._unblock(actor)
            return
        waiters = self.memory.waiters.get(addr)
        if not waiters:
            return
        for actor in list(waiters):
            if actor.wait.ready(self.memory.peek(actor, addr)):
                self._unblock(actor)

    def _anyone(self, rank: int) -> Actor:
        return Actor(-1, "", Cta(Role.HOST, rank, 0, 0), iter(()))  # type: ignore[arg-type]

    def _block(self, actor: Actor) -> None:
        self.blocked[actor] = None
        self.memory.waiters.setdefault(actor.wait.addr, []).append(actor)

    def _unblock(self, actor: Actor) -> None:
        del self.blocked[actor]
        self.memory.waiters[actor.wait.addr].remove(actor)
        self.runnable.append(actor)

    def _is_aborted(self, actor: Actor) -> bool:
        return bool(self.memory.peek(actor, (actor.rank, "abort", 0)))

    def _expire_one(self) -> bool:
        """Lets a random blocked wait run out of its budget."""
        reset = self.config.reset_after
        able = [
            a
            for a in self.blocked
            if a.wait.edge is not None and (reset is None or a.cta.replay < reset)
        ]
        if not able or not self.config.expiries:
            return False
        # By kind first, so that the many short waits do not hide the few long ones.
        kind = self.rng.choice(sorted({actor.wait.kind for actor in able}))
        actor = self.rng.choice([a for a in able if a.wait.kind == kind])
        self._unblock(actor)
        actor.reply = EXPIRED
        actor.aborted = True
        return True

    # ---- the loop -------------------------------------------------------------------------

    def run(self) -> None:
        """Steps actors until all have finished; raises :class:`Violation`."""
        memory, runnable, rng = self.memory, self.runnable, self.rng
        weak, policy = memory.weak, self.policy
        while True:
            if (
                weak
                and memory.has_pending
                and (not runnable or rng.random() < self.drain_rate)
                and memory.drain_one(rng)
            ):
                self.trace = (self.trace * 0x100000001B3 + 1) & MASK_64
                continue
            if self.expiries_left and rng.random() < self.expiry_rate and self._expire_one():
                self.expiries_left -= 1
            if not runnable:
                if not self.blocked:
                    return
                # A stuck run goes on when budgets run out; without injected faults it is stuck.
                if self._expire_one():
                    continue
                raise Violation("no_deadlock", self.describe_blocked())
            index = policy(runnable)
            actor = runnable[index]
            if actor.wait is not None and not self._resume(actor, index):
                continue
            self.steps += 1
            self.trace = (self.trace * 0x100000001B3 + actor.ident + 2) & MASK_64
            if self.steps > MAX_STEPS:
                raise Violation("no_deadlock", f"still running after {MAX_STEPS} steps")
            try:
                request = actor.steps.send(actor.reply)
            except StopIteration:
                # Other actors may have been appended; the index still holds.
                runnable[index] = runnable[-1]
                runnable.pop()
                self._finish(actor)
                continue
            actor.reply = None
            if request.__class__ is Wait:
                actor.wait = request
                actor.region = request.addr[1]
                if not request.ready(memory.peek(actor, request.addr)):
                    self.blocked_waits[request.kind] += 1
                    runnable[index] = runnable[-1]
                    runnable.pop()
                    self._block(actor)
                    if request.edge is not None and self._is_aborted(actor):
                        actor.aborted = True
                        self._unblock(actor)
            else:
                actor.region = request

    def _resume(self, actor: Actor, index: int) -> bool:
        """Ends the wait of an actor that was picked; False if it has to go on waiting."""
        wait, memory = actor.wait, self.memory
        if wait.ready(memory.peek(actor, wait.addr)):
            if wait.edge is not None:
                memory.observe(actor, wait.addr, wait.edge)
            actor.reply = READY
        elif actor.aborted:
            if actor.reply is not EXPIRED:
                actor.reply = ABORTED
        else:
            self.runnable[index] = self.runnable[-1]
            self.runnable.pop()
            self._block(actor)
            return False
        actor.wait = None
        actor.aborted = False
        return True

    def describe_blocked(self) -> str:
        """Who waits for what from whom."""
        lines = []
        for actor in sorted(self.blocked, key=lambda a: (a.cta.role is Role.HOST, a.ident)):
            wait = actor.wait
            rank, region, index = wait.addr
            whom = "" if wait.peer is None else f" from rank {wait.peer}"
            seen = self.memory.peek(actor, wait.addr)
            lines.append(
                f"{actor.name} waits for {wait.kind}{whom}: {region}[{index}] of rank {rank}, "
                f"wanted {wait.wanted:#x}, seen {seen:#x}"
            )
        return "; ".join(lines)
