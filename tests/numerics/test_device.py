"""The same bits on the GPU as on the CPU: packing, quantisation and the oracle."""

from __future__ import annotations

import math

import pytest
import torch

from gcmoe.config import MoEConfig
from gcmoe.numerics import (
    ExpertWeights,
    decode_subblock,
    moe_reference,
    pack,
    quantize_e4m3,
    quantize_mxfp4,
    rebase_to_window,
    unpack,
)

pytestmark = pytest.mark.gpu

CONFIG = MoEConfig(hidden=512, intermediate=384, num_experts=3, top_k=2, max_tokens=64)


def weights() -> ExpertWeights:
    g = torch.Generator().manual_seed(0)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=g, dtype=torch.uint8)

    # 21 octaves of scales: exact, rescaled and (with the zeroed ones) free blocks.
    w = ExpertWeights(
        draw(256, 3, 768, 256),
        draw(21, 3, 768, 16) + 110,
        draw(256, 3, 512, 192),
        draw(21, 3, 512, 12) + 110,
    )
    w.w13.view(3, 768, 16, 16)[:, ::3, 5] &= 0x88
    w.w2[1, 9] = 0
    return w


def to_gpu(w: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(w.w13.cuda(), w.w13_scale.cuda(), w.w2.cuda(), w.w2_scale.cuda())


def test_pack_and_unpack(compile_only: bool) -> None:
    if compile_only:
        return
    w = weights()
    on_gpu = to_gpu(w)
    p, q = (pack(x.w13, x.w13_scale, x.w2, x.w2_scale, CONFIG) for x in (w, on_gpu))
    for name in ("w13", "w13_row_scale", "w2", "w2_row_scale"):
        assert torch.equal(getattr(p, name), getattr(q, name).cpu()), name
    assert p.num_rescaled_blocks == q.num_rescaled_blocks > 0
    assert p.max_rescale_error == q.max_rescale_error
    back = unpack(q)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert torch.equal(getattr(back, name), getattr(on_gpu, name)), name
    assert torch.equal(decode_subblock(q.w2).cpu(), decode_subblock(p.w2))


def test_quantise(compile_only: bool) -> None:
    if compile_only:
        return
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-(2**31), 2**31 - 1, (64, 1024), generator=g).int().view(torch.float32)
    x[0] = 0.0
    x[1] = 1e-40
    x[2, ::7] = math.nan
    for group in (32, 128):
        on_cpu, on_gpu = quantize_e4m3(x, group), quantize_e4m3(x.cuda(), group)
        assert torch.equal(on_cpu[0], on_gpu[0].cpu())
        assert torch.equal(on_cpu[1], on_gpu[1].cpu())
        if group == 32:
            again = zip(rebase_to_window(*on_cpu), rebase_to_window(*on_gpu), strict=True)
            assert all(torch.equal(a, b.cpu()) for a, b in again)
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    pairs = zip(quantize_mxfp4(finite), quantize_mxfp4(finite.cuda()), strict=True)
    assert all(torch.equal(a, b.cpu()) for a, b in pairs)


@pytest.mark.parametrize("recipe", ["sm90", "sm100"])
def test_oracle(recipe: str, compile_only: bool) -> None:
    if compile_only:
        return
    g = torch.Generator().manual_seed(2)
    x = torch.randn(16, 512, generator=g).bfloat16()
    ids = torch.randint(-1, 3, (16, 2), generator=g)
    topk_weights = torch.rand(16, 2, generator=g)
    w = weights()
    on_cpu = moe_reference(x, ids, topk_weights, w, CONFIG, recipe)
    on_gpu = moe_reference(x.cuda(), ids.cuda(), topk_weights.cuda(), to_gpu(w), CONFIG, recipe)
    assert torch.equal(on_cpu.xq_codes, on_gpu.xq_codes.cpu())
    # exp of the two math libraries may differ in its last fp64 bit, which may turn one rounding.
    torch.testing.assert_close(on_gpu.a.cpu(), on_cpu.a, rtol=2.0**-23, atol=0.0)
    assert torch.equal(on_cpu.a_exponents, on_gpu.a_exponents.cpu())
    assert (on_cpu.a_codes != on_gpu.a_codes.cpu()).sum() <= 1
