"""Fault records become exceptions that say what happened and what to do."""

import pytest

from gcmoe.errors import CallMismatch, DeviceFault, OverlappingReplays, PeerTimeout
from gcmoe.protocol import Cell, FaultKind, FaultRecord, Role
from gcmoe.protocol.faults import NO_PEER
from gcmoe.runtime.faults import ADVICE, LATE_SMS, LOST, error_of


def words(kind: int, cell: int = Cell.RECV_HEADER, peer: int = 3) -> tuple[int, ...]:
    return kind, Role.DISPATCH, 1, cell, 40, 0x17, 0x16, 23, peer, *[0] * 7


def test_no_fault():
    assert error_of(words(FaultKind.NONE)) is None


@pytest.mark.parametrize(
    ("kind", "exception", "text"),
    [
        (FaultKind.TIMEOUT, PeerTimeout, r"dispatch of rank 1 in replay 23 waited for recv_header"),
        (FaultKind.CALL_MISMATCH, CallMismatch, "skipped or reordered a layer"),
        (FaultKind.OVERLAPPING_REPLAYS, OverlappingReplays, "two replays overlapped"),
        (FaultKind.BAD_COUNT, DeviceFault, "more than the capacity"),
    ],
)
def test_kinds(kind, exception, text):
    error = error_of(words(kind))
    assert type(error) is exception
    with pytest.raises(exception, match=text):
        raise error
    assert isinstance(error.record, FaultRecord)
    assert error.record.peer == 3
    assert "reset()" in str(error)
    assert ADVICE[kind] in str(error)


def test_every_kind_has_advice():
    assert set(ADVICE) == set(FaultKind) - {FaultKind.NONE}


def test_own_roles_have_no_peer():
    error = error_of(words(FaultKind.TIMEOUT, Cell.TOKEN_RING_FULL, NO_PEER))
    assert error.record.peer is None
    assert "rank 4294967295" not in str(error)


@pytest.mark.parametrize("broken", [words(77), words(FaultKind.TIMEOUT, cell=99)])
def test_a_record_that_cannot_be_read_is_still_a_fault(broken):
    error = error_of(broken)
    assert type(error) is DeviceFault
    assert "cannot be read" in str(error)
    assert error.record is None


@pytest.mark.parametrize("record", [words(FaultKind.TIMEOUT), words(77)])
def test_on_a_device_that_failed_only_close_remains(record):
    text = str(error_of(record, RuntimeError("illegal memory access")))
    assert "The device failed as well: illegal memory access" in text
    assert LOST in text
    assert "reset()" not in text


def test_a_wait_for_own_compute_blames_no_peer():
    text = str(error_of(words(FaultKind.TIMEOUT, Cell.COMPUTE_DONE, NO_PEER)))
    assert LATE_SMS in text
    assert ADVICE[FaultKind.TIMEOUT] not in text
