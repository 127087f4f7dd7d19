"""Many replays: changing inputs, poisoned data, small ring, counters that wrap, companions."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import (
    CASES,
    Batch,
    Problems,
    Weights,
    fresh_operator,
    layer_of,
    make_batch,
    reference,
    run,
    weights_of,
)
from stages import bases, check_bases, check_layer, expected_blocks, view
from torch import Tensor

from gcmoe.protocol import RoutesHeader

pytestmark = pytest.mark.gpu

REPLAYS = 200
WRAP = 1 << 32


def first_results(
    problems: Problems, layer: Any, batches: list[Batch], weights: Weights
) -> list[Tensor]:
    """y of each batch, checked against the oracle."""
    config = layer.op.config
    results = []
    for n, batch in enumerate(batches):
        y = run(layer, batch)
        trace = reference(batch, weights, config)
        what = f"input {n}, T = {batch.num_tokens}"
        check_layer(problems, what, layer.op, batch, y, trace, weights)
        results.append(y.clone())
    return results


def count_differences(y: Tensor, wanted: Tensor) -> Tensor:
    """Elements whose bits differ, on the GPU: asking for it does not wait."""
    return (y.view(torch.int16) != wanted.view(torch.int16)).sum()


def report(problems: Problems, what: str, order: list[int], counts: list[Tensor]) -> None:
    numbers = torch.stack(counts).tolist()
    bad = [(n, which, d) for n, (which, d) in enumerate(zip(order, numbers, strict=True)) if d]
    if bad:
        listed = ", ".join(f"{n} (input {which}): {d}" for n, which, d in bad[:8])
        problems.add(f"{what}: {len(bad)} of {len(order)} replays differ; elements: {listed}")


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        ("top-8", (64, 1, 33, 7, 0, 64)),
        ("flash-64", (64, 8, 33, 1, 7, 64)),
        ("odd-256", (256, 33, 1, 60, 130, 100, 0, 200)),  # every class of tiles
    ],
)
def test_many_replays_with_changing_inputs(case: str, tokens: tuple[int, ...]) -> None:
    layer, weights = layer_of(case)
    config = CASES[case].config
    batches = [make_batch(config, t, 20 + n) for n, t in enumerate(tokens)]
    problems = Problems()
    results = first_results(problems, layer, batches, weights)
    rng = random.Random(1)
    order = [rng.randrange(len(batches)) for _ in range(REPLAYS)]
    counts, counts_of_other = [], []
    # One set of buffers per T is overwritten in place, as a serving engine does it.
    buffers = {t: make_batch(config, t, 99) for t in set(tokens)}
    with fresh_operator(case) as other:
        second = other.bind(weights.packed)
        for n in order:
            batch = batches[n]
            into = buffers[batch.num_tokens]
            into.x.copy_(batch.x)
            into.ids.copy_(batch.ids)
            into.weights.copy_(batch.weights)
            y = layer(into.x, into.ids, into.weights)
            counts.append(count_differences(y, results[n]))
            y = second(batch.x, batch.ids, batch.weights)
            counts_of_other.append(count_differences(y, results[n]))
        layer.op.check(synchronize=True)
        other.check(synchronize=True)
        report(problems, "the same operator", order, counts)
        report(problems, "a second operator", order, counts_of_other)
        if other.stats().rows.tolist() != expected_rows(batches, order, config.num_experts):
            problems.add(f"stats: {other.stats().rows.tolist()}")
    problems.finish()


def expected_rows(batches: list[Batch], order: list[int], num_experts: int) -> list[int]:
    total = torch.zeros(num_experts, dtype=torch.int64)
    for n in order:
        ids = batches[n].ids.flatten().cpu().long()
        total += torch.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts)
    return total.tolist()


@pytest.mark.parametrize("case", ["top-8", "odd-33", "flash-64"])
def test_data_regions_hold_nothing_between_replays(case: str) -> None:
    layer, _ = layer_of(case)
    op, config = layer.op, CASES[case].config
    batches = [make_batch(config, t, 40 + t) for t in (config.max_tokens, 7, 1)]
    clean = [run(layer, batch).clone() for batch in batches]
    data = [region.name for region in op.plan.workspace.regions if not region.is_cell]
    problems = Problems()
    for n in range(12):
        pattern = (0xFF, 0x7F)[n % 2]
        for name in data:
            op.workspace_view(name).fill_(pattern)
        which = n % len(batches)
        y = run(layer, batches[which])
        what = f"replay {n} after {pattern:#x}, T = {batches[which].num_tokens}"
        problems.expect_equal(what, y, clean[which])
    problems.finish()


def test_a_small_call_is_that_of_an_operator_for_small_calls() -> None:
    """Bit for bit, between calls with the tiles of a full batch."""
    large, _ = layer_of("flash-256")
    small, _ = layer_of("flash-64")
    config = CASES["flash-256"].config
    assert len(large.op.plan.classes) == 3
    full = make_batch(config, 256, 57)
    wanted_of_full = run(large, full).clone()
    problems = Problems()
    for n, num_tokens in enumerate((64, 1, 8, 48)):
        batch = make_batch(config, num_tokens, 58 + n)
        # At 48 more rows of an expert than a block of a small call holds, not of a full batch.
        batch.ids[:, 0] = 3
        wanted = run(small, batch)
        problems.expect_equal(f"T = {num_tokens}", run(large, batch), wanted)
        routes = [int(view(layer.op, "routes", torch.int64, 1)[0]) for layer in (large, small)]
        blocks = [int(RoutesHeader.NUM_BLOCKS.get(word)) for word in routes]
        assert blocks[0] == blocks[1], f"T = {num_tokens}: {blocks} blocks"
        problems.expect_equal(f"T = 256, turn {n}", run(large, full), wanted_of_full)
    problems.finish()


@pytest.mark.parametrize(
    ("case", "whole"),
    [
        ("small-ring", "many-experts"),
        ("small-ring-jitter", "many-experts"),
        ("odd-ring", "odd-256"),  # blocks of other sizes from call to call
    ],
)
def test_smallest_ring(case: str, whole: str) -> None:
    """Two slots for many blocks: every slot is reused again and again inside a replay."""
    large, weights = layer_of(whole)
    small, _ = layer_of(case)
    config = CASES[case].config
    shape = small.op.plan.workspace
    assert shape.num_slots == 2
    hot = make_batch(config, 256, 50)
    hot.ids[:, 0] = 3
    batches = [
        make_batch(config, 256, 51, "single"),
        hot,
        make_batch(config, 256, 52),
        make_batch(config, 33, 53, "masked"),
        make_batch(config, 1, 54),
        make_batch(config, 0, 55),
    ]
    problems = Problems()
    most = 0
    for n in range(24):
        batch = batches[n % len(batches)]
        before = bases(small.op)
        blocks = expected_blocks(small.op, batch, before[2])
        most = max(most, len(blocks.entries))
        y = run(small, batch)
        what = f"replay {n}, T = {batch.num_tokens}, {len(blocks.entries)} blocks"
        found = Problems()
        check_bases(found, small.op, blocks, before)
        problems.lines += [f"{what}: {line}" for line in found.lines]
        y_large = run(large, batch)
        problems.expect_equal(f"{what}: small ring against large", y, y_large)
        if n < len(batches) and case != "small-ring-jitter":
            # The large ring still holds the call.
            trace = reference(batch, weights, config)
            check_layer(problems, what, large.op, batch, y_large, trace, weights)
    assert most >= 4 * shape.num_slots, f"only {most} blocks: the ring was not overrun"
    problems.finish()


def test_smallest_ring_cannot_be_serial() -> None:
    with pytest.raises(ValueError, match="serial"), fresh_operator("small-ring", serial=True):
        pass


@pytest.mark.parametrize("case", ["top-8", "small-ring"])
def test_counters_wrap(case: str) -> None:
    layer, weights = layer_of("many-experts" if case == "small-ring" else case)
    config = CASES[case].config
    batches = [make_batch(config, t, 60 + t) for t in (config.max_tokens, 7, 33)]
    clean = [run(layer, batch).clone() for batch in batches]
    problems = Problems()
    with fresh_operator(case, initial=(WRAP - 3, WRAP - 2, WRAP - 1000)) as op:
        near = op.bind(weights.packed)
        for n in range(12):
            batch = batches[n % 3]
            before = bases(op)
            blocks = expected_blocks(op, batch, before[2])
            y = run(near, batch)
            problems.expect_equal(f"replay {n}, bases {before}", y, clean[n % 3])
            found = Problems()
            check_bases(found, op, blocks, before)
            problems.lines += [f"replay {n}: {line}" for line in found.lines]
        generation, epoch, _, arrivals = bases(op)
        assert generation == 9
        assert epoch < WRAP // 2, f"epoch_base {epoch:#x} did not wrap"
        assert arrivals < WRAP // 2
    problems.finish()


def test_result_depends_on_no_companion() -> None:
    """Bits of a token: alone, in other orders, beside other tokens, at other capacities."""
    layer, _ = layer_of("flash-64")
    config = CASES["flash-64"].config
    batch = make_batch(config, 64, 70)
    whole = run(layer, batch).clone()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3)).cuda()
    picks = {
        "alone": torch.tensor([17]).cuda(),
        "seven": order[:7],
        "eight": order[8:16],
        "shuffled": order,
    }
    problems = Problems()
    for case in ("flash-8", "flash-64", "flash-256"):
        at_capacity, _ = layer_of(case)
        for name, tokens in picks.items():
            if len(tokens) <= CASES[case].config.max_tokens:
                y = run(at_capacity, batch.pick(tokens))
                problems.expect_equal(f"{case}, {name}", y, whole[tokens])
    # Beside 192 tokens that all choose the experts of the first: the widest tiles.
    wide, _ = layer_of("flash-256")
    crowd = make_batch(config, 192, 71)
    crowd.ids[:] = batch.ids[:1]
    both = Batch(
        torch.cat((crowd.x, batch.x)),
        torch.cat((crowd.ids, batch.ids)),
        torch.cat((crowd.weights, batch.weights)),
    )
    problems.expect_equal("in a crowd", run(wide, both)[192:], whole)
    problems.finish()


@pytest.mark.parametrize("case", ["top-8", "flash-64"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_stays_in_its_token(case: str, bad: float) -> None:
    layer, _ = layer_of(case)
    config = CASES[case].config
    batch = make_batch(config, 33, 80)
    clean = run(layer, batch).clone()
    batch.x[5, 77] = bad
    dirty = run(layer, batch)
    others = torch.arange(33, device=dirty.device) != 5
    problems = Problems()
    problems.expect_equal("other tokens", dirty[others], clean[others])
    if not bool(dirty[5].isnan().all()):
        finite = int((~dirty[5].isnan()).sum())
        problems.add(f"token 5: {finite} of {config.hidden} columns are not NaN")
    problems.finish()


def test_two_geometries_take_turns() -> None:
    """Two operators of different shape in one process, on one stream, without a wait between."""
    one, _ = layer_of("top-8")
    two, _ = layer_of("odd-33")
    a, b = (make_batch(layer.op.config, 33, 90) for layer in (one, two))
    wanted_a, wanted_b = run(one, a).clone(), run(two, b).clone()
    results = []
    for _ in range(20):
        results.append((one(a.x, a.ids, a.weights), two(b.x, b.ids, b.weights)))
    one.op.check(synchronize=True)
    two.op.check(synchronize=True)
    problems = Problems()
    for n, (y_a, y_b) in enumerate(results):
        problems.expect_equal(f"first, round {n}", y_a, wanted_a)
        problems.expect_equal(f"second, round {n}", y_b, wanted_b)
    problems.finish()


def test_layers_share_an_operator() -> None:
    """Weights of one layer never reach another."""
    _, weights = layer_of("top-8")
    config = CASES["top-8"].config
    other = weights_of(config, 4, 2)
    batch = make_batch(config, 64, 95)
    problems = Problems()
    with fresh_operator("top-8") as op:
        layers = [op.bind(weights.packed), op.bind(other.packed)]
        again = [run(layers[n % 2], batch).clone() for n in range(6)]
        for n in range(2, 6):
            problems.expect_equal(f"call {n}", again[n], again[n - 2])
        for n, own in enumerate((weights, other)):
            # The call that the workspace holds stands for the ones before.
            y = run(layers[n], batch)
            problems.expect_equal(f"layer {n} once more", y, again[n])
            trace = reference(batch, own, config)
            check_layer(problems, f"layer {n}", op, batch, y, trace, own)
    problems.finish()
