"""Runs compiled kernels on the CPU: their PTX, warp by warp, on one shared memory.

What is modelled: all threads of all CTAs of all launches, divergence and reconvergence, CTA
barriers, mbarriers with their transaction counts, atomics, and asynchronous copies and tensor core
work that end at a random later time. Warps and pending work take turns at random, by a seed, so a
missing wait shows as wrong data, a missing arrival as a deadlock.

What is not: caches, fences and proxies (memory is sequentially consistent; :mod:`ptx_order` checks
rules instead, when asked to), time, and the width of the hardware's own sums. Shared and tensor
memory hold random bytes at first.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mx_datapath import Machine as TensorCore
from ptx_order import Order
from ptx_text import Program

LANES = 32
SHARED_BASE = 1024
"""Where dynamic shared memory begins on sm_100: behind the 1 KiB that the driver keeps."""
TURN = 400
"""Instructions of a warp before another one may run."""
PATIENCE = 40_000
"""Turns without progress that make a deadlock."""

ADVANCE, BRANCH, BLOCKED, FAILED_POLL = range(4)
"""What an instruction says: go on, pc is set, try again later, go on but let others run."""


class Deadlock(AssertionError):
    """No warp makes progress and nothing is pending."""


class Memory:
    """Global memory: named arrays of bytes at addresses of their own."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._next = 1 << 32

    def map(self, array: np.ndarray[Any, Any]) -> int:
        """Give bytes an address, a multiple of 4,096 with room behind it; shares the array."""
        start = self._next
        self._starts.append(start)
        self._arrays.append(array)
        self._next += (len(array) + 0x11FFF) & ~0xFFF
        return start

    def find(self, address: int, num_bytes: int) -> tuple[np.ndarray[Any, Any], int]:
        """(array, offset) of some bytes.

        Raises:
            AssertionError: they are not within one array.
        """
        n = bisect_right(self._starts, address) - 1
        offset = address - self._starts[n]
        assert n >= 0, f"global address {address:#x}"
        assert offset + num_bytes <= len(self._arrays[n]), f"global address {address:#x}"
        return self._arrays[n], offset

    def read(self, address: int, num_bytes: int) -> np.ndarray[Any, Any]:
        array, offset = self.find(address, num_bytes)
        return array[offset : offset + num_bytes].copy()

    def write(self, address: int, content: np.ndarray[Any, Any]) -> None:
        array, offset = self.find(address, len(content))
        array[offset : offset + len(content)] = content


@dataclass(frozen=True)
class TensorMap:
    """A tiled map of bytes, or of 4-bit elements that are padded; 128-byte swizzle.

    Args:
        address: of the first byte. dims, box: in elements, the contiguous dimension first.
        strides: bytes, of dimensions 1 and up.
    """

    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    nibbles: bool


@dataclass
class MBarrier:
    """Arrivals and bytes that the running phase still waits for."""

    count: int
    pending: int
    num_bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the mbarrier expects"
        if self.pending == 0 and self.num_bytes == 0:
            self.pending = self.count
            self.phase ^= 1


