"""The whole operator against the recording driver: what is launched, captured, updated, freed."""

import ctypes
import gc
import re
import warnings

import pytest
import torch
from cuda.bindings import driver as real
from small_layer import H, T, inputs, weights

from gcmoe import operator as operators
from gcmoe.config import MoEConfig
from gcmoe.errors import CaptureError, DeviceFault, GCMoEError, OperatorClosed, PeerTimeout
from gcmoe.kernels.spec import kernel_specs
from gcmoe.kernels.trace_words import TRACE_WORDS
from gcmoe.protocol import Role
from gcmoe.runtime import device as devices
from gcmoe.runtime.group import RankGroup
from gcmoe.runtime.memory import Workspace
from gcmoe.runtime.modules import check_parameters

CHOOSE_DEVICE = devices.choose_device


def argument_values(op, parameters):
    """Name -> value of the arguments of a recorded ``CUDA_KERNEL_NODE_PARAMS``."""
    names = {int(kernel.kernel): role for role, kernel in op._sizes[op.plan].kernels.items()}
    spec = op._sizes[op.plan].specs[names[int(parameters.kern)]]
    pointers = (ctypes.c_void_p * len(spec.parameters)).from_address(int(parameters.kernelParams))
    types = {"u64": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32}
    return {
        p.name: types.get(p.kind, ctypes.c_uint64).from_address(address).value
        for p, address in zip(spec.parameters, pointers, strict=True)
    }


@pytest.mark.parametrize("split", [False, True])
def test_kernels_are_loaded_in_their_contexts_before_anything_runs(make, standin, split):
    op = make(green_contexts=split)
    contexts = {int(context) for context in op._partition.contexts}
    pushed = [int(a[0]) for a in standin.arguments("cuCtxPushCurrent")]
    loads = 6 if split else 3
    assert len(contexts) == loads // 3
    assert len(pushed) == loads
    assert set(pushed) == contexts
    assert standin.names().count("cuCtxPopCurrent") == loads
    assert standin.names().count("cuFuncLoad") == loads
    smem = real.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert {a[:2] for a in standin.arguments("cuKernelSetAttribute")} == {(smem, 100_000)}
    assert {a[1:] for a in standin.arguments("cuFuncSetAttribute")} == {(smem, 100_000)}
    assert "cuGraphLaunch" not in standin.names()


def test_a_second_operator_shares_partition_and_kernels(op, make, standin):
    before = len(standin.arguments("cuLibraryLoadData"))
    other = make()
    assert len(standin.arguments("cuLibraryLoadData")) == before
    assert other._partition is op._partition
    assert other._order is op._order


def test_a_kernel_with_other_parameters_is_refused(op, standin):
    size = op._sizes[op.plan]
    spec = size.specs[Role.FINALIZE]
    standin.sizes[spec.symbol][2] = 4
    with pytest.raises(GCMoEError, match=r"2 \(topk_ids\) has 4 bytes, the spec says 8"):
        check_parameters(size.kernels[Role.FINALIZE].kernel, spec)


@pytest.mark.parametrize("split", [False, True])
def test_the_graph_has_three_nodes_in_their_contexts(make, standin, split):
    op = make(green_contexts=split)
    op.bind(weights())
    nodes = standin.arguments("cuGraphAddKernelNode")
    assert len(nodes) == 3
    dispatch, compute, finalize = (node[3] for node in nodes)
    assert [len(node[1]) for node in nodes] == [0, 0, 0]
    assert int(dispatch.ctx) == int(op._partition.dispatch.context)
    assert int(compute.ctx) == int(finalize.ctx) == int(op._partition.compute.context)
    assert (int(dispatch.ctx) != int(compute.ctx)) == split
    assert dispatch.gridDimX == op.plan.dispatch_sms == 8
    assert compute.gridDimX == op.plan.compute_sms == 124
    assert finalize.gridDimX == 1
    for parameters in (dispatch, compute, finalize):
        assert (parameters.gridDimY, parameters.gridDimZ) == (1, 1)
        assert (parameters.blockDimX, parameters.sharedMemBytes) == (512, 100_000)


def test_green_contexts_keep_the_grids_and_load_again(make, standin):
    one = make()
    assert "cuGreenCtxCreate" not in standin.names()
    loads = standin.names().count("cuFuncLoad")
    op = make(green_contexts=True)
    op.bind(weights())
    nodes = [node[3] for node in standin.arguments("cuGraphAddKernelNode")]
    assert int(one._partition.compute.context) not in {int(node.ctx) for node in nodes}
    assert [node.gridDimX for node in nodes[:2]] == [one.plan.dispatch_sms, one.plan.compute_sms]
    assert standin.names().count("cuFuncLoad") > loads
    assert "primary context" in one.report.describe()
    assert "balanced" in op.report.describe()


