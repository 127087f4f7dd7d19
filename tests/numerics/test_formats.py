"""E2M1, E4M3, UE8M0: every code, every boundary of the scale rule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gcmoe.errors import WeightFormatError
from gcmoe.numerics import formats as f

MAGNITUDES = torch.tensor(f.E2M1_MAGNITUDES)
few = settings(max_examples=40, deadline=None, derandomize=True)


def nearest_even(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Index of the nearest of the ascending ``values``, a tie to the even index."""
    distance = (x.double().abs().unsqueeze(-1) - values.double()).abs()
    first = distance.argmin(-1)
    tie = (distance == distance.amin(-1, keepdim=True)).sum(-1) == 2
    return torch.where(tie, first + first % 2, first)


def bits_to_float(bits: int) -> float:
    return float(torch.tensor([bits], dtype=torch.int32).view(torch.float32))


def group_with(amax: float, group: int = 32) -> torch.Tensor:
    x = torch.zeros(1, group)
    x[0, 5] = -amax
    return x


# ---- E2M1 ---------------------------------------------------------------------------------


def test_every_e2m1_code_round_trips() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = f.decode_e2m1(codes)
    assert values.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(f.encode_e2m1(values), codes)  # -0 keeps its sign


def test_e2m1_rounds_to_nearest_even() -> None:
    x = torch.linspace(-8, 8, 16 * 64 + 1)  # hits every midpoint exactly
    expected = nearest_even(x, MAGNITUDES) | (torch.signbit(x).long() << 3)
    assert torch.equal(f.encode_e2m1(x).long(), expected)


def test_nibbles() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes = f.split_nibbles(packed)
    assert codes[0, :4].tolist() == [0, 0, 1, 0]  # low nibble first
    assert torch.equal(f.join_nibbles(codes), packed)


# ---- E4M3 ---------------------------------------------------------------------------------


def test_every_e4m3_code_round_trips() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = f.decode_e4m3(codes)
    nan = (codes & 0x7F) == 0x7F
    assert torch.equal(values.isnan(), nan)
    assert torch.equal(f.encode_e4m3(values)[~nan], codes[~nan])
    assert f.encode_e4m3(values)[nan].tolist() == [0x7F, 0x7F]
    for code in range(127):
        mantissa, exponent = code & 7, code >> 3
        value = math.ldexp(mantissa + 8 * (exponent > 0), max(exponent, 1) - 10)
        assert float(values[code]) == value


def test_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    table = f.decode_e4m3(torch.arange(127, dtype=torch.uint8))
    midpoints = (table[1:] + table[:-1]) / 2
    up = torch.nextafter(midpoints, torch.full_like(midpoints, 1e9))
    down = torch.nextafter(midpoints, torch.zeros_like(midpoints))
    for x in (midpoints, up, down, torch.randn(4096) * 100):
        magnitude = x.abs().clamp(max=448)
        expected = nearest_even(magnitude, table) | (torch.signbit(x).long() << 7)
        assert torch.equal(f.encode_e4m3(x).long(), expected)
    extreme = torch.tensor([448.0, 460.0, 464.0, 465.0, 1e30, math.inf, -math.inf])
    assert f.encode_e4m3(extreme).tolist() == [0x7E] * 6 + [0xFE]


# ---- UE8M0 --------------------------------------------------------------------------------


def test_every_ue8m0_byte() -> None:
    values = f.decode_ue8m0(torch.arange(256, dtype=torch.uint8))
    assert [float(v) for v in values[:255]] == [math.ldexp(1.0, s - 127) for s in range(255)]
    assert values[255].isnan()
    assert f.encode_ue8m0(torch.tensor([-200, -127, 0, 127, 300])).tolist() == [0, 0, 127, 254, 254]


def test_powers_of_two_are_exact() -> None:
    e32, e64 = torch.arange(-149, 128), torch.arange(-1022, 1024)
    assert f.pow2_f32(e32).tolist() == [math.ldexp(1.0, int(e)) for e in e32]
    assert f.pow2_f64(e64).tolist() == [math.ldexp(1.0, int(e)) for e in e64]


# ---- the E4M3 scale rule ------------------------------------------------------------------


@pytest.mark.parametrize("n", range(-126, 120))
def test_scale_boundary_at_448(n: int) -> None:
    boundary = math.ldexp(448.0, n)
    bits = int(torch.tensor([boundary]).view(torch.int32))
    for step, expected in ((-1, n), (0, n), (1, n + 1)):
        codes, exponents = f.quantize_e4m3(group_with(bits_to_float(bits + step)), 32)
        assert int(exponents) == expected + 127
        assert int(codes[0, 5]) == (0xFE if step <= 0 else 0xF6)  # -448, or -224 one step up


