"""Faults with a budget of half a second: what each rank is told, and that the pair goes on."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import torch
from pair import Pair, differences, expect, fault_of
from scenarios_layers import call
from torch import Tensor

from gcmoe.errors import CallMismatch, DeviceFault, GCMoEError, OverlappingReplays, PeerTimeout
from gcmoe.protocol import Cell, Role
from gcmoe.runtime.faults import ABORTED_BY_PEER
from gcmoe.runtime.partition import Part

NAME = "tiny"
BUDGET_S = 0.5
GRACE_S = 1.0
SQUAT_S = 0.1
ROUNDS = 12


class Setting:
    """A layer with a short budget, some inputs and their results."""

    def __init__(
        self, pair: Pair, budget_s: float = BUDGET_S, layers: int = 1, **options: Any
    ) -> None:
        self.pair = pair
        self.op = pair.operator(NAME, budget_s, **options)
        packed = pair.weights(NAME)[1]
        self.layers = [self.op.bind(packed) for _ in range(layers)]
        self.layer = self.layers[0]
        self.batches = [pair.batch(NAME, t, "distinct", 60 + t) for t in (64, 7, 1, 0, 33)]
        if pair.rank == 1:
            self.batches.reverse()
        self.wanted = [call(self.layer, batch).clone() for batch in self.batches]
        pair.meet("set up")

    def call(self, which: int = 0, layer: int = 0) -> Tensor:
        b = self.batches[which]
        return self.layers[layer](b.x, b.ids, b.weights)

    def call_and_check(self, which: int = 0) -> None:
        self.call(which)
        self.op.check(synchronize=True)

    def recover(self) -> None:
        self.pair.recover(self.layer, self.batches, self.wanted)


def expect_timeout(fault: Any, seconds: float, role: Role, cell: Cell, peer: int | None) -> str:
    """A PeerTimeout in time that names all it should."""
    expect(type(fault) is PeerTimeout, f"{type(fault).__name__}: {fault}")
    expect(seconds < BUDGET_S + GRACE_S, f"raised after {seconds:.2f} s")
    record, text = fault.record, str(fault)
    found = record.role, record.cell, record.peer
    expect(found == (role, cell, peer), f"{found}, wanted {(role, cell, peer)}: {text}")
    expect(record.wanted != record.seen, text)
    words = [role.name.lower(), cell.name.lower(), f"{record.wanted:#x}", f"{record.seen:#x}"]
    words += [] if peer is None else [f"from rank {peer}"]
    expect(all(word in text for word in words), f"{words}: {text}")
    return text


def expect_aborted(fault: Any) -> None:
    """A fault, but without a record of its own."""
    expect(type(fault) is DeviceFault, f"{type(fault).__name__}: {fault}")
    expect(str(fault) == ABORTED_BY_PEER, str(fault))


def skipped_call(pair: Pair) -> dict[str, Any]:
    s = Setting(pair)
    text = ""
    if pair.rank == 0:
        fault, seconds = fault_of(s.call_and_check)
        text = expect_timeout(fault, seconds, Role.DISPATCH, Cell.RECV_HEADER, 1)
        again, _ = fault_of(s.call)
        expect(type(again) is PeerTimeout, "the next eager call raises the fault")
    pair.meet("skipped")
    if pair.rank == 1:
        expect_aborted(fault_of(lambda: s.op.check(synchronize=True))[0])
    s.recover()
    return {"text": text}


def skipped_layer(pair: Pair) -> dict[str, Any]:
    """Of three layers rank 1 skips the middle one."""
    s = Setting(pair, layers=3)

    def calls() -> None:
        for layer in (0, 1, 2) if pair.rank == 0 else (0, 2):
            s.call(0, layer)
        s.op.check(synchronize=True)

    fault, seconds = fault_of(calls)
    expect(type(fault) is CallMismatch, f"{type(fault).__name__}: {fault}")
    expect(f"rank {pair.peer} sent" in str(fault), str(fault))
    expect(seconds < BUDGET_S + GRACE_S, f"raised after {seconds:.2f} s")
    pair.meet("mismatch")
    s.recover()
    return {"text": str(fault)}


def delayed_role(pair: Pair) -> dict[str, Any]:
    """Dispatch of rank 0 cannot start for longer than the budget."""
    s = Setting(pair)
    squatter = pair.squatter(s.op)
    pair.meet("delay")
    if pair.rank == 0:
        part = s.op._partition.dispatch
        squatter.hold(part, s.op.report.num_sms, 2 * BUDGET_S + GRACE_S)
    fault, seconds = fault_of(s.call_and_check)
    if pair.rank == 1:
        expect_timeout(fault, seconds, Role.DISPATCH, Cell.RECV_HEADER, 0)
    else:
        expect(isinstance(fault, DeviceFault), "rank 0 sees no fault")
    pair.meet("delayed")
    s.recover()
    return {"text": str(fault)}


def calls_after_abort(pair: Pair) -> dict[str, Any]:
    """y is NaN, and no peer's memory changes."""
    s = Setting(pair)
    batch = s.batches[0]
    y = torch.empty_like(batch.x)
    graph = pair.capture(lambda: s.layer(batch.x, batch.ids, batch.weights, out=y))
    pair.meet("captured")
    if pair.rank == 0:
        expect(fault_of(s.call_and_check)[0] is not None, "no fault")
    pair.meet("fault")
    torch.cuda.synchronize()
    regions = [r.name for r in s.op.plan.workspace.regions if r.is_remote or r.name == "bases"]
    before = {name: s.op.workspace_view(name).clone() for name in regions}
    torch.cuda.synchronize()
    pair.meet("snapshot")
    for _ in range(3):
        y.zero_()
        graph.replay()
    torch.cuda.synchronize()
    expect(bool(y.isnan().all()), "y of a replay after the abort is not NaN")
    if pair.rank == 1:
        expect(bool(s.call(0).isnan().all()), "y of a call after the abort is not NaN")
        torch.cuda.synchronize()
    pair.meet("after")
    changed = [n for n in regions if not torch.equal(before[n], s.op.workspace_view(n))]
    expect(not changed, f"calls after the abort changed {changed}")
    pair.meet("compared")
    s.recover()
    y.zero_()
    graph.replay()
    s.op.check(synchronize=True)
    expect(int(differences(y, s.wanted[0])) == 0, "the graph is wrong after reset()")
    return {"regions": regions}


