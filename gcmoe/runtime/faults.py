"""From a fault record to an exception."""

from __future__ import annotations

from collections.abc import Sequence

from gcmoe.errors import CallMismatch, DeviceFault, OverlappingReplays, PeerTimeout
from gcmoe.protocol import Cell, FaultKind, FaultRecord

EXCEPTIONS: dict[FaultKind, type[DeviceFault]] = {
    FaultKind.TIMEOUT: PeerTimeout,
    FaultKind.CALL_MISMATCH: CallMismatch,
    FaultKind.OVERLAPPING_REPLAYS: OverlappingReplays,
    FaultKind.BAD_COUNT: DeviceFault,
}

ADVICE: dict[FaultKind, str] = {
    FaultKind.TIMEOUT: (
        "A rank that made fewer calls, died or is slow has this effect; so has other work that "
        "waits for a peer and was enqueued in another order on another rank."
    ),
    FaultKind.CALL_MISMATCH: "All ranks must call the same layers in the same order.",
    FaultKind.OVERLAPPING_REPLAYS: (
        "Replays that share an operator must follow each other on one stream or by events."
    ),
    FaultKind.BAD_COUNT: "The workspace of a rank was overwritten, or the ranks differ.",
}
LATE_SMS = (
    "A CTA of compute could not start or end here: other work holds an SM of this device, or a "
    "replay of the same operator overlaps."
)
LOST = "Only close() remains, and a new process: the device takes no more work from this one."
RECOVERY = "Call reset() on all ranks to go on, or close()."
ABORTED_BY_PEER = (
    "a peer aborted the replay: its own check() names the fault; y is NaN where it is wrong. "
    + RECOVERY
)


def error_of(words: Sequence[int], broken: Exception | None = None) -> DeviceFault | None:
    """The exception for a record in host memory; None if there is no fault.

    Args:
        words: at least nine 32-bit words, in the order of ``gcmoe.protocol.faults.RECORD_WORDS``.
        broken: the error of a device that has failed as well, so that nothing brings it back.
    """
    if not words[0]:
        return None
    way_on = RECOVERY if broken is None else f"The device failed as well: {broken}. {LOST}"
    try:
        record = FaultRecord.decode(tuple(words))
    except ValueError:
        text = " ".join(f"{word:#x}" for word in words)
        return DeviceFault(f"the fault record cannot be read: {text}. {way_on}")
    assert record is not None
    kind = EXCEPTIONS.get(record.kind, DeviceFault)
    advice = LATE_SMS if record.cell == Cell.COMPUTE_DONE else ADVICE[record.kind]
    return kind(f"{record.describe()}. {advice} {way_on}", record)
