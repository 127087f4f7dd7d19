"""The protocol text that a run executes: as specified, or with one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gcmoe.protocol import EDGES, GRAPH_EDGES, Edge, WorkOrder, is_less, is_reached
from gcmoe.protocol.edges import LONE_OPERATIONS, LoneOperation


def _default_edges() -> dict[str, Edge]:
    return {edge.name: edge for edge in EDGES}


def _default_lone() -> dict[str, LoneOperation]:
    # "abort" names two rows, its store and its poll; the store is the one that is executed here.
    return {row.name: row for row in reversed(LONE_OPERATIONS)}


@dataclass(frozen=True)
class Variant:
    """Edges and hand-written switches; the default is the specification.

    Each switch is one way of getting the protocol wrong; ``gcmoe.sim.mutants`` describes them.
    """

    edges: Mapping[str, Edge] = field(default_factory=_default_edges)
    lone: Mapping[str, LoneOperation] = field(default_factory=_default_lone)
    graph_edges: frozenset[str] = frozenset(edge.name for edge in GRAPH_EDGES)
    skip_zero_header: bool = False
    skip_header_wait_without_tokens: bool = False
    one_parity: bool = False
    double_segments: bool = False
    swap_order: bool = False
    set_bitmap: bool = False
    short_arrivals: bool = False
    first_cta_advances: bool = False
    forget_abort: bool = False
    publish_after_abort: bool = False
    skip_first_barrier: bool = False
    skip_second_barrier: bool = False
    ignore_call: bool = False
    count_tiles: bool = False
    plain_compare: bool = False
    count_block_rows: bool = False
    empty_blocks: bool = False
    wait_before_publishing: bool = False
    skip_own_headers: bool = False
    assume_own_grid: bool = False
    sum_counts: bool = False
    reread_generation: bool = False
    first_item_is_index: bool = False
    keep_poisoned_y: bool = False
    advance_after_abort: bool = False
    skip_ticket_reset: bool = False
    add_before_scatter: bool = False
    empty_before_read: bool = False
    skip_full_before_bits: bool = False
    skip_compute_done: bool = False
    wait_for_one_group: bool = False

    def reached(self, value: Any, target: Any) -> bool:
        """``is_reached``, or the compare that forgets the wrap."""
        if self.plain_compare:
            return int(value) >= int(target)
        return bool(is_reached(value, target))


@dataclass(frozen=True, slots=True)
class DoubledOrder(WorkOrder):
    """Segments of S blocks: two of them do not fit the ring."""

    def segment_blocks(self, num_blocks: Any) -> Any:
        overflow = is_less(num_blocks * 0 + self.num_slots, num_blocks)
        return num_blocks + (self.num_slots - num_blocks) * overflow


@dataclass(frozen=True, slots=True)
class SwappedOrder(WorkOrder):
    """W2 of a block before its W1."""

    def item(self, ticket: Any, num_blocks: Any) -> Any:
        last = self.num_items(num_blocks) - 1
        return WorkOrder.item(self, last - ticket, num_blocks)


SPECIFIED = Variant()


def work_order(
    variant: Variant, num_slots: int, w1_tiles: int, w2_tiles: int, groups: int
) -> WorkOrder:
    if variant.double_segments:
        return DoubledOrder(num_slots, w1_tiles, w2_tiles, groups)
    if variant.swap_order:
        return SwappedOrder(num_slots, w1_tiles, w2_tiles, groups)
    return WorkOrder(num_slots, w1_tiles, w2_tiles, groups)
