"""The split and its green contexts, against the recording driver."""

import pytest
import torch
from cuda.bindings import driver as real

from gcmoe.errors import UnsupportedDevice
from gcmoe.runtime import driver
from gcmoe.runtime.partition import create_partition, get_partition, whole_device

INVALID_TYPE = real.CUresult.CUDA_ERROR_INVALID_RESOURCE_TYPE


def without_queues(standin):
    plain = standin.answer_cuDeviceGetDevResource

    def call(name, arguments):
        kind = real.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG
        if name == "cuDeviceGetDevResource" and arguments[1] == kind:
            return (INVALID_TYPE,)
        return type(standin)._call(standin, name, arguments)

    standin.__dict__["_call"] = call
    return plain


def test_one_split_two_contexts(standin):
    partition = create_partition(0, 12)
    assert standin.names().count("cuDevSmResourceSplitByCount") == 1
    assert (partition.dispatch.sms, partition.compute.sms) == (16, 116)
    report = partition.report
    assert (report.requested, report.dispatch_sms, report.compute_sms) == (12, 16, 116)
    assert report.num_sms == 132
    flag = real.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    assert [a[2] for a in standin.arguments("cuGreenCtxCreate")] == [flag, flag]
    non_blocking = real.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert [a[1:] for a in standin.arguments("cuGreenCtxStreamCreate")] == [(non_blocking, 0)] * 2
    assert int(partition.dispatch.context) != int(partition.compute.context)


def test_balanced_work_queues_are_used_where_offered(standin):
    report = create_partition(0, 16).report
    assert report.work_queues == "balanced"
    for resources, count in standin.arguments("cuDevResourceGenerateDesc"):
        scope = real.CUdevWorkqueueConfigScope.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
        assert count == 2
        assert resources[1].wqConfig.sharingScope == scope


def test_missing_work_queues_are_reported(standin):
    without_queues(standin)
    report = create_partition(0, 16).report
    assert "CUDA_ERROR_INVALID_RESOURCE_TYPE" in report.work_queues
    assert "CUDA 13.1" in report.describe()
    assert [a[1] for a in standin.arguments("cuDevResourceGenerateDesc")] == [1, 1]


def test_refused_work_queues_are_left_out(standin):
    def generate(resources, count):
        if count == 2:
            raise driver.DriverError("cuDevResourceGenerateDesc", "CUDA_ERROR_INVALID_VALUE")
        return (real.CUdevResourceDesc(1),)

    standin.answer_cuDevResourceGenerateDesc = generate
    report = create_partition(0, 16).report
    assert "refused" in report.work_queues
    assert report.dispatch_sms == 16


def test_a_split_that_fails_says_what_was_required(standin):
    standin.failing["cuDevSmResourceSplitByCount"] = (
        real.CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
    )
    with pytest.raises(UnsupportedDevice, match=r"of 200 of the 132 SMs.*CONFIGURATION"):
        create_partition(0, 200)


@pytest.mark.parametrize("split", [False, True])
def test_one_partition_per_device_and_split(standin, split):
    device = torch.device("cuda", 0)
    first = get_partition(device, 16, split)
    assert first.is_split == split
    assert get_partition(device, 16, split) is first
    assert get_partition(device, 16, not split) is not first
    assert get_partition(device, 8, split) is not first
    assert get_partition(torch.device("cuda", 1), 16, split) is not first


def test_the_whole_device_is_one_context(standin):
    partition = whole_device(0, 16)
    assert partition.contexts == (partition.compute.context,) == (partition.dispatch.context,)
    assert (partition.dispatch.sms, partition.compute.sms) == (16, 116)
    assert "16 SMs dispatch (16 asked), 116 SMs compute of 132" in partition.report.describe()
    assert "cuGreenCtxCreate" not in standin.names()
    with pytest.raises(UnsupportedDevice, match="more than the 132 SMs of dispatch"):
        whole_device(0, 132)
