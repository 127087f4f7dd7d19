"""The device of an operator, and the few questions a call asks the framework about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

import torch

from gcmoe.errors import CaptureError, DeviceFault, UnsupportedDevice
from gcmoe.runtime import driver, faults

TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""What kernels are compiled for, by compute capability."""

RECORDS: dict[str, str] = {
    "sm_90a": "bench/results/peers-20261201T115933Z.json",
}
"""A committed record of a correct layer on a GPU, by target: the first to run it adds a row."""

MIN_DRIVER = 13000
CAPABILITIES = "9.0, 10.0 or 10.3"
REQUIRED = (
    f"GC-MoE requires a GPU of compute capability {CAPABILITIES} and a driver for CUDA 13.0 or "
    "newer"
)
NOT_YET_RUN = "compiled, not yet run: docs/blackwell.md locates the first failure"


def choose_device(device: torch.device | str | int | None) -> torch.device:
    """The CUDA device meant, with its index; None takes the current one.

    Raises:
        UnsupportedDevice: this process has no GPU; says what was required and what was found.
        ValueError: ``device`` is not a CUDA device.
    """
    if isinstance(device, int):
        device = torch.device("cuda", device)
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda":
        raise ValueError(f"device = {device!r}: must be a CUDA device")
    if not torch.cuda.is_available():
        built = "a CPU build" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        raise UnsupportedDevice(
            f"{REQUIRED}; found none: torch.cuda.is_available() is False (torch "
            f"{torch.__version__}, {built})"
        )
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    return torch.device("cuda", index)


def arch_of(device: torch.device) -> str:
    """The target of the kernels for a device.

    Raises:
        UnsupportedDevice: there are none for its compute capability.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability not in TARGETS:
        raise UnsupportedDevice(
            f"{REQUIRED}; found {torch.cuda.get_device_name(device)} of compute capability "
            f"{capability[0]}.{capability[1]}"
        )
    return TARGETS[capability]


def warn_if_not_yet_run(arch: str) -> None:
    """Warn about kernels that no committed record shows to be right on a GPU."""
    if arch not in RECORDS:
        warnings.warn(f"the kernels for {arch} are {NOT_YET_RUN}", RuntimeWarning, stacklevel=3)


def require_device(device: torch.device) -> None:
    """The device can run the kernels; its primary context is alive afterwards.

    Raises:
        UnsupportedDevice: no target, or a driver older than CUDA 13.0; says what was required and
            what was found.
    """
    arch_of(device)
    version = driver.version()
    if version < MIN_DRIVER:
        raise UnsupportedDevice(
            f"{REQUIRED}; found a driver for CUDA {version // 1000}.{version % 1000 // 10}"
        )
    torch.zeros(1, device=device)


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` current."""
    return torch.cuda.device(device)


def is_current(index: int) -> bool:
    return torch.cuda.current_device() == index


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_handle(index: int) -> int:
    """Handle of the current stream of a device; 0 for the default stream."""
    if _raw_stream is not None:
        return int(_raw_stream(index))
    return int(torch.cuda.current_stream(index).cuda_stream)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    torch.cuda.synchronize(device)


@contextmanager
def failures_named(what: str) -> Iterator[None]:
    """Errors of the device inside become :class:`DeviceFault`; others pass."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceFault(f"{what}: the device failed: {error}. {faults.LOST}") from error


def refuse_capture(device: torch.device, what: str) -> None:
    """Raises CaptureError while the current stream of ``device`` is being captured.

    A wait for the device would end the capture with an error.
    """
    try:
        with guard(device):
            capturing = is_capturing()
    except RuntimeError:
        return  # the device has failed: what the caller does next says so
    if capturing:
        raise CaptureError(f"{what} waits for the device and cannot be captured")


def wait(device: torch.device, what: str) -> None:
    """Wait until the device is idle, for ``what``.

    Raises:
        CaptureError: inside a graph capture, which goes on.
        DeviceFault: the device has failed.
    """
    refuse_capture(device, what)
    with failures_named(what):
        synchronize(device)


def failure_of(device: torch.device) -> RuntimeError | None:
    """Wait until the device is idle; the error that it answers with, None if it is sound."""
    try:
        synchronize(device)
    except RuntimeError as error:
        return error
    return None


def release(device: torch.device, steps: Sequence[Callable[[], None]]) -> RuntimeError | None:
    """Wait until the device is idle, then take all steps in order, also after one that raises.

    Returns:
        The error of a device that has failed, where steps fail silently; else None.

    Raises:
        Exception: what the last step that failed raised.
    """

    def forgive(step: Callable[[], None]) -> None:
        with suppress(driver.DriverError, RuntimeError):
            step()

    with guard(device):
        broken = failure_of(device)
        with ExitStack() as stack:
            for step in reversed(steps):
                if broken is None:
                    stack.callback(step)
                else:
                    stack.callback(forgive, step)
    return broken
