"""The operator's own promises: arguments, statistics, life cycle."""

from __future__ import annotations

import pytest
import torch
from helpers import CASES, Batch, Problems, fresh_operator, layer_of, make_batch, run, weights_of

import gcmoe
from gcmoe.errors import OperatorClosed

pytestmark = pytest.mark.gpu

CASE = "top-8"
CONFIG = CASES[CASE].config


def test_ids_of_no_expert_are_masked_and_counted() -> None:
    batch = make_batch(CONFIG, 33, 160)
    e = CONFIG.num_experts
    too_large = {(0, 0): e, (1, 3): 2**31 - 1, (2, 1): e + 7, (5, 7): 1 << 20}
    negative = {(0, 1): -1, (8, 0): -(2**31)}
    masked = batch.ids.clone()
    for place, value in (too_large | negative).items():
        batch.ids[place] = value
        masked[place] = -1
    problems = Problems()
    with fresh_operator(CASE) as op:
        layer = op.bind(weights_of(CONFIG).packed)
        wanted = run(layer, Batch(batch.x, masked, batch.weights)).clone()
        if op.stats().bad_ids != 0:
            problems.add(f"bad_ids {op.stats().bad_ids} after negative ids only, wanted 0")
        y = run(layer, batch)
        problems.expect_equal("y with bad ids against y with -1", y, wanted)
        wide = batch.ids.to(torch.int64)
        wide[3, 0] = 1 << 40
        masked[3, 0] = -1
        wanted = run(layer, Batch(batch.x, masked, batch.weights)).clone()
        y = run(layer, Batch(batch.x, wide, batch.weights))
        problems.expect_equal("y with bad 64-bit ids", y, wanted)
        stats = op.stats()
        if stats.bad_ids != 2 * len(too_large) + 1:
            problems.add(f"bad_ids {stats.bad_ids}, wanted {2 * len(too_large) + 1}")
    problems.finish()


def test_stats_count_rows() -> None:
    batches = [make_batch(CONFIG, t, 170 + t, r) for t, r in ((64, "masked"), (7, "duplicates"))]
    total = torch.zeros(CONFIG.num_experts, dtype=torch.int64)
    with fresh_operator(CASE) as op:
        layer = op.bind(weights_of(CONFIG).packed)
        for _ in range(3):
            for batch in batches:
                run(layer, batch)
                ids = batch.ids.flatten().cpu().long()
                total += torch.bincount(ids[ids >= 0], minlength=CONFIG.num_experts)
        assert op.stats().rows.tolist() == total.tolist()
        op.reset()
        assert op.stats().rows.tolist() == [0] * CONFIG.num_experts
        assert op.stats().bad_ids == 0


def test_reset_keeps_results() -> None:
    batch = make_batch(CONFIG, 33, 180)
    with fresh_operator(CASE) as op:
        layer = op.bind(weights_of(CONFIG).packed)
        before = run(layer, batch).clone()
        op.reset()
        after = run(layer, batch)
        assert torch.equal(before.view(torch.int16), after.view(torch.int16))


def test_too_many_tokens() -> None:
    layer, _ = layer_of(CASE)
    batch = make_batch(CONFIG, CONFIG.max_tokens + 1, 190)
    with pytest.raises(ValueError, match=str(CONFIG.max_tokens)):
        layer(batch.x, batch.ids, batch.weights)


def test_wrong_arguments() -> None:
    layer, _ = layer_of(CASE)
    b = make_batch(CONFIG, 7, 191)
    with pytest.raises(TypeError, match="x has dtype"):
        layer(b.x.float(), b.ids, b.weights)
    with pytest.raises(TypeError, match="topk_ids has dtype"):
        layer(b.x, b.ids.to(torch.int16), b.weights)
    with pytest.raises(ValueError, match="topk_weights has shape"):
        layer(b.x, b.ids, b.weights[:, :1].contiguous())
    with pytest.raises(ValueError, match="topk_ids is on cpu"):
        layer(b.x, b.ids.cpu(), b.weights)
    with pytest.raises(ValueError, match="contiguous"):
        layer(b.x.t().contiguous().t(), b.ids, b.weights)
    y = layer(b.x, b.ids, b.weights)
    assert y.shape == b.x.shape
    assert y.dtype == torch.bfloat16


def test_close_is_final_and_may_be_repeated() -> None:
    batch = make_batch(CONFIG, 7, 200)
    case = CASES[CASE]
    op = gcmoe.MoE(case.config, **case.options())
    layer = op.bind(weights_of(CONFIG).packed)
    run(layer, batch)
    op.close()
    op.close()
    with pytest.raises(OperatorClosed):
        layer(batch.x, batch.ids, batch.weights)
    with pytest.raises(OperatorClosed):
        op.stats()
    with pytest.raises(OperatorClosed):
        op.bind(weights_of(CONFIG).packed)


def test_report_is_the_plan() -> None:
    layer, _ = layer_of("one-expert")
    op = layer.op
    assert op.plan.dispatch_sms == op.report.dispatch_sms == 24
    assert op.plan.compute_sms == op.report.compute_sms
    assert op.report.num_sms == op.report.dispatch_sms + op.report.compute_sms
