"""The exception family of GC-MoE.

Bad arguments raise the built-in ``TypeError`` or ``ValueError`` with the offending value and the
bound. Everything else derives from :class:`GCMoEError`, so a serving engine can catch one class.
"""

from __future__ import annotations


class GCMoEError(Exception):
    """Base of every error that is not a bad argument."""


class UnsupportedError(GCMoEError):
    """This machine, driver or build lacks something that the operator requires.

    The message names what was required and what was found.
    """


class UnsupportedDevice(UnsupportedError):
    """The GPU or its driver cannot run this kernel set."""


class UnsupportedConcurrency(UnsupportedError):
    """The dispatch and the compute kernel of a replay did not run at the same time."""


class KernelNotCached(UnsupportedError):
    """A kernel is missing from the cache and the DSL that would compile it is not installed."""


class KernelCacheCorrupt(GCMoEError):
    """A cached kernel does not match the checksum in its manifest."""


class WeightFormatError(GCMoEError):
    """A weight tensor holds values that no packed format can represent."""


class CaptureError(GCMoEError):
    """A call inside a CUDA graph capture that would need work which a capture forbids."""


class OperatorClosed(GCMoEError):
    """The operator was closed: only ``close()`` is allowed."""


class DeviceFault(GCMoEError):
    """A kernel reported a fault; the outputs of the faulty replay are NaN where they are wrong.

    ``record`` is the decoded fault record (``gcmoe.protocol.FaultRecord``).
    """

    def __init__(self, message: str, record: object | None = None) -> None:
        super().__init__(message)
        self.record = record


class PeerTimeout(DeviceFault):
    """A wait on a peer, or on another role of this rank, outlasted its budget."""


class CallMismatch(DeviceFault):
    """A rank skipped or reordered a layer call: two layers would have been mixed."""


class OverlappingReplays(DeviceFault):
    """Two replays that share a workspace ran at the same time; both outputs are invalid."""
