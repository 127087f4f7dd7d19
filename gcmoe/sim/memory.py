"""Shared memory of all ranks: sequentially consistent, or weak as the edge table allows.

A cell is addressed by ``(rank, region, index)``. The weak memory has three places for a store on
its way: a bulk store that has not completed, a store that only its CTA has made, and a store that
the rank's own CTAs see but no other rank does. What moves a store on, and what makes a load see it,
is taken from the fields of the :class:`Edge` that the flag operation belongs to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

from gcmoe.protocol import Edge, Operation, Role, WorkspaceShape

Addr = tuple[int, str, int]
Steps = Generator[Any, Any, Any]

_SAMPLE = WorkspaceShape(256, 128, 1, 1, 1, 1, 2, 8, 1, 1)
REGION_NAMES = frozenset(region.name for region in _SAMPLE.regions)
CELL_REGIONS = frozenset(region.name for region in _SAMPLE.regions if region.is_cell)
REMOTE_REGIONS = frozenset(region.name for region in _SAMPLE.regions if region.is_remote)


class Cta:
    """What the warps of a CTA share."""

    __slots__ = (
        "entered_aborted",
        "index",
        "is_counted",
        "num_items",
        "poisoned",
        "rank",
        "replay",
        "role",
    )

    def __init__(self, role: Role, rank: int, replay: int, index: int) -> None:
        self.role, self.rank, self.replay, self.index = role, rank, replay, index
        self.poisoned = False
        self.entered_aborted = False
        self.num_items: int | None = None
        self.is_counted = False


class Actor:
    """One thread of control: a CTA, a warp of a dispatch CTA, or the host of a rank."""

    __slots__ = (
        "aborted",
        "cta",
        "fence_far",
        "fence_near",
        "ident",
        "name",
        "priority",
        "rank",
        "region",
        "reply",
        "seen_far",
        "seen_near",
        "steps",
        "unproxied",
        "wait",
    )

    def __init__(self, ident: int, name: str, cta: Cta, steps: Steps) -> None:
        self.ident, self.name, self.cta, self.steps = ident, name, cta, steps
        self.rank = cta.rank
        self.region: Any = None
        self.reply: Any = None
        self.wait: Any = None
        self.priority = 0.0
        self.aborted = False
        # Weak memory: times up to which loads must see stores of the own rank and of other ranks,
        # for the generic and (as of the last proxy fence) for the async proxy.
        self.seen_near = self.seen_far = self.fence_near = self.fence_far = 0
        self.unproxied: list[Store] = []


class Memory:
    """Sequential consistency: every operation takes effect at once, for everybody."""

    weak = False

    def __init__(self) -> None:
        self.cells: dict[Addr, Any] = {}
        self.waiters: dict[Addr, list[Actor]] = {}
        self.wake: Callable[[Addr], None] = lambda addr: None

    def init(self, addr: Addr, value: Any) -> None:
        self.cells[addr] = value

    def clear(self, rank: int) -> None:
        """Zeroes the cells of ``rank``, as ``reset`` does."""
        for addr in [a for a in self.cells if a[0] == rank and a[1] in CELL_REGIONS]:
            del self.cells[addr]

    def begin(self, actor: Actor) -> None:
        """A kernel starts: graph order covers everything before."""

    def end(self, actor: Actor) -> None:
        """A kernel ends: its stores are visible to what the graph orders after it."""

    def fork(self, child: Actor, parent: Actor) -> None:
        """A warp goes on after a barrier of its CTA."""

    def load(self, actor: Actor, addr: Addr) -> Any:
        return self.cells.get(addr, 0)

    def load_async(self, actor: Actor, addr: Addr) -> Any:
        return self.cells.get(addr, 0)

    def store(self, actor: Actor, addr: Addr, value: Any) -> None:
        self.cells[addr] = value

    def store_async(self, actor: Actor, addr: Addr, value: Any) -> None:
        self.cells[addr] = value

    def prepare(self, actor: Actor, edge: Edge) -> None:
        """Everything the writer does before the flag of ``edge``: waits, fences, release."""

    def store_flag(self, actor: Actor, addr: Addr, value: int, operation: Operation) -> None:
        self.cells[addr] = value
        if addr in self.waiters:
            self.wake(addr)

    def update(
        self, actor: Actor, addr: Addr, function: Callable[[int], int], operation: Operation
    ) -> int:
        """A read-modify-write; returns the old value."""
        old: int = self.cells.get(addr, 0)
        self.cells[addr] = function(old)
        if addr in self.waiters:
            self.wake(addr)
        return old

    def peek(self, actor: Actor, addr: Addr) -> int:
        """What a poll of ``addr`` reads."""
        value: int = self.cells.get(addr, 0)
        return value

    def observe(self, actor: Actor, addr: Addr, edge: Edge) -> None:
        """The poll of ``edge`` succeeded: its acquire and its reader's fence take effect."""

    def orders_stores(self, edge: Edge, proxy: str) -> bool:
        """Whether a store by ``proxy`` after the wait of ``edge`` stays after it."""
        return True

    def orders_loads(self, edge: Edge) -> bool:
        """Whether a load before the flag of ``edge`` stays before what follows the flag."""
        return True

    def drain_one(self, rng: random.Random) -> bool:
        """Moves one store on its way a step further; False if there is none."""
        return False

    @property
    def has_pending(self) -> bool:
        return False


