"""The bench on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from on_cpu import TINY, StopWatchGraph, stop_watch_times

from bench import bank, data, runner, timing
from bench.impls.base import Impl
from bench.watchdog import Watchdog
from bench.world import World
from gcmoe import models


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner without a GPU, and the model ``tiny``."""
    monkeypatch.setitem(models.MODELS, TINY.name, TINY)
    monkeypatch.setattr(data, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 1 << 30))
    monkeypatch.setattr(runner, "read_clocks", dict)
    monkeypatch.setattr(timing, "capture", StopWatchGraph)
    monkeypatch.setattr(timing, "replay_times", stop_watch_times)
    monkeypatch.setattr(bank, "MIN_SETS", 1)


@pytest.fixture
def make_runner(on_cpu: None) -> Callable[..., runner.Runner]:
    """A runner of one rank over some implementations."""

    def make(impls: list[Impl], **options: Any) -> runner.Runner:
        chosen = runner.Options(**{"layers": 2, "replays": 20, **options})
        watchdog = Watchdog(lambda reason: None)
        return runner.Runner(impls, chosen, World(0, 1), watchdog, lambda text: None)

    return make