def test_what_the_kernels_get(op, standin):
    packed = weights()
    op.bind(packed)
    layer = op.bind(packed)
    x, ids, w = inputs()
    y = layer(x, ids, w)
    dispatch, compute, finalize = (
        argument_values(op, node[3]) for node in standin.arguments("cuGraphAddKernelNode")[3:]
    )
    workspace = op._workspace.address
    for values in (dispatch, compute, finalize):
        assert values["peers"] == values["workspace"] == workspace
        assert values["fault_record"] == op._record.device_address
        assert (values["trace"], values["rank"]) == (0, 0)
    # Compute and finalize wait longer, so that the fault names the peer that dispatch waits for.
    budgets = [values["spin_budget_ns"] for values in (dispatch, compute, finalize)]
    assert budgets == [500_000_000, 625_000_000, 625_000_000]
    assert dispatch["call"] == 1
    assert dispatch["x"] == x.data_ptr()
    assert dispatch["topk_weights"] == w.data_ptr()
    assert finalize["y"] == y.data_ptr()
    for values in (dispatch, finalize):
        assert values["topk_ids"] == ids.data_ptr()
        assert (values["num_tokens"], values["ids_are_int64"]) == (T, 1)
    assert compute["w13"] == packed.w13.data_ptr()
    assert compute["w2_row_scale"] == packed.w2_row_scale.data_ptr()
    assert len(standin.maps) == 2 * len(op.plan.tiles.widths)


def test_eager_calls_update_dispatch_and_finalize_after_a_change_only(op, standin):
    layer = op.bind(weights())
    x, ids, w = inputs()
    y = torch.empty_like(x)
    assert layer(x, ids, w, out=y) is y
    assert standin.names().count("cuGraphInstantiate") == 1
    layer(x, ids, w, out=y)
    assert standin.names().count("cuGraphExecKernelNodeSetParams") == 0
    graph = layer._replays[op.plan].graph
    nodes = graph._nodes
    wanted = [(graph._executable, nodes[role]) for role in (Role.DISPATCH, Role.FINALIZE)]
    changes = (
        (x[:2], ids[:2], w[:2], y[:2]),
        (x[:2], ids[:2], w[:2], x[:2]),
        (x[:2], ids[:2].int(), w[:2], x[:2]),
    )
    for n, (*arguments, out) in enumerate(changes):
        before = len(standin.calls)
        for _ in range(2):
            layer(*arguments, out=out)
        names = [name for name, _ in standin.calls[before:]]
        launch = ["cuGraphLaunch", "cuEventRecord"]
        assert names == [*["cuGraphExecKernelNodeSetParams"] * 2, *launch, *launch], n
        updates = standin.arguments("cuGraphExecKernelNodeSetParams")[-2:]
        assert [update[:2] for update in updates] == wanted
        dispatch, finalize = (argument_values(op, update[2]) for update in updates)
        assert dispatch["x"] == arguments[0].data_ptr()
        assert finalize["y"] == out.data_ptr()
        for values in (dispatch, finalize):
            assert values["num_tokens"] == 2
            assert values["topk_ids"] == arguments[1].data_ptr()
            assert values["ids_are_int64"] == int(n < 2)
    assert standin.names().count("cuGraphInstantiate") == 1


def test_a_new_stream_waits_for_the_previous_call(op, standin, fake_device):
    layer = op.bind(weights())
    arguments = inputs()
    layer(*arguments)
    layer(*arguments)
    assert "cuStreamWaitEvent" not in standin.names()
    fake_device.stream = 0x77
    layer(*arguments)
    ((stream, event, flags),) = standin.arguments("cuStreamWaitEvent")
    assert (int(stream), flags) == (0x77, 0)
    records = standin.arguments("cuEventRecord")
    assert len(records) == 3
    assert all(int(record[0]) == int(event) for record in records)
    assert [int(a[1]) for a in standin.arguments("cuGraphLaunch")] == [0, 0, 0x77]


