"""The operator of one rank: ``MoE(config, group)``, then ``bind(weights)`` for each layer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.errors import (
    CaptureError,
    DeviceFault,
    OperatorClosed,
    UnsupportedDevice,
)
from gcmoe.kernels.build import get_kernel
from gcmoe.kernels.spec import KernelSpec, call_specs, kernel_specs
from gcmoe.kernels.trace_words import TRACE_WORDS
from gcmoe.layer import Layer
from gcmoe.numerics import Packed, packed_form
from gcmoe.plan import LayerPlan, make_plan
from gcmoe.plan.targets import family_of
from gcmoe.protocol import NUM_CALLS, Role
from gcmoe.runtime import checks, faults, probe
from gcmoe.runtime import device as devices
from gcmoe.runtime.agreement import (
    BUDGET_SHARE,
    arguments_fingerprint,
    build_fingerprint,
    draft_plan,
    finalize_grid,
    initial_words,
    require_config,
)
from gcmoe.runtime.graph import LayerGraph, replay_order
from gcmoe.runtime.group import RankGroup
from gcmoe.runtime.launch import WEIGHTS, Arguments
from gcmoe.runtime.memory import (
    HostRecord,
    Stats,
    Workspace,
    device_identity,
    require_peer_atomics,
)
from gcmoe.runtime.modules import LoadedKernel, load_kernel
from gcmoe.runtime.partition import Partition, PartitionReport, get_partition

__all__ = ["Layer", "MoE", "Stats"]

RESET_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class CallSize:
    """The kernels of the calls of one plan, by role."""

    specs: dict[Role, KernelSpec]
    kernels: dict[Role, LoadedKernel]


class MoE:
    """The MoE layers of one rank that share a workspace.

    Creation is collective: all ranks of the group create the operator with equal arguments, in the
    same order as any other operator or rendezvous, outside any graph capture. Ranks fail together.
    It ends with a probe: a replay without tokens, which shows that the kernels of a replay run at
    once and that the ranks reach each other.

    All calls of all operators of a device form one order, the same on all ranks, as collectives do;
    this covers other kernels that wait for a peer. Replays of captured graphs are calls. One thread
    uses an operator at a time. Destroy captured graphs before the operator.

    Args:
        config: the layer.
        group: a ``torch.distributed`` process group of R ranks, one GPU each; None is one rank.
        serial: run dispatch before compute, not beside it: slower, for debuggers and comparisons.
            Needs a ring that holds every block of a replay.
        green_contexts: give dispatch and compute disjoint SMs by CUDA Green Contexts; 7 us slower
            (decision 13), for comparisons.
        prefetch: compute loads weights before it knows the routes; False is for comparisons.
        dispatch_sms: SMs that dispatch runs on, rounded up to a multiple of 8; None decides by
            capacity.
        ring_slots: S, a power of two; None decides by capacity.
        late_compute: whether compute takes over the SMs of dispatch once that has ended; None
            decides by capacity.
        device: CUDA device; None is the current one.
        cache_dir: folder of the kernel cache; None takes ``GCMOE_CACHE`` or ``~/.cache/gcmoe``.
        trace: use kernels that record timestamps.
        initial: (generation, epoch, arrivals) that the counters start at, for tests near 2^32.
        jitter_ns: use kernels whose CTAs start late by random times below this, for tests.

    Attributes:
        config, group, device: as given.
        rank, num_ranks: of the group.
        family: of kernels, by device; what ``gcmoe.pack`` takes as ``arch``.
        plan: ``LayerPlan``, equal on all ranks; ``plan.for_tokens(T)`` says how a call runs.
        report: ``PartitionReport``, what the driver gave this rank.

    Raises:
        UnsupportedDevice: no GPU that there are kernels for, an old driver, or no peer atomics.
        UnsupportedConcurrency: kernels in two green contexts do not run at once; on all ranks.
        PeerTimeout: the probe did not end, because a rank was not heard; on all ranks.
        KernelNotCached: a kernel is missing and cannot be compiled here.
        CaptureError: the current stream is being captured.
        ValueError: a limit is exceeded, or the ranks' arguments or builds differ; on all ranks.
        GCMoEError: another rank failed; names it.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: Any | None = None,
        *,
        serial: bool = False,
        green_contexts: bool = False,
        prefetch: bool = True,
        dispatch_sms: int | None = None,
        ring_slots: int | None = None,
        late_compute: bool | None = None,
        device: torch.device | str | int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        trace: bool = False,
        initial: tuple[int, int, int] | None = None,
        jitter_ns: int = 0,
    ) -> None:
        self._closed = True
        self.config = config
        self.group = group
        self.serial = serial
        self._ranks = RankGroup(group)
        self.rank, self.num_ranks = self._ranks.rank, self._ranks.size
        self._owned: list[Callable[[], None]] = []
        self._zeroed = False

        def read_arguments() -> tuple[LayerPlan, dict[str, str]]:
            require_config(config)
            self._initial = initial_words(initial)
            asked = config, self.num_ranks, dispatch_sms, ring_slots, late_compute, serial
            draft_plan(*asked, "sm90")
            self.device = devices.choose_device(device)  # the errors above need no GPU
            self._arch = devices.arch_of(self.device)
            self.family = family_of(self._arch)
            plan = draft_plan(*asked, self.family)
            current.enter_context(devices.guard(self.device))
            if devices.is_capturing():
                raise CaptureError("an operator cannot be created inside a graph capture")
            launch = {"serial": serial, "green_contexts": green_contexts, "initial": self._initial}
            return plan, arguments_fingerprint(plan, arch=self._arch, **launch, **build)

        build = {"trace": trace, "jitter_ns": jitter_ns, "prefetch": prefetch}
        with ExitStack() as current:
            draft, fingerprint = self._ranks.together("reading the arguments", read_arguments)
            self._index = -1 if self.device.index is None else self.device.index
            self._ranks.require_equal(fingerprint)
            self._ranks.together(
                "creating the operator",
                lambda: self._prepare(draft, cache_dir, green_contexts, build),
            )
            kernels = [size.kernels for size in self._sizes.values()]
            self._ranks.require_equal(build_fingerprint(self.plan, kernels))
            if self.num_ranks > 1:
                identities = self._ranks.gather(self._identity)
                self._ranks.together(
                    "checking the peers", lambda: require_peer_atomics(self.device, identities)
                )
            try:
                self._ranks.together("mapping the workspace", self._allocate)
                self._ranks.require_equal({"workspace offset": str(self._workspace.offset)})
                self._ranks.open_barriers()
                self._order = replay_order(self._index)
                self._probe()
            except BaseException:
                with suppress(Exception):
                    devices.release(self.device, self._owned[::-1])
                raise
        devices.warn_if_not_yet_run(self._arch)
        self._next_call = 0
        self._layers: list[Layer] = []
        self._is_warm = False
        self._closed = False

    # -------------------------------------------------------------------------------- creation

    def _prepare(
        self,
        draft: LayerPlan,
        cache_dir: str | os.PathLike[str] | None,
        green_contexts: bool,
        build: dict[str, Any],
    ) -> None:
        """What needs no peer: partition, plan, kernels."""
        devices.require_device(self.device)
        self._partition: Partition = get_partition(self.device, draft.dispatch_sms, green_contexts)
        self.report: PartitionReport = self._partition.report
        given, rest = self.report.dispatch_sms, self.report.compute_sms
        self.plan = make_plan(
            self.config,
            self.num_ranks,
            given + rest,
            dispatch_sms=given,
            ring_slots=draft.workspace.num_slots,
            late_compute=draft.late_ctas > 0,
            family=self.family,
        )
        if self.plan.dispatch_sms != given:
            raise UnsupportedDevice(
                f"a dispatch partition in steps that the plan knows is required "
                f"({self.plan.dispatch_sms} SMs); the driver gives {given}"
            )
        if self.serial:  # compute frees no slot for dispatch: the ring must hold every block
            self.plan = replace(self.plan, tile_classes=self.plan.tile_classes[-1:])
        loaded = {
            spec: load_kernel(spec, get_kernel(spec, cache_dir), self._index, self._partition)
            for spec in kernel_specs(self.plan, self._arch, **build)
        }
        self._sizes: dict[LayerPlan, CallSize] = {}
        for plan in self.plan.classes:
            specs = call_specs(plan, self._arch, **build)
            kernels = {role: loaded[spec] for role, spec in specs.items()}
            self._sizes[plan] = CallSize(specs, kernels)
        split = self._partition.is_split
        self._grids = {
            Role.DISPATCH: self.plan.dispatch_sms,
            Role.COMPUTE: self.plan.compute_sms if split else self.plan.compute_ctas,
            Role.FINALIZE: finalize_grid(self.config, rest if split else given + rest),
        }
        if self.num_ranks > 1:
            self._identity = device_identity(self.device)

    def _allocate(self) -> None:
        """Workspace, fault record and trace buffers."""
        self._workspace = Workspace(self.plan.workspace, self.device, self._ranks)
        self._owned.append(self._workspace.close)
        self._workspace.reset_cells(*self._initial)
        self._record = HostRecord()
        self._owned.append(self._record.close)
        self._traces: dict[Role, Tensor] = {}
        for role, spec in self._sizes[self.plan].specs.items():
            if spec.trace:
                ctas = self.plan.compute_ctas if role == Role.COMPUTE else self._grids[role]
                self._traces[role] = torch.zeros(
                    (ctas, TRACE_WORDS), dtype=torch.int64, device=self.device
                )
        devices.synchronize(self.device)

    def _blocks(self, size: CallSize, shares: dict[Role, float]) -> dict[Role, Arguments]:
        """Argument blocks without a layer: no weights, no tokens.

        Args:
            size: of the calls.
            shares: of the spin budget, by role.
        """
        blocks = {}
        for role, spec in size.specs.items():
            block = blocks[role] = Arguments(spec)
            trace = self._traces.get(role)
            block.set_peers(self._workspace.peers)
            block.set(
                workspace=self._workspace.address,
                fault_record=self._record.device_address,
                trace=0 if trace is None else trace.data_ptr(),
                rank=self.rank,
                spin_budget_ns=round(self.config.spin_budget_s * shares[role] * 1e9),
            )
        blocks[Role.COMPUTE].encode_ring_maps(self._workspace.address)
        blocks[Role.FINALIZE].set(compute_ctas=self.plan.compute_ctas)
        return blocks

    def _arguments(self, size: CallSize, call: int, weights: Packed) -> dict[Role, Arguments]:
        """Argument blocks of a layer, apart from what each call brings."""
        blocks = self._blocks(size, BUDGET_SHARE)
        blocks[Role.DISPATCH].set(call=call)
        addresses = {name: getattr(weights, name).data_ptr() for name in WEIGHTS[self.family]}
        blocks[Role.COMPUTE].set_weights(addresses)
        return blocks

    def _graph(self, size: CallSize, blocks: dict[Role, Arguments]) -> LayerGraph:
        """A replay with these arguments."""
        late = None
        if self.plan.late_ctas and self._partition.is_split:
            late = blocks[Role.COMPUTE].copy()
            if Role.COMPUTE in self._traces:
                late.set(trace=self._traces[Role.COMPUTE][self.plan.compute_sms].data_ptr())
        return LayerGraph(size.kernels, blocks, self._grids, self._partition, self.serial, late)

    def _probe(self) -> None:
        """Replay once without tokens on all ranks; see :mod:`gcmoe.runtime.probe`."""
        room: list[Tensor] = []

        def make_graph(shares: dict[Role, float]) -> LayerGraph:
            # Compute may load the weights of its first tiles before it knows that it needs none.
            size = probe.weight_bytes(self.plan.workspace, self.plan.compute_ctas)
            room[:] = [torch.empty(size, dtype=torch.uint8, device=self.device)]
            largest = self._sizes[self.plan]
            blocks = self._blocks(largest, shares)
            names = WEIGHTS[self.family]
            blocks[Role.COMPUTE].set_weights(dict.fromkeys(names, room[0].data_ptr()))
            return self._graph(largest, blocks)

        def verdict(is_last: bool) -> probe.Verdict:
            view = self._workspace.view
            has_begun = bool(view("in_flight").any()) or not self._partition.is_split
            abort = bool(view("abort").any())
            return probe.judge(self._record.read(), abort, has_begun, is_last)

        probe.require_hand_off(
            lambda shares: probe.run(
                make_graph, shares, self._ranks, self._order, self._index, self.device
            ),
            verdict,
            self._reset_cells,
            self._ranks,
            self.config.spin_budget_s,
            self.serial,
        )

    # -------------------------------------------------------------------------------- public

    def bind(self, packed: Packed) -> Layer:
        """A layer with these weights. All ranks bind the same layers in the same order.

        The layer keeps the tensors' addresses: values written into them later, by
        ``pack(..., out=packed)`` say, are seen by eager calls and captured graphs alike. The
        operator keeps ``packed`` alive until ``close()``.

        Args:
            packed: this rank's EL experts, on the operator's device, packed for its family.

        Raises:
            OperatorClosed: after ``close()``.
            TypeError, ValueError: not packed weights for this family, or not of this layer's
                shapes, dtypes or device.
        """
        self._require_open()
        shape = self.plan.workspace
        sizes = shape.local_experts, shape.hidden, shape.intermediate
        checks.require_weights(packed, *packed_form(self.family, *sizes), shape, self.device)
        call = self._next_call % NUM_CALLS
        self._next_call += 1
        layer = Layer(self, packed, call)
        self._layers.append(layer)
        return layer

    def stats(self) -> Stats:
        """Rows received by each local expert, and ids masked. Waits for the device.

        Raises:
            CaptureError, DeviceFault, OperatorClosed: as :meth:`check` when it waits.
        """
        self._require_open()
        devices.wait(self.device, "stats()")
        cells = self._workspace.view("stats").cpu().view(torch.int64)
        return Stats(cells[:-1].clone(), int(cells[-1]))

    def check(self, *, synchronize: bool = False) -> None:
        """Raise the fault that a kernel of this rank reported. Every call does so first.

        Args:
            synchronize: wait for the device, and also report that a peer aborted a replay, which
                only the peer's own record explains.

        Raises:
            PeerTimeout, CallMismatch, OverlappingReplays, DeviceFault: the fault; it stays until
                ``reset()``, and for ever where the device has failed.
            CaptureError: asked to wait inside a graph capture.
            OperatorClosed: after ``close()``.
        """
        self._require_open()
        broken = None
        if synchronize:
            devices.refuse_capture(self.device, "check(synchronize = True)")
            broken = devices.failure_of(self.device)
        error = faults.error_of(self._record.read(), broken)
        if error is not None:
            raise error from broken
        if broken is not None:
            raise DeviceFault(f"the device failed: {broken}. {faults.LOST}") from broken
        if synchronize and bool(self._workspace.view("abort").any()):
            raise DeviceFault(faults.ABORTED_BY_PEER)

    def reset(self, *, timeout_s: float = RESET_LIMIT_S) -> None:
        """Back to the state after creation, after a fault say. Collective; waits for the device.

        Layers and captured graphs stay valid. ``stats()`` start again at zero. No rank makes a call
        until its ``reset()`` has returned.

        Args:
            timeout_s: seconds to wait for the other ranks, at each of two barriers.

        Raises:
            GCMoEError: ranks have not come in time; names them. The call may be repeated: it goes
                on at the barrier where it waited.
            DeviceFault: the device has failed; only ``close()`` remains.
            CaptureError: inside a graph capture.
            OperatorClosed: after ``close()``.
        """
        self._require_open()
        devices.refuse_capture(self.device, "reset()")
        with devices.failures_named("reset()"), devices.guard(self.device):
            self._reset_cells(timeout_s)

    def _reset_cells(self, timeout_s: float = RESET_LIMIT_S) -> None:
        """The steps of ``reset()``, in the only order that is safe; goes on where it stopped."""
        if not self._zeroed:
            devices.synchronize(self.device)
            # Late arrivals of a rank that still runs would fall into zeroed cells.
            self._ranks.barrier("reset, own calls ended", timeout_s)
            self._workspace.reset_cells(*self._initial)
            self._record.clear()
            devices.synchronize(self.device)
            self._zeroed = True
        # An early header of a rank that is ahead would be lost.
        self._ranks.barrier("reset, own cells zeroed", timeout_s)
        self._zeroed = False

    def close(self) -> None:
        """Wait for this rank's calls and free what the operator owns. Not collective.

        Graphs that captured its layers must not be replayed any more, by no rank. On a device that
        has failed, when a peer has died say, it frees what it can and warns.

        Raises:
            CaptureError: inside a graph capture; the operator stays open.
        """
        if self._closed:
            return
        devices.refuse_capture(self.device, "close()")
        self._closed = True
        replays = [replay for layer in self._layers for replay in layer._replays.values()]
        graphs = [replay.graph.close for replay in replays]
        lists = [self._layers.clear, self._traces.clear]
        broken = devices.release(self.device, [*graphs, *self._owned[::-1], *lists])
        if broken is not None:
            text = f"close(): the device failed: {broken}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            text = "an operator was dropped without close(): its graphs and host memory remain"
            warnings.warn(text, ResourceWarning, stacklevel=2)

    def workspace_view(self, region: str) -> Tensor:
        """A region of the workspace as uint8 [bytes] that shares its memory, for tests.

        Raises:
            KeyError: ``gcmoe.protocol.WorkspaceShape`` has no such region.
        """
        self._require_open()
        return self._workspace.view(region)

    def trace_records(self) -> dict[Role, Tensor]:
        """Timestamps of the last call: int64 [grid, TRACE_WORDS] on the CPU, by role.

        The words are those of :mod:`gcmoe.kernels.trace_words`. Waits for the device.

        Raises:
            ValueError: the operator was created without ``trace``.
        """
        self._require_open()
        if not self._traces:
            raise ValueError("trace_records() needs an operator with trace = True")
        devices.wait(self.device, "trace_records()")
        return {role: trace.cpu() for role, trace in self._traces.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------------- checks

    def _require_open(self) -> None:
        if self._closed:
            raise OperatorClosed("the operator is closed")
