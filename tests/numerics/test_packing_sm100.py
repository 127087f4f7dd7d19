"""Packing for Blackwell: a permutation, undone exactly, and the one that the data path reads."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import mx_datapath as mx
import pytest
import torch
from checkpoints import random_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.errors import WeightFormatError
from gcmoe.numerics import (
    ExpertWeights,
    PackedWeightsSm100,
    ReferenceTrace,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    moe_reference,
    pack,
    pack_sm100,
    quantize_e4m3,
    unpack,
    unpack_sm100,
)

few = settings(max_examples=15, deadline=None, derandomize=True)
NAMES = ("w13", "w13_scale", "w2", "w2_scale")


def config(h: int = 256, i: int = 256, e: int = 3, clamp: float | None = None) -> MoEConfig:
    return MoEConfig(hidden=h, intermediate=i, num_experts=e, top_k=2, max_tokens=256, clamp=clamp)


def do_pack(
    w: ExpertWeights, cfg: MoEConfig, out: PackedWeightsSm100 | None = None
) -> PackedWeightsSm100:
    return pack_sm100(w.w13, w.w13_scale, w.w2, w.w2_scale, cfg, out=out)


def same(a: object, b: object) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in NAMES)


# ---- packed bytes -------------------------------------------------------------------------


@pytest.mark.parametrize(("h", "i", "experts"), [(256, 128, 1), (256, 256, 3), (512, 384, 2)])
def test_shapes_and_inverse(h: int, i: int, experts: int) -> None:
    cfg = config(h, i)
    w = random_weights(cfg, experts, seed=h + i, low=0, high=254)
    p = do_pack(w, cfg)
    assert (p.num_experts, p.hidden, p.intermediate, p.arch) == (experts, h, i, "sm100")
    assert p.w13.shape == (experts, i // 128, h // 128, 16384)
    assert p.w13_scale.shape == (experts, i // 128, h // 128, 2, 512)
    assert p.w2.shape == (experts, h // 256, i // 128, 16384)
    assert p.w2_scale.shape == (experts, h // 256, i // 128, 2, 512)
    for name in NAMES:
        packed, plain = getattr(p, name), getattr(w, name)
        assert packed.dtype == torch.uint8
        assert packed.is_contiguous()
        counts = [torch.bincount(x.flatten().int(), minlength=256) for x in (packed, plain)]
        assert torch.equal(*counts)  # nothing but a permutation
    assert p.nbytes == sum(getattr(w, n).nbytes for n in NAMES)
    assert same(unpack(p), w)
    assert same(unpack_sm100(p), w)
    with pytest.raises(FrozenInstanceError):
        p.arch = "sm90"  # type: ignore[misc]


def test_packed_bytes_by_the_formula() -> None:
    """Sampled codes and scales, one byte at a time, straight from the layout's text."""
    cfg = config(512, 384)
    w = random_weights(cfg, 2, seed=1, low=0, high=254)
    p = do_pack(w, cfg)
    g = torch.Generator().manual_seed(2)
    for name in ("w13", "w2"):
        burst, atoms = getattr(p, name), getattr(p, f"{name}_scale")
        codes, scale = getattr(w, name), getattr(w, f"{name}_scale")
        for _ in range(300):
            pick = torch.randint(0, 1 << 30, (6,), generator=g).tolist()
            e, item, window = (n % size for n, size in zip(pick, burst.shape[:3], strict=False))
            half, r, byte, k = pick[3] % 2, pick[4] % 128, pick[5] % 64, pick[5] % 4
            if name == "w13":
                row = half * cfg.intermediate + 128 * item + r
            else:
                row = 256 * item + 128 * half + r
            at = (128 * half + r) * 64 + byte
            assert burst[e, item, window, at] == codes[e, row, 64 * window + byte]
            at = r % 32 * 16 + r // 32 % 4 * 4 + k
            assert atoms[e, item, window, half, at] == scale[e, row, 4 * window + k]


def test_every_code_and_every_scale_byte() -> None:
    cfg = config()
    w = random_weights(cfg, 1)
    w.w13.view(-1)[:256] = torch.arange(256)
    w.w13_scale.view(-1)[:255] = torch.arange(255)
    w.w2.view(-1)[:256] = torch.arange(256).flip(0)
    w.w2_scale.view(-1)[:255] = torch.arange(255).flip(0)
    p = do_pack(w, cfg)
    assert torch.equal(p.w13[0, 0, :, :64].flatten(), torch.arange(128).byte())  # row 0
    assert same(unpack(p), w)
    assert set(p.w13_scale.unique().tolist()) == set(range(255))