def test_scale_range_ends() -> None:
    largest = bits_to_float(0x7F7FFFFF)
    assert int(f.quantize_e4m3(group_with(largest), 32)[1]) == 120 + 127
    for tiny in (0.0, bits_to_float(1), 1e-40, 1e-38):
        codes, exponents = f.quantize_e4m3(group_with(tiny), 32)
        assert int(exponents) == 1  # -126
        expected = f.encode_e4m3((group_with(tiny).double() * 2.0**126).float())
        assert torch.equal(codes, expected)


def test_all_zero_group_gives_zeros() -> None:
    codes, exponents = f.quantize_e4m3(torch.zeros(3, 256), 128)
    assert not codes.any()
    assert (exponents == 1).all()
    assert not f.dequantize_e4m3(codes, exponents).any()


@few
@given(bits=st.integers(0, 0x7F7FFFFF))
def test_exponent_is_the_exact_ceiling(bits: int) -> None:
    amax = bits_to_float(bits)
    e = int(f.quantize_e4m3(group_with(amax), 32)[1]) - 127
    assert amax <= math.ldexp(448.0, e)
    assert e == -126 or amax > math.ldexp(448.0, e - 1)
    assert e + 127 == max(((bits + 0x1FFFFF) >> 23) - 8, 1)


def test_nan_and_inf_are_left_out_and_marked() -> None:
    x = torch.full((2, 128), 0.5, dtype=torch.bfloat16)
    clean_codes, clean_exponents = f.quantize_e4m3(x, 128)
    x[0, 3], x[0, 7], x[0, 9] = math.nan, math.inf, -math.inf
    codes, exponents = f.quantize_e4m3(x, 128)
    assert torch.equal(exponents, clean_exponents)
    assert codes[0, [3, 7, 9]].tolist() == [0x7F] * 3
    keep = torch.ones_like(codes, dtype=torch.bool)
    keep[0, [3, 7, 9]] = False
    assert torch.equal(codes[keep], clean_codes[keep])
    codes, exponents = f.quantize_e4m3(torch.full((1, 32), math.nan), 32)
    assert (codes == 0x7F).all()
    assert int(exponents) == 1


@few
@given(seed=st.integers(0, 2**31), octaves=st.integers(0, 30), group=st.sampled_from([32, 128]))
def test_quantize_e4m3_is_within_half_a_step(seed: int, octaves: int, group: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 256, generator=g) * torch.exp2(-octaves * torch.rand(3, 256, generator=g))
    codes, exponents = f.quantize_e4m3(x, group)
    scale = f.decode_ue8m0(exponents).repeat_interleave(group, -1)
    error = (f.dequantize_e4m3(codes, exponents) - x).abs()
    assert (error <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)).all()


def test_quantize_e4m3_rejects() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        f.quantize_e4m3(torch.zeros(2, 96), 128)
    with pytest.raises(TypeError, match="float64"):
        f.quantize_e4m3(torch.zeros(2, 128, dtype=torch.float64), 128)
    with pytest.raises(ValueError, match="do not fit"):
        f.dequantize_e4m3(torch.zeros(2, 128, dtype=torch.uint8), torch.zeros(3, 1).byte())


# ---- MXFP4 --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [-127, -126, -40, -1, 0, 1, 40, 125])
def test_mxfp4_scale_boundary_at_6(n: int) -> None:
    bits = int(torch.tensor([math.ldexp(6.0, n)]).view(torch.int32))
    for step, expected in ((-1, n), (0, n), (1, n + 1)):
        packed, scale = f.quantize_mxfp4(group_with(bits_to_float(bits + step)))
        assert int(scale) == expected + 127
        assert int(f.split_nibbles(packed)[0, 5]) == (0xF if step <= 0 else 0xD)  # -6, -3


def test_mxfp4_of_mxfp4_is_itself() -> None:
    g = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (5, 64), generator=g, dtype=torch.uint8)
    packed[:, ::16] = 0x7F  # every block holds a 6, so its scale is determined
    scale = torch.randint(1, 250, (5, 4), generator=g, dtype=torch.uint8)
    again = f.quantize_mxfp4(f.dequantize_mxfp4(packed, scale))
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scale)


def test_mxfp4_zero_and_special() -> None:
    packed, scale = f.quantize_mxfp4(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert not packed.any()
    assert not scale.any()
    w = torch.zeros(2, 64)
    w[1, 40] = math.inf
    with pytest.raises(WeightFormatError, match=r"\(1, 40\)"):
        f.quantize_mxfp4(w)
    nan = f.dequantize_mxfp4(packed, torch.full_like(scale, 255))
    assert nan.isnan().all()


@few
@given(seed=st.integers(0, 2**31))
def test_mxfp4_picks_the_nearest_code(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(4, 64, generator=g).bfloat16()
    packed, scale = f.quantize_mxfp4(w)
    value = w.float() / f.decode_ue8m0(scale).repeat_interleave(32, -1)
    codes = f.split_nibbles(packed).long()
    assert value.abs().max() <= 6
    assert torch.equal(codes & 7, nearest_even(value, MAGNITUDES))
    assert torch.equal(codes >> 3, torch.signbit(w).long())
