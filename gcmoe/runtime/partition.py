"""Two disjoint SM partitions of a device, one green context each.

The driver promises disjoint SMs, not that kernels in both partitions run at once: see
``UnsupportedConcurrency``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from gcmoe.errors import UnsupportedDevice
from gcmoe.runtime import driver


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What the driver gave.

    Args:
        device: index of the GPU.
        num_sms: SMs that the device offers for partitions.
        requested: SMs asked for dispatch.
        dispatch_sms, compute_sms: SMs of the two partitions.
        granule: step in which the driver cuts.
        work_queues: "balanced", or why not.
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
class GreenContext:
    """A green context, as a plain context, and a stream on it; both unset in an undivided one."""

    green: Any
    context: Any
    stream: Any
    sms: int


@dataclass(frozen=True, slots=True)
class Partition:
    """The two green contexts of a split; they live as long as the process."""

    dispatch: GreenContext
    compute: GreenContext
    report: PartitionReport

    @property
    def contexts(self) -> tuple[GreenContext, GreenContext]:
        return self.dispatch, self.compute


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


def _green_context(device: Any, resources: list[Any], sms: int) -> GreenContext:
    cu = driver.cu
    desc = driver.call("cuDevResourceGenerateDesc", resources, len(resources))
    flag = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = driver.call("cuGreenCtxCreate", desc, device, flag)
    context = driver.call("cuCtxFromGreenCtx", green)
    non_blocking = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = driver.call("cuGreenCtxStreamCreate", green, non_blocking, 0)
    return GreenContext(green, context, stream, sms)


def create_partition(index: int, dispatch_sms: int) -> Partition:
    """Split the SMs of a device with one call and make a green context of each part.

    Args:
        index: of the GPU; its primary context exists.
        dispatch_sms: least SMs of the dispatch partition; the driver rounds up.

    Raises:
        UnsupportedDevice: the device cannot be split so.
    """
    cu = driver.cu
    device = driver.call("cuDeviceGet", index)
    sm_type = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    offered = driver.call("cuDeviceGetDevResource", device, sm_type)
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
) -> tuple[GreenContext, GreenContext]:
    extra = [] if queue is None else [queue]
    return (
        _green_context(device, [group, *extra], counts[0]),
        _green_context(device, [rest, *extra], counts[1]),
    )


def undivided(partition: Partition) -> Partition:
    """The same split on paper, both parts in the primary context of the device, for comparisons."""
    device = driver.call("cuDeviceGet", partition.report.device)
    context = driver.call("cuDevicePrimaryCtxRetain", device)
    dispatch, compute = (
        replace(part, green=None, context=context, stream=None) for part in partition.contexts
    )
    report = replace(partition.report, work_queues="one context for both")
    return Partition(dispatch, compute, report)


_lock = threading.Lock()
_partitions: dict[tuple[int, int], Partition] = {}


def get_partition(device: torch.device, dispatch_sms: int, one_context: bool = False) -> Partition:
    """The partition of this process for a device and a dispatch size; made on first use.

    Args:
        one_context: the undivided one.
    """
    key = device.index or 0, dispatch_sms
    with _lock:
        if key not in _partitions:
            _partitions[key] = create_partition(*key)
        return undivided(_partitions[key]) if one_context else _partitions[key]