@few
@given(
    seed=st.integers(0, 2**31),
    h=st.sampled_from([256, 512]),
    i=st.sampled_from([128, 256, 384]),
    experts=st.integers(1, 3),
    low=st.integers(0, 254),
)
def test_unpack_inverts_pack(seed: int, h: int, i: int, experts: int, low: int) -> None:
    cfg = config(h, i)
    w = random_weights(cfg, experts, seed, low=low, high=254)
    before = ExpertWeights(*(getattr(w, n).clone() for n in NAMES))
    p = do_pack(w, cfg)
    assert same(unpack(p), w)
    assert same(w, before)


def test_unpack_still_reads_the_other_layout() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    assert same(unpack(pack(w.w13, w.w13_scale, w.w2, w.w2_scale, cfg)), w)


def test_pack_by_arch() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    plain = (w.w13, w.w13_scale, w.w2, w.w2_scale)
    p = pack(*plain, cfg, arch="sm100", max_rescale_error=0.0)
    assert isinstance(p, PackedWeightsSm100)
    assert same(p, do_pack(w, cfg))
    assert pack(*plain, cfg, arch="sm100", out=p).w13 is p.w13
    with pytest.raises(TypeError, match=r"PackedWeights for sm90, got PackedWeightsSm100"):
        pack(*plain, cfg, out=p)
    with pytest.raises(TypeError, match=r"PackedWeightsSm100 for sm100, got PackedWeights$"):
        pack(*plain, cfg, arch="sm100", out=pack(*plain, cfg))


# ---- out= ---------------------------------------------------------------------------------


def test_repack_keeps_the_storage() -> None:
    cfg = config(256, 384)
    first = do_pack(random_weights(cfg, 2, seed=1), cfg)
    addresses = [getattr(first, n).data_ptr() for n in NAMES]
    new = random_weights(cfg, 2, seed=2)
    again = do_pack(new, cfg, out=first)
    assert [getattr(again, n).data_ptr() for n in NAMES] == addresses
    assert same(first, do_pack(new, cfg))
    assert same(unpack(again), new)


def test_a_failed_repack_changes_nothing() -> None:
    cfg = config()
    old = random_weights(cfg, 2, seed=1)
    p = do_pack(old, cfg)
    bad = random_weights(cfg, 2, seed=2)
    bad.w2_scale[1, 200, 3] = 255
    with pytest.raises(WeightFormatError, match="w2_scale"):
        do_pack(bad, cfg, out=p)
    good = random_weights(cfg, 2, seed=3)
    with pytest.raises(ValueError, match=r"out\.w13 has shape"):
        do_pack(random_weights(cfg, 3), cfg, out=p)
    wide = PackedWeightsSm100(p.w13, p.w13_scale.int(), p.w2, p.w2_scale)
    with pytest.raises(TypeError, match=r"out\.w13_scale.*int32"):
        do_pack(good, cfg, out=wide)
    strided = torch.empty((*p.w2.shape, 2), dtype=torch.uint8)[..., 0]
    with pytest.raises(ValueError, match=r"out\.w2 has shape.*contiguous"):
        do_pack(good, cfg, out=PackedWeightsSm100(p.w13, p.w13_scale, strided, p.w2_scale))
    sm90 = pack(good.w13, good.w13_scale, good.w2, good.w2_scale, cfg)
    with pytest.raises(TypeError, match=r"PackedWeightsSm100.*PackedWeights$"):
        do_pack(good, cfg, out=sm90)  # type: ignore[arg-type]
    assert same(unpack(p), old)


# ---- arguments ----------------------------------------------------------------------------


@few
@given(
    name=st.sampled_from(["w13", "w2"]),
    expert=st.integers(0, 1),
    row=st.integers(0, 255),
    block=st.integers(0, 7),
)
def test_nan_scale_names_its_place(name: str, expert: int, row: int, block: int) -> None:
    cfg = config()
    w = random_weights(cfg, 2, low=0, high=254)
    getattr(w, f"{name}_scale")[expert, row, block] = 255
    place = rf"{name}_scale: 1 scales.*expert {expert}, row {row}, block {block} "
    with pytest.raises(WeightFormatError, match=place):
        do_pack(w, cfg)


