"""Rules of order that :mod:`ptx_machine` checks when asked to, thread by thread.

Memory of the machine is sequentially consistent, so a missing fence does no harm there. These rules
find it all the same:

* what a thread wrote by ordinary stores is read by a copy only after that thread's proxy fence;
* what a thread read from shared memory by ordinary loads is overwritten by a copy only after it;
* a thread that acquired a flag starts a copy only after a proxy fence of its own;
* a thread that waited on a barrier uses tensor memory only after ``fence::after_thread_sync``;
* a warp that read tensor memory arrives on a barrier only after ``fence::before_thread_sync``.

They are stricter than the memory model, which would let one thread fence for others in some cases.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

THREADS = 2048
"""Room for the threads of a CTA in a thread's number."""


class OutOfOrder(AssertionError):
    """A rule is broken."""


class Order:
    """What each thread has done since its last fence. Methods do nothing unless ``is_on``."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.writers: dict[int, np.ndarray[Any, Any]] = {}
        self.readers: dict[int, np.ndarray[Any, Any]] = {}
        self.written: dict[tuple[int, bool], list[tuple[int, int, int]]] = defaultdict(list)
        self.read: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self.acquired: set[int] = set()
        self.waited: set[int] = set()
        self.loaded: set[int] = set()

    @staticmethod
    def thread(w: Any, lane: int) -> int:
        return int(w.cta.number * THREADS + w.threads[lane] + 1)

    def _table(self, tables: dict[int, Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Thread (or count) by byte of an array."""
        found = tables.get(id(array))
        if found is None:
            found = tables[id(array)] = np.zeros(len(array), dtype=np.int32)
        return found

    # ------------------------------------------------------------------- ordinary accesses

    def wrote(self, w: Any, lane: int, array: Any, at: int, size: int, shared: bool) -> None:
        if self.is_on:
            thread = self.thread(w, lane)
            self._table(self.writers, array)[at : at + size] = thread
            self.written[thread, shared].append((id(array), at, size))

    def loaded_shared(self, w: Any, lane: int, at: int, size: int) -> None:
        if self.is_on:
            place, thread = (at, size), self.thread(w, lane)
            if place not in self.read[thread]:
                self.read[thread].add(place)
                self._table(self.readers, w.cta.shared)[at : at + size] += 1

    def acquire(self, w: Any, lane: int) -> None:
        if self.is_on:
            self.acquired.add(self.thread(w, lane))

    # ------------------------------------------------------------------- fences and barriers

    def fence(self, w: Any, mask: Any, operation: str) -> None:
        """A fence by all lanes of ``mask``."""
        if not self.is_on:
            return
        for lane in np.flatnonzero(mask):
            thread = self.thread(w, int(lane))
            if operation == "fence.proxy.async.shared::cta":
                self._forget(thread, True)
                for at, size in self.read.pop(thread, ()):
                    self._table(self.readers, w.cta.shared)[at : at + size] -= 1
            elif operation == "fence.proxy.async.global":
                self._forget(thread, False)
                self.acquired.discard(thread)
            elif operation == "tcgen05.fence::after_thread_sync":
                self.waited.discard(thread)
            elif operation == "tcgen05.fence::before_thread_sync":
                self.loaded.discard(thread)

    def _forget(self, thread: int, shared: bool) -> None:
        for key, at, size in self.written.pop((thread, shared), ()):
            part = self.writers[key][at : at + size]
            part[part == thread] = 0

    def wait(self, w: Any, mask: Any) -> None:
        """A wait on a barrier has succeeded."""
        if self.is_on:
            self.waited.update(self.thread(w, int(lane)) for lane in np.flatnonzero(mask))

    def arrive(self, w: Any) -> None:
        if self.is_on and any(self.thread(w, lane) in self.loaded for lane in range(32)):
            raise OutOfOrder(f"arrives before its loads of tensor memory are fenced: {w.where()}")

    # ------------------------------------------------------------------- the other proxy

    def copy(self, w: Any, lane: int) -> None:
        """A copy is started."""
        if self.is_on and self.thread(w, lane) in self.acquired:
            raise OutOfOrder(f"a copy after an acquire without a proxy fence: {w.where()}")

    def copy_reads(self, w: Any, array: Any, at: int, size: int) -> None:
        if self.is_on:
            writers = self._table(self.writers, array)[at : at + size]
            if writers.any():
                number, thread = divmod(int(writers.max()) - 1, THREADS)
                raise OutOfOrder(
                    f"a copy of bytes {at} to {at + size} reads ordinary stores of thread {thread} "
                    f"of CTA {number}, which has not fenced them: {w.where()}"
                )

    def copy_overwrites(self, w: Any, at: int, size: int) -> None:
        """Of shared memory."""
        if not self.is_on:
            return
        self.copy_reads(w, w.cta.shared, at, size)
        if self._table(self.readers, w.cta.shared)[at : at + size].any():
            raise OutOfOrder(f"a copy overwrites {at} before its readers have fenced: {w.where()}")

    def tensor(self, w: Any, mask: Any, loads: bool = False) -> None:
        """An instruction on tensor memory."""
        if not self.is_on:
            return
        for lane in np.flatnonzero(mask):
            thread = self.thread(w, int(lane))
            if thread in self.waited:
                raise OutOfOrder(f"tensor memory after a wait without its fence: {w.where()}")
            if loads:
                self.loaded.add(thread)