def test_capture(op, standin, fake_device):
    layer = op.bind(weights())
    first, second = inputs(), inputs(3, torch.int32)
    fake_device.capturing = True
    with pytest.raises(CaptureError, match="once outside the capture"):
        layer(*first)
    fake_device.capturing = False
    y = layer(*first)
    launches = standin.names().count("cuGraphLaunch")

    fake_device.capturing, fake_device.stream = True, 0x99
    layer(*second)
    assert standin.names().count("cuGraphLaunch") == launches
    ((graph, after, count, _),) = standin.arguments("cuGraphAddChildGraphNode")
    assert (int(graph), [int(node) for node in after], count) == (7, [9], 1)
    ((stream, nodes, data, count, flag),) = standin.arguments("cuStreamUpdateCaptureDependencies")
    assert (int(stream), len(nodes), data, count) == (0x99, 1, None, 1)
    set_flag = real.CUstreamUpdateCaptureDependencies_flags
    assert flag == set_flag.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    order = [n for n in standin.names() if n.startswith(("cuGraphKernelNode", "cuGraphAddChild"))]
    assert order[-3:] == [*["cuGraphKernelNodeSetParams"] * 2, "cuGraphAddChildGraphNode"]

    # The eager graph gets its own arguments back.
    fake_device.capturing, fake_device.stream = False, 0
    layer(*first, out=y)
    dispatch, finalize = (u[2] for u in standin.arguments("cuGraphExecKernelNodeSetParams"))
    assert argument_values(op, dispatch)["num_tokens"] == T
    assert argument_values(op, finalize)["y"] == y.data_ptr()


@pytest.mark.parametrize("state", ["INVALIDATED", "NONE"])
def test_a_stream_that_stopped_capturing(op, standin, fake_device, state):
    layer = op.bind(weights())
    layer(*inputs())
    fake_device.capturing = True
    name = f"CU_STREAM_CAPTURE_STATUS_{state}"
    standin.capture_status = getattr(real.CUstreamCaptureStatus, name)
    with pytest.raises(CaptureError, match=f"not being captured: {name}"):
        layer(*inputs())
    assert "cuGraphAddChildGraphNode" not in standin.names()
    assert standin.names().count("cuGraphLaunch") == 1


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("check(synchronize = True)", lambda op: op.check(synchronize=True)),
        ("stats()", lambda op: op.stats()),
        ("trace_records()", lambda op: op.trace_records()),
        ("reset()", lambda op: op.reset()),
        ("close()", lambda op: op.close()),
    ],
)
def test_what_waits_is_refused_inside_a_capture(make, fake_device, standin, name, use):
    op = make(trace=True)
    before = fake_device.syncs
    fake_device.capturing = True
    with pytest.raises(CaptureError, match=re.escape(f"{name} waits for the device")):
        use(op)
    op.check()
    assert fake_device.syncs == before
    assert "cuMemFreeHost" not in standin.names()
    fake_device.capturing = False
    use(op)
    assert fake_device.syncs > before


def test_zero_tokens_still_run(op, standin):
    y = op.bind(weights())(*inputs(0))
    assert y.shape == (0, H)
    assert standin.names().count("cuGraphLaunch") == 1


def test_a_call_waits_for_nothing(op, standin, fake_device):
    layer = op.bind(weights())
    before = fake_device.syncs
    for _ in range(3):
        layer(*inputs())
    assert fake_device.syncs == before


def test_faults_surface_in_check_and_in_the_next_call(op):
    layer = op.bind(weights())
    op.check()
    for i, word in enumerate((1, Role.DISPATCH, 0, 2, 0, 7, 6, 7, 1)):
        op._record.words[i] = word
    with pytest.raises(PeerTimeout, match="recv_header"):
        op.check()
    with pytest.raises(PeerTimeout):
        layer(*inputs())
    op.reset()
    op.check(synchronize=True)
    layer(*inputs())


def test_an_abort_by_a_peer_shows_when_asked(op):
    op.workspace_view("abort").fill_(1)
    op.check()
    with pytest.raises(GCMoEError, match="a peer aborted"):
        op.check(synchronize=True)
    op.reset()
    op.check(synchronize=True)


def test_reset_restores_the_initial_cells(make):
    op = make(initial=(0xFFFFFFFF, 3, 5))
    bases = op.workspace_view("bases").view(torch.int32)
    assert bases.tolist() == [-1, 3, 0, 5]
    bases.fill_(9)
    op.reset()
    assert bases.tolist() == [-1, 3, 0, 5]


def test_stats_wait_for_the_device(op, monkeypatch):
    cells = op.workspace_view("stats").view(torch.int64)
    # What the device still has to do.
    monkeypatch.setattr(devices, "synchronize", lambda device: cells.copy_(torch.arange(9)))
    stats = op.stats()
    assert stats.rows.tolist() == list(range(8))
    assert stats.bad_ids == 8


def test_traces(make):
    op = make(trace=True)
    records = op.trace_records()
    assert {role: tuple(t.shape) for role, t in records.items()} == {
        Role.DISPATCH: (8, TRACE_WORDS),
        Role.COMPUTE: (124, TRACE_WORDS),
        Role.FINALIZE: (1, TRACE_WORDS),
    }
    with pytest.raises(ValueError, match="trace = True"):
        make().trace_records()