def test_storage_types_and_strides() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    p = do_pack(w, cfg)
    for code_type in (torch.int8, torch.float4_e2m1fn_x2):
        q = pack_sm100(
            w.w13.view(code_type),
            w.w13_scale.view(torch.float8_e8m0fnu),
            w.w2.view(code_type),
            w.w2_scale.view(torch.float8_e8m0fnu),
            cfg,
        )
        assert same(p, q)
    strided = w.w13.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.cat((torch.zeros(1, dtype=torch.uint8), w.w2.flatten()))[1:].view(w.w2.shape)
    q = pack_sm100(strided, w.w13_scale.repeat(1, 1, 2)[..., :8], shifted, w.w2_scale, cfg)
    assert same(p, q)


def test_rejects() -> None:
    cfg = config()
    w = random_weights(cfg, 2)
    with pytest.raises(TypeError, match="float32"):
        pack_sm100(w.w13.float(), w.w13_scale, w.w2, w.w2_scale, cfg)
    with pytest.raises(ValueError, match="hidden = 512"):
        do_pack(w, config(512, 256))
    with pytest.raises(ValueError, match="intermediate = 128"):
        do_pack(w, config(256, 128))
    with pytest.raises(ValueError, match="w13_scale has shape"):
        pack_sm100(w.w13, w.w13_scale[..., :4], w.w2, w.w2_scale, cfg)
    with pytest.raises(ValueError, match="w2 has shape"):
        pack_sm100(w.w13, w.w13_scale, w.w2[:1], w.w2_scale[:1], cfg)
    with pytest.raises(ValueError, match="0 experts"):
        pack_sm100(w.w13[:0], w.w13_scale[:0], w.w2[:0], w.w2_scale[:0], cfg)


# ---- the model's own parts ----------------------------------------------------------------


def test_format_tables_of_the_model() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(mx.E2M1, decode_e2m1(codes[:16]).double())
    for table, other in ((mx.E4M3, decode_e4m3(codes)), (mx.UE8M0, decode_ue8m0(codes))):
        torch.testing.assert_close(table, other.double(), rtol=0, atol=0, equal_nan=True)


@few
@given(seed=st.integers(0, 2**31), octaves=st.integers(0, 120))
def test_quantiser_of_the_model(seed: int, octaves: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 32, generator=g)
    x *= torch.exp2(torch.randint(-octaves, octaves + 1, (40, 1), generator=g).float())
    x[0] = 0.0
    x[1, 3] = torch.nan
    x[2, 5] = -torch.inf
    x[3] = torch.linspace(-448.0, 448.0, 32)  # amax is exactly 448
    x[4] = torch.linspace(-448.0, 448.0, 32).nextafter(torch.tensor(1e9))
    x[5] = torch.arange(32) * 0.5 + 16.0  # many ties
    codes, scale = mx.quantize(x)
    expected, exponents = quantize_e4m3(x, 32)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, exponents.squeeze(-1))


def test_instruction_descriptor() -> None:
    assert mx.instruction_descriptor(16, 0, 0) == 0x08840280
    assert mx.instruction_descriptor(8, 0, 0) == 0x08820280
    assert mx.instruction_descriptor(256, 0, 0) == 0x08C00280
    assert mx.instruction_descriptor(16, 3, 1) == 0x68840290
    constant = {
        "sparse": 0,
        "a_format": 5,  # E2M1
        "b_format": 0,  # E4M3
        "a_negate": 0,
        "b_negate": 0,
        "a_major": 0,  # K-major
        "b_major": 0,
        "scale_format": 1,  # UE8M0
        "m": 128 >> 4,
        "k_size": 0,  # K32
    }
    for n in range(8, 257, 8):
        for sfa_id in range(4):
            for sfb_id in range(4):
                word = mx.instruction_descriptor(n, sfa_id, sfb_id)
                found = mx.fields_of(word, mx.INSTRUCTION_FIELDS)
                ids = {"sfa_id": sfa_id, "sfb_id": sfb_id}
                assert found == {**constant, **ids, "n": n >> 3}
    for bad in ((0, 0, 0), (12, 0, 0), (264, 0, 0), (8, 4, 0), (8, 0, -1)):
        with pytest.raises(ValueError):
            mx.instruction_descriptor(*bad)
    with pytest.raises(ValueError, match="reserved"):
        mx.fields_of(0x08840280 | 1 << 6, mx.INSTRUCTION_FIELDS)


