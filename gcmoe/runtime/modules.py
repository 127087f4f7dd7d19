"""Cubins on a device.

Kernels load lazily: the first launch of one may wait for running kernels, and a partner that spins
meanwhile spins until its time-out. So every kernel is loaded into its contexts before the first
launch, whatever ``CUDA_MODULE_LOADING`` says.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from gcmoe.errors import GCMoEError
from gcmoe.kernels.build import CompiledKernel, parameter_size
from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol import Role
from gcmoe.runtime import driver
from gcmoe.runtime.partition import Partition


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that a graph node can name; lives as long as the process.

    Args:
        kernel: ``CUkernel``.
    """

    role: Role
    kernel: Any
    threads: int
    smem_bytes: int
    checksum: str


def check_parameters(kernel: Any, spec: KernelSpec) -> None:
    """The loaded kernel's parameters have the sizes of the spec's.

    Offsets are the driver's business: an aligned parameter is aligned in the constant bank, whose
    parameter area starts at an odd place.

    Raises:
        GCMoEError: they do not.
    """
    for i, parameter in enumerate(spec.parameters):
        detail = f"{spec.symbol}, parameter {i} ({parameter.name})"
        _, size = driver.call("cuKernelGetParamInfo", kernel, i, detail=detail)
        wanted, _ = parameter_size(parameter, spec.shape.num_ranks)
        if int(size) != wanted:
            raise GCMoEError(f"{detail} has {int(size)} bytes, the spec says {wanted}")


_lock = threading.Lock()
_loaded: dict[tuple[int, str, tuple[int, ...]], LoadedKernel] = {}
_images: list[tuple[Any, bytes]] = []


def load_kernel(
    spec: KernelSpec, compiled: CompiledKernel, index: int, partition: Partition
) -> LoadedKernel:
    """Load a cubin and force its kernel into the contexts of a partition.

    Args:
        index: of the device.

    Raises:
        DriverError: the driver refuses the image, its shared memory or its threads.
        GCMoEError: the kernel's parameters differ from the spec.
    """
    contexts = tuple(int(context) for context in partition.contexts)
    key = index, compiled.checksum, contexts
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(spec, compiled, index, partition)
        return _loaded[key]


def _load(
    spec: KernelSpec, compiled: CompiledKernel, index: int, partition: Partition
) -> LoadedKernel:
    attribute = driver.cu.CUfunction_attribute
    smem = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = driver.call("cuDeviceGet", index)
    library = driver.call("cuLibraryLoadData", compiled.cubin, [], [], 0, [], [], 0)
    _images.append((library, compiled.cubin))
    kernel = driver.call("cuLibraryGetKernel", library, compiled.symbol.encode())
    check_parameters(kernel, spec)
    detail = f"{compiled.symbol}, {compiled.smem_bytes} bytes"
    driver.call("cuKernelSetAttribute", smem, compiled.smem_bytes, kernel, device, detail=detail)
    for context in partition.contexts:
        with driver.current(context):
            function = driver.call("cuKernelGetFunction", kernel, detail=compiled.symbol)
            driver.call("cuFuncLoad", function, detail=compiled.symbol)
            # Both the kernel and its function of each context: nodes are added by kernel.
            driver.call("cuFuncSetAttribute", function, smem, compiled.smem_bytes, detail=detail)
    limit = attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    most = int(driver.call("cuKernelGetAttribute", limit, kernel, device))
    if compiled.threads > most:
        raise GCMoEError(f"{compiled.symbol}: {compiled.threads} threads, at most {most} fit")
    return LoadedKernel(spec.role, kernel, compiled.threads, compiled.smem_bytes, compiled.checksum)