def test_close(op, standin):
    layer = op.bind(weights())
    layer(*inputs())
    op.close()
    op.close()
    for function in ("cuGraphExecDestroy", "cuGraphDestroy", "cuMemFreeHost"):
        assert standin.names().count(function) == 1
    for use in (op.check, op.reset, op.stats, lambda: op.bind(layer.packed)):
        with pytest.raises(OperatorClosed):
            use()
    with pytest.raises(OperatorClosed):
        layer(*inputs())


def test_close_takes_all_steps_also_after_one_that_fails(op, standin):
    workspace = op._workspace
    op.bind(weights())(*inputs())
    op.bind(weights())(*inputs())
    standin.failing["cuGraphExecDestroy"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(GCMoEError, match="cuGraphExecDestroy failed"):
        op.close()
    assert standin.names().count("cuGraphExecDestroy") == 2
    assert standin.names().count("cuMemFreeHost") == 1
    assert workspace.buffer.numel() == 0
    assert op._layers == []
    op.close()


def test_an_operator_that_is_dropped_without_close_warns(make, standin):
    op = make()
    op.bind(weights())
    dropped = [op]
    del op
    with pytest.warns(ResourceWarning, match=r"dropped without close\(\)"):
        dropped.clear() or gc.collect()
    assert "cuMemFreeHost" not in standin.names()
    op = make()
    op.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del op
        gc.collect()


def test_context_manager(make, standin):
    with make() as op:
        op.bind(weights())
    assert "cuMemFreeHost" in standin.names()


def test_driver_errors_name_call_and_code(op, standin):
    layer = op.bind(weights())
    standin.failing["cuGraphLaunch"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(GCMoEError, match="cuGraphLaunch failed with CUDA_ERROR_INVALID_VALUE"):
        layer(*inputs())


def test_the_plan_follows_the_split(make, standin):
    standin.num_sms = 78
    op = make(dispatch_sms=9)
    assert op.report.requested == 16
    assert (op.plan.dispatch_sms, op.plan.num_sms, op.plan.compute_sms) == (16, 78, 62)
    assert op._grids[Role.COMPUTE] == 62
    assert {s.dispatch_ctas for s in kernel_specs(op.plan, "sm_90a")} == {16}


class TwoRanks:
    """Rank 1 of two; the other answers what ``answers`` says, else the same."""

    def __init__(self, group):
        self.rank, self.size, self.group, self.seen = 1, 2, group, []
        self.answers = {}
        self.steps = []

    def open_barriers(self):
        self.steps.append("open")

    def barrier(self, step, limit_s=60.0):
        self.steps.append((step, limit_s))

    def gather(self, value):
        self.seen.append(value)
        return [self.answers.get(len(self.seen) - 1, value), value]

    together, require_equal = RankGroup.together, RankGroup.require_equal


@pytest.fixture
def two_ranks(monkeypatch):
    """Answers of rank 0 by number of the exchange."""
    answers = {}

    def make_group(group):
        ranks = TwoRanks(group)
        ranks.answers = answers
        return ranks

    def allocate(self, device):
        self.buffer = torch.zeros(self.shape.num_bytes + 128, dtype=torch.uint8)
        self.buffer = self.buffer[-self.buffer.data_ptr() % 128 :]
        self.address = self.buffer.data_ptr()

    def map_peers(self, group):
        self.peers = [1 << 40, self.address]

    monkeypatch.setattr(operators, "RankGroup", make_group)
    monkeypatch.setattr(operators, "device_identity", lambda device: ("host", "uuid"))
    monkeypatch.setattr(operators, "require_peer_atomics", lambda device, identities: None)
    monkeypatch.setattr(Workspace, "_allocate", allocate)
    monkeypatch.setattr(Workspace, "_map_peers", map_peers)
    return answers


def test_two_ranks(make, two_ranks, standin):
    op = make(group="a group")
    assert (op.rank, op.num_ranks, op.group) == (1, 2, "a group")
    assert op.plan.workspace.local_experts == 4
    assert all(len(k) for k in op._ranks.seen[1])
    layer = op.bind(weights(MoEConfig(256, 128, 4, 2, 16)))
    layer(*inputs())
    parameters = standin.arguments("cuGraphAddKernelNode")[0][3]
    pointers = (ctypes.c_void_p * 1).from_address(int(parameters.kernelParams))
    table = (ctypes.c_uint64 * 2).from_address(pointers[0])
    assert list(table) == [1 << 40, op._workspace.address]
    assert argument_values(op, parameters)["rank"] == 1
    exchanges = len(op._ranks.seen)
    assert op._ranks.steps == ["open"]
    op.reset(timeout_s=3.0)
    steps = [("reset, own calls ended", 3.0), ("reset, own cells zeroed", 3.0)]
    assert op._ranks.steps == ["open", *steps]
    op.close()
    assert len(op._ranks.seen) == exchanges


def test_ranks_that_differ_all_raise(make, two_ranks):
    two_ranks[1] = {"config.top_k": "8"}
    with pytest.raises(ValueError, match=r"differs over the ranks: rank 0 has None, rank 1 has"):
        make(group="a group")
    two_ranks.clear()
    two_ranks[3] = {"SMs": "78"}
    with pytest.raises(ValueError, match=r"SMs differs over the ranks: rank 0 has 78, rank 1 has"):
        make(group="a group")


def test_a_rank_that_fails_fails_all(make, two_ranks):
    two_ranks[0] = "KernelNotCached: gcmoe_dispatch_0"
    with pytest.raises(GCMoEError, match=r"reading the arguments failed on rank 0: KernelNotCa"):
        make(group="a group")
    two_ranks[2] = two_ranks.pop(0)
    with pytest.raises(GCMoEError, match=r"creating the operator failed on rank 0: KernelNotCach"):
        make(group="a group")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"hidden": 256}}, "config must be a MoEConfig, got dict"),
        ({"initial": (1, 2)}, "initial must be"),
        ({"device": "cpu"}, "must be a CUDA device"),
        ({}, "cannot be created inside a graph capture"),
    ],
)
def test_a_bad_rank_tells_the_others(make, two_ranks, fake_device, monkeypatch, options, message):
    """Its first exchange carries the failure, so nobody waits for it."""
    groups, make_group = [], operators.RankGroup
    monkeypatch.setattr(
        operators, "RankGroup", lambda group: groups.append(make_group(group)) or groups[-1]
    )
    if "device" in options:
        monkeypatch.setattr(devices, "choose_device", CHOOSE_DEVICE)
    fake_device.capturing = not options
    with pytest.raises((TypeError, ValueError, CaptureError), match=message):
        make(group="a group", **options)
    (ranks,) = groups
    assert len(ranks.seen) == 1
    assert message in ranks.seen[0]


