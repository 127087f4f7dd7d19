"""The hand-off probe: what it launches, what it concludes, and a driver that serialises."""

from dataclasses import replace

import pytest
import torch
from cuda.bindings import driver as real

from gcmoe import operator as operators
from gcmoe.config import MoEConfig
from gcmoe.errors import GCMoEError, PeerTimeout, UnsupportedConcurrency
from gcmoe.numerics import pack
from gcmoe.operator import MoE
from gcmoe.protocol import Cell, Role
from gcmoe.protocol.faults import NO_PEER
from gcmoe.runtime import memory, probe
from gcmoe.runtime.launch import WEIGHTS
from gcmoe.runtime.probe import BUDGETS_S, Verdict, failure_of, judge, likely_cause

CONFIG = MoEConfig(256, 128, 8, 2, 16, spin_budget_s=0.5)
NO_FAULT = (0,) * 16


def record(role: Role, cell: Cell, peer: int = NO_PEER) -> tuple[int, ...]:
    return 1, role, 0, cell, 0, 1, 0, 1, peer, *[0] * 7


ROUTES = record(Role.COMPUTE, Cell.ROUTES)
HEADER = record(Role.DISPATCH, Cell.RECV_HEADER, 1)


@pytest.mark.parametrize(
    ("words", "abort", "has_begun", "is_last", "kind"),
    [
        (NO_FAULT, False, False, False, "passed"),
        (ROUTES, True, False, False, "serialised"),
        # Dispatch runs and waits for a peer.
        (ROUTES, True, True, False, "late"),
        (HEADER, True, True, True, "late"),
        # Aborted by a peer before dispatch began: late, or kept away twice.
        (NO_FAULT, True, False, False, "late"),
        (NO_FAULT, True, False, True, "serialised"),
        (NO_FAULT, True, True, True, "late"),
        # In one context, where dispatch has always begun.
        (ROUTES, True, True, True, "late"),
    ],
)
def test_verdicts(words, abort, has_begun, is_last, kind):
    verdict = judge(words, abort, has_begun, is_last)
    assert verdict.kind == kind
    assert bool(verdict.text) == (kind != "passed")


def test_all_ranks_raise_the_same():
    passed, late = Verdict("passed"), judge(HEADER, True, True, True)
    assert failure_of([passed, passed]) is None
    serialised = judge(ROUTES, True, False, False)
    late = replace(late, cause="of rank 0")
    error = failure_of([late, replace(serialised, cause="too few queues")])
    assert type(error) is UnsupportedConcurrency
    assert "rank 1 dispatch did not begin while compute waited for it" in str(error)
    assert "Likely cause: too few queues" in str(error)
    assert "serial = True" in str(error)
    assert "serial = True" not in str(failure_of([passed, serialised], 3.0))
    error = failure_of([judge(NO_FAULT, True, True, False), late])
    assert type(error) is PeerTimeout
    assert f"for more than {BUDGETS_S[-1]:g} s" in str(error)
    assert "on rank 1: dispatch of rank 0 in replay 1 waited for recv_header[0] from rank 1" in str(
        error
    )


