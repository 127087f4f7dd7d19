"""The workspace: one list of regions decides all sizes, offsets and views.

The workspace of an operator is one symmetric allocation, shared by all its layers and zeroed once.
Nothing is reset between replays: cells are cumulative or carry the generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from gcmoe.protocol.codecs import BlockEntry
from gcmoe.protocol.order import column_groups
from gcmoe.protocol.ring import WINDOW_COLUMNS, Arrivals, TokenRing, W1Bitmap, is_less

LINE = 128
MX_COLUMNS = 32
ATOM_ROWS = 128
BASES_WORDS = ("generation", "epoch_base", "slot_base", "arrivals_base")
FIRST_GENERATION = 1


@dataclass(frozen=True, slots=True)
class Region:
    """``count`` items of ``item_bytes`` at byte ``offset``.

    ``is_cell`` regions hold synchronisation state and start at zero; the rest is data that no role
    reads before a flag of the same replay covers it. ``is_remote`` regions are accessed by peers.
    """

    name: str
    shape: str
    count: int
    item_bytes: int
    is_cell: bool
    is_remote: bool
    meaning: str
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return self.count * self.item_bytes


@dataclass(frozen=True)
class WorkspaceShape:
    """The workspace constants: equal on all ranks, part of the fingerprint.

    Args:
        hidden, intermediate, top_k, max_tokens: as in ``MoEConfig``.
        num_ranks: R.
        local_experts: EL.
        num_slots: S, slots of the token ring, a power of two.
        slot_rows: U, rows of a slot.
        block_rows: BM <= U, rows of a full block. The slots of a replay lie BM rows apart, at the
            start of their regions.
        least_block_rows: the smallest BM of any replay; None for ``block_rows``.
        header_words: Q, receive-header words per source, at least the largest dispatch grid.
        scale_columns: columns under one activation scale, 128 (Hopper) or 32 (Blackwell). With 32
            the scales of a window lie in atoms, as the block-scaled MMA reads them.
    """

    hidden: int
    intermediate: int
    top_k: int
    max_tokens: int
    num_ranks: int
    local_experts: int
    num_slots: int
    slot_rows: int
    block_rows: int
    header_words: int
    scale_columns: int = WINDOW_COLUMNS
    least_block_rows: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.block_rows <= self.slot_rows:
            raise ValueError(
                f"block_rows = {self.block_rows}: from 1 to slot_rows = {self.slot_rows}"
            )
        if self.least_block_rows is not None and not 0 < self.least_block_rows <= self.block_rows:
            raise ValueError(
                f"least_block_rows = {self.least_block_rows}: from 1 to block_rows = "
                f"{self.block_rows}"
            )
        if self.slot_rows >= BlockEntry.ROWS.limit:
            raise ValueError(
                f"slot_rows = {self.slot_rows}: below {BlockEntry.ROWS.limit}, because the block "
                f"table has {BlockEntry.ROWS.bits} bits for the rows of a block"
            )
        for name in ("top_k", "max_tokens", "num_ranks", "local_experts", "header_words"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        if self.hidden < 1 or self.hidden % WINDOW_COLUMNS:
            raise ValueError(f"hidden = {self.hidden}: a positive multiple of {WINDOW_COLUMNS}")
        if self.scale_columns not in (WINDOW_COLUMNS, MX_COLUMNS):
            raise ValueError(
                f"scale_columns = {self.scale_columns}: {WINDOW_COLUMNS} or {MX_COLUMNS}"
            )
        if self.has_atoms and self.slot_rows > ATOM_ROWS:
            raise ValueError(
                f"slot_rows = {self.slot_rows}: at most {ATOM_ROWS}, the rows of a scale atom"
            )
        # The parts check the rest.
        _ = self.ring, self.bitmap

    @property
    def ring(self) -> TokenRing:
        return TokenRing(self.num_slots, self.slot_rows, self.hidden)

    @property
    def bitmap(self) -> W1Bitmap:
        return W1Bitmap(self.intermediate)

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals(self.hidden, column_groups(self.hidden))

    @property
    def num_windows(self) -> int:
        """128-column windows of a token row."""
        return self.hidden // WINDOW_COLUMNS

    @property
    def entry_capacity(self) -> int:
        """Entries that one source can send to one rank."""
        return self.max_tokens * self.top_k

    @property
    def row_stride(self) -> int:
        """Bytes of a staged row: H codes, a scale exponent per ``scale_columns`` columns, padded to
        a multiple of 128."""
        return -(-(self.hidden + self.hidden // self.scale_columns) // LINE) * LINE

    @property
    def ring_tensor(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(extents, byte strides of all but the first) of ``ring_rows`` as a tensor of bytes: those
        of a window, rows of a slot, windows of a row, slots."""
        slot_bytes = self.block_rows * self.row_stride
        extents = WINDOW_COLUMNS, self.block_rows, self.num_windows, self.num_slots
        return extents, (self.row_stride, WINDOW_COLUMNS, slot_bytes)

    @property
    def has_atoms(self) -> bool:
        """Activation scales lie in atoms of the block-scaled MMA."""
        return self.scale_columns == MX_COLUMNS

    @property
    def scale_words(self) -> int:
        """32-bit words of the activation scales of one slot and 128-column window: an FP32 scale
        per row, or an atom."""
        return ATOM_ROWS if self.has_atoms else self.slot_rows

    @property
    def max_blocks(self) -> int:
        """Blocks of one replay in the worst case."""
        return self._most_blocks(self.block_rows)

    @property
    def table_blocks(self) -> int:
        """Entries of the block table: for the replays with the smallest blocks."""
        return self._most_blocks(self.least_block_rows or self.block_rows)

    def _most_blocks(self, block_rows: int) -> int:
        """As many experts as possible with one row each, and all other rows in full blocks."""
        entries = self.num_ranks * self.entry_capacity
        experts = min(self.local_experts, entries)
        return (entries - experts) // block_rows + experts

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        s, u, r = self.num_slots, self.slot_rows, self.num_ranks
        windows, a_windows = self.num_windows, self.intermediate // WINDOW_COLUMNS
        scale, staged = "[U] f32", "permuted in each window, then H/128"
        weights = "those of a tile in fragment order"
        scales = "a tile of N rows has N words per window, packed, in fragment order"
        if self.has_atoms:
            scale, staged = f"[{ATOM_ROWS}] u8x4", "in column order, then H/32"
            weights, scales = "row order", "an atom per window"
        cell, data = (True, False), (False, False)
        remote_cell, remote_data = (True, True), (False, True)
        rows: list[tuple[str, str, int, int, tuple[bool, bool], str]] = [
            ("bases", "[4] u32", 4, 4, cell, ", ".join(BASES_WORDS)),
            (
                "combine_arrivals",
                "[groups] u32",
                self.arrivals.groups,
                4,
                remote_cell,
                "cumulative rows x 64-column units, per group of columns",
            ),
            ("work_ticket", "u32", 1, 4, cell, "next work item"),
            ("finalize_done", "u32", 1, 4, cell, "CTAs of finalize, modulo its grid"),
            ("compute_done", "u32", 1, 4, cell, "CTAs of compute that take no more tickets"),
            ("in_flight", "u32", 1, 4, cell, "generation | 1 of the running replay, 0 between"),
            ("abort", "u32", 1, 4, remote_cell, "sticky"),
            ("fault", "u32", 1, 4, cell, "claimed by the first waiter that expires"),
            ("routes", "u64", 1, 8, cell, "RoutesHeader"),
            (
                "recv_header",
                "[2][R][Q] u64",
                2 * r * self.header_words,
                8,
                remote_cell,
                "RecvHeader per parity, source and word",
            ),
            ("token_ring_full", "[S] u32", s, 4, cell, "cumulative, U per use"),
            ("token_ring_empty", "[S] u32", s, 4, cell, "cumulative, H/64 per use"),
            ("w1_bitmap", "[S] u64", s, 8, cell, "a bit per 64 columns, flipped per use"),
            ("stats", "[EL + 1] u64", self.local_experts + 1, 8, cell, "rows per expert; bad ids"),
            (
                "recv_entries",
                "[2][R][cap] u64",
                2 * r * self.entry_capacity,
                8,
                remote_data,
                "Entry per parity and source, in (token, slot) order",
            ),
            ("block_table", "[table_blocks] u32", self.table_blocks, 4, data, "BlockEntry"),
            ("ring_meta", "[S][U] u32", s * u, 4, data, "RowMeta"),
            ("ring_weight", "[S][U] f32", s * u, 4, data, f"routing weights, {weights}"),
            (
                "ring_scale",
                f"[S][H/128]{scale}",
                s * windows * self.scale_words,
                4,
                data,
                f"token scales; {scales}",
            ),
            (
                "ring_rows",
                "[S][U][row_stride] u8",
                s * u,
                self.row_stride,
                data,
                "staged rows as pulled; the rows of a block are the last ones of its slot",
            ),
            (
                "a_scale",
                f"[S][I/128]{scale}",
                s * a_windows * self.scale_words,
                4,
                data,
                f"scales of a; {scales}",
            ),
            (
                "a_rows",
                "[S][I/128][U*128] u8",
                s * a_windows,
                u * WINDOW_COLUMNS,
                data,
                "re-quantised W1 output; a block of tile N uses N*128 bytes per window, packed",
            ),
            (
                "staged_x",
                "[max_tokens][row_stride] u8",
                self.max_tokens,
                self.row_stride,
                remote_data,
                f"H E4M3 codes {staged} UE8M0 exponents",
            ),
            (
                "combine",
                "[max_tokens][k][H] bf16",
                self.max_tokens * self.top_k,
                2 * self.hidden,
                remote_data,
                "W2 output per token and slot",
            ),
        ]
        regions, offset = [], 0
        for name, shape, count, item, (is_cell, is_remote), meaning in rows:
            regions.append(Region(name, shape, count, item, is_cell, is_remote, meaning, offset))
            offset += -(-count * item // LINE) * LINE
        return tuple(regions)

    @cached_property
    def offsets(self) -> dict[str, int]:
        return {region.name: region.offset for region in self.regions}

    def region(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    def initial_cells(
        self, generation: int = FIRST_GENERATION, epoch: int = 0, arrivals: int = 0
    ) -> dict[str, list[int]]:
        """Cell values of a workspace before a replay, by region; regions not named are zero.

        The defaults are a fresh workspace. Other values continue a history that has used every
        slot ``epoch`` times and has seen ``arrivals`` arrivals, all modulo 2^32.
        """
        wrap = (1 << 32) - 1
        flipped = self.bitmap.mask if epoch & 1 else 0
        return {
            "bases": [generation & wrap, epoch & wrap, 0, arrivals & wrap],
            "combine_arrivals": [arrivals & wrap] * self.arrivals.groups,
            "token_ring_full": [epoch * self.slot_rows & wrap] * self.num_slots,
            "token_ring_empty": [epoch * self.ring.empty_units & wrap] * self.num_slots,
            "w1_bitmap": [flipped] * self.num_slots,
        }

    @property
    def num_bytes(self) -> int:
        last = self.regions[-1]
        return last.offset + -(-last.num_bytes // LINE) * LINE


def ring_row(row: Any, rows: Any, block_rows: int) -> Any:
    """Where row ``row`` of a block of ``rows`` rows lies in the ``block_rows`` rows of its slot.

    A block ends with its slot. A load of a wider tile then meets the end of a tensor dimension: the
    padding comes as zeros, and not from memory.
    """
    return row + (block_rows - rows)


def tile_width(widths: Sequence[int], rows: Any) -> Any:
    """The token tile of a block of ``rows`` rows, a word: the narrowest of the ascending ``widths``
    that holds them."""
    width = widths[0]
    for narrow, wide in pairwise(widths):
        width = width + is_less(narrow, rows) * (wide - narrow)
    return width


def fragment_position(row: Any, width: Any) -> Any:
    """Where row ``row`` of a tile lies in a per-row array in fragment order.

    A thread of a WGMMA consumer holds the columns n = 8j + 2t + c of its accumulator, t = lane % 4;
    the order [t][j][c] lets it read all its scales with wide loads.
    """
    t, j, c = (row >> 1) & 3, row >> 3, row & 1
    return t * (width >> 2) + 2 * j + c


def atom_word(row: int) -> int:
    """Which 32-bit word of a scale atom holds the four scales of row ``row`` below 128.

    An atom is 128 rows x 128 columns of a block-scaled operand; byte k of the word is the UE8M0
    scale of columns 32k..32k+31. Source: PTX ISA, scale factor layout of ``tcgen05.mma``.
    """
    return (row & 31) * 4 + (row >> 5)
