"""CPU model of the Blackwell data path, from packed bytes to the rows of both projections.

Written from the documented layouts and encodings, step by step, and sharing no code with the
packer or the oracle:

1. A tensor map over 4-bit elements writes 16 codes as 8 bytes of codes and 8 undefined bytes, a
   row of 128 codes as 128 bytes, under the 128-byte swizzle. Token rows (8-bit) come the same way.
2. Scale atoms of 512 bytes come as they are.
3. ``tcgen05.cp.32x128b.warpx4`` brings an atom to four columns of tensor memory.
4. ``tcgen05.mma.kind::mxf8f6f4.block_scale`` finds its operands through 64-bit shared-memory
   descriptors and a 32-bit instruction descriptor, which this model decodes bit by bit.
5. The epilogue reads accumulators as (lane = feature, column = token).

Everything that the documents leave undefined holds random bytes. Accumulators are fp64, so the
order and width of the hardware's own sums is outside the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1 = torch.cat((E2M1, -E2M1))
_E4M3_FINITE = torch.tensor(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:119],
    dtype=torch.float64,
)
_E4M3_HALF = torch.cat((_E4M3_FINITE, torch.tensor([torch.nan], dtype=torch.float64)))
E4M3 = torch.cat((_E4M3_HALF, -_E4M3_HALF))
UE8M0 = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [torch.nan], dtype=torch.float64)

SMEM_A, SMEM_B, SMEM_SFA, SMEM_SFB, SMEM_END = 0, 32768, 65536, 66560, 67584
SWIZZLE_NONE, SWIZZLE_128B = 0, 2


# ---- descriptors --------------------------------------------------------------------------

INSTRUCTION_FIELDS = {
    "sparse": (2, 1),
    "sfb_id": (4, 2),
    "a_format": (7, 3),
    "b_format": (10, 3),
    "a_negate": (13, 1),
    "b_negate": (14, 1),
    "a_major": (15, 1),
    "b_major": (16, 1),
    "n": (17, 6),
    "scale_format": (23, 1),
    "m": (24, 5),
    "sfa_id": (29, 2),
    "k_size": (31, 1),
}
"""(first bit, width) of the fields of a block-scaled instruction descriptor."""

SMEM_FIELDS = {
    "start": (0, 14),
    "leading": (16, 14),
    "stride": (32, 14),
    "version": (46, 2),
    "base_offset": (49, 3),
    "swizzle": (61, 3),
}
"""(first bit, width) of the fields of a shared-memory descriptor; offsets are in 16 bytes."""


def fields_of(word: int, table: dict[str, tuple[int, int]]) -> dict[str, int]:
    """Values of all fields of a descriptor; raises ValueError if a bit outside them is set."""
    values = {name: (word >> at) & ((1 << width) - 1) for name, (at, width) in table.items()}
    rest = word
    for name, (at, _) in table.items():
        rest &= ~(values[name] << at)
    if rest:
        raise ValueError(f"descriptor {word:#x} has reserved bits {rest:#x}")
    return values


def instruction_descriptor(n: int, sfa_id: int, sfb_id: int) -> int:
    """The 32-bit descriptor of an M128 x n x K32 MMA, E2M1 x E4M3, UE8M0 scales, both K-major.

    Args:
        n: tokens of the MMA, 8..256 in steps of 8.
        sfa_id, sfb_id: byte 0..3 of a scale word, for weights and for tokens.

    Raises:
        ValueError: an argument is outside its range.
    """
    if n not in range(8, 257, 8):
        raise ValueError(f"n = {n}: must be 8..256 in steps of 8")
    if sfa_id not in range(4) or sfb_id not in range(4):
        raise ValueError(f"scale ids ({sfa_id}, {sfb_id}): must be in 0..3")
    e2m1, e4m3, ue8m0, m = 5, 0, 1, 128
    word = sfb_id << 4 | e2m1 << 7 | e4m3 << 10 | (n >> 3) << 17
    return word | ue8m0 << 23 | (m >> 4) << 24 | sfa_id << 29


def smem_descriptor(start: int, leading: int, stride: int, swizzle: int) -> int:
    """The 64-bit descriptor of a matrix in shared memory; addresses and offsets in bytes."""
    if start % 16 or leading % 16 or stride % 16:
        raise ValueError(f"({start}, {leading}, {stride}): must be multiples of 16 bytes")
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | swizzle << 61


# ---- the machine --------------------------------------------------------------------------


def random_bytes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def swizzled(address: Tensor) -> Tensor:
    """128-byte swizzle: bits 7..9 of an address are XORed into bits 4..6."""
    return address ^ (((address >> 7) & 7) << 4)


@dataclass
class Machine:
    """Shared memory, tensor memory for scales, and accumulators of one SM.

    Attributes:
        smem: uint8 [bytes].
        tmem: uint8 [128 lanes, 512 columns, 4 bytes]; the model keeps scales there.
        accumulator: fp64 [128 lanes, 512 columns]; the same columns, kept apart for precision.
    """

    generator: torch.Generator
    smem: Tensor = field(init=False)
    tmem: Tensor = field(init=False)
    accumulator: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.smem = random_bytes(self.generator, SMEM_END)
        self.tmem = random_bytes(self.generator, 128, 512, 4)
        self.accumulator = torch.full((128, 512), torch.nan, dtype=torch.float64)

    def load_u4(self, memory: Tensor, row: int, rows: int, to: int) -> None:
        """Box [128 columns, rows] at (0, row) of a map of 4-bit elements, 64 bytes a row."""
        box = memory[64 * row : 64 * (row + rows)].reshape(rows, 8, 8)
        chunks = torch.cat((box, random_bytes(self.generator, rows, 8, 8)), dim=-1)
        address = to + torch.arange(128 * rows)
        self.smem[swizzled(address)] = chunks.flatten()

    def load_u8(self, memory: Tensor, column: int, row: int, rows: int, to: int) -> None:
        """Box [128 columns, rows] at (column, row) of a map of bytes; zeros past the last row."""
        box = torch.zeros((rows, 128), dtype=torch.uint8)
        there = memory[row : row + rows, column : column + 128]
        box[: there.shape[0]] = there
        self.smem[swizzled(to + torch.arange(128 * rows))] = box.flatten()

    def load_bulk(self, memory: Tensor, to: int) -> None:
        self.smem[to : to + memory.numel()] = memory

    def copy_scales(self, descriptor: int, column: int) -> None:
        """tcgen05.cp.32x128b.warpx4: 32 rows of 16 bytes, to the four groups of 32 lanes."""
        d = fields_of(descriptor, SMEM_FIELDS)
        assert (d["version"], d["base_offset"], d["swizzle"]) == (1, 0, SWIZZLE_NONE)
        row, byte = torch.arange(32)[:, None], torch.arange(16)
        address = 16 * d["start"] + row // 8 * 16 * d["stride"] + row % 8 * 16 + byte
        words = self.smem[address].view(32, 4, 4)
        for group in range(4):
            self.tmem[32 * group : 32 * group + 32, column : column + 4] = words

    def _operand(self, descriptor: int, rows: int) -> Tensor:
        """uint8 [rows, 32]: the containers of one K32 step of a K-major operand."""
        d = fields_of(descriptor, SMEM_FIELDS)
        assert (d["version"], d["base_offset"], d["swizzle"]) == (1, 0, SWIZZLE_128B)
        row, byte = torch.arange(rows)[:, None], torch.arange(32)
        address = 16 * d["start"] + row // 8 * 16 * d["stride"] + row % 8 * 128 + byte
        return self.smem[swizzled(address)]

    def mma(
        self, a: int, b: int, instruction: int, accumulate: bool, d: int, sfa: int, sfb: int
    ) -> None:
        """tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32, one K32 step.

        Args:
            a, b: shared-memory descriptors. instruction: instruction descriptor.
            accumulate: add to the accumulator instead of overwriting it.
            d, sfa, sfb: first columns of accumulator and scales.
        """
        f = fields_of(instruction, INSTRUCTION_FIELDS)
        n = 8 * f["n"]
        assert (f["a_format"], f["b_format"], f["scale_format"], f["m"]) == (5, 0, 1, 8)
        zero = ("sparse", "a_negate", "b_negate", "a_major", "b_major", "k_size")
        assert not any(f[name] for name in zero)

        chunks = self._operand(a, 128).view(128, 2, 16)[..., :8].to(torch.int64)  # pad left out
        weight = E2M1[torch.stack((chunks & 15, chunks >> 4), dim=-1).reshape(128, 32)]
        token = E4M3[self._operand(b, n).to(torch.int64)]
        m_row, n_row = torch.arange(128), torch.arange(n)
        weight_scale = self.tmem[m_row % 32, sfa + m_row // 32, f["sfa_id"]]
        token_scale = self.tmem[n_row % 32, sfb + n_row // 32, f["sfb_id"]]
        weight = weight * UE8M0[weight_scale.to(torch.int64)][:, None]
        token = token * UE8M0[token_scale.to(torch.int64)][:, None]
        total = weight @ token.T
        if accumulate:
            total = self.accumulator[:, d : d + n] + total
        self.accumulator[:, d : d + n] = total


# ---- formats of the epilogue --------------------------------------------------------------


def encode_e4m3(x: Tensor) -> Tensor:
    """Codes of fp64 values, nearest with ties to the even code, saturating."""
    middle = (_E4M3_FINITE[1:] + _E4M3_FINITE[:-1]) / 2
    magnitude = x.abs().contiguous()
    code = torch.searchsorted(middle, magnitude)  # middles below the value
    tie = magnitude == middle[code.clamp(max=len(middle) - 1)]
    code = code + (tie & (code % 2 == 1))
    return (code + 128 * torch.signbit(x)).to(torch.uint8)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 codes uint8 [..., 32], UE8M0 bytes uint8 [...]) of blocks [..., 32]."""
    value = x.to(torch.float64)
    odd = ~torch.isfinite(value)
    largest = value.masked_fill(odd, 0.0).abs().amax(dim=-1)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa 2^exponent; 448 = 0.875 * 2^9
    e = exponent - 9 + (mantissa > 0.875).to(torch.int32)
    e = torch.where(largest == 0, torch.full_like(e, -126), e).clamp(-126, 127)
    scaled = torch.ldexp(value.masked_fill(odd, 0.0), -e.unsqueeze(-1).to(torch.float64))
    codes = encode_e4m3(scaled).masked_fill(odd, 0x7F)
    return codes, (e + 127).to(torch.uint8)


