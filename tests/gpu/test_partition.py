"""Where CTAs run, that dispatch and compute overlap, what it is worth."""

from __future__ import annotations

import statistics

import pytest
import torch
from helpers import (
    CASES,
    capture,
    fresh_operator,
    layer_of,
    make_batch,
    operator_of,
    replay_times,
    run,
    weights_of,
)

from gcmoe.kernels.trace_words import ComputeTrace
from gcmoe.protocol import Role

pytestmark = pytest.mark.gpu

LAYERS = 8
REPLAYS = 21
# Words of a trace record.
SM, START = 0, 1
DISPATCH_LAST_ROW = 6
DISPATCH_END = 7
COMPUTE_FIRST_BLOCK = 3
STAMPS = {
    Role.DISPATCH: {
        "staged": 2,
        "headers": 3,
        "binned": 4,
        "row loaded": 8,
        "row stored": 9,
        "first row published": 5,
        "last row": DISPATCH_LAST_ROW,
    },
    Role.COMPUTE: {"routes seen": 2, "first block full": COMPUTE_FIRST_BLOCK},
}
"""In the order in which a CTA passes them."""


def sms(records: dict[Role, torch.Tensor], role: Role, first: int = 0, count: int = 999) -> set:
    """SMs of the CTAs ``first`` to ``first + count`` of a role."""
    return set(records[role][first : first + count, SM].tolist())


def test_dispatch_has_its_sms_before_compute_gets_any() -> None:
    """In every replay; compute comes to the SMs of dispatch when that has left them."""
    layer, _ = layer_of("flash-64-trace")
    op = layer.op
    batch = make_batch(CASES["flash-64-trace"].config, 64, 150)
    run(layer, batch)
    y = torch.empty_like(batch.x)
    graph = capture(lambda: layer(batch.x, batch.ids, batch.weights, out=y))
    print(op.report.describe())
    for n in range(200):
        if n % 2:
            graph.replay()
        else:
            layer(batch.x, batch.ids, batch.weights, out=y)
        op.check(synchronize=True)
        records = op.trace_records()
        dispatch, compute = records[Role.DISPATCH], records[Role.COMPUTE]
        ended = dict(zip(dispatch[:, SM].tolist(), dispatch[:, DISPATCH_END].tolist(), strict=True))
        assert len(ended) == op.plan.dispatch_sms, sorted(ended)
        assert len(compute) == len(sms(records, Role.COMPUTE)) == 132
        late = [cta for cta in compute.tolist() if cta[SM] in ended]
        assert len(late) == op.plan.late_ctas == op.plan.dispatch_sms
        assert all(cta[START] >= ended[cta[SM]] for cta in late)
        assert int(compute[:, START].min()) >= int(dispatch[:, START].min())


def test_in_green_contexts_every_cta_stays_in_its_partition() -> None:
    config = CASES["flash-64-trace"].config
    batch = make_batch(config, 64, 150)
    y = torch.empty_like(batch.x)
    with fresh_operator("flash-64-trace", green_contexts=True) as op:
        layer = op.bind(weights_of(config).packed)
        run(layer, batch)
        eager = op.trace_records()
        graph = capture(lambda: layer(batch.x, batch.ids, batch.weights, out=y))
        print(op.report.describe())
        for n in range(5):
            graph.replay()
            op.check(synchronize=True)
            records = op.trace_records()
            dispatch, split = sms(records, Role.DISPATCH), op.plan.compute_sms
            compute = sms(records, Role.COMPUTE, 0, split)
            late = sms(records, Role.COMPUTE, split)
            finalize = sms(records, Role.FINALIZE)
            assert len(dispatch) == op.plan.dispatch_sms == op.report.dispatch_sms, sorted(dispatch)
            assert len(compute) == op.plan.compute_sms == op.report.compute_sms, sorted(compute)
            assert not dispatch & compute, f"both roles on SMs {sorted(dispatch & compute)}"
            assert finalize <= compute, f"finalize on SMs {sorted(finalize - compute)}"
            assert len(records[Role.COMPUTE]) == split + op.plan.late_ctas == 132
            assert late == dispatch, f"late compute on SMs {sorted(late)}"
            assert int(records[Role.COMPUTE][split:, START].min()) >= int(
                records[Role.DISPATCH][:, DISPATCH_END].max()
            )
            assert dispatch == sms(eager, Role.DISPATCH), f"replay {n}: other SMs than eager"
            assert compute == sms(eager, Role.COMPUTE, 0, split), f"replay {n}: other SMs"
        del graph


