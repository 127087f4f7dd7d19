"""Reads every stage of the last call out of the workspace and compares it with the oracle.

Valid while every block of the call fits the ring and no later call has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers import Batch, Problems, Weights
from torch import Tensor

from gcmoe.numerics import (
    ReferenceTrace,
    decode_e4m3,
    decode_ue8m0,
    finalize,
    permute_window,
    unpermute_window,
    unswizzle128,
)
from gcmoe.numerics.reference import _product
from gcmoe.protocol import BlockEntry, RoutesHeader, RowMeta, fragment_position

NEAR_BOUNDARY = 1e-3
MAX_CODE_STEP = 1
MAX_CODE_ERROR = 0.25
MAX_W2_ERROR = 2e-3
MAX_W2_ERROR_NARROW = 2.5e-3
"""Of a row of fewer than 1,024 columns, where rounding averages less."""


def view(op: Any, region: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """A workspace region as a tensor that shares its memory."""
    return op.workspace_view(region).view(dtype).view(*shape)


def bases(op: Any) -> tuple[int, int, int, int]:
    """(generation, epoch_base, slot_base, arrivals_base), each modulo 2^32."""
    words = view(op, "bases", torch.int32, 4).tolist()
    generation, epoch, slot, arrivals = (word & 0xFFFF_FFFF for word in words)
    return generation, epoch, slot, arrivals


@dataclass(frozen=True)
class Blocks:
    """The blocks and rows that a routing asks for, in ring order."""

    entries: list[int]
    """BlockEntry of each block."""
    slot: Tensor
    row: Tensor
    width: Tensor
    expert: Tensor
    token: Tensor
    k_slot: Tensor
    """int64 [rows] each, on the GPU."""
    fragment: Tensor
    """Place of each row in an array in fragment order."""


def expected_blocks(op: Any, batch: Batch, slot_base: int) -> Blocks:
    """Blocks in the order (expert, token, slot), placed from ``slot_base`` on."""
    shape, widths = op.plan.workspace, op.plan.tiles.widths
    ids = batch.ids.cpu()
    entries: list[int] = []
    rows: list[tuple[int, int, int, int, int, int]] = []
    for expert in range(shape.local_experts):
        pairs = (ids == expert).nonzero().tolist()
        for first in range(0, len(pairs), shape.block_rows):
            part = pairs[first : first + shape.block_rows]
            slot = (slot_base + len(entries)) & (shape.num_slots - 1)
            entries.append(BlockEntry.pack(expert, len(part)))
            width = next(w for w in widths if w >= len(part))
            rows += [(slot, row, width, expert, *pair) for row, pair in enumerate(part)]
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)
    fragment = [fragment_position(row, shape.slot_rows) for row in table[:, 1].tolist()]
    columns = [column.contiguous().cuda() for column in table.unbind(dim=1)]
    return Blocks(entries, *columns, torch.tensor(fragment, dtype=torch.int64).cuda())


@dataclass(frozen=True)
class CodeReport:
    """How the kernel's codes of ``a`` compare with the oracle's."""

    equal: float
    scales: int
    scales_differ: int


def check_staged(problems: Problems, op: Any, trace: ReferenceTrace) -> Tensor:
    """Codes and exponents of staged x, exactly; returns the expected rows."""
    shape = op.plan.workspace
    length = shape.hidden + shape.num_windows
    wanted = torch.cat((permute_window(trace.xq_codes), trace.xq_exponents), dim=1)
    staged = view(op, "staged_x", torch.uint8, shape.max_tokens, shape.row_stride)
    problems.expect_equal("staged x", staged[: len(wanted), :length], wanted)
    return wanted


def check_ring(problems: Problems, op: Any, batch: Batch, staged: Tensor, b: Blocks) -> None:
    """Routes and every row of the ring, exactly."""
    shape = op.plan.workspace
    s, u, w = shape.num_slots, shape.slot_rows, shape.num_windows
    routes = int(view(op, "routes", torch.int64, 1)[0])
    num_blocks = int(RoutesHeader.NUM_BLOCKS.get(routes))
    if num_blocks != len(b.entries):
        problems.add(f"routes: {num_blocks} blocks, wanted {len(b.entries)}")
    table = view(op, "block_table", torch.int32, shape.max_blocks)[: len(b.entries)]
    wanted = torch.tensor(b.entries, dtype=torch.int32, device="cuda")
    problems.expect_equal("block table", table, wanted)
    meta = view(op, "ring_meta", torch.int32, s, u)[b.slot, b.row]
    origin = RowMeta.pack(0, b.token, b.k_slot).to(torch.int32)
    problems.expect_equal("ring meta", meta, origin)
    weight = view(op, "ring_weight", torch.float32, s, u)[b.slot, b.fragment]
    problems.expect_equal("ring weights", weight, batch.weights[b.token, b.k_slot])
    rows = view(op, "ring_rows", torch.uint8, s, u, shape.row_stride)[b.slot, b.row]
    problems.expect_equal("ring rows", rows[:, : staged.shape[1]], staged[b.token])
    scale = view(op, "ring_scale", torch.int32, s, w, u)[b.slot, :, b.fragment]
    exponents = staged[b.token, shape.hidden :].to(torch.int32) << 23
    problems.expect_equal("ring scales", scale, exponents)


def read_activations(op: Any, b: Blocks) -> tuple[Tensor, Tensor]:
    """(codes uint8 [rows, I], scale bits int32 [rows, I/128]) of ``a``, in ring order."""
    shape = op.plan.workspace
    s, u, windows = shape.num_slots, shape.slot_rows, shape.intermediate // 128
    blocks = view(op, "a_rows", torch.uint8, s, windows * u * 128)
    codes = torch.zeros((len(b.slot), shape.intermediate), dtype=torch.uint8, device="cuda")
    for width in b.width.unique().tolist():
        mine = (b.width == width).nonzero().flatten()
        slots, index = b.slot[mine].unique(return_inverse=True)
        tiles = blocks[slots, : windows * width * 128].view(-1, windows, width, 128)
        tiles = unpermute_window(unswizzle128(tiles)).transpose(1, 2).flatten(2)
        codes[mine] = tiles[index, b.row[mine]]
    scales = view(op, "a_scale", torch.int32, s, windows, u)[b.slot, :, b.fragment]
    return codes, scales


def magnitude_order(codes: Tensor) -> Tensor:
    """E4M3 codes as integers in the order of their values; both zeros are 0."""
    magnitude = (codes & 0x7F).to(torch.int32)
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def check_activations(
    problems: Problems,
    codes: Tensor,
    scales: Tensor,
    trace: ReferenceTrace,
    b: Blocks,
    min_equal: float,
) -> CodeReport:
    """``a`` against the oracle: scales equal but at boundaries, codes equal but for few, those
    close."""
    a = trace.a[b.token, b.k_slot]
    wanted_codes = trace.a_codes[b.token, b.k_slot]
    wanted = trace.a_exponents[b.token, b.k_slot].to(torch.int32)
    if bool((scales & 0x7F_FFFF).any()):
        problems.add("scales of a: not powers of two")
    found = scales >> 23
    windows = wanted.shape[1]
    amax = a.abs().nan_to_num(0.0, 0.0, 0.0).view(len(a), windows, 128).amax(dim=2).double()
    octave = torch.log2(amax / 448)
    near = ((octave - octave.round()).exp2() - 1).abs() <= NEAR_BOUNDARY
    wrong = (found != wanted) & ~(near & ((found - wanted).abs() == 1))
    for row, window in wrong.nonzero()[:4].tolist():
        problems.add(
            f"scales of a: token {int(b.token[row])} slot {int(b.k_slot[row])} window {window}: "
            f"byte {int(found[row, window])}, wanted {int(wanted[row, window])}, amax "
            f"{float(amax[row, window]):.6g}"
        )
    if bool(wrong.any()):
        problems.add(f"scales of a: {int(wrong.sum())} of {wrong.numel()} wrong")
    same = (found == wanted).repeat_interleave(128, dim=1)
    nan = (wanted_codes & 0x7F) == 0x7F
    if bool((((codes & 0x7F) == 0x7F) != nan).any()):
        problems.add("codes of a: NaN in other places")
    distance = (magnitude_order(codes) - magnitude_order(wanted_codes)).abs()
    error = (decode_e4m3(codes) - decode_e4m3(wanted_codes)).abs()
    counted = same & ~nan
    far = counted & (distance > MAX_CODE_STEP) & ~(error <= MAX_CODE_ERROR)
    for row, column in far.nonzero()[:4].tolist():
        problems.add(
            f"codes of a: token {int(b.token[row])} slot {int(b.k_slot[row])} expert "
            f"{int(b.expert[row])} column {column}: {int(codes[row, column]):#x}, wanted "
            f"{int(wanted_codes[row, column]):#x} (ring row {int(b.row[row])}, width "
            f"{int(b.width[row])})"
        )
    if bool(far.any()):
        columns = far.any(dim=0).nonzero().flatten()
        problems.add(
            f"codes of a: {int(far.sum())} of {far.numel()} far off, in {int(far.any(1).sum())} "
            f"rows and {len(columns)} columns from {int(columns[0])} to {int(columns[-1])}"
        )
    equal = float((distance[counted] == 0).double().mean()) if bool(counted.any()) else 1.0
    if equal < min_equal:
        problems.add(f"codes of a: {equal:.5f} equal, at least {min_equal}")
    # Where the scale moved by an octave, the values still agree to the coarser code.
    moved = ~same & ~nan
    if bool(moved.any()):
        value = decode_e4m3(codes) * decode_ue8m0(found.to(torch.uint8)).repeat_interleave(128, 1)
        exact = a.nan_to_num(0.0, 0.0, 0.0)
        unit = torch.maximum(found, wanted).clamp(0, 254).to(torch.uint8)
        bound = 2.0**-3 * exact.abs() + 0.5 * decode_ue8m0(unit).repeat_interleave(128, dim=1)
        if bool(((value - exact).abs() > bound)[moved].any()):
            problems.add("codes of a: wrong values where the scale moved by an octave")
    return CodeReport(equal, found.numel(), int((found != wanted).sum()))


def check_w2(
    problems: Problems, op: Any, codes: Tensor, scales: Tensor, weights: Weights, b: Blocks
) -> float:
    """W2 from the kernel's own ``a``, against the product before its rounding to BF16."""
    shape = op.plan.workspace
    rows = view(op, "combine", torch.bfloat16, shape.max_tokens, shape.top_k, shape.hidden)
    exponents = (scales >> 23).to(torch.uint8)
    worst = 0.0
    bound = MAX_W2_ERROR if shape.hidden >= 1024 else MAX_W2_ERROR_NARROW
    experts = weights.experts
    for expert in b.expert.unique().tolist():
        mine = (b.expert == expert).nonzero().flatten()
        wanted = _product(
            codes[mine], exponents[mine], experts.w2[expert], experts.w2_scale[expert], "sm90"
        ).double()
        found = rows[b.token[mine], b.k_slot[mine]].double()
        norm = wanted.norm(dim=1)
        error = (found - wanted).norm(dim=1)
        good = (error <= bound * norm) | (wanted.isnan().any(dim=1) & found.isnan().any(dim=1))
        for place in (~good).nonzero().flatten()[:2].tolist():
            row = int(mine[place])
            off = ((found - wanted)[place].abs() > 0.02 * norm[place] / shape.hidden**0.5).nonzero()
            span = f"{int(off[0])} to {int(off[-1])}" if len(off) else "none"
            problems.add(
                f"W2: expert {expert} token {int(b.token[row])} slot {int(b.k_slot[row])}: "
                f"relative L2 {float(error[place] / norm[place]):.5f}, at most {bound}; "
                f"{len(off)} columns off, {span} (ring row {int(b.row[row])}, width "
                f"{int(b.width[row])})"
            )
        finite = norm > 0
        if bool(finite.any()):
            worst = max(worst, float((error[finite] / norm[finite]).nan_to_num(0.0).max()))
    return worst


