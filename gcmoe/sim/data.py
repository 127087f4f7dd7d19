"""What the rows carry: tags that say where each came from, or real numbers."""

from __future__ import annotations

from typing import Any, Protocol

from gcmoe.protocol import is_valid
from gcmoe.sim.config import Problem, SimConfig

NAN = "nan"


class DataMode(Protocol):
    """How rows are made and combined. ``layer`` names the layer call that gives the weights,
    ``expert`` counts over all ranks."""

    def weight_bits(self, layer: int, rank: int, token: int, slot: int) -> int: ...

    def stage(self, layer: int, rank: int, token: int) -> Any: ...

    def scale(self, staged: Any, window: int) -> Any: ...

    def w1(
        self, layer: int, expert: int, row: Any, scales: list[Any], weight_bits: int, window: int
    ) -> tuple[Any, Any]: ...

    def w2(
        self, layer: int, expert: int, codes: list[Any], scales: list[Any], tile: int, columns: int
    ) -> Any: ...

    def finish(self, slots: list[list[Any]]) -> Any: ...

    def error(self, layer: int, rank: int, token: int, y: Any) -> str | None: ...


class Tags:
    """Every value names its origin, so y shows each wrong, missing or stale piece."""

    def __init__(self, config: SimConfig, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.windows = config.intermediate // 128

    def weight_bits(self, layer: int, rank: int, token: int, slot: int) -> int:
        return 0x3F80_0000 + (((layer * 16 + rank) * 64 + token) * 32 + slot)

    def stage(self, layer: int, rank: int, token: int) -> Any:
        return (layer, rank, token)

    def scale(self, staged: Any, window: int) -> Any:
        return staged

    def w1(
        self, layer: int, expert: int, row: Any, scales: list[Any], weight_bits: int, window: int
    ) -> tuple[Any, Any]:
        scale = scales[0] if len(set(scales)) == 1 else tuple(scales)
        return (row, scale, weight_bits, layer, expert, window), (layer, expert, window)

    def w2(
        self, layer: int, expert: int, codes: list[Any], scales: list[Any], tile: int, columns: int
    ) -> Any:
        return (tuple(codes), tuple(scales), layer, expert, tile)

    def finish(self, slots: list[list[Any]]) -> Any:
        return tuple(tuple(tiles) for tiles in slots)

    def expected(self, layer: int, rank: int, token: int, tiles: dict[int, int]) -> Any:
        """y of one token; ``tiles`` gives the W2 tiles of each rank."""
        slots = []
        for slot, expert_id in enumerate(self.problem[layer][rank][token]):
            if not is_valid(expert_id, self.config.experts):
                continue
            home, expert = expert_id // self.config.local_experts, expert_id
            x = (layer, rank, token)
            bits = self.weight_bits(layer, rank, token, slot)
            codes = tuple((x, x, bits, layer, expert, w) for w in range(self.windows))
            scales = tuple((layer, expert, w) for w in range(self.windows))
            slots.append(tuple((codes, scales, layer, expert, t) for t in range(tiles[home])))
        return tuple(slots)

    def error(self, layer: int, rank: int, token: int, y: Any) -> str | None:
        columns = self.config.w2_columns
        tiles = {
            r: self.config.hidden // columns[r % len(columns)] for r in range(self.config.ranks)
        }
        wanted = self.expected(layer, rank, token, tiles)
        if y == wanted:
            return None
        return f"y holds {y!r}, expected {wanted!r}"