def test_instruction_descriptor_of_the_kernel_language() -> None:
    cutlass = pytest.importorskip("cutlass")
    primitives = pytest.importorskip("cutlass.experimental.primitives")
    for n in (8, 16, 24, 40, 128, 256):
        word = primitives.Tcgen05MxInstrDesc.build(
            a_dtype=cutlass.Float4E2M1FN,
            b_dtype=cutlass.Float8E4M3FN,
            scale_format=1,
            n_dim=n,
            m_dim=128,
        )
        assert int(word.value) == mx.instruction_descriptor(n, 0, 0)


def test_smem_descriptor() -> None:
    assert mx.smem_descriptor(0, 16, 1024, mx.SWIZZLE_128B) == 0x4000404000010000
    assert mx.smem_descriptor(0, 16, 128, mx.SWIZZLE_NONE) == 0x400800010000
    word = mx.smem_descriptor(0x8020, 16, 1024, mx.SWIZZLE_128B)
    assert mx.fields_of(word, mx.SMEM_FIELDS) == {
        "start": 0x802,
        "leading": 1,
        "stride": 64,
        "version": 1,
        "base_offset": 0,
        "swizzle": 2,
    }
    with pytest.raises(ValueError):
        mx.smem_descriptor(8, 16, 1024, mx.SWIZZLE_128B)


def test_padded_tile_in_shared_memory() -> None:
    """Codes at chunk c ^ (row % 8); what lies between them is undefined and really varies."""
    machine = mx.Machine(torch.Generator().manual_seed(0))
    memory = torch.randint(0, 256, (3 * 16384,), dtype=torch.uint8)
    tiles = []
    for _ in range(2):
        machine.load_u4(memory, 256, 256, mx.SMEM_A)
        tiles.append(machine.smem[:32768].view(256, 8, 16).clone())
    for row in range(256):
        for c in range(8):
            at = 16384 + 64 * row + 8 * c
            assert torch.equal(tiles[0][row, c ^ (row % 8), :8], memory[at : at + 8])
    assert torch.equal(tiles[0][..., :8], tiles[1][..., :8])
    assert (tiles[0][..., 8:] != tiles[1][..., 8:]).float().mean() > 0.99


# ---- packed weights through the data path -------------------------------------------------