class Cta:
    """A CTA: shared memory, barriers, the tensor core of its SM."""

    def __init__(self, machine: Machine, launch: Launch, index: int) -> None:
        self.machine, self.launch, self.index = machine, launch, index
        self.number = machine.count_cta()
        rng = np.random.default_rng(machine.seed + 97 * index)
        self.shared = rng.integers(0, 256, SHARED_BASE + launch.shared_bytes, dtype=np.uint8)
        self.mbarriers: dict[int, MBarrier] = {}
        self.warps = [Warp(self, n) for n in range(launch.threads // LANES)]
        self.waiting: list[Warp] = []
        self.uncommitted: Counter[int] = Counter()
        self.storing: Counter[int] = Counter()
        self.tensor_work: deque[Callable[[], None]] = deque()
        self.columns: tuple[int, int] | None = None
        self.core: TensorCore | None = None

    def tensor_core(self) -> TensorCore:
        """The model of the tensor core, on this CTA's shared memory."""
        if self.core is None:
            self.core = TensorCore(torch.Generator().manual_seed(self.machine.seed + self.index))
            self.core.smem = torch.from_numpy(self.shared)
        return self.core

    def mbarrier(self, address: int) -> MBarrier:
        assert address in self.mbarriers, f"no mbarrier at {address}"
        return self.mbarriers[address]

    def arrive_at_barrier(self, warp: Warp) -> None:
        """CTA-wide barrier 0: the last warp lets all go on."""
        self.waiting.append(warp)
        warp.at_barrier = True
        if len(self.waiting) == sum(not w.is_done for w in self.warps):
            for other in self.waiting:
                self.machine.order.wait(other, np.ones(LANES, dtype=bool))
                other.at_barrier = False
                other.advance_all()
            self.waiting = []

    def finish(self) -> None:
        """What must hold when the last warp has left."""
        assert not self.tensor_work, "tensor core work is under way at the end of the CTA"
        assert not +self.storing, "bulk stores are under way at the end of the CTA"
        assert self.columns is None, "tensor memory was not freed"


class Warp:
    """32 lanes with registers of 64 bits; lanes at the same place run together."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.registers = np.zeros((cta.launch.num_registers, LANES), dtype=np.uint64)
        self.groups: dict[int, np.ndarray[Any, Any]] = {0: np.ones(LANES, dtype=bool)}
        self.parked: set[int] = set()
        self.at_barrier = False
        self.is_done = False
        self.threads = np.arange(LANES, dtype=np.uint64) + np.uint64(LANES * index)
        self.failed_at = -1

    def move(self, pc: int, mask: np.ndarray[Any, Any], to: int) -> None:
        """Send some lanes of the group at ``pc`` to another place."""
        rest = self.groups.pop(pc)
        if not mask.all():
            rest = rest & ~mask
            if rest.any():
                self.groups[pc] = rest
        there = self.groups.get(to)
        self.groups[to] = mask if there is None else there | mask

    def advance_all(self) -> None:
        ((pc, mask),) = self.groups.items()
        self.move(pc, mask, pc + 1)

    def leave(self, pc: int, mask: np.ndarray[Any, Any]) -> None:
        """Some lanes return."""
        rest = self.groups.pop(pc) & ~mask
        if rest.any():
            self.groups[pc] = rest
        self.is_done = not self.groups

    def run(self) -> bool:
        """A turn; whether it changed anything that others can see."""
        steps = self.cta.launch.steps
        changed = False
        for _ in range(TURN):
            if self.is_done or self.at_barrier:
                return changed
            open_groups = [pc for pc in self.groups if pc not in self.parked]
            if not open_groups:
                # All lanes are at warp-wide instructions: they must be at the same one.
                assert len(self.groups) == 1, f"lanes meet at different places: {self.where()}"
                self.parked.clear()
                open_groups = list(self.groups)
            pc = min(open_groups)
            if self.failed_at == pc and len(open_groups) > 1:
                pc = self.cta.machine.random.choice(open_groups)
            self.failed_at = -1
            mask, step = self.groups[pc], steps[pc]
            if step.needs_warp and len(self.groups) > 1:
                self.parked.add(pc)
                continue
            outcome = step.run(self, pc, mask)
            if outcome == BLOCKED:
                self.failed_at = pc
                return changed
            if outcome != BRANCH:
                self.move(pc, mask, pc + 1)
            if outcome == FAILED_POLL:
                self.failed_at = pc + 1
                return changed
            changed = changed or step.changes
        return changed

    def where(self) -> str:
        places = {
            pc: self.cta.launch.program.instructions[pc].operation for pc in sorted(self.groups)
        }
        return f"{self.cta.launch.program.name} CTA {self.cta.index} warp {self.index}: {places}"


@dataclass
class Step:
    """An instruction, decoded: ``run(warp, pc, lanes)`` returns one of the outcomes."""

    run: Callable[[Warp, int, np.ndarray[Any, Any]], int]
    needs_warp: bool = False
    changes: bool = False


@dataclass
class Launch:
    """A kernel with its arguments.

    Args:
        arguments: by position: an integer, a list of u64 by value, or a tensor map.
        after: launches that must have ended before this one starts.
        prerequisites: launches whose end it waits for itself (a programmatic edge).
    """

    program: Program
    grid: int
    threads: int
    shared_bytes: int
    arguments: Sequence[int | list[int] | TensorMap]
    after: list[Launch] = field(default_factory=list)
    prerequisites: list[Launch] = field(default_factory=list)
    steps: list[Step] = field(init=False)
    num_registers: int = field(init=False)
    ctas: list[Cta] = field(init=False)

    @property
    def has_ended(self) -> bool:
        return all(warp.is_done for cta in self.ctas for warp in cta.warps)


class Machine:
    """All launches share memory, warps of all of them take turns.

    Args:
        seed: of the order of turns and of what memory holds at first.
        ordered: check the rules of :mod:`ptx_order`.
    """

    def __init__(self, seed: int = 0, ordered: bool = False) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.order, self._ctas = Order(ordered), 0
        self.memory = Memory()
        self.pending: list[Callable[[], None]] = []
        self.turns = 0

    def count_cta(self) -> int:
        """A number for a new CTA."""
        self._ctas += 1
        return self._ctas

    def run(self, *launches: Launch) -> None:
        """Run kernels side by side until all their CTAs have ended.

        Raises:
            Deadlock: nothing moves any more; names where every warp waits.
        """
        threads = torch.get_num_threads()
        # The operations are small: a second thread would only spin.
        torch.set_num_threads(1)
        try:
            self._run(launches)
        finally:
            torch.set_num_threads(threads)

    def _run(self, launches: Sequence[Launch]) -> None:
        from ptx_operations import decode

        for launch in launches:
            launch.steps, launch.num_registers = decode(launch.program)
            launch.ctas = [Cta(self, launch, n) for n in range(launch.grid)]
        ctas = [cta for launch in launches for cta in launch.ctas]
        waiting, warps = list(launches), list[Warp]()
        idle = 0
        while warps or waiting:
            for launch in waiting[:]:
                if all(other.has_ended for other in launch.after):
                    warps += [warp for cta in launch.ctas for warp in cta.warps]
                    waiting.remove(launch)
            self.turns += 1
            moved = self.work(ctas)
            warp = self.random.choice(warps)
            moved = warp.run() or moved
            if warp.is_done:
                warps.remove(warp)
                if all(other.is_done for other in warp.cta.warps):
                    warp.cta.finish()
            idle = 0 if moved else idle + 1
            if idle > PATIENCE:
                raise Deadlock("\n".join(w.where() for w in warps))
        assert not self.pending

    def work(self, ctas: list[Cta]) -> bool:
        """Maybe end some pending copies, or MMAs in their order."""
        moved = False
        if self.pending and self.random.random() < 0.5:
            self.pending.pop(self.random.randrange(len(self.pending)))()
            moved = True
        busy = [cta for cta in ctas if cta.tensor_work]
        if busy and self.random.random() < 0.7:
            self.random.choice(busy).tensor_work.popleft()()
            moved = True
        return moved
