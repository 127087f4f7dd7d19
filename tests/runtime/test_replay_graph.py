"""The nodes and edges of a replay that are not its three roles in a row."""

import ctypes

import pytest
from cuda.bindings import driver as real
from small_layer import weights

from gcmoe.protocol import Role
from gcmoe.runtime.agreement import BUDGET_SHARE


def programmatic(standin):
    """(node before, node after) of each such edge, as places in the order in which nodes came."""
    kind = real.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    port = real.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    found = []
    for _, before, after, edges, count in standin.arguments("cuGraphAddDependencies"):
        assert (len(before), len(after), len(edges), count) == (1, 1, 1, 1)
        assert (edges[0].type, edges[0].from_port, edges[0].to_port) == (kind, port, 0)
        found.append((int(before[0]), int(after[0])))
    first = min(min(edge) for edge in found)
    return sorted((before - first, after - first) for before, after in found)


def test_each_role_hangs_on_the_one_before_by_a_programmatic_edge(op, standin):
    op.bind(weights())
    assert programmatic(standin) == [(0, 1), (1, 2)]


def test_between_green_contexts_there_is_no_edge(make, standin):
    make(green_contexts=True).bind(weights())
    assert programmatic(standin) == [(0, 1)]  # compute to finalize
    assert [len(node[1]) for node in standin.arguments("cuGraphAddKernelNode")] == [0, 0, 0]


def test_serial_has_a_whole_edge_in_the_place_of_a_programmatic_one(make, standin):
    make(serial=True).bind(weights())
    assert [len(node[1]) for node in standin.arguments("cuGraphAddKernelNode")] == [0, 1, 0]
    assert programmatic(standin) == [(0, 1)]


@pytest.mark.parametrize("late", [False, True])
def test_late_compute_is_more_ctas_of_the_same_node(make, standin, late):
    op = make(late_compute=late)
    op.bind(weights())
    _, compute, _ = (node[3] for node in standin.arguments("cuGraphAddKernelNode"))
    assert compute.gridDimX == op.plan.compute_ctas == (132 if late else 124)
    finalize = op._blocks(op._sizes[op.plan], BUDGET_SHARE)[Role.FINALIZE]
    assert finalize.fields["compute_ctas"].value == compute.gridDimX


def test_between_green_contexts_late_compute_runs_behind_dispatch_in_its_context(make, standin):
    op = make(late_compute=True, green_contexts=True)
    op.bind(weights())
    nodes = standin.arguments("cuGraphAddKernelNode")
    dispatch, compute, late, finalize = (node[3] for node in nodes)
    assert [len(node[1]) for node in nodes] == [0, 0, 1, 0]
    assert int(late.ctx) == int(op._partition.dispatch.context) == int(dispatch.ctx)
    assert int(late.kern) == int(compute.kern) != int(finalize.kern)
    assert (compute.gridDimX, late.gridDimX) == (op.plan.compute_sms, op.plan.dispatch_sms)
    assert late.blockDimX == compute.blockDimX
    assert late.sharedMemBytes == compute.sharedMemBytes
    assert len(standin.arguments("cuGraphAddDependencies")) == 1  # finalize waits in memory
    finalize = op._blocks(op._sizes[op.plan], BUDGET_SHARE)[Role.FINALIZE]
    assert finalize.fields["compute_ctas"].value == 132


def test_a_copied_block_of_arguments_has_the_same_values(op):
    op.bind(weights())
    block = op._blocks(op._sizes[op.plan], BUDGET_SHARE)[Role.COMPUTE]
    block.set(w13=0x1234)
    copy = block.copy()
    assert copy.address != block.address
    for name, field in block.fields.items():
        assert bytes(copy.fields[name]) == bytes(field), name
    assert block.map_addresses
    for name, address in block.map_addresses.items():
        assert ctypes.string_at(copy.map_addresses[name], 128) == ctypes.string_at(address, 128)
    copy.set(trace=7)
    assert block.fields["trace"].value == 0