BULK, BUFFERED, NEAR = 0, 1, 2


class Store:
    """A store on its way, and later an entry of the history of its address."""

    __slots__ = (
        "addr",
        "far_time",
        "near_time",
        "proxied",
        "rank",
        "stage",
        "stuck",
        "value",
        "writer",
    )

    def __init__(self, addr: Addr, value: Any, writer: Actor | None, stage: int) -> None:
        self.addr, self.value, self.writer, self.stage = addr, value, writer, stage
        self.rank = -1 if writer is None else writer.rank
        self.near_time = self.far_time = -1
        self.proxied = False
        # A store of scope gpu need never reach another rank while its kernel runs.
        self.stuck = False


class WeakMemory(Memory):
    """Stores are late, loads are stale, the async proxy has its own view, unless an edge says no.

    Time is the order in which stores arrive. A plain load may return any value from the one its
    last acquire covers to the newest; a load through the async proxy needs a proxy fence on top, of
    the writer after its stores or of the reader after its acquire.
    """

    weak = True
    KEEP = 10

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.history: dict[Addr, list[Store]] = {}
        self.pending: list[Store] = []
        self.now = 1
        self.rng = rng
        self.freshness = rng.choice((0.0, 0.3, 0.7))

    def init(self, addr: Addr, value: Any) -> None:
        store = Store(addr, value, None, NEAR)
        store.near_time = store.far_time = 0
        store.proxied = True
        self.history[addr] = [store]

    def clear(self, rank: int) -> None:
        for addr in [a for a in self.history if a[0] == rank and a[1] in CELL_REGIONS]:
            del self.history[addr]

    def begin(self, actor: Actor) -> None:
        actor.seen_near = actor.seen_far = actor.fence_near = actor.fence_far = self.now

    def end(self, actor: Actor) -> None:
        for store in [s for s in self.pending if s.writer is actor]:
            self._advance(store, far=True)

    def fork(self, child: Actor, parent: Actor) -> None:
        child.seen_near, child.seen_far = parent.seen_near, parent.seen_far
        child.fence_near, child.fence_far = parent.fence_near, parent.fence_far

    # ---- loads ----------------------------------------------------------------------------

    def load(self, actor: Actor, addr: Addr) -> Any:
        for store in reversed(self.history.get(addr, ())):
            near = store.rank == actor.rank
            time = store.near_time if near else store.far_time
            if time < 0:
                continue
            if store.writer is actor or time <= (actor.seen_near if near else actor.seen_far):
                return store.value
            if self.rng.random() < self.freshness:
                return store.value
        return 0

    def load_async(self, actor: Actor, addr: Addr) -> Any:
        for store in reversed(self.history.get(addr, ())):
            near = store.rank == actor.rank
            time = store.near_time if near else store.far_time
            if time < 0:
                continue
            seen = actor.seen_near if near else actor.seen_far
            if time <= (actor.fence_near if near else actor.fence_far):
                return store.value
            if store.proxied and (time <= seen or store.writer is actor):
                return store.value
            if self.rng.random() < self.freshness:
                return store.value
        return 0

    def _newest(self, actor: Actor, addr: Addr) -> Store | None:
        for store in reversed(self.history.get(addr, ())):
            if (store.near_time if store.rank == actor.rank else store.far_time) >= 0:
                return store
        return None

    def peek(self, actor: Actor, addr: Addr) -> int:
        store = self._newest(actor, addr)
        return 0 if store is None else store.value

    def _acquire(self, actor: Actor, time: int, scope: str) -> None:
        actor.seen_near = max(actor.seen_near, time)
        if scope == "sys":
            actor.seen_far = max(actor.seen_far, time)

    def observe(self, actor: Actor, addr: Addr, edge: Edge) -> None:
        store = self._newest(actor, addr)
        if store is not None and edge.read.order in ("acquire", "acq_rel"):
            time = store.near_time if store.rank == actor.rank else store.far_time
            self._acquire(actor, time, edge.read.scope)
        if edge.read_proxy_fence == "async.global":
            actor.fence_near, actor.fence_far = actor.seen_near, actor.seen_far

    def orders_stores(self, edge: Edge, proxy: str) -> bool:
        acquires = edge.read.order in ("acquire", "acq_rel")
        return acquires and (proxy == "generic" or edge.read_proxy_fence == "async.global")

    def orders_loads(self, edge: Edge) -> bool:
        return bool(edge.write_fence) or edge.write.order in ("release", "acq_rel")

    # ---- stores ---------------------------------------------------------------------------

    def store(self, actor: Actor, addr: Addr, value: Any) -> None:
        store = Store(addr, value, actor, BUFFERED)
        self.pending.append(store)
        actor.unproxied.append(store)

    def store_async(self, actor: Actor, addr: Addr, value: Any) -> None:
        store = Store(addr, value, actor, BULK)
        self.pending.append(store)
        actor.unproxied.append(store)

    def prepare(self, actor: Actor, edge: Edge) -> None:
        if edge.completion_wait:
            for store in self.pending:
                if store.writer is actor and store.stage == BULK:
                    store.stage = BUFFERED
        if edge.write_proxy_fence == "async.global":
            rest = []
            for store in actor.unproxied:
                if store.stage == BULK:
                    rest.append(store)
                else:
                    store.proxied = True
            actor.unproxied = rest
        self._release(actor, edge.write)
        if edge.write_fence:
            self._drain(actor, edge.write_fence.rpartition(".")[2])

    def _release(self, actor: Actor, operation: Operation) -> None:
        if operation.order in ("release", "acq_rel"):
            self._drain(actor, operation.scope)

    def _drain(self, actor: Actor, scope: str) -> None:
        """A release by ``actor``; bulk stores that were not waited for stay behind."""
        mine = [s for s in self.pending if s.writer is actor and s.stage != BULK]
        for store in mine:
            self._advance(store, far=scope == "sys")

    def store_flag(self, actor: Actor, addr: Addr, value: int, operation: Operation) -> None:
        store = Store(addr, value, actor, BUFFERED)
        store.stuck = operation.scope == "gpu" and addr[1] in REMOTE_REGIONS
        self.pending.append(store)

    def update(
        self, actor: Actor, addr: Addr, function: Callable[[int], int], operation: Operation
    ) -> int:
        self._release(actor, operation)
        old = self.peek(actor, addr)
        if operation.scope == "gpu" and addr[0] != actor.rank:
            # Not atomic towards another rank: a load and, some time later, a store.
            self.pending.append(Store(addr, function(old), actor, BUFFERED))
            return old
        store = Store(addr, function(old), actor, NEAR)
        self.now += 1
        store.near_time = store.far_time = self.now
        self._append(store)
        if operation.order in ("acquire", "acq_rel"):
            self._acquire(actor, self.now, operation.scope)
        if addr in self.waiters:
            self.wake(addr)
        return old

    def _append(self, store: Store) -> None:
        entries = self.history.setdefault(store.addr, [])
        entries.append(store)
        if len(entries) > self.KEEP:
            del entries[0]

    def _advance(self, store: Store, far: bool) -> None:
        """Makes ``store`` visible to its rank, and to the others if ``far`` or if it is local."""
        self.now += 1
        addr = store.addr
        if store.stage != NEAR:
            store.stage = NEAR
            store.near_time = self.now
            self._append(store)
            far = far or addr[1] not in REMOTE_REGIONS
        if far:
            entries = self.history[addr]
            if entries[-1] is not store and store in entries:
                # Memory order is the order of arrival at the home of the address.
                entries.remove(store)
                entries.append(store)
            store.far_time = self.now
            self.pending.remove(store)
        if addr in self.waiters:
            self.wake(addr)

    def drain_one(self, rng: random.Random) -> bool:
        pending = self.pending
        if not pending:
            return False
        start = int(rng.random() * len(pending))
        for offset in range(len(pending)):
            store = pending[(start + offset) % len(pending)]
            for earlier in pending:
                # Stores to one address keep their order.
                if earlier.addr == store.addr and earlier.rank == store.rank:
                    store = earlier
                    break
            if not (store.stuck and store.stage == NEAR):
                self._advance(store, far=store.stage == NEAR)
                return True
        return False

    @property
    def has_pending(self) -> bool:
        return bool(self.pending)
