"""What a run says while it goes on: a bar of rich on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self


class Progress:
    """Counts cases.

    Args:
        total: cases of the run.
        quiet: say nothing, on ranks above 0.
    """

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self._total, self._quiet, self._done = total, quiet, 0
        self._start = time.monotonic()
        self._bar: Any = None
        if not quiet and sys.stdout.isatty():
            try:
                from rich.progress import Progress as Bar
            except ImportError:
                return
            self._bar = Bar(transient=True)
            self._task = self._bar.add_task("bench", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line, with the seconds since the start."""
        if self._quiet:
            return
        line = f"[{time.monotonic() - self._start:6.1f} s] {text}"
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def case_done(self, text: str) -> None:
        """A case has ended."""
        self._done += 1
        self.say(f"{self._done}/{self._total} {text}")
        if self._bar is not None:
            self._bar.advance(self._task)
