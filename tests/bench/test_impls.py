"""What the adapters do on the host: FP8 weights of the same values, sorting, summing."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from on_cpu import TINY

from bench import data
from bench.cases import Case
from bench.checks import OWN_ROUNDING, judge, make_references
from bench.data import case_inputs, share_weights
from bench.impls import IMPLS, gcmoe_layer, torch_unfused
from bench.impls.base import LayerWeights, missing_package
from bench.impls.fp8 import block_scaled, row_scaled
from bench.impls.humming_configs import swiglu_text
from bench.world import World
from gcmoe.numerics import dequantize_mxfp4, unpack

CASE = Case(TINY.name, 5)


@pytest.fixture
def experts(on_cpu):
    return unpack(share_weights(CASE, 0, 0, 0))


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_fp8_weights_have_the_values_of_the_mxfp4_ones(experts, name):
    codes, scale = getattr(experts, name), getattr(experts, f"{name}_scale")
    wanted = torch.stack([dequantize_mxfp4(c, s) for c, s in zip(codes, scale, strict=True)])
    blocks, block_scale = block_scaled(codes, scale)
    spread = block_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert torch.equal(blocks.float() * spread, wanted.float())
    rows, row_scale = row_scaled(codes, scale)
    assert torch.equal(rows.float() * row_scale[..., None], wanted.float())


def test_scales_too_far_apart_are_refused(experts):
    scale = experts.w2_scale.clone()
    scale[0, 0, 0] = 90
    with pytest.raises(ValueError, match="14 octaves"):
        block_scaled(experts.w2, scale)


def plain_grouped(rows, scale, weights, ends):
    """The grouped GEMM, expert by expert."""
    codes, row_scale = weights
    out = torch.full((len(rows), codes.shape[1]), float("nan"))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        part = rows[start:end].float() * scale[start:end]
        out[start:end] = part @ (codes[expert].float() * row_scale[expert][:, None]).T
        start = end
    return out.bfloat16()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_unfused_chain_computes_the_layer(on_cpu, monkeypatch, rank):
    """On two ranks the parts of both must add up; their exchange is played by hand."""
    monkeypatch.setattr(torch_unfused, "grouped", plain_grouped)
    case = Case(TINY.name, 5, ranks=1 + rank)
    impl = IMPLS["torch_unfused"]
    inputs = case_inputs(case, 2, 0, 0)
    total = [torch.zeros_like(one.y) for one in inputs]
    for owner in range(case.ranks):
        packed = [share_weights(case, 0, n, owner) for n in range(2)]
        weights = [impl.convert(case, LayerWeights(p, unpack(p))) for p in packed]
        world = World(0, 1)
        session = impl.open(case, "eager", weights, inputs, world)
        session._first = owner * case.local_experts
        session.clear()
        for n in range(2):
            session.layer(n)
            total[n] += session.result(n)
    references = make_references(
        case, inputs, lambda layer, owner: share_weights(case, 0, layer, owner)
    )
    verdict = judge(references, lambda n: total[n], OWN_ROUNDING)
    assert verdict["correct"], verdict
    total[1] += 0.5 * total[1].abs().mean()
    assert not judge(references, lambda n: total[n], OWN_ROUNDING)["correct"]


def test_sorting_puts_foreign_rows_last():
    ids = torch.tensor([[3, 9], [8, 2], [3, 11]], dtype=torch.int32)
    routing = torch_unfused.route(ids, 2, 8)
    assert routing.offsets.tolist() == [1, 3, 3, 3, 3, 3, 4, 5]
    assert routing.order.tolist() == [3, 0, 4, 2, 1, 5]
    assert routing.is_local.tolist() == [[True, True], [True, True], [True, False]]


@pytest.mark.parametrize("clamp", [None, 10.0])
def test_humming_gets_the_clamped_swiglu(clamp):
    """The C++ expression, read as Python."""
    text = re.sub(r"(?<=\d)f|__", "", swiglu_text(clamp))
    names = {"expf": math.exp, "fminf": min, "fmaxf": max}
    for a, b in ((0.5, -0.25), (12.0, -30.0), (-20.0, 11.0)):
        gate, up = (a, b) if clamp is None else (min(a, clamp), max(-clamp, min(b, clamp)))
        wanted = torch.nn.functional.silu(torch.tensor(gate)).item() * up
        assert eval(text, names | {"a": a, "b": b}) == pytest.approx(wanted, rel=1e-6)


def test_absent_packages_are_named():
    assert missing_package("no-such-package-at-all", "1.0") == (
        "no-such-package-at-all is not installed"
    )
    assert "is " in missing_package("pytest", "0.0")
    assert data.DEVICE == "cuda"


def test_compiling_ahead_takes_each_kernel_once_and_names_what_cannot_be(monkeypatch):
    taken, said = [], []

    def get_kernel(spec):
        taken.append(spec)
        return SimpleNamespace(from_cache=True)

    monkeypatch.setattr(gcmoe_layer, "get_kernel", get_kernel)
    cases = [Case("glm-5.2", t, 2) for t in (7, 8, 512)]
    count = gcmoe_layer.compile_kernels(
        cases, ("default", "no-prefetch", "capacity-64x"), trace=True, say=said.append
    )
    assert count == len(taken) == len(set(taken))
    assert {spec.trace for spec in taken} == {False, True}
    assert {spec.prefetch for spec in taken} == {False, True}
    assert [text for text in said if "max_tokens" in text and "T = 512" in text]
