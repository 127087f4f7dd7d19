"""The nodes and edges of a replay that are not its three roles in a row."""

import ctypes

import pytest
import torch
from cuda.bindings import driver as real
from small_layer import inputs, weights

from gcmoe.errors import CaptureError, OperatorClosed, UnsupportedDevice
from gcmoe.protocol import Role
from gcmoe.runtime.agreement import BUDGET_SHARE


def test_finalize_hangs_on_compute_by_a_programmatic_edge(op, standin):
    op.bind(weights())
    (_, before, after, edges, count), *_ = standin.arguments("cuGraphAddDependencies")
    assert (len(before), len(after), len(edges), count) == (1, 1, 1, 1)
    kind = real.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    port = real.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    assert (edges[0].type, edges[0].from_port, edges[0].to_port) == (kind, port, 0)


def test_late_compute_runs_behind_dispatch_in_its_partition(make, standin):
    op = make(late_compute=True)
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
    finalize = op._blocks(BUDGET_SHARE)[Role.FINALIZE]
    assert finalize.fields["compute_ctas"].value == 132


def test_a_copied_block_of_arguments_has_the_same_values(op):
    op.bind(weights())
    block = op._blocks(BUDGET_SHARE)[Role.COMPUTE]
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


def test_stream_is_one_of_the_compute_partition(make, monkeypatch):
    class Stream:
        def __init__(self, handle, device):
            self.handle, self.device = handle, device

    monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
    op = make()
    assert op.stream.handle == int(op._partition.compute.stream)
    assert op.stream.device == op.device
    one = make(one_context=True)
    with pytest.raises(UnsupportedDevice, match="one"):
        _ = one.stream
    op.close()
    with pytest.raises(OperatorClosed):
        _ = op.stream


def test_an_eager_call_on_the_own_stream_is_refused(op, standin, fake_device):
    layer = op.bind(weights())
    fake_device.stream = int(op._partition.compute.stream)
    with pytest.raises(CaptureError, match="for captures"):
        layer(*inputs())
    assert "cuGraphLaunch" not in standin.names()