class Problem:
    """One layer: its weights, packed bytes as flat memory, routing and the oracle's trace."""

    def __init__(self, cfg: MoEConfig, n: int, low: int, high: int, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.cfg, self.n = cfg, n
        self.weights = random_weights(cfg, cfg.num_experts, seed, low, high)
        self.memory = {name: getattr(do_pack(self.weights, cfg), name).flatten() for name in NAMES}
        self.x = torch.randn(n, cfg.hidden, generator=g)
        self.x *= (
            torch.exp2(torch.randint(-3, 4, (n, cfg.hidden // 32), generator=g).float())[:, :, None]
            .expand(-1, -1, 32)
            .reshape(n, -1)
        )
        self.x = self.x.bfloat16()
        self.ids = torch.randint(-1, cfg.num_experts, (n, 2), generator=g)
        self.ids[:, 0] = 1  # expert 1 has all tokens
        self.ids[self.ids[:, 1] == 1, 1] = 2
        self.topk_weights = torch.randn(n, 2, generator=g)
        self.topk_weights[0, 0] = 0.0

    def oracle(self) -> ReferenceTrace:
        return moe_reference(
            self.x, self.ids, self.topk_weights, self.weights, self.cfg, recipe="sm100"
        )

    def run(self, expert: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(a, codes, exponents, combine rows) of one expert by the model, after its mask."""
        machine = mx.Machine(torch.Generator().manual_seed(expert + 7))
        cfg = self.cfg
        mask = self.ids == expert
        token, slot = mask.nonzero(as_tuple=True)
        codes, scale = mx.quantize(self.x.view(-1, cfg.hidden // 32, 32))
        codes, scale = codes.view(-1, cfg.hidden)[token], scale[token]
        # Rows of a neighbour before and after the batch, NaN among them.
        other = mx.random_bytes(machine.generator, 5, cfg.hidden)
        other[:, ::5] = 0x7F
        rows = torch.cat((other[:3], codes, other[3:]))
        count = len(token)
        atoms = mx.token_atoms(scale, -(-count // 8) * 8, machine.generator)
        a, h = mx.w1(
            machine,
            self.memory["w13"],
            self.memory["w13_scale"],
            expert,
            cfg.intermediate,
            mx.Operand(rows, 3, count, atoms),
            self.topk_weights[token, slot],
            cfg.clamp,
        )
        exponents = torch.empty((count, cfg.intermediate // 32), dtype=torch.uint8)
        for t in range(count):
            for k in range(4):
                exponents[t, k::4] = h.atoms[:, t // 128, mx.atom_offset(t, k)]
        combine = mx.w2(machine, self.memory["w2"], self.memory["w2_scale"], expert, cfg.hidden, h)
        return mask, a, h.codes[:count], exponents, combine

    def agrees(self, expert: int, trace: ReferenceTrace) -> list[bool]:
        """Which of (a, codes, exponents, combine rows) equal the oracle's; two NaN are equal."""
        mask, a, codes, exponents, combine = self.run(expert)
        pairs = (
            (a, trace.a[mask]),
            (codes, trace.a_codes[mask]),
            (exponents, trace.a_exponents[mask]),
            (combine, trace.combine[mask]),
        )
        return [bool(((x == y) | ((x != x) & (y != y))).all()) for x, y in pairs]


@pytest.mark.parametrize(
    ("n", "h", "i", "clamp", "low", "high"),
    [
        (8, 256, 384, None, 114, 126),
        (16, 512, 256, 7.0, 118, 130),
        (24, 256, 128, 0.5, 114, 126),
        (40, 512, 384, None, 118, 122),
        (128, 256, 384, 7.0, 100, 132),
        (13, 256, 128, None, 0, 254),  # padded tokens; infinities and NaN in the layer itself
        (144, 256, 128, None, 116, 126),  # two scale atoms
    ],
)
def test_both_projections_equal_the_oracle(
    n: int, h: int, i: int, clamp: float | None, low: int, high: int
) -> None:
    p = Problem(config(h, i, 3, clamp), n, low, high, seed=n)
    trace = p.oracle()
    for expert in range(3):
        assert p.agrees(expert, trace) == [True] * 4, expert
    if high < 250:
        assert trace.combine.isfinite().all()
        assert (trace.a_codes & 0x7F).float().mean() > 40  # not a layer of zeros
        assert trace.a_exponents[trace.valid].unique().numel() > 3


def test_special_tokens() -> None:
    """NaN and infinity stay in their token, an all-zero token gives zeros."""
    p = Problem(config(256, 128), 16, 114, 126)
    p.x[2, 17] = torch.nan
    p.x[5, 200] = torch.inf
    p.x[7] = 0.0
    trace = p.oracle()
    assert p.agrees(1, trace) == [True] * 4
    combine = p.run(1)[-1]
    bad = ~combine.isfinite().all(dim=-1)
    assert bad.nonzero().flatten().tolist() == [2, 5]
    assert not combine[7].any()


def swap(memory: Tensor, a: slice, b: slice) -> None:
    memory[a], memory[b] = memory[b].clone(), memory[a].clone()


MUTANTS = {
    "nibbles": lambda m: m["w13"].copy_((m["w13"] >> 4) | (m["w13"] << 4)),
    "sign": lambda m: m["w2"].bitwise_xor_(0x08),
    "rows": lambda m: swap(m["w13"].view(-1, 256, 64), *((..., r, slice(None)) for r in (5, 6))),
    "columns": lambda m: swap(m["w2"].view(-1, 8, 8), *((slice(None), c) for c in (2, 3))),
    "windows": lambda m: m["w13"].copy_(m["w13"].view(-1, 2, 16384).flip(1).flatten()),
    "experts": lambda m: m["w2"].copy_(m["w2"].view(3, -1).roll(1, 0).flatten()),
    "halves": lambda m: m["w13"].copy_(m["w13"].view(-1, 2, 8192).flip(1).flatten()),
    "scale halves": lambda m: m["w2_scale"].copy_(m["w2_scale"].view(-1, 2, 512).flip(1).flatten()),
    "scale blocks": lambda m: m["w13_scale"].copy_(m["w13_scale"].view(-1, 4).flip(1).flatten()),
    "scale groups": lambda m: m["w13_scale"].copy_(m["w13_scale"].view(-1, 4, 4).flip(1).flatten()),
    "scale lanes": lambda m: m["w2_scale"].copy_(m["w2_scale"].view(-1, 32, 16).flip(1).flatten()),
    "row-major scales": lambda m: m["w13_scale"].copy_(
        m["w13_scale"].view(-1, 32, 4, 4).transpose(1, 2).flatten()
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_another_layout(name: str) -> None:
    p = Problem(config(256, 128), 8, 114, 126)
    trace = p.oracle()
    MUTANTS[name](p.memory)
    assert p.agrees(1, trace)[-1] is False
