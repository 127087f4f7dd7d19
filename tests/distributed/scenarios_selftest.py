"""Scenarios without a GPU, for the launcher's own tests."""

from __future__ import annotations

import time
from typing import Any

from gcmoe.runtime.group import RankGroup


def passes(ranks: RankGroup) -> dict[str, Any]:
    ranks.barrier("both")
    return {"ranks": ranks.gather(ranks.rank)}


def fails_on_one_rank(ranks: RankGroup) -> None:
    if ranks.rank == 1:
        raise ValueError("on purpose")


def meets_again(ranks: RankGroup) -> None:
    ranks.barrier("both")


def hangs(ranks: RankGroup) -> None:
    time.sleep(600)