def test_the_likely_cause_is_named(monkeypatch):
    for name in (*probe.TOOL_VARIABLES, "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert "CUDA_DEVICE_MAX_CONNECTIONS is not set" in likely_cause()
    for few in ("1", "7"):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", few)
        wanted = f"CUDA_DEVICE_MAX_CONNECTIONS={few}, too few work queues"
        assert likely_cause() == wanted
        assert judge(ROUTES, True, False, False).cause == wanted
    for other in ("8", "32", "many", "0"):
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", other)
        assert "too few" not in likely_cause()
        assert f"CUDA_DEVICE_MAX_CONNECTIONS is {other}" in likely_cause()
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/opt/tool.so")
    assert "debugger or profiler" in likely_cause()


@pytest.fixture
def make(standin, fake_device, fake_kernel, monkeypatch):
    monkeypatch.setattr(operators, "get_kernel", fake_kernel)
    return lambda **options: MoE(CONFIG, **options)


class Serialising:
    """Puts a fault record where compute would have put one, in the first ``times`` launches."""

    def __init__(self, standin, monkeypatch, words, times, cells=()):
        self.launches = 0
        records, workspaces = [], []
        make_record, make_workspace = memory.HostRecord.__init__, memory.Workspace.__init__

        def record_init(this):
            make_record(this)
            records.append(this)

        def workspace_init(this, *arguments):
            make_workspace(this, *arguments)
            workspaces.append(this)

        def launch(graph, stream):
            self.launches += 1
            if self.launches <= times:
                for i, word in enumerate(words):
                    records[-1].words[i] = int(word)
                workspaces[-1].view("abort").view(torch.int32).fill_(1)
                for cell in cells:
                    workspaces[-1].view(cell).view(torch.int32).fill_(1)
            return ()

        monkeypatch.setattr(memory.HostRecord, "__init__", record_init)
        monkeypatch.setattr(memory.Workspace, "__init__", workspace_init)
        standin.answer_cuGraphLaunch = launch


def test_a_probe_is_one_replay_and_leaves_nothing(make, standin):
    op = make(initial=(7, 3, 5))
    assert standin.names().count("cuGraphLaunch") == 1
    assert standin.names().count("cuGraphExecDestroy") == 1
    assert [len(node[1]) for node in standin.arguments("cuGraphAddKernelNode")] == [0, 0, 0]
    assert op.workspace_view("bases").view(torch.int32).tolist() == [7, 3, 0, 5]
    assert op._layers == []
    op.check(synchronize=True)


def test_compute_waits_half_as_long_as_the_others():
    assert probe.shares(0.4, False) == {
        Role.DISPATCH: 0.8,
        Role.COMPUTE: 0.4,
        Role.FINALIZE: 0.8,
    }
    assert set(probe.shares(1.0, True).values()) == {1.0}


def test_a_driver_that_serialises_is_refused(make, standin, monkeypatch):
    serialising = Serialising(standin, monkeypatch, ROUTES, 9)
    with pytest.raises(UnsupportedConcurrency, match="must run at the same time"):
        make(green_contexts=True)
    assert serialising.launches == 1


def test_in_one_context_nothing_serialises(make, standin, monkeypatch):
    """Compute hangs on dispatch there: whatever did not begin was late."""
    serialising = Serialising(standin, monkeypatch, ROUTES, 9)
    with pytest.raises(PeerTimeout, match="the hand-off probe"):
        make()
    assert serialising.launches == len(BUDGETS_S)


def test_ranks_that_were_late_get_a_second_probe(make, standin, monkeypatch):
    serialising = Serialising(standin, monkeypatch, HEADER, 1, ("in_flight",))
    op = make()
    assert serialising.launches == 2
    assert op._record.read() == NO_FAULT
    assert not bool(op.workspace_view("abort").any())


def test_a_rank_that_is_never_heard(make, standin, monkeypatch):
    serialising = Serialising(standin, monkeypatch, HEADER, 9, ("in_flight",))
    with pytest.raises(PeerTimeout, match=r"recv_header\[0\] from rank 1"):
        make()
    assert serialising.launches == len(BUDGETS_S)


def test_a_serial_probe_names_the_budget_that_it_waited(make, standin, monkeypatch):
    Serialising(standin, monkeypatch, HEADER, 9, ("in_flight",))
    with pytest.raises(PeerTimeout, match=r"for more than spin_budget_s = 0\.5 s"):
        make(serial=True)


@pytest.mark.parametrize("function", ["cuGraphInstantiate", "cuGraphLaunch"])
def test_what_was_allocated_is_freed_when_the_probe_fails(make, standin, monkeypatch, function):
    workspaces, closed = [], memory.Workspace.close

    def close(workspace):
        closed(workspace)
        workspaces.append(workspace)

    monkeypatch.setattr(memory.Workspace, "close", close)
    standin.failing[function] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(GCMoEError, match=f"{function} failed with CUDA_ERROR_OUT_OF_MEMORY"):
        make()
    assert [workspace.buffer.numel() for workspace in workspaces] == [0]
    assert standin.names().count("cuMemFreeHost") == 1
    assert standin.names().count("cuGraphDestroy") == 1


def test_the_workspace_is_freed_when_the_fault_record_fails(make, standin, monkeypatch):
    closed = []
    monkeypatch.setattr(memory.Workspace, "close", lambda workspace: closed.append(workspace))
    standin.failing["cuMemHostAlloc"] = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(GCMoEError, match="cuMemHostAlloc failed"):
        make()
    assert len(closed) == 1
    assert "cuMemFreeHost" not in standin.names()


def test_serial_is_probed_with_the_whole_budget(make, standin):
    make(serial=True)
    assert standin.names().count("cuGraphLaunch") == 1
    assert [len(node[1]) for node in standin.arguments("cuGraphAddKernelNode")] == [0, 1, 0]


def test_compute_gets_room_for_the_weights_that_it_guesses(make, standin):
    op = make()
    packed = pack(
        torch.zeros((8, 256, 128), dtype=torch.uint8),
        torch.full((8, 256, 8), 120, dtype=torch.uint8),
        torch.zeros((8, 256, 64), dtype=torch.uint8),
        torch.full((8, 256, 4), 120, dtype=torch.uint8),
        CONFIG,
    )
    shape = op.plan.workspace
    assert probe.weight_bytes(shape, 1000) == packed.w13.nbytes
    assert probe.weight_bytes(shape, 3) == 3 * packed.w13[0, 0].nbytes
    names = [parameter.name for parameter in op._sizes[op.plan].specs[Role.COMPUTE].parameters]
    assert set(WEIGHTS["sm90"]) <= set(names)