def atom_offset(row: int, block: int) -> int:
    """Byte of a 512-byte atom that holds the scale of (row, K32 block of the window)."""
    return row % 32 * 16 + row // 32 % 4 * 4 + block


def token_atoms(scale: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """uint8 [K/128, n/128 rounded up, 512]: scale atoms of the token operand.

    Args:
        scale: UE8M0 uint8 [tokens, K/32]; only these rows are defined.
        n: tokens of the MMA.
    """
    atoms = random_bytes(generator, scale.shape[1] // 4, -(-n // 128), 512)
    for row in range(scale.shape[0]):
        for k in range(4):
            atoms[:, row // 128, atom_offset(row, k)] = scale[row, k::4]
    return atoms


def swiglu(gate: Tensor, up: Tensor, weight: Tensor, clamp: float | None) -> Tensor:
    """fp32 of ``silu(gate) * up * weight``; NaN passes the clamp."""
    if clamp is not None:
        gate = torch.where(gate > clamp, clamp, gate)
        up = torch.where(up > clamp, clamp, torch.where(up < -clamp, -clamp, up))
    gate, up = gate.to(torch.float64), up.to(torch.float64)
    return (gate / (1.0 + torch.exp(-gate)) * up * weight.to(torch.float64)).to(torch.float32)


# ---- the two projections ------------------------------------------------------------------


@dataclass
class Operand:
    """Token rows in memory, as one projection reads them.

    Attributes:
        codes: uint8 [rows, K], rows of other batches included.
        first: row of the batch's first token.
        tokens: tokens of the batch.
        atoms: uint8 [K/128, atoms, 512], see :func:`token_atoms`.
    """

    codes: Tensor
    first: int
    tokens: int
    atoms: Tensor

    @property
    def n(self) -> int:
        """N of the MMA: tokens rounded up to 8."""
        return -(-self.tokens // 8) * 8


def run_item(
    machine: Machine, codes: Tensor, scales: Tensor, item: int, windows: int, x: Operand
) -> tuple[Tensor, Tensor]:
    """All windows of one work item.

    Args:
        codes, scales: flat uint8, the packed tensors as memory.
        item: number of the item over all experts.
        windows: windows of K.

    Returns:
        The accumulators of the two halves, fp32 [128, tokens] each: lane = row of the half.
    """
    n = x.n
    d = (0, n)
    sfa, sfb = (2 * n, 2 * n + 4), 2 * n + 8
    num_atoms = x.atoms.shape[1]
    assert sfb + 4 * num_atoms <= 512
    for window in range(windows):
        burst = item * windows + window
        machine.load_u4(codes, 256 * burst, 256, SMEM_A)
        machine.load_u8(x.codes, 128 * window, x.first, n, SMEM_B)
        machine.load_bulk(scales[1024 * burst : 1024 * (burst + 1)], SMEM_SFA)
        machine.load_bulk(x.atoms[window].flatten(), SMEM_SFB)
        for half in range(2):
            at = SMEM_SFA + 512 * half
            machine.copy_scales(smem_descriptor(at, 16, 128, SWIZZLE_NONE), sfa[half])
        for atom in range(num_atoms):
            at = SMEM_SFB + 512 * atom
            machine.copy_scales(smem_descriptor(at, 16, 128, SWIZZLE_NONE), sfb + 4 * atom)
        for k in range(4):
            b = smem_descriptor(SMEM_B + 32 * k, 16, 1024, SWIZZLE_128B)
            for half in range(2):
                a = smem_descriptor(SMEM_A + 16384 * half + 32 * k, 16, 1024, SWIZZLE_128B)
                machine.mma(
                    a,
                    b,
                    instruction_descriptor(n, k, k),
                    window > 0 or k > 0,
                    d[half],
                    sfa[half],
                    sfb,
                )
    first, second = (machine.accumulator[:, c : c + x.tokens].to(torch.float32) for c in d)
    return first, second


def w1(
    machine: Machine,
    codes: Tensor,
    scales: Tensor,
    expert: int,
    intermediate: int,
    x: Operand,
    weight: Tensor,
    clamp: float | None,
) -> tuple[Tensor, Operand]:
    """First projection of one expert, re-quantised into the operand of the second.

    Args:
        codes, scales: flat uint8, packed w13.
        x: tokens of the expert.
        weight: fp32 [tokens], routing weights.

    Returns:
        (a fp32 [tokens, I], operand with K = I).
    """
    items, windows = intermediate // 128, x.atoms.shape[0]
    a = torch.empty((x.tokens, intermediate), dtype=torch.float32)
    rows = random_bytes(machine.generator, x.tokens + 3, intermediate)
    atoms = random_bytes(machine.generator, items, x.atoms.shape[1], 512)
    for fb in range(items):
        gate, up = run_item(machine, codes, scales, expert * items + fb, windows, x)
        act = swiglu(gate, up, weight, clamp).T.contiguous()  # [tokens, 128 lanes]
        code, byte = quantize(act.view(x.tokens, 4, 32))  # a warp is a block
        a[:, 128 * fb : 128 * (fb + 1)] = act
        rows[: x.tokens, 128 * fb : 128 * (fb + 1)] = code.view(x.tokens, 128)
        for token in range(x.tokens):
            for warp in range(4):
                atoms[fb, token // 128, atom_offset(token, warp)] = byte[token, warp]
    return a, Operand(rows, 0, x.tokens, atoms)


def w2(
    machine: Machine, codes: Tensor, scales: Tensor, expert: int, hidden: int, h: Operand
) -> Tensor:
    """Second projection of one expert: bf16 [tokens, H]; ``codes`` and ``scales`` are flat w2."""
    items, windows = hidden // 256, h.atoms.shape[0]
    out = torch.empty((h.tokens, hidden), dtype=torch.bfloat16)
    for item in range(items):
        halves = run_item(machine, codes, scales, expert * items + item, windows, h)
        for half, rows in enumerate(halves):
            first = 256 * item + 128 * half
            out[:, first : first + 128] = rows.T.to(torch.bfloat16)
    return out