def test_reset_goes_on_where_it_waited(make, two_ranks, monkeypatch):
    op = make(group="a group")
    ranks, zeroed = op._ranks, []
    reset_cells = Workspace.reset_cells
    monkeypatch.setattr(
        Workspace,
        "reset_cells",
        lambda workspace, *words: zeroed.append(len(ranks.steps)) or reset_cells(workspace, *words),
    )
    barrier = ranks.barrier
    for late, wanted in (
        ("reset, own calls ended", ["calls ended", "calls ended", "cells zeroed"]),
        ("reset, own cells zeroed", ["calls ended", "cells zeroed", "cells zeroed"]),
    ):
        ranks.steps.clear()
        zeroed.clear()

        def too_late(step, limit_s, late=late):
            barrier(step, limit_s)
            if step == late:
                raise GCMoEError("waited in vain")

        ranks.barrier = too_late
        with pytest.raises(GCMoEError, match="in vain"):
            op.reset()
        ranks.barrier = barrier
        op.reset()
        assert [step.removeprefix("reset, own ") for step, _ in ranks.steps] == wanted
        assert len(zeroed) == 1
    op.reset()
    assert len(ranks.steps) == 5


def test_a_device_that_fails(op, fake_device, monkeypatch):
    """``check()`` says so, and ``close()`` frees what it can."""
    op.bind(weights())

    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(devices, "synchronize", fail)
    lost = r"illegal memory access.*Only close\(\) remains"
    for use in (lambda: op.check(synchronize=True), op.stats, op.reset):
        with pytest.raises(DeviceFault, match=lost):
            use()
    # Torch asks the device about captures too.
    monkeypatch.setattr(devices, "is_capturing", lambda: fail(None))
    for use in (lambda: op.check(synchronize=True), op.stats, op.reset):
        with pytest.raises(DeviceFault, match=lost):
            use()
    for i, word in enumerate((1, Role.DISPATCH, 0, 2, 0, 7, 6, 7, 1)):
        op._record.words[i] = word
    with pytest.raises(PeerTimeout, match=lost) as caught:
        op.check(synchronize=True)
    assert "reset()" not in str(caught.value)
    with pytest.warns(RuntimeWarning, match=r"close\(\): the device failed"):
        op.close()
    with pytest.raises(OperatorClosed):
        op.check()
