"""A stand-in for the CUDA driver that records calls: real enums and structures, no GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real

from gcmoe import operator as operators
from gcmoe.kernels.build import CompiledKernel, parameter_size
from gcmoe.kernels.spec import KernelSpec
from gcmoe.operator import MoE
from gcmoe.runtime import device, driver, graph, modules, partition

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)

from small_layer import CONFIG  # noqa: E402

SUCCESS = real.CUresult.CUDA_SUCCESS


def sm_resource(count: int) -> Any:
    resource = real.CUdevResource()
    resource.sm.smCount = count
    resource.sm.smCoscheduledAlignment = 8
    return resource


class StandIn:
    """Looks like ``cuda.bindings.driver``; ``calls`` are (function, arguments) in order.

    ``failing`` maps a function to the error that it returns. Handles count up from 0x1000.
    """

    def __init__(self, num_sms: int = 132) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failing: dict[str, Any] = {}
        self.num_sms = num_sms
        self.capture_status = real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        self.sizes: dict[str, list[int]] = {}
        self.symbols: dict[int, str] = {}
        self.host: list[Any] = []
        self.maps: list[tuple[Any, ...]] = []
        self._next = 0x1000

    def handle(self) -> int:
        self._next += 1
        return self._next

    def encode_tiled(self, *arguments: Any) -> None:
        self.maps.append(arguments)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def arguments(self, function: str) -> list[tuple[Any, ...]]:
        return [arguments for name, arguments in self.calls if name == function]

    def __getattr__(self, name: str) -> Any:
        if not (name.startswith("cu") and callable(getattr(real, name)) and name[2].isupper()):
            return getattr(real, name)
        if isinstance(getattr(real, name), type):
            return getattr(real, name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, arguments))
        if name in self.failing:
            return (self.failing[name],)
        answer: Callable[..., tuple[Any, ...]] | None = getattr(self, f"answer_{name}", None)
        return (SUCCESS, *(answer(*arguments) if answer else ()))

    def answer_cuDriverGetVersion(self) -> tuple[Any, ...]:
        return (13000,)

    def answer_cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return (real.CUdevice(max(index, 0)),)

    def answer_cuDeviceGetDevResource(self, device: Any, kind: Any) -> tuple[Any, ...]:
        return (sm_resource(self.num_sms),)

    def answer_cuDevSmResourceSplitByCount(
        self, groups: int, resource: Any, flags: int, count: int
    ) -> tuple[Any, ...]:
        assert (groups, flags) == (1, 0)
        given = -(-count // 8) * 8
        return [sm_resource(given)], 1, sm_resource(self.num_sms - given)

    def answer_cuDevResourceGenerateDesc(self, resources: Any, count: int) -> tuple[Any, ...]:
        assert len(resources) == count
        return (real.CUdevResourceDesc(self.handle()),)

    def answer_cuGreenCtxCreate(self, desc: Any, device: Any, flags: Any) -> tuple[Any, ...]:
        return (real.CUgreenCtx(self.handle()),)

    def answer_cuGreenCtxStreamCreate(
        self, green: Any, flags: Any, priority: int
    ) -> tuple[Any, ...]:
        return (real.CUstream(self.handle()),)

    def answer_cuCtxFromGreenCtx(self, green: Any) -> tuple[Any, ...]:
        return (real.CUcontext(int(green) + 0x10000),)

    def answer_cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        return (real.CUcontext(0x20000),)

    def answer_cuLibraryLoadData(self, image: bytes, *rest: Any) -> tuple[Any, ...]:
        assert rest == ([], [], 0, [], [], 0)
        return (real.CUlibrary(self.handle()),)

    def answer_cuLibraryGetKernel(self, library: Any, name: bytes) -> tuple[Any, ...]:
        kernel = real.CUkernel(self.handle())
        self.symbols[int(kernel)] = name.decode()
        return (kernel,)

    def answer_cuKernelGetParamInfo(self, kernel: Any, index: int) -> tuple[Any, ...]:
        return 8 * index, self.sizes[self.symbols[int(kernel)]][index]

    def answer_cuKernelGetFunction(self, kernel: Any) -> tuple[Any, ...]:
        return (real.CUfunction(self.handle()),)

    def answer_cuKernelGetAttribute(self, which: Any, kernel: Any, device: Any) -> tuple[Any, ...]:
        return (1024,)

    def answer_cuMemHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        memory = (ctypes.c_uint8 * size)(*[0xFF] * size)
        self.host.append(memory)
        return (ctypes.addressof(memory),)

    def answer_cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        return (real.CUdeviceptr(address),)

    def answer_cuGraphCreate(self, flags: int) -> tuple[Any, ...]:
        return (real.CUgraph(self.handle()),)

    def answer_cuGraphAddKernelNode(
        self, graph: Any, after: Any, count: int, parameters: Any
    ) -> tuple[Any, ...]:
        assert isinstance(parameters, real.CUDA_KERNEL_NODE_PARAMS)
        assert len(after) == count
        assert not int(parameters.func)
        return (real.CUgraphNode(self.handle()),)

    def answer_cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        return (real.CUgraphExec(self.handle()),)

    def answer_cuGraphAddChildGraphNode(
        self, graph: Any, after: Any, count: int, child: Any
    ) -> tuple[Any, ...]:
        return (real.CUgraphNode(self.handle()),)

    def answer_cuStreamGetCaptureInfo(self, stream: Any) -> tuple[Any, ...]:
        if self.capture_status != real.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return self.capture_status, real.cuuint64_t(0), real.CUgraph(0), [], [], 0
        return (
            self.capture_status,
            real.cuuint64_t(1),
            real.CUgraph(7),
            [real.CUgraphNode(9)],
            [],
            1,
        )

    def answer_cuEventCreate(self, flags: Any) -> tuple[Any, ...]:
        return (real.CUevent(self.handle()),)


class FakeDevice:
    """CPU memory in the place of a GPU: what ``gcmoe.runtime.device`` asks torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = 0
        self.capturing = False
        self.syncs = 0
        self.arch = "sm_90a"
        monkeypatch.setattr(device, "choose_device", lambda _: torch.device("cpu"))
        monkeypatch.setattr(device, "arch_of", lambda _: self.arch)
        monkeypatch.setattr(device, "require_device", lambda _: None)
        monkeypatch.setattr(device, "guard", lambda _: nullcontext())
        monkeypatch.setattr(device, "is_current", lambda _: True)
        monkeypatch.setattr(device, "is_capturing", lambda: self.capturing)
        monkeypatch.setattr(device, "stream_handle", lambda _: self.stream)
        monkeypatch.setattr(device, "synchronize", self.synchronize)

    def synchronize(self, device: torch.device) -> None:
        self.syncs += 1


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, in the place of the driver, with empty registries."""
    standin = StandIn()
    monkeypatch.setattr(driver, "cu", standin)
    monkeypatch.setattr(driver, "encode_tiled", standin.encode_tiled)
    monkeypatch.setattr(partition, "_partitions", {})
    monkeypatch.setattr(modules, "_loaded", {})
    monkeypatch.setattr(graph, "_orders", {})
    return standin


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The CPU in the place of the GPU."""
    return FakeDevice(monkeypatch)


@pytest.fixture
def fake_kernel(standin: StandIn) -> Callable[..., CompiledKernel]:
    """Makes kernels that the stand-in can load; signature of ``get_kernel``."""

    def get(spec: KernelSpec, cache_dir: object = None) -> CompiledKernel:
        ranks = spec.shape.num_ranks
        standin.sizes[spec.symbol] = [parameter_size(p, ranks)[0] for p in spec.parameters]
        return CompiledKernel(spec.role, spec.symbol, spec.symbol.encode(), 512, 100_000, 64)

    return get


@pytest.fixture
def make(
    standin: StandIn, fake_device: Any, fake_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., MoE]:
    """Makes operators, of the small layer by default, that have not met their peers."""
    monkeypatch.setattr(operators, "get_kernel", fake_kernel)
    monkeypatch.setattr(MoE, "_probe", lambda self: None)
    return lambda config=CONFIG, **options: MoE(config, **options)


@pytest.fixture
def op(make: Callable[..., MoE]) -> MoE:
    return make()
