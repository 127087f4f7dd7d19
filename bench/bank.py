"""The weights of one model, made once for all its cases and implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bench.cases import Case
from bench.data import share_weights
from bench.impls.base import Impl, LayerWeights
from bench.world import World
from gcmoe.numerics import Packed, unpack

MEMORY_SHARE = 0.85
"""Of the free device memory, what weights may take."""
MIN_SETS = 4


def count_sets(layers: int, free_bytes: float, bytes_per_set: float) -> int:
    """Distinct weight sets that fit; a graph of more layers uses them in turn.

    Raises:
        MemoryError: fewer than 4 fit (or than there are layers), which the L2 might hold.
    """
    count = min(layers, int(free_bytes * MEMORY_SHARE / bytes_per_set))
    if count < min(layers, MIN_SETS):
        raise MemoryError(
            f"{MIN_SETS} weight sets of {bytes_per_set / 2**30:.1f} GiB do not fit into "
            f"{free_bytes / 2**30:.1f} GiB"
        )
    return count


class WeightBank:
    """Weight sets of this rank, by implementation.

    Attributes:
        sets: distinct sets; layer n uses set ``n % sets``.
        failed: why an implementation has no weights, by name.
    """

    def __init__(
        self, case: Case, impls: Sequence[Impl], layers: int, seed: int, world: World
    ) -> None:
        self._case, self._seed, self._layers, self._rank = case, seed, layers, world.rank
        free, _ = torch.cuda.mem_get_info()
        own = case.local_experts * case.expert_bytes
        peers = [impl for impl in impls if impl.name != "gcmoe"]
        need = own + sum(impl.bytes_per_layer(case) for impl in peers)
        self.sets = min(world.gather(count_sets(layers, free, need)))
        self.packed: list[Packed] = []
        self._converted: dict[str, list[Any]] = {impl.name: [] for impl in impls}
        self.failed: dict[str, str] = {}
        for index in range(self.sets):
            self._add(index, impls, bool(peers))
        everywhere = world.gather(self.failed)
        for rank, failed in enumerate(everywhere):
            for name, why in failed.items():
                self.failed.setdefault(name, f"rank {rank}: {why}")
        for name in self.failed:
            self._converted.pop(name, None)
        torch.cuda.synchronize()

    def _add(self, index: int, impls: Sequence[Impl], with_peers: bool) -> None:
        packed = share_weights(self._case, self._seed, index, self._rank)
        self.packed.append(packed)
        weights = LayerWeights(packed, unpack(packed) if with_peers else None)
        for impl in impls:
            if impl.name in self.failed:
                continue
            try:
                self._converted[impl.name].append(impl.convert(self._case, weights))
            except Exception as error:
                self.failed[impl.name] = f"weights: {type(error).__name__}: {error}"
                self._converted[impl.name].clear()

    def of(self, name: str) -> list[Any]:
        """An implementation's weights of each layer.

        Raises:
            RuntimeError: it has none.
        """
        if name in self.failed:
            raise RuntimeError(self.failed[name])
        sets = self._converted[name]
        return [sets[n % self.sets] for n in range(self._layers)]

    def packed_of(self, layer: int, rank: int) -> Packed:
        """Weights of a layer of any rank; those of another one are made again."""
        index = layer % self.sets
        if rank == self._rank:
            return self.packed[index]
        return share_weights(self._case, self._seed, index, rank)