def check_sum(problems: Problems, op: Any, batch: Batch, y: Tensor) -> None:
    """y from the kernel's own combine rows, exactly."""
    shape = op.plan.workspace
    rows = view(op, "combine", torch.bfloat16, shape.max_tokens, shape.top_k, shape.hidden)
    valid = (batch.ids >= 0) & (batch.ids < op.config.num_experts)
    problems.expect_equal("y", y, finalize(rows[: batch.num_tokens], valid))


def check_stages(
    problems: Problems,
    op: Any,
    batch: Batch,
    y: Tensor,
    trace: ReferenceTrace,
    weights: Weights,
    before: tuple[int, int, int, int],
    min_equal: float,
) -> str:
    """All stages of the last call; ``before`` are the bases before it. Returns a summary."""
    shape = op.plan.workspace
    b = expected_blocks(op, batch, before[2])
    if len(b.entries) > shape.num_slots:
        raise ValueError(f"{len(b.entries)} blocks do not fit {shape.num_slots} slots")
    staged = check_staged(problems, op, trace)
    check_ring(problems, op, batch, staged, b)
    codes, scales = read_activations(op, b)
    report = check_activations(problems, codes, scales, trace, b, min_equal)
    worst = check_w2(problems, op, codes, scales, weights, b)
    check_sum(problems, op, batch, y)
    check_bases(problems, op, b, before)
    return (
        f"{len(b.entries)} blocks, {len(b.slot)} rows, codes equal {report.equal:.5f}, scales "
        f"moved {report.scales_differ} of {report.scales}, W2 relative L2 {worst:.5f}"
    )


