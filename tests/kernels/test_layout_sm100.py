"""The Blackwell kernel's descriptors and places, field by field against the documented encodings.

``mx_datapath`` decodes and builds them on its own, from the documents.
"""

from __future__ import annotations

import mx_datapath as mx
import pytest
import torch

from gcmoe.config import MoEConfig
from gcmoe.kernels import layout_sm100 as layout
from gcmoe.numerics import packing_sm100
from gcmoe.plan import tiles_sm100
from gcmoe.protocol import atom_word

TILES = {
    "narrow": tiles_sm100.NARROW_TILES,
    "medium": tiles_sm100.MEDIUM_TILES,
    "wide": tiles_sm100.WIDE_TILES,
}
ADDRESSES = (1024, 33 * 1024, 226 * 1024)


def test_instruction_descriptor() -> None:
    for n in range(8, 129, 8):
        for step in range(4):
            word = layout.instruction_descriptor(n, step)
            assert word == mx.instruction_descriptor(n, step, step)
            fields = mx.fields_of(word, mx.INSTRUCTION_FIELDS)
            assert fields == {
                "sparse": 0,
                "sfb_id": step,
                "a_format": 5,  # E2M1
                "b_format": 0,  # E4M3
                "a_negate": 0,
                "b_negate": 0,
                "a_major": 0,  # K-major
                "b_major": 0,
                "n": n // 8,
                "scale_format": 1,  # UE8M0
                "m": 8,  # 128
                "sfa_id": step,
                "k_size": 0,  # K32
            }


def test_instruction_descriptor_of_the_kernel_language() -> None:
    cutlass = pytest.importorskip("cutlass")
    primitives = pytest.importorskip("cutlass.experimental.primitives")
    for n in (8, 16, 24, 40, 128):
        word = primitives.Tcgen05MxInstrDesc.build(
            a_dtype=cutlass.Float4E2M1FN,
            b_dtype=cutlass.Float8E4M3FN,
            scale_format=1,
            n_dim=n,
            m_dim=128,
        )
        assert int(word.value) == layout.instruction_descriptor(n, 0)


@pytest.mark.parametrize("address", ADDRESSES)
def test_shared_memory_descriptors(address: int) -> None:
    operand, scales = layout.operand_descriptor(address), layout.scale_descriptor(address)
    assert operand == mx.smem_descriptor(address, 16, 1024, mx.SWIZZLE_128B)
    assert scales == mx.smem_descriptor(address, 16, 128, mx.SWIZZLE_NONE)
    common = {"start": address // 16, "leading": 1, "version": 1, "base_offset": 0}
    assert mx.fields_of(operand, mx.SMEM_FIELDS) == common | {"stride": 64, "swizzle": 2}
    assert mx.fields_of(scales, mx.SMEM_FIELDS) == common | {"stride": 8, "swizzle": 0}
    for num_bytes in (32, 512, 16384 + 96):
        wanted = mx.smem_descriptor(address + num_bytes, 16, 1024, mx.SWIZZLE_128B)
        assert operand + layout.advance(num_bytes) == wanted


def test_a_window_issues_every_half_and_step_once() -> None:
    assert {(mma.half, mma.step) for mma in layout.MMAS} == {
        (h, k) for h in (0, 1) for k in range(4)
    }
    assert len(layout.MMAS) == 8
    for mma in layout.MMAS:
        assert mma.a_bytes == 16384 * mma.half + 32 * mma.step
        assert mma.b_bytes == 32 * mma.step
        # A half's scales are where the copy of its atom puts them, the tokens' likewise.
        copied = {copy.column: (copy.source, copy.source_bytes) for copy in layout.COPIES}
        assert copied[mma.a_column] == ("w_scale", 512 * mma.half)
        assert copied[mma.b_column] == ("x_scale", 0)
    # The step that may start the sums comes first in its half.
    for half in (0, 1):
        assert [mma.step for mma in layout.MMAS if mma.half == half] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", TILES)
def test_tensor_memory_columns_do_not_meet(name: str) -> None:
    tiles = TILES[name]
    memory = layout.TensorMemory(tiles.max_width, tiles.stages, tiles.accumulators)
    used: list[int] = []
    for b in range(tiles.accumulators):
        for half in (0, 1):
            first = b * memory.accumulator_columns + half * memory.width
            used += range(first, first + memory.width)
    for s in range(tiles.stages):
        for copy in layout.COPIES:
            first = memory.first_scale + s * memory.stage_columns + copy.column
            assert first % 4 == 0
            used += range(first, first + layout.ATOM_COLUMNS)
    assert sorted(used) == list(range(memory.columns))
    assert memory.columns <= memory.allocated <= 512
    assert memory.allocated in (32, 64, 128, 256, 512)


def test_byte_counts_are_the_packers() -> None:
    assert layout.CODE_BYTES == packing_sm100.BURST_BYTES
    assert layout.ATOM_BYTES == packing_sm100.ATOM_BYTES
    assert layout.HALF_ROWS == packing_sm100.HALF_ROWS
    e, h, i = 3, 512, 384
    cfg = MoEConfig(hidden=h, intermediate=i, num_experts=e, top_k=2, max_tokens=8)
    shapes = ((e, 2 * i, h // 2), (e, 2 * i, h // 32), (e, h, i // 2), (e, h, i // 32))
    packed = packing_sm100.pack_sm100(*(torch.zeros(s, dtype=torch.uint8) for s in shapes), cfg)
    w1_bursts = e * (i // 128) * (h // 128)
    w2_bursts = e * (h // 256) * (i // 128)
    assert packed.nbytes == layout.WEIGHT_BYTES * (w1_bursts + w2_bursts)
    assert packed.w13.nbytes == w1_bursts * layout.CODE_BYTES
    assert packed.w2_scale.nbytes == w2_bursts * layout.SCALE_BYTES
    # Padded in shared memory: 16 bytes for 16 codes.
    assert layout.CODE_SHARED_BYTES == 2 * layout.CODE_BYTES
    assert layout.token_bytes(24) == 24 * 128 + layout.ATOM_BYTES


def test_swizzle_of_the_window_that_the_epilogue_stages() -> None:
    rows, columns = torch.arange(128)[:, None], torch.arange(128)
    found = layout.swizzled_byte(rows, columns)
    assert torch.equal(found, mx.swizzled(rows * 128 + columns))


def test_atom_words() -> None:
    for row in range(128):
        assert [4 * atom_word(row) + k for k in range(4)] == [
            mx.atom_offset(row, k) for k in range(4)
        ]
    assert sorted(atom_word(row) for row in range(128)) == list(range(128))
