"""The whole layer against the oracle: shapes, token counts, routings; small layers stage by
stage."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    CASES,
    ROUTINGS,
    SMALL_CASES,
    Problems,
    layer_of,
    make_batch,
    reference,
    run,
)
from stages import bases, check_layer, check_stages

from gcmoe.config import MoEConfig
from gcmoe.numerics import ExpertWeights, compare, moe_reference, moe_unquantized

pytestmark = pytest.mark.gpu

SHARE_TOKENS = {
    "flash-8": (0, 1, 7, 8),
    "flash-64": (0, 1, 33, 64),
    "flash-128": (43, 128),
    "flash-256": (8, 64, 256),
    "flash41-64": (1, 7, 64),
    "flash41-256": (33, 256),
}
SHARE_ROUTINGS = {
    "flash-64": (
        ("single", 64),
        ("last", 8),
        ("masked", 33),
        ("nothing", 7),
        ("duplicates", 33),
        ("weights", 64),
        ("int64", 8),
    ),
    "flash-256": (("single", 256), ("masked", 64)),
    "flash41-64": (("single", 33), ("masked", 64), ("weights", 8), ("nothing", 1)),
}


@pytest.mark.parametrize("case", SHARE_TOKENS)
def test_share(case: str) -> None:
    layer, weights = layer_of(case)
    problems = Problems()
    for num_tokens in SHARE_TOKENS[case]:
        batch = make_batch(CASES[case].config, num_tokens)
        y = run(layer, batch)
        trace = reference(batch, weights, CASES[case].config)
        what = f"{case} T = {num_tokens}"
        check_layer(problems, what, layer.op, batch, y, trace, weights)
    problems.finish()


@pytest.mark.parametrize("case", SHARE_ROUTINGS)
def test_share_routings(case: str) -> None:
    layer, weights = layer_of(case)
    problems = Problems()
    for routing, num_tokens in SHARE_ROUTINGS[case]:
        batch = make_batch(CASES[case].config, num_tokens, 3, routing)
        y = run(layer, batch)
        trace = reference(batch, weights, CASES[case].config)
        what = f"{case} {routing} T = {num_tokens}"
        check_layer(problems, what, layer.op, batch, y, trace, weights)
        unused = ~trace.valid.any(dim=1)
        problems.expect_equal(
            f"{what}: tokens without an expert", y[unused], torch.zeros_like(y[unused])
        )
    problems.finish()


@pytest.mark.parametrize("case", SMALL_CASES)
def test_small_layers_stage_by_stage(case: str) -> None:
    layer, weights = layer_of(case)
    op, config = layer.op, CASES[case].config
    most = config.max_tokens
    calls = [("distinct", t) for t in (0, 1, 7, 8, 33, 64, 256) if t <= most]
    calls += [(routing, t) for routing in ROUTINGS[1:] for t in (7, most)]
    problems = Problems()
    for seed, (routing, num_tokens) in enumerate(calls):
        what = f"{case} {routing} T = {num_tokens}"
        batch = make_batch(config, num_tokens, seed, routing)
        found = Problems()
        before = bases(op)
        y = run(layer, batch)
        trace = reference(batch, weights, config)
        check_layer(found, what, op, batch, y, trace, weights)
        summary = check_stages(found, op, batch, y, trace, weights, before)
        print(f"    {summary}")
        for line in found.lines:
            problems.add(line if line.startswith(what) else f"{what}: {line}")
        if len(problems.lines) > 30:
            break
    problems.finish()


@pytest.mark.parametrize("case", ["flash-64", "flash41-64"])
def test_quality_against_unquantised_activations(case: str) -> None:
    layer, weights = layer_of(case)
    config = CASES[case].config
    batch = make_batch(config, 64, 5)
    y = run(layer, batch)
    plain = moe_unquantized(batch.x, batch.ids, batch.weights, weights.experts, config)
    found = compare(y, plain)
    print(f"{case}: cosine {found.cosine:.5f}, relative L2 {found.relative_l2:.5f} to BF16")
    assert found.cosine >= 0.97


def test_oracle_is_the_same_on_gpu_and_cpu() -> None:
    """At the width of a real model, so that the GPU's oracle can stand for the CPU's."""
    config = MoEConfig(4096, 2048, 2, 2, 8, 10.0)
    g = torch.Generator().manual_seed(7)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g, dtype=torch.uint8)

    w = ExpertWeights(
        draw(256, 2, 4096, 2048),
        draw(13, 2, 4096, 128) + 108,
        draw(256, 2, 4096, 1024),
        draw(13, 2, 4096, 64) + 108,
    )
    x = torch.randn(4, 4096, generator=g).bfloat16()
    ids = torch.tensor([[0, 1], [1, -1], [0, 0], [1, 0]])
    topk_weights = torch.rand(4, 2, generator=g)
    on_cpu = moe_reference(x, ids, topk_weights, w, config)
    moved = ExpertWeights(w.w13.cuda(), w.w13_scale.cuda(), w.w2.cuda(), w.w2_scale.cuda())
    on_gpu = moe_reference(x.cuda(), ids.cuda(), topk_weights.cuda(), moved, config)
    assert torch.equal(on_cpu.xq_codes, on_gpu.xq_codes.cpu())
    assert torch.equal(on_cpu.xq_exponents, on_gpu.xq_exponents.cpu())
    # exp of the two math libraries may differ in its last fp64 bit, which may turn one rounding.
    torch.testing.assert_close(on_gpu.a.cpu(), on_cpu.a, rtol=2.0**-23, atol=0.0)
    assert torch.equal(on_cpu.a_exponents, on_gpu.a_exponents.cpu())
    moved_codes = int((on_cpu.a_codes != on_gpu.a_codes.cpu()).sum())
    assert moved_codes <= 2
    if moved_codes == 0:
        assert torch.equal(on_cpu.combine.view(torch.int16), on_gpu.combine.cpu().view(torch.int16))
        assert torch.equal(on_cpu.y.view(torch.int16), on_gpu.y.cpu().view(torch.int16))
