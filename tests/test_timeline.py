"""Traces that Perfetto opens, and pictures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcmoe.timeline import (
    ROWS_OF_AN_SM,
    Span,
    Timeline,
    from_chrome,
    placed_rows,
    read_chrome,
    rows_of,
    to_chrome,
    write,
)

ROLES = ("dispatch", "compute", "finalize")
times = st.integers(0, 400).map(lambda n: n / 4)
spans = st.builds(
    lambda name, role, rank, sm, start, length, detail: Span(
        name, role, rank, sm, sm, start, start + length, detail
    ),
    name=st.sampled_from(["W1", "W2", "stage", "sum"]),
    role=st.sampled_from(ROLES),
    rank=st.integers(0, 3),
    sm=st.integers(0, 4),
    start=times,
    length=times,
    detail=st.dictionaries(st.sampled_from(["rows", "slot"]), st.integers(0, 64)),
)
timelines = st.lists(spans, max_size=30).map(
    lambda found: Timeline("title", tuple(found), {"T": 8})
)

EXAMPLE = Timeline(
    "two ranks",
    (
        Span("stage", "dispatch", 0, 0, 0, 0.0, 2.5),
        Span("W1", "compute", 0, 9, 1, 8.0, 12.25, {"rows": 12, "width": 16}),
        Span("sum", "finalize", 0, 9, 1, 13.0, 14.0),
        Span("W2", "compute", 1, 8, 0, 8.5, 12.0, {"rows": 3, "width": 8}),
    ),
    {"gpu": "none"},
)


def check_trace_events(trace: dict) -> None:
    """The rules of the trace event format that viewers rely on."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named = set()
    open_until: dict[tuple[int, int], float] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["pid"] > 0  # 0 is the idle task
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event["tid"] > 0
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["name"], str)
        assert isinstance(event["cat"], str)
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
        # Complete events of a thread must nest; here they follow each other.
        row = event["pid"], event["tid"]
        assert event["ts"] >= open_until.get(row, 0.0) - 1e-9
        open_until[row] = event["ts"] + event["dur"]


@given(timelines)
def test_every_timeline_makes_a_sound_trace(timeline):
    trace = json.loads(json.dumps(to_chrome(timeline)))
    check_trace_events(trace)
    back = from_chrome(trace)
    assert (back.title, back.facts, back.unit) == ("title", {"T": 8}, "us")
    assert sorted(map(repr, back.spans)) == sorted(map(repr, timeline.spans))


def test_ranks_are_processes_and_sms_are_threads():
    events = to_chrome(EXAMPLE)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"].get("name") for e in events if "_name" in e["name"]}
    assert names[1, 0] == "rank 0"
    assert names[2, 0] == "rank 1"
    assert names[1, 10] == "SM 9 compute"
    (w1,) = [e for e in events if e["name"] == "W1"]
    assert (w1["pid"], w1["tid"], w1["cat"], w1["ts"], w1["dur"]) == (1, 10, "compute", 8.0, 4.25)
    assert w1["args"] == {"sm": 9, "cta": 1, "rows": 12, "width": 16}


def test_overlapping_spans_of_an_sm_get_rows_of_their_own():
    a, b = (Span("W1", "compute", 0, 3, c, 0.0 + c, 5.0 + c) for c in (0, 1))
    assert placed_rows([b, a]) == [(a, 0), (b, 1)]
    threads = [e["tid"] for e in to_chrome(Timeline("", (a, b)))["traceEvents"] if e["ph"] == "X"]
    assert threads == [4, ROWS_OF_AN_SM + 4]


@pytest.mark.parametrize("trace", [{}, {"otherData": {}, "traceEvents": []}, {"otherData": 3}])
def test_another_programs_trace_is_refused(trace):
    with pytest.raises(ValueError, match="not a trace that gcmoe wrote"):
        from_chrome(trace)


def test_rows_of_the_picture():
    assert rows_of(EXAMPLE) == [(0, 0, "dispatch"), (0, 9, "compute"), (1, 8, "compute")]


def test_writes_trace_and_picture(tmp_path):
    write(EXAMPLE, str(tmp_path / "a" / "trace.json"))
    assert from_chrome(to_chrome(EXAMPLE)) == read_chrome(tmp_path / "a" / "trace.json")
    write(EXAMPLE, str(tmp_path / "b" / "trace.png"))
    from matplotlib.image import imread

    pixels = imread(tmp_path / "b" / "trace.png")[..., :3]
    assert min(pixels.shape[:2]) > 100
    # Each kind of span has left its colour.
    for colour in ("#0072B2", "#E69F00", "#009E73", "#D55E00"):
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(pixels - wanted).max(axis=-1) < 0.01).sum() > 50, colour