def reset_while_spinning(pair: Pair) -> dict[str, Any]:
    """A rank resets while its peer still spins for it; then both reset without a look."""
    s = Setting(pair)
    start = time.monotonic()
    if pair.rank == 0:
        s.call(0)
        pair.meet("spinning")
        expect(fault_of(lambda: s.op.check(synchronize=True))[0] is not None, "no fault")
    else:
        pair.meet("spinning")
    s.recover()
    seconds = time.monotonic() - start
    if pair.rank == 0:
        s.call(0)
    s.recover()
    return {"seconds": round(seconds, 2)}


def reset_names_missing_ranks(pair: Pair) -> dict[str, Any]:
    s = Setting(pair)
    text = ""
    if pair.rank == 0:
        try:
            s.op.reset(timeout_s=0.3)
        except GCMoEError as error:
            text = str(error)
        expect("rank 0 waited 0.3 s for rank 1" in text, text or "reset() did not raise")
    pair.meet("alone")
    s.recover()
    return {"text": text}


def overlapping_graphs(pair: Pair) -> dict[str, Any]:
    """Two graphs at once: compute of the first is held back, so dispatch of the second meets it."""
    s = Setting(pair, green_contexts=True)
    batch = s.batches[0 if pair.rank == 0 else -1]
    wanted = call(s.layer, batch).clone()
    outputs = [torch.zeros_like(batch.x) for _ in range(2)]
    graphs = [
        pair.capture(lambda y=y: s.layer(batch.x, batch.ids, batch.weights, out=y)) for y in outputs
    ]
    streams = [torch.cuda.Stream() for _ in range(2)]
    squatter = pair.squatter(s.op)
    torch.cuda.synchronize()
    pair.meet("overlap")
    part = s.op._partition.compute
    squatter.hold(part, part.sms, SQUAT_S)
    for graph, stream in zip(graphs, streams, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    fault, _ = fault_of(lambda: s.op.check(synchronize=True))
    expect(isinstance(fault, DeviceFault), "no fault on this rank")
    names = pair.ranks.gather(type(fault).__name__)
    expect(OverlappingReplays.__name__ in names, f"{names}: {fault}")
    for y in outputs:
        wrong = ~(y.isnan() | (y == wanted))
        expect(not bool(wrong.any()), f"{int(wrong.sum())} elements are neither right nor NaN")
    s.recover()
    return {"faults": names, "text": str(fault)}


def squatters(pair: Pair) -> dict[str, Any]:
    """Another kernel on some or all SMs costs time and nothing else."""
    s = Setting(pair, budget_s=3.0)
    part, sms = s.op._partition.compute, s.op.report.num_sms
    return squat(pair, s, [(part, ctas, "all") for ctas in (1, 8, sms - 1, sms)])


def squatters_in_green_contexts(pair: Pair) -> dict[str, Any]:
    """Another kernel on 1, 8 and all SMs of either partition costs time and nothing else."""
    s = Setting(pair, budget_s=3.0, green_contexts=True)
    parts = (s.op._partition.dispatch, "dispatch"), (s.op._partition.compute, "compute")
    return squat(pair, s, [(p, ctas, name) for p, name in parts for ctas in (1, 8, p.sms)])


def squat(pair: Pair, s: Setting, turns: list[tuple[Part, int, str]]) -> dict[str, Any]:
    """Calls while CTAs of another kernel hold SMs: on one rank in turn, all SMs on both."""
    squatter = pair.squatter(s.op)
    times = {}
    for turn, (part, ctas, name) in enumerate(turns):
        is_all = ctas == (part.sms if s.op._partition.is_split else s.op.report.num_sms)
        pair.meet("squat")
        start = time.monotonic()
        if pair.rank == turn % 2 or is_all:
            squatter.hold(part, ctas, SQUAT_S)
        pair.replay_checked(s.layer, s.batches, s.wanted, 10)
        held = times[f"{name} {ctas}"] = round(time.monotonic() - start, 3)
        torch.cuda.synchronize()
        enough = not is_all or held > 0.7 * SQUAT_S
        expect(enough, f"{name}: all SMs were held, yet the calls took {held} s")
    return times


def tiny_eager_and_graphs(pair: Pair) -> dict[str, Any]:
    s = Setting(pair, budget_s=3.0)
    outputs = [torch.empty_like(batch.x) for batch in s.batches]
    graphs = [
        pair.capture(lambda b=b, y=y: s.layer(b.x, b.ids, b.weights, out=y))
        for b, y in zip(s.batches, outputs, strict=True)
    ]
    counts = []
    for n in range(60 * ROUNDS):
        which = (n * 7 + n // 5) % len(graphs)
        if n % 2:
            outputs[which].zero_()
            graphs[which].replay()
            counts.append(differences(outputs[which], s.wanted[which]))
        else:
            counts.append(differences(s.call(which), s.wanted[which]))
    s.op.check(synchronize=True)
    wrong = int((torch.stack(counts) != 0).sum())
    expect(wrong == 0, f"{wrong} replays differ")
    return {
        "replays": len(counts),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    }


def peer_killed(pair: Pair) -> dict[str, Any]:
    """Rank 1 dies in the middle of a replay; rank 0 is told, cannot reset, and closes."""
    # Else compute would do all its items on the SMs that dispatch leaves.
    s = Setting(pair, late_compute=False, green_contexts=True)
    squatter = pair.squatter(s.op)
    # torchrun ends the survivors of a failed worker: this one has something left to do.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pair.meet("last")
    if pair.rank == 1:
        part = s.op._partition.compute
        squatter.hold(part, part.sms, 5.0)
        s.call(0)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    which = len(s.batches) - 1
    fault, seconds = fault_of(lambda: s.call_and_check(which))
    expect(isinstance(fault, DeviceFault), f"the survivor sees no fault in {seconds:.1f} s")
    expect(seconds < 2 * BUDGET_S + GRACE_S, f"raised after {seconds:.2f} s")
    try:
        s.op.reset(timeout_s=1.0)
        reset = "reset() returned"
    except (GCMoEError, RuntimeError) as error:
        reset = f"{type(error).__name__}: {error}"
    expect("returned" not in reset, reset)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        s.op.close()
    try:
        torch.zeros(4, device=pair.device).add_(1).sum().item()
        device = "sound"
    except RuntimeError as error:
        device = str(error).splitlines()[0]
    return {
        "fault": f"{type(fault).__name__}: {fault}",
        "seconds": round(seconds, 2),
        "reset": reset,
        "close": [str(w.message) for w in caught],
        "device": device,
    }
