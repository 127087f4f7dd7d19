"""From the words that CTAs record to spans, and ``gcmoe trace`` on a trace that is there."""

from __future__ import annotations

import argparse

import pytest

from gcmoe import cli, trace
from gcmoe.config import MoEConfig
from gcmoe.kernels.records import Kind
from gcmoe.kernels.trace_words import (
    HEAD_WORDS,
    ITEM_WORDS,
    TRACE_ITEMS,
    TRACE_WORDS,
    ComputeTrace,
    DispatchTrace,
    FinalizeTrace,
    ItemTrace,
    item_word,
)
from gcmoe.models import share
from gcmoe.plan import make_plan
from gcmoe.protocol import Role
from gcmoe.runtime.group import RankGroup
from gcmoe.timeline import read_chrome

PLAN = make_plan(MoEConfig(512, 256, 8, 2, 8))
T0 = 1_000_000


def record(*pairs: tuple[int, int]) -> list[int]:
    """Words of a CTA; 7, a time long ago, where nothing is given."""
    words = [7] * TRACE_WORDS
    for word, value in pairs:
        words[word] = value
    return words


def timed(kind: type, sm: int, **times: int) -> list[int]:
    return record((0, sm), *((kind[name], T0 + time) for name, time in times.items()))


def compute(sm: int, items: list[tuple[Kind, int, int, int, int]], end: int) -> list[int]:
    """A compute CTA with items (kind, rows, start, fed, end)."""
    words = timed(ComputeTrace, sm, START=100, ROUTES=4_000, END=end)
    words[ComputeTrace.ITEMS] = len(items)
    for n, (kind, rows, start, fed, done) in enumerate(items[:TRACE_ITEMS]):
        words[item_word(n, ItemTrace.WHAT)] = int(kind) | rows << 8 | 5 << 24 | (n + 1) << 40
        for word, time in (("START", start), ("FED", fed), ("END", done), ("PUBLISHED", done + 9)):
            words[item_word(n, ItemTrace[word])] = T0 + time
    return words


def shifted(found: trace.Records, shift: int) -> trace.Records:
    """The same of a rank whose clock is ``shift`` ahead."""
    for words in (w for ctas in found.values() for w in ctas):
        for i, value in enumerate(words):
            if T0 <= value < T0 + 10**6:
                words[i] = value + shift
    return found


def records() -> trace.Records:
    """A rank's replay."""
    return {
        Role.DISPATCH: [
            timed(
                DispatchTrace, 3, START=0, STAGED=2_000, HEADERS=3_000, BINNED=4_000,
                FIRST_ROW=5_000, LAST_ROW=6_000, END=6_500,
            )
        ],
        Role.COMPUTE: [
            compute(
                8, [(Kind.W1, 9, 4_500, 5_500, 8_000), (Kind.W2, 9, 8_200, 8_100, 9_000)], 9_500
            ),
            compute(9, [], 4_600),
        ],
        Role.FINALIZE: [timed(FinalizeTrace, 8, START=10_000, ARRIVED=10_500, END=11_000)],
    }  # fmt: skip


def spans(found: trace.Records) -> list[tuple[str, int, float, float]]:
    return [(s.name, s.sm, s.start, s.end) for s in trace.spans_of(PLAN, found, 0, T0)]


def test_words_of_an_item_lie_behind_the_head():
    places = [item_word(n, word) for n in range(TRACE_ITEMS) for word in ItemTrace]
    assert places == list(range(HEAD_WORDS, TRACE_WORDS))
    assert len(ItemTrace) == ITEM_WORDS
    assert max(max(DispatchTrace), max(ComputeTrace), max(FinalizeTrace)) < HEAD_WORDS


def test_spans_of_a_replay():
    assert spans(records()) == [
        ("stage", 3, 0.0, 2.0),
        ("headers", 3, 2.0, 3.0),
        ("sort", 3, 3.0, 4.0),
        ("pull", 3, 4.0, 6.0),
        ("close", 3, 6.0, 6.5),
        ("routes", 8, 0.1, 4.0),
        ("wait", 8, 4.5, 5.5),
        ("W1", 8, 5.5, 8.0),
        ("W2", 8, 8.2, 9.0),
        ("routes", 9, 0.1, 4.0),
        ("arrivals", 8, 10.0, 10.5),
        ("sum", 8, 10.5, 11.0),
    ]
    (w1,) = [s for s in trace.spans_of(PLAN, records(), 0, T0) if s.name == "W1"]
    assert w1.detail == {
        "rows": 9, "width": 16, "tile": 5, "slot": 1, "item": 0, "published_us": 8.009
    }  # fmt: skip


