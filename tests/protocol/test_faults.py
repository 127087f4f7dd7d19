"""Fault records: decoding, and one sentence that names who waited for what from whom."""

import pytest

from gcmoe.protocol import Cell, FaultKind, FaultRecord, Role
from gcmoe.protocol.document import FAULT_MEANINGS
from gcmoe.protocol.faults import NO_PEER, RECORD_BYTES, RECORD_WORDS


def words(kind, **changes):
    values = {"role": 2, "rank": 1, "cell": 4, "index": 7, "wanted": 64, "seen": 33}
    values |= {"generation": 12, "peer": NO_PEER} | changes
    return tuple(int({"kind": kind, **values}[name]) for name in RECORD_WORDS)


def test_no_fault():
    assert FaultRecord.decode((0,) * len(RECORD_WORDS)) is None


def test_fields_come_back():
    record = FaultRecord.decode(words(FaultKind.TIMEOUT, peer=3))
    assert record == FaultRecord(
        FaultKind.TIMEOUT, Role.COMPUTE, 1, Cell.TOKEN_RING_FULL, 7, 64, 33, 12, 3
    )
    assert FaultRecord.decode(words(FaultKind.TIMEOUT)).peer is None


def test_the_record_fits_its_memory():
    assert 4 * len(RECORD_WORDS) <= RECORD_BYTES


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind])
def test_the_sentence_names_role_rank_cell_and_values(kind):
    text = FaultRecord.decode(words(kind, peer=3)).describe()
    for part in ("compute of rank 1", "replay 12", "token_ring_full[7]"):
        assert part in text
    assert "rank 3" in text or kind == FaultKind.OVERLAPPING_REPLAYS


def test_a_short_record_is_refused():
    with pytest.raises(ValueError, match="3 words"):
        FaultRecord.decode((1, 2, 3))


def test_every_kind_is_explained():
    assert set(FAULT_MEANINGS) == set(FaultKind)
