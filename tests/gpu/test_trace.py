"""The records of a traced replay: every item once, every hand-off in order."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from helpers import CASES, layer_of, make_batch, run

from gcmoe.kernels.trace_words import DispatchTrace
from gcmoe.protocol import Role
from gcmoe.trace import bounds, lost_items, spans_of

pytestmark = pytest.mark.gpu

CASE = "flash-64-trace"
CONFIG = CASES[CASE].config


def test_a_traced_replay_shows_every_item_once_and_in_order() -> None:
    layer, _ = layer_of(CASE)
    op = layer.op
    batch = make_batch(CONFIG, 64, 155)
    run(layer, batch)
    records = {role: words.tolist() for role, words in op.trace_records().items()}
    zero, end = bounds(records)
    assert 0 < end - zero < 10_000_000
    assert lost_items(records) == 0
    spans = spans_of(op.plan.for_tokens(64), records, 0, zero)

    rows = Counter(batch.ids.flatten().tolist())
    blocks = sum(-(-n // op.plan.for_tokens(64).tiles.max_width) for n in rows.values())
    for name, tiles in (("W1", CONFIG.intermediate // 128), ("W2", CONFIG.hidden // 256)):
        items = Counter((s.detail["slot"], s.detail["tile"]) for s in spans if s.name == name)
        assert len(items) == blocks * tiles
        assert set(items.values()) == {1}
        of_tile = [s.detail["rows"] for s in spans if s.name == name and s.detail["tile"] == 0]
        assert sum(of_tile) == sum(rows.values())

    # A W2 item ends after all W1 items of its slot are published.
    ready: dict[int, float] = {}
    for span in (s for s in spans if s.name == "W1"):
        published = span.detail["published_us"]
        ready[span.detail["slot"]] = max(ready.get(span.detail["slot"], 0.0), published)
    early = [s for s in spans if s.name == "W2" and s.end < ready[s.detail["slot"]]]
    assert early == []

    # On one SM items follow each other, and the last sum of a CTA begins behind the last W2 item.
    for cta in range(len(records[Role.COMPUTE])):
        mine = [s for s in spans if s.role == "compute" and s.cta == cta]
        assert all(a.end <= b.start + 0.001 for a, b in pairwise(mine))
    last = max(s.end for s in spans if s.name == "W2")
    sums = [s for s in spans if s.name == "sum"]
    assert len(sums) == len(records[Role.FINALIZE])
    assert min(s.start for s in sums) >= last
    for words in records[Role.DISPATCH]:
        order = [words[w] for w in (DispatchTrace.STAGED, DispatchTrace.HEADERS)]
        assert order == sorted(order)
