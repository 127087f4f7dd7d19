"""Writes ``docs/protocol.md`` from the protocol's own objects, so it cannot drift from the code.

``python -m gcmoe.protocol.document [--check] [PATH]``
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gcmoe.protocol import order
from gcmoe.protocol.codecs import CODECS, NUM_CALLS
from gcmoe.protocol.edges import (
    EDGES,
    GRAPH_EDGES,
    LONE_OPERATIONS,
    Cell,
    Edge,
    Payload,
    Role,
)
from gcmoe.protocol.faults import RECORD_WORDS, FaultKind
from gcmoe.protocol.invariants import INVARIANTS
from gcmoe.protocol.workspace import BASES_WORDS, FIRST_GENERATION, MX_COLUMNS, WorkspaceShape

DEFAULT_PATH = Path("docs/protocol.md")

EXAMPLE = WorkspaceShape(
    hidden=5120,
    intermediate=2304,
    top_k=6,
    max_tokens=64,
    num_ranks=8,
    local_experts=48,
    num_slots=128,
    slot_rows=40,
    block_rows=40,
    header_words=32,
    least_block_rows=40,
)
"""DeepSeek-V4.1-Flash on eight ranks, 64 tokens a rank."""

CELL_REGIONS: dict[Cell, str] = {cell: cell.name.lower() for cell in Cell} | {
    Cell.GENERATION: "bases"
}
"""Which workspace region holds a cell."""

FAULT_MEANINGS: dict[FaultKind, str] = {
    FaultKind.NONE: "no fault",
    FaultKind.TIMEOUT: "a wait outlasted its budget; the record names role, cell, index and peer",
    FaultKind.CALL_MISMATCH: "a peer's header has this generation and another layer's bind index",
    FaultKind.OVERLAPPING_REPLAYS: "`in_flight` was claimed: two replays share a workspace",
    FaultKind.BAD_COUNT: "a count from a peer exceeds the entry capacity",
}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; a bar inside a cell text is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines]


def role_name(role: Role) -> str:
    return role.name.lower()


def payload_text(payload: Sequence[Payload]) -> str:
    return ", ".join(f"`{p.region}` ({p.written_by} → {p.read_by})" for p in payload)


def cell_section() -> list[str]:
    regions = {region.name: region for region in EXAMPLE.regions}
    rows = []
    for cell in Cell:
        region = regions[CELL_REGIONS[cell]]
        edges = [edge for edge in EDGES if edge.cell == cell]
        lone = [operation for operation in LONE_OPERATIONS if operation.cell == cell]
        uses = [f"{role_name(e.writer)} → {role_name(e.reader)}" for e in edges]
        uses += [f"{role_name(o.role)}: `{o.operation.ptx}`" for o in lone]
        note = region.meaning
        if cell == Cell.GENERATION:
            uses = ["finalize → all roles of the next replay, by graph order"]
            note = f"replay number, starts at {FIRST_GENERATION}; `bases` also holds " + ", ".join(
                f"`{word}`" for word in BASES_WORDS[1:]
            )
        name = cell.name.lower()
        rows.append([int(cell), f"`{name}`", f"`{region.shape}`", "; ".join(uses), note])
    return [
        "## Cells",
        "",
        "The number is what a fault record holds. A cell with several writers changes by "
        "read-modify-write only, and all differences are taken modulo 2^32.",
        "",
        *table(["no.", "cell", "shape", "used by", "holds"], rows),
    ]


def workspace_section() -> list[str]:
    e = EXAMPLE
    rows = [
        [
            f"`{r.name}`",
            f"`{r.shape}`",
            "cell" if r.is_cell else "data",
            "yes" if r.is_remote else "",
            f"{r.offset:,}",
            f"{r.num_bytes:,}",
            r.meaning,
        ]
        for r in e.regions
    ]
    return [
        "## Workspace",
        "",
        "One symmetric allocation per operator, shared by its layers and zeroed once. R ranks, EL "
        "experts of a rank, S ring slots of U rows, Q header words per source, cap = max_tokens * "
        "k entries. Cells are synchronisation state; no role reads data before a flag of the same "
        "replay covers it. Peers access the remote regions. A replay whose blocks have BM < U rows "
        "packs its slots BM rows apart; cells count U rows a use whatever BM is.",
        "",
        f"The byte columns are an example: DeepSeek-V4.1-Flash on {e.num_ranks} ranks, "
        f"H = {e.hidden}, I = {e.intermediate}, k = {e.top_k}, EL = {e.local_experts}, "
        f"max_tokens = {e.max_tokens}, S = {e.num_slots}, U = {e.slot_rows}, "
        f"Q = {e.header_words}, row_stride = {e.row_stride}, table_blocks = {e.table_blocks}: "
        f"{e.num_bytes:,} bytes.",
        "",
        *table(["region", "shape", "kind", "remote", "offset", "bytes", "holds"], rows),
        "",
        f"With a scale for every {MX_COLUMNS} columns (Blackwell) these regions differ; an atom "
        "holds the scales of 128 rows of a window in the order of the block-scaled MMA. Cells, "
        "edges and all other regions are the same.",
        "",
        *table(["region", "shape", "holds"], atom_rows()),
    ]


def atom_rows() -> list[list[object]]:
    """The regions that depend on the form of activation scales."""
    other = replace(EXAMPLE, scale_columns=MX_COLUMNS)
    return [
        [f"`{b.name}`", f"`{b.shape}`", b.meaning]
        for a, b in zip(EXAMPLE.regions, other.regions, strict=True)
        if (a.shape, a.meaning) != (b.shape, b.meaning)
    ]


def codec_section() -> list[str]:
    lines = ["## Codecs", "", f"`call` is the bind index of a layer modulo {NUM_CALLS}."]
    for codec in CODECS:
        rows = [
            [f"{f.shift + f.bits - 1}..{f.shift}", f.name, f.bits, f"{f.limit - 1:,}"]
            for f in reversed(codec.FIELDS)  # type: ignore[attr-defined]
        ]
        lines += ["", f"### {codec.__name__}", "", inspect.getdoc(codec) or "", ""]
        lines += table(["bits", "field", "width", "largest"], rows)
    return lines


def edge_row(edge: Edge) -> list[object]:
    before = []
    if edge.completion_wait:
        before.append("`wait_group 0` by each thread with bulk stores")
    if edge.write_proxy_fence:
        before.append(f"`fence.proxy.{edge.write_proxy_fence}` by each thread with plain stores")
    if edge.write_fence:
        before.append(f"`fence.{edge.write_fence}` by the thread that writes the flag")
    after = f"`fence.proxy.{edge.read_proxy_fence}`" if edge.read_proxy_fence else ""
    return [
        f"`{edge.name}`",
        role_name(edge.writer),
        role_name(edge.reader),
        "; ".join(before),
        f"`{edge.write.ptx}`",
        f"{edge.write.order}, {edge.write.scope}",
        f"`{edge.read.ptx}`",
        f"{edge.read.order}, {edge.read.scope}",
        after,
        payload_text(edge.payload),
        edge.meaning,
    ]


def edge_section() -> list[str]:
    head = ["cell", "writer", "reader", "before the write", "write", "order, scope", "read"]
    head += ["order, scope", "after the read", "payload (written by → read by)", "means"]
    lone = [
        [f"`{o.name}`", role_name(o.role), f"`{o.operation.ptx}`", o.operation.order]
        + [o.operation.scope, o.meaning]
        for o in LONE_OPERATIONS
    ]
    graph = [
        [f"`{g.name}`", role_name(g.before), role_name(g.after)]
        + ["the next replay" if g.next_replay else "the same replay", g.meaning]
        for g in GRAPH_EDGES
    ]
    return [
        "## Edges",
        "",
        "Every hand-off through memory. A proxy fence is the `.global` form: it orders plain "
        "(generic) and bulk (async) accesses of one thread. The payload of `token_ring_empty` is "
        "what its writer has read and its reader overwrites.",
        "",
        *table(head, [edge_row(edge) for edge in EDGES]),
        "",
        "### Operations that publish no data",
        "",
        "Every role makes those on `abort` and `fault`; the role named is one of them.",
        "",
        *table(["cell", "role", "operation", "order", "scope", "means"], lone),
        "",
        "### Graph edges",
        "",
        "Order that the stream gives, because a replay ends when all its roles have ended; it also "
        "covers plain accesses. Within a replay the roles meet in memory only.",
        "",
        *table(["edge", "before", "after", "of", "needed for"], graph),
    ]


def order_section() -> list[str]:
    return [
        "## Work order",
        "",
        inspect.getdoc(order) or "",
        "",
        f"A W1 item is {order.W1_COLUMNS} columns of the intermediate width of one block, a W2 "
        f"item {order.W2_COLUMNS} output columns.",
    ]


def invariant_section() -> list[str]:
    rows = [[f"`{i.name}`", i.text, i.holds_because] for i in INVARIANTS]
    return ["## Invariants", "", *table(["name", "holds", "because"], rows)]


def fault_section() -> list[str]:
    rows = [[int(kind), f"`{kind.name}`", FAULT_MEANINGS[kind]] for kind in FaultKind]
    return [
        "## Faults",
        "",
        f"A fault record is {len(RECORD_WORDS)} 32-bit words in host-mapped memory: "
        + ", ".join(f"`{word}`" for word in RECORD_WORDS)
        + ". The first waiter to fail claims `fault`, writes the record and sets the sticky "
        "`abort` here and, best effort, at all peers.",
        "",
        *table(["kind", "name", "means"], rows),
    ]


def render() -> str:
    """The whole document, ending in a newline."""
    roles = ", ".join(f"`{role_name(role)}` = {int(role)}" for role in Role)
    sections = [
        ["<!-- Generated by `make docs` from gcmoe/protocol; do not edit. -->", ""]
        + ["# The protocol of a layer replay", ""]
        + [f"Roles, as a fault record numbers them: {roles}."],
        cell_section(),
        workspace_section(),
        codec_section(),
        edge_section(),
        order_section(),
        invariant_section(),
        fault_section(),
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the document, or with ``--check`` return 1 when the file is stale or missing."""
    parser = argparse.ArgumentParser(prog="python -m gcmoe.protocol.document", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if PATH is stale")
    parser.add_argument("path", nargs="?", type=Path, default=DEFAULT_PATH, metavar="PATH")
    args = parser.parse_args(argv)
    text = render()
    if args.check:
        if args.path.is_file() and args.path.read_text(encoding="utf-8") == text:
            return 0
        print(f"{args.path} is stale: run `make docs`", file=sys.stderr)
        return 1
    args.path.parent.mkdir(parents=True, exist_ok=True)
    args.path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