def test_late_compute_takes_items() -> None:
    config = CASES["flash-64-trace"].config
    batch = make_batch(config, 64, 153)
    layer, _ = layer_of("flash-64-trace")
    op = layer.op
    run(layer, batch)
    records = op.trace_records()
    dispatch = sms(records, Role.DISPATCH)
    late = [cta for cta in records[Role.COMPUTE].tolist() if cta[SM] in dispatch]
    assert sum(cta[ComputeTrace.ITEMS] for cta in late) > 0


@pytest.mark.parametrize(
    "options", [{"late_compute": False}, {"green_contexts": True}, {"serial": True}], ids=str
)
def test_where_kernels_run_changes_no_bit(options: dict) -> None:
    config = CASES["flash-64"].config
    batch = make_batch(config, 64, 153)
    layer, weights = layer_of("flash-64")
    wanted = run(layer, batch)
    with fresh_operator("flash-64", **options) as other:
        assert bool(other.plan.late_ctas) == options.get("late_compute", True)
        y = run(other.bind(weights.packed), batch)
        assert torch.equal(y.view(torch.int16), wanted.view(torch.int16))


def describe_stamps(records: dict[Role, torch.Tensor]) -> str:
    """Microseconds from the first CTA's start, of the first and of the last CTA."""
    start = min(int(records[role][:, START].min()) for role in STAMPS)
    lines = []
    for role, stamps in STAMPS.items():
        words = records[role]
        parts = []
        for name, word in stamps.items():
            # A CTA that did not pass a point in this replay keeps an older time.
            times = words[:, word][words[:, word] > words[:, START]]
            if len(times):
                first, last = (int(t) - start for t in (times.min(), times.max()))
                parts.append(f"{name} {first / 1000:.1f} to {last / 1000:.1f}")
            else:
                parts.append(f"{name} never")
        lines.append(f"    {role.name.lower()}: " + ", ".join(parts))
    return "\n".join(lines)


def test_compute_starts_before_dispatch_ends() -> None:
    layer, _ = layer_of("flash-64-trace")
    op = layer.op
    shape = op.plan.workspace
    assert shape.num_slots >= shape.max_blocks
    batch = make_batch(CASES["flash-64-trace"].config, 64, 151)
    run(layer, batch)
    y = torch.empty_like(batch.x)
    graph = capture(lambda: layer(batch.x, batch.ids, batch.weights, out=y))
    leads = []
    for _ in range(20):
        graph.replay()
        op.check(synchronize=True)
        records = op.trace_records()
        dispatch, compute = records[Role.DISPATCH], records[Role.COMPUTE]
        # A CTA without a W1 item in this replay keeps an older time.
        first = compute[:, COMPUTE_FIRST_BLOCK]
        first_block = int(first[first > compute[:, START]].min())
        last_row = int(dispatch[:, DISPATCH_LAST_ROW].max())
        leads.append((last_row - first_block) / 1000)
    print(
        f"compute sees its first block {statistics.median(leads):.1f} us before the last row "
        f"({min(leads):.1f} to {max(leads):.1f}); last replay, us after the start, first to last "
        f"CTA:\n{describe_stamps(records)}"
    )
    assert sum(lead > 0 for lead in leads) >= 15, leads


def test_overlap_beats_serial() -> None:
    config = CASES["flash-64"].config
    batch = make_batch(config, 64, 152)
    y = torch.empty_like(batch.x)
    graphs, results = [], []
    for serial in (False, True):
        layer, _ = layer_of("flash-64", serial=serial)
        results.append(run(layer, batch).clone())

        def call(layer: object = layer) -> None:
            for _ in range(LAYERS):
                layer(batch.x, batch.ids, batch.weights, out=y)  # type: ignore[operator]

        graphs.append(capture(call))
    times = replay_times(graphs, REPLAYS)
    for serial in (False, True):
        operator_of("flash-64", serial).check(synchronize=True)
    overlapped, in_turn = (statistics.median(t) / LAYERS for t in times)
    print(f"a layer takes {overlapped:.1f} us overlapped, {in_turn:.1f} us in turn")
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    assert overlapped < in_turn
