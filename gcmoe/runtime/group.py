"""The ranks of an operator: what they exchange while it is created, reset and checked."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gcmoe.errors import GCMoEError

Value = TypeVar("Value")

BARRIER_LIMIT_S = 60.0
"""How long a rank waits for the others in a barrier if its caller does not say."""
POLL_S = 0.001


def default_store() -> Any | None:
    """The key-value store of the process, which needs no device; None if there is none."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None


@contextmanager
def store_limit(seconds: float) -> Iterator[None]:
    """Waits on the process's store end after ``seconds``, where the store allows to say so."""
    store = default_store()
    before: timedelta | None = getattr(store, "timeout", None)
    if store is None or before is None:
        yield
        return
    store.set_timeout(min(before, timedelta(seconds=seconds)))
    try:
        yield
    finally:
        with suppress(RuntimeError):
            store.set_timeout(before)


class RankGroup:
    """A process group, or a single rank without one.

    Args:
        group: a ``torch.distributed`` process group; None is one rank on its own.
    """

    def __init__(self, group: Any | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0 or self.size < 1:
            raise ValueError("this process is not a member of the process group")
        self._store: Any = None
        self._name = ""
        self._turn = 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Also a barrier. The device must be current."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, step: str, action: Callable[[], Value]) -> Value:
        """Run ``action`` on every rank; all ranks raise if one does.

        Raises:
            Exception: what ``action`` raised on this rank, also when the ranks cannot be told.
            GCMoEError: it failed on other ranks only; names the first.
        """
        value, failure = None, None
        try:
            value = action()
        except Exception as error:
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            reports = self.gather(text)
        except Exception as error:
            if failure is not None:
                raise failure from error
            raise
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report is not None:
                raise GCMoEError(f"{step} failed on rank {rank}: {report}")
        return value  # type: ignore[return-value]

    def require_equal(self, fingerprint: dict[str, str]) -> None:
        """Compare values that must be equal on all ranks.

        Raises:
            ValueError: on all ranks, when one differs; names it and two ranks' values.
        """
        answers = self.gather(fingerprint)
        # Every rank finds the same difference, also one between two others.
        first = answers[0]
        for rank, other in enumerate(answers):
            for name in sorted({*first, *other}):
                mine, theirs = first.get(name), other.get(name)
                if mine != theirs:
                    raise ValueError(
                        f"{name} differs over the ranks: rank 0 has {mine}, "
                        f"rank {rank} has {theirs}"
                    )

    # ------------------------------------------------------------------------------ barriers

    def open_barriers(self) -> None:
        """Agree on a name for the barriers of this group; collective, once."""
        name = self.gather(uuid.uuid4().hex)[0]
        if self.size > 1:
            self._name = name
            self._store = default_store()

    def _key(self, turn: int, rank: int) -> str:
        return f"gcmoe/{self._name}/{turn}/{rank}"

    def _require_step(self, step: str, rank: int, other: str) -> None:
        if other != step:
            raise GCMoEError(
                f"the ranks are not at the same step: rank {self.rank} is at '{step}', rank {rank} "
                f"at '{other}'. All ranks must make the same calls in the same order"
            )

    def _is_here(self, rank: int, step: str) -> bool:
        """Whether a rank has come to this barrier, for the same step."""
        key = self._key(self._turn, rank)
        if not self._store.check([key]):
            return False
        found = self._store.get(key)
        self._require_step(step, rank, found.decode() if isinstance(found, bytes) else str(found))
        return True

    def barrier(self, step: str, limit_s: float = BARRIER_LIMIT_S) -> None:
        """Wait until all ranks are here; runs nothing on the device.

        A rank that ran into the limit may come again: it then waits in the same barrier.

        Args:
            step: what the ranks do here; must be the same on all ranks.
            limit_s: seconds to wait for the others.

        Raises:
            GCMoEError: ranks are missing after ``limit_s``; names them. Or a rank is here for
                another step. Or the store of the process group does not answer.
        """
        if self.size == 1:
            return
        if self._store is None:
            try:
                steps = self.gather(step)
            except RuntimeError as error:
                raise GCMoEError(f"{step}: the process group does not answer: {error}") from error
            for rank, other in enumerate(steps):
                self._require_step(step, rank, other)
            return
        deadline = time.monotonic() + limit_s
        missing = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._store.set(self._key(self._turn, self.rank), step)
            while True:
                missing = [rank for rank in missing if not self._is_here(rank, step)]
                if not missing or time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        except RuntimeError as error:
            raise GCMoEError(
                f"{step}: the store of the process group does not answer: {error}. The process "
                f"that holds it has ended; only close() remains"
            ) from error
        if missing:
            names = ", ".join(str(rank) for rank in missing)
            raise GCMoEError(
                f"{step}: rank {self.rank} waited {limit_s:g} s for rank {names} of {self.size} in "
                f"vain. If it is only late, call again; if its process has ended, only close() "
                f"remains"
            )
        self._turn += 1
        if self._turn > 1:
            # All ranks are past the barrier before this one: nobody looks at its keys any more.
            with suppress(RuntimeError):
                self._store.delete_key(self._key(self._turn - 2, self.rank))
