"""``gcmoe tile`` against the recording driver: what it launches, and what it says of a hang."""

import ctypes

import pytest
import torch
from cuda.bindings import driver as real

from gcmoe import tile
from gcmoe.kernels.trace_words import TRACE_WORDS, ComputeTrace
from gcmoe.runtime import driver

DEVICE = torch.device("cpu")


@pytest.fixture
def run(standin, fake_device, fake_kernel, monkeypatch):
    standin.num_sms = 148
    monkeypatch.setattr(tile, "get_kernel", fake_kernel)
    monkeypatch.setattr(tile, "SECONDS", 0.05)
    return tile.run_on_gpu(DEVICE)


@pytest.fixture
def problem():
    case, spec = tile.make_cases()[0], tile.make_spec("sm_100a")
    codes, exponents = tile.quantize_input(case.x[:8], "sm100")
    e = case.experts
    config = tile.MoEConfig(tile.HIDDEN, tile.INTERMEDIATE, 1, 1, tile.CAPACITY)
    packed = tile.pack_sm100(e.w13, e.w13_scale, e.w2, e.w2_scale, config)
    return spec, tile.fill_block(spec.shape, codes, exponents), packed


def test_one_node_with_every_argument(run, problem, standin, monkeypatch):
    spec, workspace, _ = problem
    values = {}

    def add_node(graph, after, count, node):
        """The driver copies the arguments when a node is added."""
        pointers = (ctypes.c_void_p * len(spec.parameters)).from_address(int(node.kernelParams))
        for parameter, address in zip(spec.parameters, pointers, strict=True):
            if parameter.kind in ("u64", "i64", "peers"):
                values[parameter.name] = ctypes.c_uint64.from_address(address).value
        return (real.CUgraphNode(standin.handle()),)

    monkeypatch.setattr(standin, "answer_cuGraphAddKernelNode", add_node)
    assert torch.equal(run(*problem), workspace)  # the stand-in runs nothing
    (node,) = (arguments[3] for arguments in standin.arguments("cuGraphAddKernelNode"))
    assert (node.gridDimX, node.sharedMemBytes) == (140, 100_000)
    assert values["peers"] == values["workspace"]
    assert all(values.values()), values
    assert len(standin.maps) == 2 + len(spec.tiles.widths)
    names = standin.names()
    assert names.index("cuGraphLaunch") < names.index("cuStreamQuery")
    assert names.count("cuMemHostAlloc") == names.count("cuMemFreeHost") == 2


def test_a_hang_is_left_with_the_last_mark(run, problem, standin, monkeypatch):
    monkeypatch.setattr(tile, "POLL_SECONDS", 0.001)

    def never(stream):
        words = (ctypes.c_uint64 * (140 * TRACE_WORDS)).from_buffer(standin.host[0])
        for cta in range(140):
            words[cta * TRACE_WORDS + ComputeTrace.START] = 1 << 40
        for cta in range(3):
            words[cta * TRACE_WORDS + ComputeTrace.ROUTES] = 5
        return (real.CUresult.CUDA_ERROR_NOT_READY,)

    monkeypatch.setattr(standin, "cuStreamQuery", never, raising=False)
    with pytest.raises(tile.Hang) as caught:
        run(*problem)
    text = str(caught.value)
    assert "140 of 140 CTAs started; 3 of 140 CTAs saw the routes; 0 of 140 CTAs saw the" in text


def test_a_device_that_fails_is_an_error(run, problem, standin):
    standin.failing["cuStreamQuery"] = real.CUresult.CUDA_ERROR_ILLEGAL_INSTRUCTION
    with pytest.raises(driver.DriverError, match="CUDA_ERROR_ILLEGAL_INSTRUCTION"):
        run(*problem)
