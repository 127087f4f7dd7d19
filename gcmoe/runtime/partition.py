"""Where the kernels of a layer run: in the primary context, or in two green contexts.

In the primary context the two parts are numbers of CTAs only. Green contexts give them disjoint
SMs, for comparisons; the driver does not promise that kernels in both run at once: see
``UnsupportedConcurrency``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from gcmoe.errors import UnsupportedDevice
from gcmoe.runtime import driver


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What the driver gave.

    Args:
        device: index of the GPU.
        num_sms: SMs that the device offers.
        requested: SMs asked for dispatch.
        dispatch_sms, compute_sms: SMs of the two parts.
        granule: step in which the driver cuts; 1 if it need not.
        work_queues: of two green contexts "balanced", or why not; else of which context.
    """

    device: int
    num_sms: int
    requested: int
    dispatch_sms: int
    compute_sms: int
    granule: int
    work_queues: str

    def describe(self) -> str:
        """One line."""
        return (
            f"GPU {self.device}: {self.dispatch_sms} SMs dispatch ({self.requested} asked), "
            f"{self.compute_sms} SMs compute of {self.num_sms}, granule {self.granule}; "
            f"work queues: {self.work_queues}"
        )


@dataclass(frozen=True, slots=True)
class Part:
    """SMs for kernels.

    Args:
        context: the primary one, or a green one as a plain context.
        sms: how many.
        green: the green context, or None.
        stream: one of the green context, or None.
    """

    context: Any
    sms: int
    green: Any = None
    stream: Any = None


@dataclass(frozen=True, slots=True)
class Partition:
    """The two parts of a device; contexts live as long as the process."""

    dispatch: Part
    compute: Part
    report: PartitionReport

    @property
    def is_split(self) -> bool:
        """Whether the parts are green contexts of their own."""
        return self.compute.green is not None

    @property
    def contexts(self) -> tuple[Any, ...]:
        """The different contexts."""
        parts = (self.dispatch, self.compute) if self.is_split else (self.compute,)
        return tuple(part.context for part in parts)


def _offered(device: Any) -> Any:
    """The SMs that the driver offers this process, as a resource."""
    sm_type = driver.cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    return driver.call("cuDeviceGetDevResource", device, sm_type)


def balanced_work_queue(device: Any) -> tuple[Any | None, str]:
    """(the resource, "balanced") where the driver offers work queues, else (None, the reason)."""
    cu = driver.cu
    kind = getattr(cu.CUdevResourceType, "CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG", None)
    if kind is None:
        return None, "shared with the device, because these cuda-bindings do not know the resource"
    result = cu.cuDeviceGetDevResource(device, kind)
    if int(result[0]):
        return None, (
            f"shared with the device, because the driver does not offer the resource "
            f"({driver.name_of(result[0])}; CUDA 13.1 and newer do)"
        )
    resource = result[1]
    scope = cu.CUdevWorkqueueConfigScope.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
    resource.wqConfig.sharingScope = scope
    return resource, "balanced"


def _green_context(device: Any, resources: list[Any], sms: int) -> Part:
    cu = driver.cu
    desc = driver.call("cuDevResourceGenerateDesc", resources, len(resources))
    flag = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = driver.call("cuGreenCtxCreate", desc, device, flag)
    context = driver.call("cuCtxFromGreenCtx", green)
    non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = driver.call("cuGreenCtxStreamCreate", green, non_blocking, 0)
    return Part(context, sms, green, stream)


def create_partition(index: int, dispatch_sms: int) -> Partition:
    """Split the SMs of a device with one call and make a green context of each part.

    Args:
        index: of the GPU; its primary context exists.
        dispatch_sms: least SMs of the dispatch partition; the driver rounds up.

    Raises:
        UnsupportedDevice: the device cannot be split so.
    """
    device = driver.call("cuDeviceGet", index)
    offered = _offered(device)
    try:
        groups, count, rest = driver.call(
            "cuDevSmResourceSplitByCount", 1, offered, 0, dispatch_sms
        )
    except driver.DriverError as error:
        raise UnsupportedDevice(
            f"a dispatch partition of {dispatch_sms} of the {offered.sm.smCount} SMs of GPU "
            f"{index} is required; {error}"
        ) from error
    if count < 1 or not rest.sm.smCount:
        raise UnsupportedDevice(
            f"two SM partitions are required, {dispatch_sms} SMs for dispatch and the rest; GPU "
            f"{index} with {offered.sm.smCount} SMs gives {count} group and "
            f"{rest.sm.smCount} SMs beside it"
        )
    counts = int(groups[0].sm.smCount), int(rest.sm.smCount)
    queue, queues = balanced_work_queue(device)
    try:
        dispatch, compute = _two_contexts(device, groups[0], rest, queue, counts)
    except driver.DriverError as error:
        if queue is None:
            raise
        queues = f"shared with the device, because the driver refused balanced ones ({error})"
        dispatch, compute = _two_contexts(device, groups[0], rest, None, counts)
    granule = int(getattr(offered.sm, "smCoscheduledAlignment", 0) or 0)
    total = int(offered.sm.smCount)
    report = PartitionReport(index, total, dispatch_sms, *counts, granule, queues)
    return Partition(dispatch, compute, report)


def _two_contexts(
    device: Any, group: Any, rest: Any, queue: Any | None, counts: tuple[int, int]
) -> tuple[Part, Part]:
    extra = [] if queue is None else [queue]
    return (
        _green_context(device, [group, *extra], counts[0]),
        _green_context(device, [rest, *extra], counts[1]),
    )


def whole_device(index: int, dispatch_sms: int) -> Partition:
    """Both parts in the primary context.

    Args:
        index: of the GPU; its primary context exists.
        dispatch_sms: CTAs of dispatch.

    Raises:
        UnsupportedDevice: the device has no more SMs than that.
    """
    device = driver.call("cuDeviceGet", index)
    total = int(_offered(device).sm.smCount)
    if dispatch_sms >= total:
        raise UnsupportedDevice(
            f"more than the {dispatch_sms} SMs of dispatch are required; GPU {index} has {total}"
        )
    context = driver.call("cuDevicePrimaryCtxRetain", device)
    report = PartitionReport(
        index, total, dispatch_sms, dispatch_sms, total - dispatch_sms, 1, "of the primary context"
    )
    return Partition(Part(context, dispatch_sms), Part(context, report.compute_sms), report)


_lock = threading.Lock()
_partitions: dict[tuple[int, int, bool], Partition] = {}


def get_partition(
    device: torch.device, dispatch_sms: int, green_contexts: bool = False
) -> Partition:
    """The partition of this process for a device and a dispatch size; made on first use.

    Args:
        green_contexts: two green contexts, not the primary one.
    """
    key = device.index or 0, dispatch_sms, green_contexts
    with _lock:
        if key not in _partitions:
            make = create_partition if green_contexts else whole_device
            _partitions[key] = make(*key[:2])
        return _partitions[key]