def test_words_of_earlier_replays_are_no_spans():
    found = records()
    for word in (DispatchTrace.BINNED, DispatchTrace.LAST_ROW):
        found[Role.DISPATCH][0][word] = 7
    found[Role.COMPUTE][0][ComputeTrace.END] = 7
    names = [name for name, *_ in spans(found)]
    assert names == ["stage", "headers", "close", "routes", "routes", "arrivals", "sum"]


def test_items_beyond_the_record_are_counted():
    found = records()
    many = [(Kind.W1, 1, 4_500, 4_500, 4_600)] * (TRACE_ITEMS + 3)
    found[Role.COMPUTE].append(compute(10, many, 9_000))
    assert trace.lost_items(found) == 3
    assert len([s for s in spans(found) if s[1] == 10]) == 1 + TRACE_ITEMS
    assert trace.lost_items(records()) == 0


def test_clocks_of_ranks_are_aligned_where_all_headers_are_seen():
    ranks = [records(), shifted(records(), 40_000)]
    seen = [[trace.headers_seen(r)] * 3 for r in ranks]
    seen[1][0] += 5_000  # one odd replay changes nothing
    assert trace.clock_offsets(seen) == [0, 40_000]
    timeline = trace.timeline_of(PLAN, ranks, trace.clock_offsets(seen), "two", {})
    first, second = ([s for s in timeline.spans if s.rank == rank] for rank in (0, 1))
    assert [(s.name, s.start, s.end) for s in first] == [(s.name, s.start, s.end) for s in second]
    assert min(s.start for s in timeline.spans) == 0.0
    assert timeline.duration == 11.0


def test_command_draws_a_trace_again(tmp_path, capsys):
    timeline = trace.timeline_of(PLAN, [records()], [0], "the title", {"gpu": "none"})
    path = tmp_path / "trace.json"
    trace.write(timeline, str(path))
    png = tmp_path / "trace.png"
    assert cli.main(["trace", "--from", str(path), "--png", str(png)]) == 0
    out = capsys.readouterr().out
    assert "the title" in out
    assert "compute   W1 N=16        1     5.5         8.0     8.0     8.0" in out
    assert png.read_bytes().startswith(b"\x89PNG")
    assert read_chrome(path).facts == {"gpu": "none"}


def lasting(end: int, shift: int = 0) -> trace.Records:
    """A replay that ends at ``end``."""
    found = records()
    found[Role.FINALIZE][0][FinalizeTrace.END] = T0 + end
    return shifted(found, shift)


def test_the_replay_of_median_length_is_shown(monkeypatch):
    """Rank 1 is the slower one in the second replay, so that the third is the median."""
    ends = {0: [11_000, 12_000, 13_000], 1: [11_500, 19_000, 12_500]}
    replays = {rank: [lasting(end, 7_000 * rank) for end in ends[rank]] for rank in ends}
    monkeypatch.setattr(trace, "replay_records", lambda *given: (PLAN, replays[0]))
    monkeypatch.setattr(trace, "facts_of", lambda *given: {"gpu": "none", "replay": given[-1]})

    def gather(group, value):
        """What rank 1 would have sent for the same question."""
        if value == replays[0][2]:
            return [value, replays[1][2]]
        if value == [trace.headers_seen(r) for r in replays[0]]:
            return [value, [trace.headers_seen(r) for r in replays[1]]]
        return [value, [end - begin for begin, end in map(trace.bounds, replays[1])]]

    monkeypatch.setattr(RankGroup, "gather", gather)
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    ns = parser.parse_args(["--tokens", "8"])
    timeline = trace.trace_layer(share("deepseek-v4-flash", 8), ns, None, 0, 2)
    assert timeline is not None
    assert timeline.facts["replay"] == 2
    assert timeline.duration == 13.0
    assert timeline.ranks == [0, 1]
    stages = [s for s in timeline.spans if s.name == "stage"]
    assert [(s.rank, s.start, s.end) for s in stages] == [(0, 0.0, 2.0), (1, 0.0, 2.0)]
    assert "13.0 us from the first CTA's start" in timeline.title
    assert trace.trace_layer(share("deepseek-v4-flash", 8), ns, None, 1, 2) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "must be positive"),
        (["--tokens", "5000"], "tokens = 5000: at most 4096"),
        (["--ranks", "7"], "ranks = 7: must divide"),
    ],
)
def test_command_names_what_is_wrong(words, message, capsys):
    assert cli.main(["trace", *words]) == 2
    assert message in capsys.readouterr().out
