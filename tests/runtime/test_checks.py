"""What a call and ``bind`` refuse: tensors that do not fit, by name."""

import re
from dataclasses import replace

import pytest
import torch
from small_layer import H, K, T, inputs, weights

from gcmoe.config import MoEConfig
from gcmoe.numerics import packed_layout
from gcmoe.plan import make_plan

X, IDS, W = inputs()
BAD_CALLS = {
    "x has dtype torch.float32, must be torch.bfloat16": (X.float(), IDS, W),
    "x must be a tensor, got list": ([1], IDS, W),
    "x has shape [5, 128], must be [T, 256]": (X[:, :128], IDS, W),
    "x has shape [1, 5, 256], must be [T, 256]": (X[None], IDS, W),
    "x has 17 tokens, at most max_tokens = 16": inputs(17),
    "x has strides (1, 5), must be contiguous": (X.new_zeros(H, T).t(), IDS, W),
    "topk_ids has dtype torch.int16, must be torch.int32 or torch.int64": (X, IDS.short(), W),
    "topk_ids must be a tensor, got NoneType": (X, None, W),
    "topk_ids has shape [4, 2], must be [5, 2]": (X, IDS[:4], W),
    "topk_ids has shape [5, 1], must be [5, 2]": (X, IDS[:, :1], W),
    "topk_weights has dtype torch.float64, must be torch.float32": (X, IDS, W.double()),
    "topk_weights has strides (1, 5), must be contiguous": (X, IDS, W.new_zeros(K, T).t()),
    "not a multiple of 16": (X.new_zeros(T * H + 1)[1:].view(T, H), IDS, W),
    "out has shape [4, 256], must be [5, 256]": (X, IDS, W, X[:4]),
    "out has dtype torch.float32, must be torch.bfloat16": (X, IDS, W, X.float()),
    "out must be a tensor, got list": (X, IDS, W, [1]),
    "out must be a tensor, got str": (X, IDS, W, "y"),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_arguments_are_named(op, message, standin):
    layer = op.bind(weights())
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        layer(*BAD_CALLS[message])
    assert "cuGraphLaunch" not in standin.names()


def test_types_of_bad_arguments(op):
    layer = op.bind(weights())
    with pytest.raises(TypeError, match="out must be a tensor"):
        layer(X, IDS, W, out=[1])
    with pytest.raises(ValueError, match="out has shape"):
        layer(X, IDS, W, out=X[:4])


def test_out_may_share_memory_with_x_only(op):
    layer = op.bind(weights())
    room = torch.zeros(T * H * 2 + 512, dtype=torch.uint8)
    room = room[-room.data_ptr() % 16 :][: T * H * 2 + 256]
    out = room[: T * H * 2].view(torch.bfloat16).view(T, H)
    for offset in (0, 160, T * H * 2 - 16):
        part = room[offset : offset + T * K * 8].view(torch.int64).view(T, K)
        with pytest.raises(ValueError, match="out overlaps topk_ids"):
            layer(X, part, W, out=out)
        part = room[offset : offset + T * K * 4].view(torch.float32).view(T, K)
        with pytest.raises(ValueError, match="out overlaps topk_weights"):
            layer(X, IDS, part, out=out)
    beside = room[T * H * 2 :][: T * K * 8].view(torch.int64).view(T, K)
    assert layer(X, beside, W, out=out) is out
    assert layer(out, IDS, W, out=out) is out


def bad_weights():
    """(message, field, its bad value) for every field that kernels read."""
    good = weights()
    for name in ("w13", "w13_row_scale", "w2", "w2_row_scale"):
        tensor = getattr(good, name)
        other = torch.float16 if tensor.dtype == torch.float32 else torch.int8
        shape = f"must be {list(tensor.shape)}"
        yield f"packed.{name} has dtype {other}, must be {tensor.dtype}", name, tensor.to(other)
        longer = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 16))
        yield f"packed.{name} has shape {list(longer.shape)}, {shape}", name, longer
        yield f"packed.{name} has shape [{tensor.numel()}], {shape}", name, tensor.flatten()
        yield f"packed.{name} must be a tensor, got NoneType", name, None
        yield f"packed.{name} is on meta, must be on cpu", name, tensor.to("meta")
        strided = tensor.repeat_interleave(2, -1)[..., ::2]
        yield f"packed.{name} must be contiguous", name, strided
    yield "packed.arch is 'sm100', must be 'sm90'", "arch", "sm100"


@pytest.mark.parametrize(("message", "field", "value"), list(bad_weights()))
def test_bad_weights_are_named(op, message, field, value):
    kind = TypeError if value is None else ValueError
    with pytest.raises(kind, match=re.escape(message)):
        op.bind(replace(weights(), **{field: value}))
    assert op._layers == []


def test_weights_of_another_layer_are_named(op):
    other = MoEConfig(256, 256, 8, 2, 16)
    with pytest.raises(ValueError, match=re.escape("(EL, H, I) = (8, 256, 256), this layer (8, 2")):
        op.bind(weights(other))
    with pytest.raises(TypeError, match="must be PackedWeights"):
        op.bind(torch.zeros(1))


@pytest.mark.parametrize("shape", [(256, 128, 8), (512, 384, 6), (4096, 2048, 2)])
def test_the_table_of_weights_is_what_pack_makes(shape):
    h, i, e = shape
    config = MoEConfig(h, i, e, 2, 16)
    packed = weights(config)
    for name, wanted in packed_layout(e, h, i).items():
        tensor = getattr(packed, name)
        assert (tensor.dtype, tuple(tensor.shape)) == wanted, name
    assert packed.w13.shape[2] == make_plan(config, 1).workspace.num_windows
