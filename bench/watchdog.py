"""Ends the process when a step takes longer than it may: a hung GPU must not hold the machine."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_STATUS = 3
POLL_S = 0.5


class Watchdog:
    """One thread that looks at the clock.

    Args:
        last_words: called with the reason before the process ends.
    """

    def __init__(self, last_words: Callable[[str], None]) -> None:
        self._last_words = last_words
        self._step: tuple[str, float] | None = None
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @contextmanager
    def step(self, name: str, limit_s: float) -> Iterator[None]:
        """A step that may take so long; steps do not nest."""
        self._step = name, time.monotonic() + limit_s
        try:
            yield
        finally:
            self._step = None

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_S)
            step = self._step
            if step is not None and time.monotonic() > step[1]:
                self._end(f"{step[0]} did not end within its limit")

    def _end(self, reason: str) -> None:
        print(f"bench: {reason}; stacks of all threads follow", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        try:
            self._last_words(reason)
        finally:
            os._exit(EXIT_STATUS)
