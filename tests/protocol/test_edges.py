"""The edge table: every row names what the memory model needs for its payload."""

import re

import pytest

from gcmoe.protocol import (
    EDGES,
    GRAPH_EDGES,
    LONE_OPERATIONS,
    Cell,
    Role,
)
from gcmoe.protocol.edges import EMPTY

# The payload of the empty edge is data that its writer has read, so nothing has to be flushed.
PUBLISHING = [edge for edge in EDGES if edge is not EMPTY]
PTX = re.compile(
    r"(ld\.(relaxed|acquire)|st\.(relaxed|release)|(red|atom)\.(relaxed|release|acq_rel))"
    r"\.(gpu|sys)\.global(\.(add|xor|inc|cas))?\.(u32|b32|b64)"
)


def by_name(edge):
    return edge.name


def test_names_are_unique():
    for rows in (EDGES, GRAPH_EDGES):
        names = [row.name for row in rows]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("edge", EDGES, ids=by_name)
def test_the_flag_releases_and_acquires_at_one_scope(edge):
    assert edge.read.order == "acquire"
    assert edge.write.scope == edge.read.scope
    if edge.write.order == "release":
        assert edge.write_fence == ""
    else:
        assert edge.write.order == "relaxed"
        assert edge.write_fence == f"acq_rel.{edge.write.scope}"


@pytest.mark.parametrize("edge", EDGES, ids=by_name)
def test_the_operations_are_ptx_of_one_width(edge):
    assert edge.write.kind in ("st", "red")
    assert edge.read.kind == "ld"
    for operation in (edge.write, edge.read):
        assert PTX.fullmatch(operation.ptx), operation.ptx
    assert edge.write.dtype[1:] == edge.read.dtype[1:]


@pytest.mark.parametrize("operation", LONE_OPERATIONS, ids=lambda o: f"{o.name}_{o.operation.kind}")
def test_lone_operations_are_ptx(operation):
    assert PTX.fullmatch(operation.operation.ptx), operation.operation.ptx


@pytest.mark.parametrize("edge", PUBLISHING, ids=by_name)
def test_plain_stores_read_by_bulk_loads_cross_proxies_on_both_sides(edge):
    crosses = any((p.written_by, p.read_by) == ("generic", "async") for p in edge.payload)
    assert (edge.write_proxy_fence is not None) >= crosses


@pytest.mark.parametrize("edge", EDGES, ids=by_name)
def test_bulk_loads_follow_a_proxy_fence(edge):
    assert (edge.read_proxy_fence == "async.global") >= any(
        p.read_by == "async" for p in edge.payload
    )


@pytest.mark.parametrize("edge", PUBLISHING, ids=by_name)
def test_bulk_stores_are_awaited_before_the_flag(edge):
    assert edge.completion_wait == any(p.written_by == "async" for p in edge.payload)


@pytest.mark.parametrize("edge", EDGES, ids=by_name)
def test_system_scope_only_where_ranks_meet(edge):
    assert edge.crosses_ranks == (edge.cell in (Cell.RECV_HEADER, Cell.COMBINE_ARRIVALS))


def test_every_cell_is_used():
    used = {edge.cell for edge in EDGES} | {operation.cell for operation in LONE_OPERATIONS}
    assert used | {Cell.GENERATION} == set(Cell)


def test_cells_with_several_writers_change_by_read_modify_write():
    """Each header word and the route table have one writer; every other flag is counted."""
    stored = {edge.cell for edge in EDGES if edge.write.kind == "st"}
    assert stored == {Cell.RECV_HEADER, Cell.ROUTES}


def test_graph_edges_order_replays_not_roles():
    """Within a replay the roles meet in memory only; the next replay starts behind finalize."""
    assert all(e.next_replay for e in GRAPH_EDGES)
    across = {(e.before, e.after) for e in GRAPH_EDGES}
    assert across == {
        *((role, Role.DISPATCH) for role in (Role.DISPATCH, Role.COMPUTE, Role.FINALIZE)),
        (Role.FINALIZE, Role.COMPUTE),
    }


def test_numbers_of_roles_and_cells_are_unique_and_small():
    assert [int(role) for role in Role] == list(range(len(Role)))
    assert [int(cell) for cell in Cell] == list(range(1, len(Cell) + 1))
