"""Very many replays, each compared bit by bit with the first result of its input."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from pair import Pair, differences, expect
from pair_cases import CASES, soak_flash_replays, soak_replays
from pair_oracle import Batch, Problems, check_layer
from scenarios_layers import call

CHUNK = 1000


def first_results(pair: Pair, name: str, layer: Any, batches: list[Batch]) -> list[torch.Tensor]:
    """y of each input, checked against the oracle."""
    experts, _ = pair.weights(name)
    problems = Problems()
    results = []
    for n, batch in enumerate(batches):
        y = call(layer, batch)
        what = f"input {n}, T = {batch.num_tokens}"
        check_layer(problems, what, y, batch, experts, CASES[name].config)
        results.append(y.clone())
    problems.finish()
    return results


class Soak:
    """A layer, its inputs, and one captured graph for each number of tokens."""

    def __init__(self, pair: Pair, name: str, tokens: tuple[int, ...], routings: tuple[str, ...]):
        self.layer = pair.layer(name)
        kinds = [(t, r) for t in tokens for r in routings]
        self.batches = [pair.batch(name, t, r, 70 + n) for n, (t, r) in enumerate(kinds)]
        self.wanted = first_results(pair, name, self.layer, self.batches)
        self.buffers = {t: pair.batch(name, t, "distinct", 99) for t in tokens}
        self.outputs = {t: torch.empty_like(b.x) for t, b in self.buffers.items()}
        self.graphs = {t: self._capture(pair, t) for t in tokens}
        pair.meet("soak")

    def _capture(self, pair: Pair, t: int) -> torch.cuda.CUDAGraph:
        b, y = self.buffers[t], self.outputs[t]
        return pair.capture(lambda: self.layer(b.x, b.ids, b.weights, out=y))

    def eager(self, n: int) -> torch.Tensor:
        b = self.batches[n]
        return differences(self.layer(b.x, b.ids, b.weights), self.wanted[n])

    def replay(self, n: int) -> torch.Tensor:
        b = self.batches[n]
        into = self.buffers[b.num_tokens]
        into.x.copy_(b.x)
        into.ids.copy_(b.ids)
        into.weights.copy_(b.weights)
        self.graphs[b.num_tokens].replay()
        return differences(self.outputs[b.num_tokens], self.wanted[n])

    def run(self, replays: int, seed: int) -> dict[str, Any]:
        """Each rank draws its own order of inputs, eager calls and replays."""
        rng = random.Random(seed)
        start = time.monotonic()
        done = 0
        while done < replays:
            order = [rng.randrange(len(self.batches)) for _ in range(min(CHUNK, replays - done))]
            counts = [self.replay(n) if rng.random() < 0.5 else self.eager(n) for n in order]
            self.layer.op.check(synchronize=True)
            wrong = [done + i for i, c in enumerate(torch.stack(counts).tolist()) if c]
            expect(not wrong, f"{len(wrong)} of {len(order)} replays differ, first {wrong[:5]}")
            done += len(order)
        rate = replays / (time.monotonic() - start)
        return {"replays": replays, "replays per second": round(rate)}


def soak_tiny(pair: Pair) -> dict[str, Any]:
    routings = ("distinct", "masked", "single", "duplicates")
    soak = Soak(pair, "tiny-late", (64, 33, 8, 1, 0), routings)
    return soak.run(soak_replays(), 11 + pair.rank)


def soak_small_ring(pair: Pair) -> dict[str, Any]:
    """A ring of two slots: every slot is reused many times within a replay."""
    soak = Soak(pair, "small-ring-late", (256, 33, 1, 0), ("distinct", "single"))
    return soak.run(max(1, soak_replays() // 4), 21 + pair.rank)


def soak_flash(pair: Pair) -> dict[str, Any]:
    """Many tokens of a real model."""
    name = "flash-256"
    layer = pair.layer(name)
    batches = [pair.batch(name, 256, "distinct", 80 + n) for n in range(3)]
    wanted = first_results(pair, name, layer, batches)
    pair.meet("flash")
    replays = soak_flash_replays()
    start = time.monotonic()
    pair.replay_checked(layer, batches, wanted, replays)
    rate = replays / (time.monotonic() - start)
    return {"replays": replays, "replays per second": round(rate)}
