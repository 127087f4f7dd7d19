"""The edge table: every hand-off through memory, with its order, scope and fences.

An edge joins one write operation on a cell to one read operation on it. Kernels state the order and
scope of each flag operation by naming its edge (``gcmoe.kernels.sync``); the simulator executes the
same rows and drops each ingredient in turn; a compile test finds each of them in the PTX.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Order = Literal["relaxed", "acquire", "release", "acq_rel"]
Scope = Literal["gpu", "sys"]
Proxy = Literal["generic", "async"]
FenceKind = Literal["async.global", "async.shared::cta"]


class Role(IntEnum):
    """A kernel of a replay. The number is what a fault record holds."""

    HOST = 0
    DISPATCH = 1
    COMPUTE = 2
    FINALIZE = 3


class Cell(IntEnum):
    """A synchronisation cell. The number is what a fault record holds."""

    GENERATION = 1
    RECV_HEADER = 2
    ROUTES = 3
    TOKEN_RING_FULL = 4
    TOKEN_RING_EMPTY = 5
    W1_BITMAP = 6
    COMBINE_ARRIVALS = 7
    WORK_TICKET = 8
    FINALIZE_DONE = 9
    IN_FLIGHT = 10
    ABORT = 11
    FAULT = 12
    COMPUTE_DONE = 13


@dataclass(frozen=True, slots=True)
class Operation:
    """One PTX memory operation: ``kind.order.scope.global.function.type``."""

    kind: Literal["ld", "st", "red", "atom"]
    order: Order
    scope: Scope
    dtype: Literal["u32", "b32", "b64"]
    function: Literal["", "add", "xor", "inc", "cas"] = ""

    @property
    def ptx(self) -> str:
        parts = [self.kind, self.order, self.scope, "global"]
        if self.function:
            parts.append(self.function)
        return ".".join([*parts, self.dtype])


@dataclass(frozen=True, slots=True)
class Payload:
    """Data that becomes visible with the flag, and the proxies that write and read it."""

    region: str
    written_by: Proxy
    read_by: Proxy


@dataclass(frozen=True, slots=True)
class Edge:
    """One row of the table.

    Args:
        name: unique; kernels mark their PTX with it.
        write_fence: the flag is relaxed and this fence, by the same thread, releases.
        write_proxy_fence: by each thread with generic stores, before the barrier or the flag.
        completion_wait: each thread with bulk stores first waits ``wait_group 0``, never ``.read``.
        read_proxy_fence: by the thread that issues bulk loads, after its acquire.
    """

    name: str
    cell: Cell
    writer: Role
    reader: Role
    write: Operation
    read: Operation
    payload: tuple[Payload, ...]
    meaning: str
    write_fence: Literal["", "acq_rel.sys"] = ""
    write_proxy_fence: FenceKind | None = None
    completion_wait: bool = False
    read_proxy_fence: FenceKind | None = None

    @property
    def crosses_ranks(self) -> bool:
        return self.write.scope == "sys"


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """An order that the child graph or the stream gives; covers plain accesses."""

    name: str
    before: Role
    after: Role
    next_replay: bool
    meaning: str


HEADER = Edge(
    name="recv_header",
    cell=Cell.RECV_HEADER,
    writer=Role.DISPATCH,
    reader=Role.DISPATCH,
    write=Operation("st", "relaxed", "sys", "b64"),
    read=Operation("ld", "acquire", "sys", "b64"),
    write_fence="acq_rel.sys",
    write_proxy_fence="async.global",
    read_proxy_fence="async.global",
    payload=(
        Payload("staged_x", "generic", "async"),
        Payload("recv_entries", "generic", "generic"),
    ),
    meaning="a source's rows are staged and its entries are stored; also sent with count zero",
)
ROUTES = Edge(
    name="routes",
    cell=Cell.ROUTES,
    writer=Role.DISPATCH,
    reader=Role.COMPUTE,
    write=Operation("st", "release", "gpu", "b64"),
    read=Operation("ld", "acquire", "gpu", "b64"),
    payload=(Payload("block_table", "generic", "generic"),),
    meaning="the block table of this generation is complete",
)
FULL = Edge(
    name="token_ring_full",
    cell=Cell.TOKEN_RING_FULL,
    writer=Role.DISPATCH,
    reader=Role.COMPUTE,
    write=Operation("red", "release", "gpu", "u32", "add"),
    read=Operation("ld", "acquire", "gpu", "u32"),
    write_proxy_fence="async.global",
    completion_wait=True,
    read_proxy_fence="async.global",
    payload=(
        Payload("ring_rows", "async", "async"),
        Payload("ring_scale", "generic", "async"),
        Payload("ring_weight", "generic", "async"),
        Payload("ring_meta", "generic", "async"),
    ),
    meaning="one row of the block lies in its slot; full at (epoch + 1) * U",
)
EMPTY = Edge(
    name="token_ring_empty",
    cell=Cell.TOKEN_RING_EMPTY,
    writer=Role.COMPUTE,
    reader=Role.DISPATCH,
    write=Operation("red", "release", "gpu", "u32", "add"),
    read=Operation("ld", "acquire", "gpu", "u32"),
    read_proxy_fence="async.global",
    payload=(
        Payload("ring_rows", "async", "async"),
        Payload("ring_scale", "generic", "async"),
        Payload("ring_weight", "generic", "async"),
        Payload("ring_meta", "generic", "async"),
        Payload("a_rows", "async", "async"),
        Payload("a_scale", "async", "async"),
    ),
    meaning="W2 columns of this slot are finished and nothing reads its rows any more",
)
W1_DONE = Edge(
    name="w1_bitmap",
    cell=Cell.W1_BITMAP,
    writer=Role.COMPUTE,
    reader=Role.COMPUTE,
    write=Operation("red", "release", "gpu", "b64", "xor"),
    read=Operation("ld", "acquire", "gpu", "b64"),
    completion_wait=True,
    read_proxy_fence="async.global",
    payload=(Payload("a_rows", "async", "async"), Payload("a_scale", "async", "async")),
    meaning="128 columns of the re-quantised W1 output of this slot are stored; the block was full "
    "before, so what is loaded behind this may also be the origins of its rows",
)
ARRIVALS = Edge(
    name="combine_arrivals",
    cell=Cell.COMBINE_ARRIVALS,
    writer=Role.COMPUTE,
    reader=Role.FINALIZE,
    write=Operation("red", "relaxed", "sys", "u32", "add"),
    read=Operation("ld", "acquire", "sys", "u32"),
    write_fence="acq_rel.sys",
    completion_wait=True,
    payload=(Payload("combine", "async", "generic"),),
    meaning="rows x 64-column units of W2 output lie in this rank's combine slots",
)
COMPUTE_DONE = Edge(
    name="compute_done",
    cell=Cell.COMPUTE_DONE,
    writer=Role.COMPUTE,
    reader=Role.FINALIZE,
    write=Operation("red", "release", "gpu", "u32", "add"),
    read=Operation("ld", "acquire", "gpu", "u32"),
    payload=(),
    meaning="the scheduler of a CTA of compute takes no more tickets and has read the bases; the "
    "last CTA of finalize waits for all of them, then zeroes this and the ticket and advances the "
    "bases",
)
EDGES: tuple[Edge, ...] = (HEADER, ROUTES, FULL, EMPTY, W1_DONE, ARRIVALS, COMPUTE_DONE)


@dataclass(frozen=True, slots=True)
class LoneOperation:
    """A cell operation that publishes no data."""

    name: str
    cell: Cell
    role: Role
    operation: Operation
    meaning: str


TICKET = LoneOperation(
    "work_ticket",
    Cell.WORK_TICKET,
    Role.COMPUTE,
    Operation("atom", "relaxed", "gpu", "u32", "add"),
    "the next work item; zeroed by the last CTA of finalize",
)
DONE = LoneOperation(
    "finalize_done",
    Cell.FINALIZE_DONE,
    Role.FINALIZE,
    Operation("atom", "acq_rel", "gpu", "u32", "inc"),
    "counts CTAs of finalize modulo the grid; the last one advances the generation",
)
CLAIM = LoneOperation(
    "in_flight",
    Cell.IN_FLIGHT,
    Role.DISPATCH,
    Operation("atom", "relaxed", "gpu", "b32", "cas"),
    "claimed by CTA 0 of dispatch with generation | 1, cleared by the last CTA of finalize, whose "
    "last sums may still run; losing is OverlappingReplays",
)
ABORT_SET = LoneOperation(
    "abort",
    Cell.ABORT,
    Role.DISPATCH,
    Operation("st", "relaxed", "sys", "b32"),
    "sticky; stored here and, best effort, at all peers by the first waiter that expires",
)
ABORT_POLL = LoneOperation(
    "abort",
    Cell.ABORT,
    Role.COMPUTE,
    Operation("ld", "relaxed", "sys", "b32"),
    "read by every role on entry and by every waiter every few dozen polls",
)
FAULT_CLAIM = LoneOperation(
    "fault",
    Cell.FAULT,
    Role.DISPATCH,
    Operation("atom", "relaxed", "gpu", "b32", "cas"),
    "the first waiter to expire writes the fault record",
)
LONE_OPERATIONS = (TICKET, DONE, CLAIM, ABORT_SET, ABORT_POLL, FAULT_CLAIM)

GRAPH_EDGES: tuple[GraphEdge, ...] = (
    GraphEdge(
        "dispatch_before_dispatch",
        Role.DISPATCH,
        Role.DISPATCH,
        True,
        "no CTA of dispatch(g) runs when dispatch(g + 1) sends headers, else a slow one finds its "
        "header words overwritten by g + 2",
    ),
    GraphEdge(
        "finalize_before_dispatch",
        Role.FINALIZE,
        Role.DISPATCH,
        True,
        "generation and bases of the next replay; combine slots and staged x are single",
    ),
    GraphEdge(
        "compute_before_dispatch",
        Role.COMPUTE,
        Role.DISPATCH,
        True,
        "slots lie as many rows apart as a block of their replay has at most: where that changes, "
        "a slot of g + 1 covers several of g, for whose readers dispatch(g + 1) does not wait",
    ),
    GraphEdge(
        "finalize_before_compute",
        Role.FINALIZE,
        Role.COMPUTE,
        True,
        "generation, bases and the zeroed ticket of the next replay",
    ),
)
