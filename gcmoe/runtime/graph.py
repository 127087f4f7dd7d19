"""A layer replay as a graph of three kernel nodes: launched eagerly, or cloned into a capture."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from gcmoe.errors import CaptureError
from gcmoe.protocol import Role
from gcmoe.runtime import driver
from gcmoe.runtime.launch import Arguments
from gcmoe.runtime.modules import LoadedKernel
from gcmoe.runtime.partition import Partition

ROLES = (Role.DISPATCH, Role.COMPUTE, Role.FINALIZE)


def node_parameters(kernel: LoadedKernel, context: Any, grid: int, arguments: Arguments) -> Any:
    """``CUDA_KERNEL_NODE_PARAMS`` that read ``arguments`` whenever they are used.

    ``func`` stays unset: with it the driver would ignore ``ctx``.
    """
    parameters = driver.cu.CUDA_KERNEL_NODE_PARAMS()
    parameters.kern = kernel.kernel
    parameters.ctx = context
    parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = grid, 1, 1
    parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = kernel.threads, 1, 1
    parameters.sharedMemBytes = kernel.smem_bytes
    parameters.kernelParams = arguments.address
    return parameters


class LayerGraph:
    """The three roles of a replay as nodes of a graph.

    In the primary context each role hangs on the one before by a programmatic edge. The CTAs of
    dispatch release compute when they start, so all of them have an SM before compute gets any:
    without the edge compute sometimes comes first and keeps the SM that it waits for. CTAs of
    compute beyond the SMs that are free start as dispatch leaves its own. The CTAs of compute
    release finalize when they take no more tickets, so finalize gets the SMs that compute leaves.
    Each role waits for the end of the one before, so finalize, the only leaf, ends last. The edge
    into dispatch must be a whole one: compute reads bases, ticket and weights before it waits.

    In two green contexts dispatch and compute start side by side, each in its own. ``late``, a
    second node of compute in dispatch's context behind dispatch, takes tickets like the first;
    finalize waits for both in memory, as an edge from the other context would cost 2 us.

    The template graph is what captures clone; the executable graph serves eager calls and takes new
    arguments without affecting launches already enqueued.

    Args:
        kernels, arguments, grids: by role; the argument blocks are read again at every update.
        partition: where they run.
        serial: compute starts after dispatch has ended.
        late: arguments of late compute, one CTA per SM of dispatch; None for none.
    """

    def __init__(
        self,
        kernels: dict[Role, LoadedKernel],
        arguments: dict[Role, Arguments],
        grids: dict[Role, int],
        partition: Partition,
        serial: bool,
        late: Arguments | None = None,
    ) -> None:
        self._arguments = arguments, late  # the nodes read them
        self._parameters: dict[Role, Any] = {}
        for role in ROLES:
            part = partition.dispatch if role == Role.DISPATCH else partition.compute
            self._parameters[role] = node_parameters(
                kernels[role], part.context, grids[role], arguments[role]
            )
        self._graph = driver.call("cuGraphCreate", 0)
        dispatch = self._add(Role.DISPATCH, [])
        compute = self._add(Role.COMPUTE, [dispatch] if serial else [])
        if not (serial or partition.is_split):
            self._add_programmatic_edge(dispatch, compute)
        if late is not None:
            context, grid = partition.dispatch.context, grids[Role.DISPATCH]
            parameters = node_parameters(kernels[Role.COMPUTE], context, grid, late)
            self._add_node("late compute", parameters, [dispatch])
        finalize = self._add(Role.FINALIZE, [])
        self._add_programmatic_edge(compute, finalize)
        self._nodes = {Role.DISPATCH: dispatch, Role.COMPUTE: compute, Role.FINALIZE: finalize}
        self._executable: Any = None

    def _add(self, role: Role, after: list[Any]) -> Any:
        return self._add_node(role.name.lower(), self._parameters[role], after)

    def _add_node(self, name: str, parameters: Any, after: list[Any]) -> Any:
        return driver.call(
            "cuGraphAddKernelNode", self._graph, after, len(after), parameters, detail=name
        )

    def _add_programmatic_edge(self, before: Any, after: Any) -> None:
        """``after`` may start once every CTA of ``before`` has released its dependents."""
        cu = driver.cu
        edge = cu.CUgraphEdgeData()
        edge.from_port = cu.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        edge.type = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        driver.call("cuGraphAddDependencies", self._graph, [before], [after], [edge], 1)

    def instantiate(self) -> None:
        """Make the executable graph, with the arguments as they are now; at most once."""
        if self._executable is None:
            self.update_template()
            self._executable = driver.call("cuGraphInstantiate", self._graph, 0)

    def update(self, role: Role) -> None:
        """Hand the arguments of one role to later launches of the executable graph."""
        result = driver.cu.cuGraphExecKernelNodeSetParams(
            self._executable, self._nodes[role], self._parameters[role]
        )
        if int(result[0]):
            driver.check(result, "cuGraphExecKernelNodeSetParams", role.name.lower())

    def update_template(self) -> None:
        """Hand the arguments of dispatch and finalize to the template."""
        for role in (Role.DISPATCH, Role.FINALIZE):
            node, parameters = self._nodes[role], self._parameters[role]
            driver.call("cuGraphKernelNodeSetParams", node, parameters, detail=role.name.lower())

    def launch(self, stream: Any) -> None:
        """Launch the executable graph on a stream."""
        result = driver.cu.cuGraphLaunch(self._executable, stream)
        if int(result[0]):
            driver.check(result, "cuGraphLaunch")

    def add_to_capture(self, stream: Any) -> None:
        """Clone the template, with the arguments as they are now, into the capture of ``stream``.

        Raises:
            CaptureError: ``stream`` is not being captured, or its capture was invalidated.
        """
        cu = driver.cu
        self.update_template()
        status, _, graph, dependencies, *_ = driver.call("cuStreamGetCaptureInfo", stream)
        if status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            raise CaptureError(
                f"the stream is not being captured: {getattr(status, 'name', status)}"
            )
        after = list(dependencies or [])
        child = driver.call("cuGraphAddChildGraphNode", graph, after, len(after), self._graph)
        replace = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        driver.call("cuStreamUpdateCaptureDependencies", stream, [child], None, 1, replace)

    def close(self) -> None:
        """Destroy both graphs; clones in other graphs stay valid."""
        if self._executable is not None:
            driver.call("cuGraphExecDestroy", self._executable)
            self._executable = None
        if self._graph is not None:
            driver.call("cuGraphDestroy", self._graph)
            self._graph = None


@dataclass
class ReplayOrder:
    """Keeps eager replays of a device in one order when the caller changes streams."""

    event: Any = None
    stream: int | None = None
    streams: dict[int, Any] = field(default_factory=dict)

    def stream_object(self, handle: int) -> Any:
        """The driver's name for a stream handle."""
        stream = self.streams.get(handle)
        if stream is None:
            stream = self.streams[handle] = driver.cu.CUstream(handle)
        return stream

    def enter(self, handle: int) -> Any:
        """The stream object of a handle; makes a new stream wait for the previous replay."""
        stream = self.stream_object(handle)
        if self.event is None:
            flag = driver.cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self.event = driver.call("cuEventCreate", flag)
        elif self.stream != handle and self.stream is not None:
            driver.call("cuStreamWaitEvent", stream, self.event, 0)
        return stream

    def leave(self, handle: int, stream: Any) -> None:
        """Mark the end of a replay on ``stream``."""
        result = driver.cu.cuEventRecord(self.event, stream)
        if int(result[0]):
            driver.check(result, "cuEventRecord")
        self.stream = handle


_lock = threading.Lock()
_orders: dict[int, ReplayOrder] = {}


def replay_order(index: int) -> ReplayOrder:
    """The order of replays of a device, shared by its operators."""
    with _lock:
        return _orders.setdefault(index, ReplayOrder())
