"""The fault record: who waited for what from whom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gcmoe.protocol.edges import Cell, Role


class FaultKind(IntEnum):
    """What went wrong; 0 in host memory means no fault."""

    NONE = 0
    TIMEOUT = 1
    CALL_MISMATCH = 2
    OVERLAPPING_REPLAYS = 3
    BAD_COUNT = 4


RECORD_WORDS = ("kind", "role", "rank", "cell", "index", "wanted", "seen", "generation", "peer")
RECORD_BYTES = 64
NO_PEER = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """Nine 32-bit words in host-mapped memory; ``kind`` is stored last, with release."""

    kind: FaultKind
    role: Role
    rank: int
    cell: Cell
    index: int
    wanted: int
    seen: int
    generation: int
    peer: int | None

    @classmethod
    def decode(cls, words: tuple[int, ...]) -> FaultRecord | None:
        """The record of nine words in the order of ``RECORD_WORDS``; None if there is no fault."""
        if len(words) < len(RECORD_WORDS):
            raise ValueError(f"{len(words)} words: a fault record has {len(RECORD_WORDS)}")
        kind, role, rank, cell, index, wanted, seen, generation, peer = words[: len(RECORD_WORDS)]
        if kind == FaultKind.NONE:
            return None
        return cls(
            FaultKind(kind),
            Role(role),
            rank,
            Cell(cell),
            index,
            wanted,
            seen,
            generation,
            None if peer == NO_PEER else peer,
        )

    def describe(self) -> str:
        """One sentence: who waited for what from whom, wanted and seen."""
        who = f"{self.role.name.lower()} of rank {self.rank} in replay {self.generation}"
        what = f"{self.cell.name.lower()}[{self.index}]"
        whom = "" if self.peer is None else f" from rank {self.peer}"
        if self.kind == FaultKind.CALL_MISMATCH:
            return (
                f"{who} runs layer call {self.wanted} but rank {self.peer} sent {what} of call "
                f"{self.seen}: a rank skipped or reordered a layer"
            )
        if self.kind == FaultKind.OVERLAPPING_REPLAYS:
            return f"{who} found {what} claimed by replay {self.seen}: two replays overlapped"
        if self.kind == FaultKind.BAD_COUNT:
            return f"{who} read {what} = {self.seen}{whom}, more than the capacity {self.wanted}"
        return f"{who} waited for {what}{whom}: wanted {self.wanted:#x}, saw {self.seen:#x}"
