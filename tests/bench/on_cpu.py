"""An implementation that computes the oracle, a tiny model and a stop-watch, all on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.cases import Case
from bench.checks import SAME_ROUNDING
from bench.data import Inputs
from bench.impls.base import Impl, LayerWeights, Session
from bench.world import World
from gcmoe.models import Model
from gcmoe.numerics import moe_reference, unpack

TINY = Model("tiny", 256, 128, 64, 2, 10.0)


@dataclass
class StopWatchGraph:
    """Runs its work again at each replay."""

    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


class OracleSession(Session):
    """y is the oracle's, or something else when spoiled."""

    rule = SAME_ROUNDING

    def __init__(self, case: Case, weights: list[Any], inputs: list[Inputs], spoil: str) -> None:
        self._case, self._weights, self._inputs, self._spoil = case, weights, inputs, spoil

    def layer(self, n: int) -> None:
        if self._spoil == "run":
            raise RuntimeError("no kernel image")
        one = self._inputs[n]
        # Weights of another layer: what a mix-up would compute.
        weights = self._weights[n if self._spoil != "result" else n - 1]
        trace = moe_reference(one.x, one.ids, one.weights, weights, self._case.config())
        one.y.copy_(trace.y)

    def result(self, n: int) -> torch.Tensor:
        return self._inputs[n].y

    def clear(self) -> None:
        for one in self._inputs:
            one.y.fill_(float("nan"))

    def check(self) -> None:
        pass


class OracleImpl(Impl):
    """An implementation that runs on a CPU."""

    install = "in this file"

    def __init__(self, name: str = "gcmoe", spoil: str = "") -> None:
        self.name, self.spoil = name, spoil

    def absent(self) -> str:
        return ""

    def unfit(self, case: Case, variant: str = "") -> str:
        return ""

    def variants(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        return wanted

    def bytes_per_layer(self, case: Case) -> float:
        return case.local_experts * case.expert_bytes

    def convert(self, case: Case, weights: LayerWeights) -> Any:
        if self.spoil == "convert":
            raise ValueError("scales span too much")
        return unpack(weights.packed)

    def open(
        self, case: Case, variant: str, weights: list[Any], inputs: list[Inputs], world: World
    ) -> Session:
        return OracleSession(case, weights, inputs, self.spoil)


def stop_watch_times(graphs: dict[str, StopWatchGraph], replays: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            start = time.perf_counter()
            graph.replay()
            times[name].append(1e6 * (time.perf_counter() - start))
    return times
