"""Packing for Hopper: every bit at its documented place, exact both ways, honest about errors."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoints import random_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.errors import WeightFormatError
from gcmoe.numerics import (
    DECODE_LUT,
    ExpertWeights,
    PackedWeights,
    decode_e4m3,
    decode_subblock,
    decode_words,
    dequantize_mxfp4,
    pack,
    permute_window,
    quantize_e4m3,
    swizzle128,
    unpack,
    unpermute_window,
    unswizzle128,
    w13_row_order,
)
from gcmoe.numerics import packing_sm90 as packing_module
from gcmoe.numerics.formats import E2M1_MAGNITUDES, split_nibbles

few = settings(max_examples=20, deadline=None, derandomize=True)


def config(h: int = 256, i: int = 256, e: int = 8) -> MoEConfig:
    return MoEConfig(hidden=h, intermediate=i, num_experts=e, top_k=2, max_tokens=16)


def do_pack(w: ExpertWeights, cfg: MoEConfig, **options: object) -> PackedWeights:
    return pack(w.w13, w.w13_scale, w.w2, w.w2_scale, cfg, **options)  # type: ignore[arg-type]


def same(a: ExpertWeights, b: ExpertWeights) -> bool:
    names = ("w13", "w13_scale", "w2", "w2_scale")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


def decoded(blocks: Tensor, row_scale: Tensor) -> Tensor:
    """fp64 [EL, rows, K] of packed blocks, rows in packed order."""
    codes = decode_subblock(blocks)  # [EL, tile, kb, s, 64, 128]
    values = decode_e4m3(codes).double().permute(0, 1, 3, 4, 2, 5)
    rows = values.reshape(blocks.shape[0], blocks.shape[1] * 256, -1)
    return rows * row_scale.double().reshape(blocks.shape[0], -1, 1)


def dense(codes: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mxfp4(codes, scale).double()


# ---- layouts ------------------------------------------------------------------------------


def test_permute_window_formula() -> None:
    x = torch.arange(3 * 256).view(3, 256)
    y = permute_window(x)
    for p in range(256):
        window, r = divmod(p, 128)
        i, q, t, b = r // 32, r // 16 % 2, r // 4 % 4, r % 4
        assert torch.equal(y[:, p], x[:, 128 * window + 32 * t + 8 * i + 4 * q + b])
    assert torch.equal(unpermute_window(y), x)
    with pytest.raises(ValueError, match="128"):
        permute_window(x[:, :96])


def test_swizzle() -> None:
    rows = torch.randint(0, 256, (2, 11, 128), dtype=torch.uint8)
    out = swizzle128(rows)
    for n in range(11):
        for c in range(8):
            at = 16 * (c ^ (n % 8))
            assert torch.equal(out[:, n, at : at + 16], rows[:, n, 16 * c : 16 * c + 16])
    assert torch.equal(unswizzle128(out), rows)


def test_decode_lut_is_exact() -> None:
    for index in range(15):
        low, high = DECODE_LUT[index]
        codes = list(low.to_bytes(4, "little") + high.to_bytes(4, "little"))
        values = decode_e4m3(torch.tensor(codes, dtype=torch.uint8))
        assert values.tolist() == [m * 2.0 ** (index - 8) for m in E2M1_MAGNITUDES]
    assert DECODE_LUT[0] == (0x03020100, 0x0C080604)
    assert DECODE_LUT[2] == (0x0C080400, 0x1C181410)
    assert DECODE_LUT[15] == (0x7F7F7F7F, 0x7F7F7F7F)


@few
@given(word=st.integers(0, 2**32 - 1), index=st.integers(0, 14))
def test_decode_words_formula(word: int, index: int) -> None:
    signed = word - (1 << 32) if word >> 31 else word
    first, second = decode_words(
        torch.tensor([signed], dtype=torch.int32), torch.tensor([index], dtype=torch.uint8)
    )
    values = decode_e4m3(torch.stack((first, second), -1).view(torch.uint8)).flatten().tolist()
    for n in range(8):
        sign_bit = 8 * n + 7 if n < 4 else 8 * (n - 4) + 3
        value = E2M1_MAGNITUDES[(word >> (4 * n)) & 7] * 2.0 ** (index - 8)
        assert values[n] == (-value if (word >> sign_bit) & 1 else value)
        assert math.copysign(1, values[n]) == (-1 if (word >> sign_bit) & 1 else 1)


def test_w13_row_order_formula() -> None:
    order = w13_row_order(384).tolist()
    assert sorted(order) == list(range(768))
    for mt in range(3):
        for s in range(4):
            for w in range(4):
                for g in range(8):
                    row = 256 * mt + 64 * s + 16 * w + g
                    f = mt * 128 + 32 * ((w % 2) * 2 + g // 4) + 8 * s + 4 * (w // 2) + g % 4
                    assert order[row] == f
                    assert order[row + 8] == 384 + f


# ---- packed bytes -------------------------------------------------------------------------


def test_packed_bits_by_the_formula() -> None:
    """Scalar re-computation of sampled words and scale bytes, straight from the layout's text."""
    cfg = config(512, 384)
    w = random_weights(cfg, 2, seed=1)
    p = do_pack(w, cfg)
    order = w13_row_order(384).tolist()
    g = torch.Generator().manual_seed(2)
    for codes, scale, blocks, rows in (
        (w.w13, w.w13_scale, p.w13, order),
        (w.w2, w.w2_scale, p.w2, list(range(512))),
    ):
        nibbles = split_nibbles(codes)
        num_kb = nibbles.shape[2] // 128
        for _ in range(200):
            pick = torch.randint(0, 1 << 30, (8,), generator=g).tolist()
            e, mt, kb = pick[0] % 2, pick[1] % blocks.shape[1], pick[2] % num_kb
            s, h, thread, i = pick[3] % 4, pick[4] % 2, pick[5] % 128, pick[6] % 4
            warp, lane = divmod(thread, 32)
            group, t = divmod(lane, 4)
            row = rows[256 * mt + 64 * s + 16 * warp + group + 8 * h]
            k = 128 * kb + 32 * t + 8 * i
            values = nibbles[e, row, k : k + 8].tolist()
            expected = 0
            for j in range(4):
                expected |= (values[j] & 7) << (4 * j) | (values[4 + j] & 7) << (4 * (4 + j))
                expected |= (values[j] >> 3) << (8 * j + 7) | (values[4 + j] >> 3) << (8 * j + 3)
            at = 4 * ((h * 128 + thread) * 4 + i)
            block = blocks[e, mt, kb, s]
            assert int.from_bytes(bytes(block[at : at + 4].tolist()), "little") == expected
            index = int(block[4096 + (warp * 32 + lane) * 2 + h])
            assert index == 14 + int(scale[e, row, k // 32]) - int(scale[e, row].max())


@pytest.mark.parametrize(("h", "i", "experts"), [(256, 128, 1), (256, 256, 3), (512, 384, 2)])
def test_decode_equals_dequantised(h: int, i: int, experts: int) -> None:
    cfg = config(h, i)
    w = random_weights(cfg, experts, seed=h + i)
    p = do_pack(w, cfg)
    assert (p.num_experts, p.hidden, p.intermediate) == (experts, h, i)
    assert p.w13.shape == (experts, i // 128, h // 128, 4, 4352)
    assert p.w2.shape == (experts, h // 256, 2 * math.ceil(i / 256), 4, 4352)
    assert p.w13.is_contiguous()
    assert p.w2.is_contiguous()
    assert p.num_rescaled_blocks == 0
    assert p.max_rescale_error == 0.0
    w13 = decoded(p.w13, p.w13_row_scale)
    assert torch.equal(w13, dense(w.w13, w.w13_scale)[:, w13_row_order(i)])
    w2 = decoded(p.w2, p.w2_row_scale)
    assert torch.equal(w2[..., :i], dense(w.w2, w.w2_scale))
    assert not w2[..., i:].any()
    if i % 256:
        assert not p.w2[:, :, -1, :, :4096].any()
        assert (p.w2[:, :, -1, :, 4096:] == 8).all()
    assert same(unpack(p), w)


def test_row_scale_at_the_ends_of_the_byte_range() -> None:
    cfg = config()
    for low, high in ((0, 14), (240, 254)):
        w = random_weights(cfg, 1, low=low, high=high)
        p = do_pack(w, cfg)
        base = w.w13_scale.amax(-1)[:, w13_row_order(256)].double()
        assert torch.equal(p.w13_row_scale.double().flatten(1), torch.exp2(base - 133))
        assert (p.w13_row_scale > 0).all()
        assert same(unpack(p), w)
        if high < 250:  # beyond, fp32 cannot hold the dense value
            expected = dense(w.w2, w.w2_scale)
            assert torch.equal(decoded(p.w2, p.w2_row_scale), expected)


def one_row(
    relative: list[int], codes: list[list[int]], base: int = 127
) -> tuple[ExpertWeights, MoEConfig]:
    """Weights that are all 1.0, apart from the first blocks of w2's row 3."""
    cfg = config()
    ones = random_weights(cfg, 1, low=base, high=base)
    w = ExpertWeights(*(x.clone() for x in (ones.w13, ones.w13_scale, ones.w2, ones.w2_scale)))
    w.w13.fill_(0x22)
    w.w2.fill_(0x22)
    for block, (r, values) in enumerate(zip(relative, codes, strict=True)):
        w.w2_scale[0, 3, block] = base + r
        packed = [values[n] | values[n + 1] << 4 for n in range(0, len(values), 2)]
        w.w2[0, 3, 16 * block : 16 * (block + 1)] = 0
        w.w2[0, 3, 16 * block : 16 * block + len(packed)] = torch.tensor(packed).byte()
    return w, cfg


ALL_CODES = list(range(16))


@pytest.mark.parametrize("r", range(-14, 1))
def test_every_code_at_every_exact_exponent(r: int) -> None:
    w, cfg = one_row([r], [ALL_CODES])
    p = do_pack(w, cfg, max_rescale_error=0.0)
    assert p.num_rescaled_blocks == 0
    assert torch.equal(decoded(p.w2, p.w2_row_scale), dense(w.w2, w.w2_scale))
    assert same(unpack(p), w)


@pytest.mark.parametrize(
    ("r", "expected"),
    [
        (-15, [0, 0, 0.5, 1, 1, 1.5, 2, 3]),  # 0.25 -> 0, 0.75 -> 1: ties to the even code
        (-16, [0, 0, 0, 0.5, 0.5, 1, 1, 1.5]),
        (-17, [0, 0, 0, 0, 0, 0.5, 0.5, 1]),
        (-18, [0, 0, 0, 0, 0, 0, 0, 0.5]),
        (-19, [0] * 8),
        (-127, [0] * 8),
    ],
)
def test_past_the_exact_range(r: int, expected: list[float]) -> None:
    w, cfg = one_row([r], [ALL_CODES])
    p = do_pack(w, cfg)
    assert p.num_rescaled_blocks == 1
    row = decoded(p.w2, p.w2_row_scale)[0, 3]
    target = torch.tensor(expected + [-v for v in expected], dtype=torch.float64) * 2.0**-14
    assert torch.equal(row[:16], target)
    assert not row[16:32].any()
    exact = dense(w.w2, w.w2_scale)[0, 3]
    error = float((row - exact).abs().max() / exact.abs().max())
    assert p.max_rescale_error == error
    assert same(unpack(p), w)
    with pytest.raises(WeightFormatError, match=r"w2: expert 0, row 3, block 0 "):
        do_pack(w, cfg, max_rescale_error=0.0)
    with pytest.raises(WeightFormatError):
        do_pack(w, cfg, max_rescale_error=error * 0.999)
    assert do_pack(w, cfg, max_rescale_error=error).max_rescale_error == error


def test_past_the_range_but_representable_is_exact() -> None:
    w, cfg = one_row([-15, -16], [[2, 4, 6, 7], [4, 6, 7, 12]])
    p = do_pack(w, cfg, max_rescale_error=0.0)
    assert p.num_rescaled_blocks == 2
    assert p.max_rescale_error == 0.0
    assert torch.equal(decoded(p.w2, p.w2_row_scale), dense(w.w2, w.w2_scale))
    assert same(unpack(p), w)


def test_all_zero_blocks_have_no_say() -> None:
    zeros = [0, 8] * 8  # also negative zeros
    w, cfg = one_row([0, 100, -127, -20], [[1, 2], zeros, zeros, zeros])
    p = do_pack(w, cfg, max_rescale_error=0.0)
    assert p.num_rescaled_blocks == 0
    assert float(p.w2_row_scale[0, 0, 3]) == 2.0**-6
    assert torch.equal(decoded(p.w2, p.w2_row_scale), dense(w.w2, w.w2_scale))
    assert same(unpack(p), w)


def test_all_zero_rows() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    w.w13[1, 7] = 0x80
    w.w13_scale[1, 7] = torch.arange(8, dtype=torch.uint8) * 36
    w.w2[0] = 0
    w.w2_scale[0] = 0
    p = do_pack(w, cfg)
    assert (p.w2_row_scale[0] == 1.0).all()
    assert (p.w2[0, ..., 4096:] == 8).all()
    assert not decoded(p.w2, p.w2_row_scale)[0].any()
    assert same(unpack(p), w)


@few
@given(seed=st.integers(0, 2**31), spread=st.integers(0, 254), zeros=st.floats(0, 1))
def test_unpack_inverts_pack(seed: int, spread: int, zeros: float) -> None:
    cfg = config(256, 128)
    g = torch.Generator().manual_seed(seed)
    w = random_weights(cfg, 2, seed, low=254 - spread, high=254)
    for codes, scale in ((w.w13, w.w13_scale), (w.w2, w.w2_scale)):
        empty = torch.rand(scale.shape, generator=g) < zeros
        codes.view(*scale.shape, 16)[empty] &= 0x88
    p = do_pack(w, cfg, max_rescale_error=1.0)
    assert same(unpack(p), w)
    assert p.max_rescale_error <= 2.0**-15  # a quarter step at index 0, against half a step at 14


def test_steps_over_experts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    w = random_weights(cfg, 5, low=90)
    w.w2.view(5, 256, 8, 16)[3, 4, 5] = 0
    whole = do_pack(w, cfg, max_rescale_error=1.0)
    monkeypatch.setattr(packing_module, "_CHUNK_BYTES", 2 * 512 * 128)
    stepped = do_pack(w, cfg, max_rescale_error=1.0)
    for name in ("w13", "w13_row_scale", "w2", "w2_row_scale"):
        assert torch.equal(getattr(whole, name), getattr(stepped, name))
    assert whole.num_rescaled_blocks == stepped.num_rescaled_blocks > 0
    assert whole.max_rescale_error == stepped.max_rescale_error
    assert same(unpack(stepped), w)


# ---- out= ---------------------------------------------------------------------------------


def test_repack_keeps_the_storage() -> None:
    cfg = config(256, 384)
    first = do_pack(random_weights(cfg, 2, seed=1), cfg)
    names = ("w13", "w13_row_scale", "w2", "w2_row_scale")
    addresses = [getattr(first, n).data_ptr() for n in names]
    new = random_weights(cfg, 2, seed=2, low=100)
    again = do_pack(new, cfg, out=first)
    assert [getattr(again, n).data_ptr() for n in names] == addresses
    fresh = do_pack(new, cfg)
    assert all(torch.equal(getattr(again, n), getattr(fresh, n)) for n in names)
    assert all(torch.equal(getattr(first, n), getattr(fresh, n)) for n in names)
    assert same(unpack(again), new)


def test_a_failed_repack_changes_nothing() -> None:
    cfg = config()
    old = random_weights(cfg, 2, seed=1)
    p = do_pack(old, cfg)
    bad = random_weights(cfg, 2, seed=2)
    bad.w2_scale[1, 200, 3] = 80
    with pytest.raises(WeightFormatError, match="w2: expert 1, row 200, block 3"):
        do_pack(bad, cfg, max_rescale_error=0.0, out=p)
    bad.w2_scale[1, 200, 3] = 255
    with pytest.raises(WeightFormatError):
        do_pack(bad, cfg, out=p)
    assert same(unpack(p), old)
    with pytest.raises(ValueError, match=r"out\.w13 has shape"):
        do_pack(random_weights(cfg, 3), cfg, out=p)


# ---- arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_nan_scale_names_its_place(name: str) -> None:
    cfg = config()
    w = random_weights(cfg, 3)
    getattr(w, f"{name}_scale")[2, 131, 6] = 255
    with pytest.raises(WeightFormatError, match=rf"{name}_scale.*expert 2, row 131, block 6"):
        do_pack(w, cfg)


def test_storage_types() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    p = do_pack(w, cfg)
    for code_type in (torch.int8, torch.float4_e2m1fn_x2):
        q = pack(
            w.w13.view(code_type),
            w.w13_scale.view(torch.float8_e8m0fnu),
            w.w2.view(code_type),
            w.w2_scale.view(torch.float8_e8m0fnu),
            cfg,
        )
        assert torch.equal(p.w13, q.w13)
        assert torch.equal(p.w2, q.w2)
    i = cfg.intermediate
    split = ExpertWeights.from_checkpoint(
        w1=w.w13[:, :i],
        w1_scale=w.w13_scale[:, :i],
        w3=w.w13[:, i:].view(torch.int8),
        w3_scale=w.w13_scale[:, i:],
        w2=w.w2,
        w2_scale=w.w2_scale,
    )
    assert same(split, w)
    with pytest.raises(TypeError, match="float32"):
        pack(w.w13.float(), w.w13_scale, w.w2, w.w2_scale, cfg)
    with pytest.raises(TypeError, match="either"):
        ExpertWeights.from_checkpoint(w2=w.w2, w2_scale=w.w2_scale, w1=w.w13, w1_scale=w.w13_scale)


def test_non_contiguous_and_misaligned_input() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    p = do_pack(w, cfg)
    strided = w.w13.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), w.w2.flatten()))[1:].view(w.w2.shape)
    q = pack(strided, w.w13_scale.repeat(1, 1, 2)[..., :8], shifted, w.w2_scale, cfg)
    assert torch.equal(p.w13, q.w13)
    assert torch.equal(p.w2, q.w2)


def test_rejects() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    with pytest.raises(ValueError, match=r"sm120.*'sm90', 'sm100'"):
        do_pack(w, cfg, arch="sm120")
    with pytest.raises(ValueError, match="max_rescale_error"):
        do_pack(w, cfg, max_rescale_error=-1.0)
    with pytest.raises(ValueError, match="hidden = 512"):
        do_pack(w, config(512, 256))
    with pytest.raises(ValueError, match="w13_scale has shape"):
        pack(w.w13, w.w13_scale[..., :4], w.w2, w.w2_scale, cfg)
    with pytest.raises(ValueError, match="w2 has shape"):
        pack(w.w13[:1], w.w13_scale[:1], w.w2, w.w2_scale, cfg)
    with pytest.raises(ValueError, match="0 experts"):
        pack(w.w13[:0], w.w13_scale[:0], w.w2[:0], w.w2_scale[:0], cfg)


# ---- what a warp computes -----------------------------------------------------------------


def test_mma_fragments_meet_the_permuted_activations() -> None:
    """Registers of step i against positions 32i.. of the permuted window give the dot product."""
    cfg = config()
    w = random_weights(cfg, 1)
    block = do_pack(w, cfg).w2[0, 0, 0, 1]  # rows 64..127, columns 0..127
    words = block[:4096].view(torch.int32).view(2, 128, 4)
    index = block[4096:].view(128, 2)
    x = quantize_e4m3(torch.randn(5, 128, generator=torch.Generator().manual_seed(1)), 128)[0]
    b = decode_e4m3(permute_window(x)).double()
    out = torch.zeros(64, 5, dtype=torch.float64)
    for h in range(2):
        first, second = decode_words(words[h], index[:, h, None])
        a = torch.stack((first, second), 1).contiguous()  # [thread, q, i]
        for thread in range(128):
            warp, lane = divmod(thread, 32)
            g, t = divmod(lane, 4)
            for q in range(2):
                four = decode_e4m3(a[thread, q].contiguous().view(torch.uint8)).double()
                for i in range(4):  # an A register: columns 16q + 4t.. of the MMA's 32
                    at = 32 * i + 16 * q + 4 * t
                    out[16 * warp + 8 * h + g] += b[:, at : at + 4] @ four[4 * i : 4 * i + 4]
    rows = decode_e4m3(decode_subblock(block)).double()
    assert torch.equal(out, rows @ decode_e4m3(x).double().T)
