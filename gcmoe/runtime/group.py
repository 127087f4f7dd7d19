"""The ranks of an operator: what they exchange while it is created, reset and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from gcmoe.errors import GCMoEError

Value = TypeVar("Value")


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
            Exception: what ``action`` raised on this rank.
            GCMoEError: it failed on other ranks only; names the first.
        """
        value, failure = None, None
        try:
            value = action()
        except Exception as error:
            failure = error
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        reports = self.gather(text)
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
        for rank, other in enumerate(self.gather(fingerprint)):
            for name in sorted({*fingerprint, *other}):
                mine, theirs = fingerprint.get(name), other.get(name)
                if mine != theirs:
                    raise ValueError(
                        f"{name} differs over the ranks: rank {self.rank} has {mine}, "
                        f"rank {rank} has {theirs}"
                    )