def check_bases(problems: Problems, op: Any, b: Blocks, before: tuple[int, int, int, int]) -> None:
    """The cells after the call are those of the protocol."""
    shape = op.plan.workspace
    generation, epoch, slot, arrivals = before
    end = slot + len(b.entries)
    wrap = (1 << 32) - 1
    wanted = (
        (generation + 1) & wrap,
        (epoch + (end >> shape.ring.shift)) & wrap,
        end & (shape.num_slots - 1),
        (arrivals + len(b.slot) * (shape.hidden // 64)) & wrap,
    )
    if bases(op) != wanted:
        problems.add(f"bases: {bases(op)}, wanted {wanted}")
    arrived = int(view(op, "combine_arrivals", torch.int32, 1)[0]) & wrap
    if arrived != wanted[3]:
        problems.add(f"combine arrivals: {arrived}, wanted {wanted[3]}")
    for name in ("work_ticket", "finalize_done", "in_flight", "abort", "fault"):
        value = int(view(op, name, torch.int32, 1)[0])
        if value:
            problems.add(f"{name}: {value}, wanted 0")
    bitmap = view(op, "w1_bitmap", torch.int64, shape.num_slots)
    full = view(op, "token_ring_full", torch.int32, shape.num_slots).tolist()
    empty = view(op, "token_ring_empty", torch.int32, shape.num_slots).tolist()
    mask = shape.bitmap.mask
    for n, bits in enumerate(bitmap.tolist()):
        # Places below the end were used once more than those above it.
        uses = (wanted[1] + (n < wanted[2])) & wrap
        seen = (bits & ((1 << 64) - 1), full[n] & wrap, empty[n] & wrap)
        cells = (
            mask if uses & 1 else 0,
            uses * shape.slot_rows & wrap,
            uses * (shape.hidden // 64) & wrap,
        )
        if seen != cells:
            problems.add(f"slot {n}: (bitmap, full, empty) {seen}, wanted {cells}")
            break
