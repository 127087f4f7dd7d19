"""The whole layer against the oracle, and every stage of a call as the workspace holds it.

The workspace holds the last call, whole if every block fits the ring. A token of ``y`` beyond the
bound of the whole layer must be explained by it: docs/decisions/0006-bounds-of-a-whole-layer.md.
"""

from __future__ import annotations

import math
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
from gcmoe.protocol import (
    BlockEntry,
    RoutesHeader,
    RowMeta,
    WorkspaceShape,
    fragment_position,
    ring_row,
)

MAX_RELATIVE_L2, MIN_COSINE = 1e-2, 0.9999
"""Of a token of the whole layer."""
MAX_EXPLAINED_L2 = 3e-3
"""Of a token against W2 and finalize of the kernel's own ``a``."""
NEAR_BOUNDARY = 1e-3
MIN_EQUAL = {4: 0.99, 12: 0.98}
"""Share of equal codes of ``a``, by octaves of weight scales."""
FEW_CODES, MIN_EQUAL_OF_FEW = 2000, 0.98
"""Of so few codes one moved code is a step of the share."""
MAX_CODE_STEP = 1
MAX_CODE_ERROR = 0.25
WGMMA_ERROR = 1.75e-4
"""Relative L2 of a W1 product with block scales over 12 octaves, to the exact one, on H200."""
SIGMAS = 6
MAX_FAR_SHARE = 1e-5
MAX_W2_ERROR = 2e-3
NARROW = 1024
"""In a row of fewer columns, rounding to BF16 averages less."""


def view(op: Any, region: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """The start of a workspace region as a tensor that shares its memory."""
    return op.workspace_view(region).view(dtype)[: math.prod(shape)].view(*shape)


def bases(op: Any) -> tuple[int, int, int, int]:
    """(generation, epoch_base, slot_base, arrivals_base), each modulo 2^32."""
    words = view(op, "bases", torch.int32, 4).tolist()
    generation, epoch, slot, arrivals = (word & 0xFFFF_FFFF for word in words)
    return generation, epoch, slot, arrivals


@dataclass(frozen=True)
class Blocks:
    """The blocks and rows that a routing asks for, in ring order."""

    shape: WorkspaceShape
    """With the block rows of a call of this size."""
    entries: list[int]
    """BlockEntry of each block."""
    slot: Tensor
    row: Tensor
    width: Tensor
    expert: Tensor
    token: Tensor
    k_slot: Tensor
    place: Tensor
    """Of the row among those of its slot in ``ring_rows``."""
    fragment: Tensor
    """Place of the row in an array of its tile in fragment order.

    All int64 [rows], on the GPU."""

    def window_words(self, op: Any, region: str, windows: int) -> Tensor:
        """The words int32 [rows, windows] of the rows in a region that keeps for each window of a
        block as many words as its tile is wide."""
        shape = self.shape
        slots = view(op, region, torch.int32, shape.num_slots, windows * shape.block_rows)
        window = torch.arange(windows, device="cuda") * self.width[:, None]
        return slots[self.slot[:, None], window + self.fragment[:, None]]


def expected_blocks(op: Any, batch: Batch, slot_base: int) -> Blocks:
    """Blocks in the order (expert, token, slot), placed from ``slot_base`` on."""
    plan = op.plan.for_tokens(batch.num_tokens)
    shape, widths = plan.workspace, plan.tiles.widths
    ids = batch.ids.cpu()
    entries: list[int] = []
    rows: list[tuple[int, ...]] = []
    for expert in range(shape.local_experts):
        pairs = (ids == expert).nonzero().tolist()
        for first in range(0, len(pairs), shape.block_rows):
            part = pairs[first : first + shape.block_rows]
            slot = (slot_base + len(entries)) & (shape.num_slots - 1)
            entries.append(BlockEntry.pack(expert, len(part)))
            width = next(w for w in widths if w >= len(part))
            for row, pair in enumerate(part):
                place = ring_row(row, len(part), shape.block_rows)
                fragment = fragment_position(row, width)
                rows.append((slot, row, width, expert, *pair, place, fragment))
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 8)
    columns = [column.contiguous().cuda() for column in table.unbind(dim=1)]
    return Blocks(shape, entries, *columns)


@dataclass(frozen=True)
class CodeReport:
    """How the kernel's codes of ``a`` compare with the oracle's."""

    equal: float
    far: int
    """Codes that need the allowance for the tensor core's sum."""
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
    shape = b.shape
    s, u = shape.num_slots, shape.block_rows
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
    rows = view(op, "ring_rows", torch.uint8, s, u, shape.row_stride)[b.slot, b.place]
    problems.expect_equal("ring rows", rows[:, : staged.shape[1]], staged[b.token])
    scale = b.window_words(op, "ring_scale", shape.num_windows)
    exponents = staged[b.token, shape.hidden :].to(torch.int32) << 23
    problems.expect_equal("ring scales", scale, exponents)


def read_activations(op: Any, b: Blocks) -> tuple[Tensor, Tensor]:
    """(codes uint8 [rows, I], scale bits int32 [rows, I/128]) of ``a``, in ring order."""
    shape = b.shape
    s, u, windows = shape.num_slots, shape.block_rows, shape.intermediate // 128
    blocks = view(op, "a_rows", torch.uint8, s, windows * u * 128)
    codes = torch.zeros((len(b.slot), shape.intermediate), dtype=torch.uint8, device="cuda")
    for width in b.width.unique().tolist():
        mine = (b.width == width).nonzero().flatten()
        slots, index = b.slot[mine].unique(return_inverse=True)
        tiles = blocks[slots, : windows * width * 128].view(-1, windows, width, 128)
        tiles = unpermute_window(unswizzle128(tiles)).transpose(1, 2).flatten(2)
        codes[mine] = tiles[index, b.row[mine]]
    return codes, b.window_words(op, "a_scale", windows)


def magnitude_order(codes: Tensor) -> Tensor:
    """E4M3 codes as integers in the order of their values; both zeros are 0."""
    magnitude = (codes & 0x7F).to(torch.int32)
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def code_step(codes: Tensor) -> Tensor:
    """fp64 distance of an E4M3 code's value to the next larger magnitude."""
    exponent = ((codes >> 3) & 0xF).to(torch.int32).clamp(min=1)
    return (exponent - 10).double().exp2()


def activation_error(gate: Tensor, up: Tensor, weight: Tensor, clamp: float | None) -> Tensor:
    """How far ``a`` may move, fp64 [n, I], when each element of gate and up moves by SIGMAS times
    what the tensor core's short sums do, to first order.

    Args:
        gate, up: [n, I], exact and before the clamp.
        weight: routing weights [n].
    """
    g, u = gate.double(), up.double()
    error_g, error_u = (
        (SIGMAS * WGMMA_ERROR * z.square().mean(dim=1, keepdim=True).sqrt()).expand_as(z)
        for z in (g, u)
    )
    if clamp is not None:
        # Beyond the limit by more than the error nothing moves.
        error_g = error_g.masked_fill(g - error_g > clamp, 0.0)
        error_u = error_u.masked_fill(u.abs() - error_u > clamp, 0.0)
        g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
    sigmoid = g.sigmoid()
    by_gate = sigmoid * (1 + g * (1 - sigmoid)) * u
    by_up = g * sigmoid
    return weight.double().abs()[:, None] * (by_gate.abs() * error_g + by_up.abs() * error_u)


def within_allowance(
    codes: Tensor,
    exponents: Tensor,
    trace: ReferenceTrace,
    batch: Batch,
    weights: Weights,
    clamp: float | None,
    b: Blocks,
    rows: Tensor,
) -> Tensor:
    """bool [n, I]: the kernel's value lies within :func:`activation_error` and half a step of the
    oracle's ``a`` before rounding, for n rows of the call."""
    allowed = torch.zeros((len(rows), codes.shape[1]), dtype=torch.bool, device=codes.device)
    experts = weights.experts
    for expert in b.expert[rows].unique().tolist():
        mine = (b.expert[rows] == expert).nonzero().flatten()
        places = rows[mine]
        token, slot = b.token[places], b.k_slot[places]
        gate, up = _product(
            trace.xq_codes[token],
            trace.xq_exponents[token],
            experts.w13[expert],
            experts.w13_scale[expert],
            "sm90",
        ).chunk(2, dim=1)
        unit = decode_ue8m0(exponents[places]).double().repeat_interleave(128, dim=1)
        value = decode_e4m3(codes[places]).double() * unit
        bound = activation_error(gate, up, batch.weights[token, slot], clamp)
        bound += 0.5 * code_step(codes[places]) * unit
        allowed[mine] = (value - trace.a[token, slot].double()).abs() <= bound
    return allowed


def min_equal(octaves: int, compared: int) -> float:
    """Share of codes of ``a`` that must be equal."""
    return MIN_EQUAL[octaves] if compared >= FEW_CODES else MIN_EQUAL_OF_FEW


def check_activations(
    problems: Problems,
    codes: Tensor,
    scales: Tensor,
    trace: ReferenceTrace,
    batch: Batch,
    weights: Weights,
    clamp: float | None,
    b: Blocks,
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
    compared = int(counted.sum())
    far = counted & (distance > MAX_CODE_STEP) & ~(error <= MAX_CODE_ERROR)
    num_allowed = 0
    rows = far.any(dim=1).nonzero().flatten()
    if len(rows):
        exponents = found.to(torch.uint8)
        allowed = within_allowance(codes, exponents, trace, batch, weights, clamp, b, rows)
        allowed &= far[rows]
        far[rows] &= ~allowed
        num_allowed = int(allowed.sum())
        if num_allowed >= MAX_FAR_SHARE * compared:
            problems.add(
                f"codes of a: {num_allowed} of {compared} need the allowance for the tensor "
                f"core's sum, the share must be below {MAX_FAR_SHARE}"
            )
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
    equal = float((distance[counted] == 0).double().mean()) if compared else 1.0
    wanted_share = min_equal(weights.octaves, compared)
    if equal < wanted_share:
        problems.add(f"codes of a: {equal:.5f} of {compared} equal, at least {wanted_share}")
    # Where the scale moved by an octave, the values still agree to the coarser code.
    moved = ~same & ~nan
    if bool(moved.any()):
        value = decode_e4m3(codes) * decode_ue8m0(found.to(torch.uint8)).repeat_interleave(128, 1)
        exact = a.nan_to_num(0.0, 0.0, 0.0)
        unit = torch.maximum(found, wanted).clamp(0, 254).to(torch.uint8)
        bound = 2.0**-3 * exact.abs() + 0.5 * decode_ue8m0(unit).repeat_interleave(128, dim=1)
        if bool(((value - exact).abs() > bound)[moved].any()):
            problems.add("codes of a: wrong values where the scale moved by an octave")
    return CodeReport(equal, num_allowed, found.numel(), int((found != wanted).sum()))


def check_w2(
    problems: Problems, op: Any, codes: Tensor, scales: Tensor, weights: Weights, b: Blocks
) -> tuple[float, Tensor]:
    """W2 from the kernel's own ``a``, against the product before its rounding to BF16; returns the
    worst relative L2 and that product rounded, as combine rows [T', k, H]."""
    shape = op.plan.workspace
    rows = view(op, "combine", torch.bfloat16, shape.max_tokens, shape.top_k, shape.hidden)
    exponents = (scales >> 23).to(torch.uint8)
    recomputed = torch.zeros_like(rows)
    worst = 0.0
    experts = weights.experts
    for expert in b.expert.unique().tolist():
        mine = (b.expert == expert).nonzero().flatten()
        product = _product(
            codes[mine], exponents[mine], experts.w2[expert], experts.w2_scale[expert], "sm90"
        )
        rounded = product.bfloat16()
        recomputed[b.token[mine], b.k_slot[mine]] = rounded
        wanted = product.double()
        found = rows[b.token[mine], b.k_slot[mine]].double()
        norm = wanted.norm(dim=1)
        error = (found - wanted).norm(dim=1)
        bound = torch.full_like(norm, MAX_W2_ERROR)
        if shape.hidden < NARROW:
            # What this row's rounding to BF16 costs in any case, and twice the tensor core's error.
            own = (rounded.double() - wanted).norm(dim=1) / norm
            bound = bound.maximum((own + 2 * WGMMA_ERROR).nan_to_num(0.0, 0.0, 0.0))
        good = (error <= bound * norm) | (wanted.isnan().any(dim=1) & found.isnan().any(dim=1))
        for place in (~good).nonzero().flatten()[:2].tolist():
            row = int(mine[place])
            off = ((found - wanted)[place].abs() > 0.02 * norm[place] / shape.hidden**0.5).nonzero()
            span = f"{int(off[0])} to {int(off[-1])}" if len(off) else "none"
            problems.add(
                f"W2: expert {expert} token {int(b.token[row])} slot {int(b.k_slot[row])}: "
                f"relative L2 {float(error[place] / norm[place]):.5f}, at most "
                f"{float(bound[place]):.5f}; "
                f"{len(off)} columns off, {span} (ring row {int(b.row[row])}, width "
                f"{int(b.width[row])})"
            )
        finite = norm > 0
        if bool(finite.any()):
            worst = max(worst, float((error[finite] / norm[finite]).nan_to_num(0.0).max()))
    return worst, recomputed


def check_sum(problems: Problems, op: Any, batch: Batch, y: Tensor) -> None:
    """y from the kernel's own combine rows, exactly."""
    shape = op.plan.workspace
    rows = view(op, "combine", torch.bfloat16, shape.max_tokens, shape.top_k, shape.hidden)
    valid = (batch.ids >= 0) & (batch.ids < op.config.num_experts)
    problems.expect_equal("y", y, finalize(rows[: batch.num_tokens], valid))


def check_kept(
    problems: Problems,
    op: Any,
    batch: Batch,
    y: Tensor,
    trace: ReferenceTrace,
    weights: Weights,
    b: Blocks,
) -> tuple[Tensor, str]:
    """Every stage of the last call; returns y recomputed from the kernel's own ``a``, and a
    summary."""
    shape = op.plan.workspace
    if len(b.entries) > shape.num_slots:
        raise ValueError(f"{len(b.entries)} blocks do not fit {shape.num_slots} slots")
    staged = check_staged(problems, op, trace)
    check_ring(problems, op, batch, staged, b)
    codes, scales = read_activations(op, b)
    clamp = op.config.clamp
    report = check_activations(problems, codes, scales, trace, batch, weights, clamp, b)
    worst, recomputed = check_w2(problems, op, codes, scales, weights, b)
    check_sum(problems, op, batch, y)
    summary = (
        f"{len(b.entries)} blocks, {len(b.slot)} rows, codes equal {report.equal:.5f}, far but "
        f"allowed {report.far}, scales moved {report.scales_differ} of {report.scales}, W2 "
        f"relative L2 {worst:.5f}"
    )
    return finalize(recomputed[: batch.num_tokens], trace.valid), summary


def check_stages(
    problems: Problems,
    op: Any,
    batch: Batch,
    y: Tensor,
    trace: ReferenceTrace,
    weights: Weights,
    before: tuple[int, int, int, int],
) -> str:
    """All stages of the last call; ``before`` are the bases before it. Returns a summary."""
    b = expected_blocks(op, batch, before[2])
    _, summary = check_kept(problems, op, batch, y, trace, weights, b)
    check_bases(problems, op, b, before)
    return summary


def token_errors(y: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """(relative L2, cosine) per token; two zero rows give (0, 1)."""
    a, b = y.double(), ref.double()
    norm_a, norm_b = a.norm(dim=1), b.norm(dim=1)
    both_zero = (norm_a == 0) & (norm_b == 0)
    relative = ((a - b).norm(dim=1) / norm_b).masked_fill(both_zero, 0.0)
    cosine = ((a / norm_a[:, None]) * (b / norm_b[:, None])).sum(dim=1)
    return relative, cosine.masked_fill(both_zero, 1.0)


def last_blocks(op: Any, batch: Batch) -> Blocks:
    """The blocks of the last call, which had these inputs: its slot base is the one after it less
    its blocks."""
    routes = int(view(op, "routes", torch.int64, 1)[0])
    num_blocks = int(RoutesHeader.NUM_BLOCKS.get(routes))
    return expected_blocks(op, batch, bases(op)[2] - num_blocks)


def explain(
    problems: Problems, op: Any, batch: Batch, y: Tensor, trace: ReferenceTrace, weights: Weights
) -> float:
    """Proves that y of the last call is off by no more than the codes of ``a`` that moved within
    their bounds: every stage holds, and y is what the oracle makes of the kernel's own ``a``.
    Returns the largest relative L2 of that."""
    b = last_blocks(op, batch)
    if len(b.entries) > op.plan.workspace.num_slots:
        problems.add("not explained: the ring no longer holds all blocks of the call")
        return float("nan")
    own, _ = check_kept(problems, op, batch, y, trace, weights, b)
    relative, _ = token_errors(y, own)
    for token in (~(relative <= MAX_EXPLAINED_L2)).nonzero().flatten()[:4].tolist():
        problems.add(
            f"not explained: token {token} relative L2 {float(relative[token]):.5f} to the oracle "
            f"with the kernel's own codes, at most {MAX_EXPLAINED_L2}"
        )
    return float(relative.max())


def check_layer(
    problems: Problems,
    what: str,
    op: Any,
    batch: Batch,
    y: Tensor,
    trace: ReferenceTrace,
    weights: Weights,
) -> None:
    """y of the last call against the oracle, token by token; tokens beyond the bound must be
    explained by the call as the workspace holds it."""
    if y.shape != trace.y.shape or y.dtype != torch.bfloat16:
        problems.add(f"{what}: y is {y.dtype} {tuple(y.shape)}, wanted {tuple(trace.y.shape)}")
        return
    if not y.shape[0]:
        return
    relative, cosine = token_errors(y, trace.y)
    rms = float(relative.square().mean().sqrt())
    line = (
        f"{what}: relative L2 worst {float(relative.max()):.5f} rms {rms:.5f}, "
        f"cosine {float(cosine.min()):.6f}"
    )
    beyond = (~((relative <= MAX_RELATIVE_L2) & (cosine >= MIN_COSINE))).nonzero().flatten()
    if not len(beyond):
        print(line)
        return
    found = Problems()
    own = explain(found, op, batch, y, trace, weights)
    how = "NOT explained" if found.lines else "explained"
    print(f"{line}; {len(beyond)} of {len(y)} tokens beyond, {how}: {own:.5f} to its own codes")
    if not found.lines:
        return
    for token in beyond[:4].tolist():
        problems.add(
            f"{what}: token {token} relative L2 {float(relative[token]):.5f} (at most "
            f"{MAX_RELATIVE_L2}), cosine {float(cosine[token]):.6f} (at least {MIN_COSINE}); "
            f"ids {batch.ids[token].tolist()}, norm {float(y[token].double().norm()):.4g} against "
            f"{float(trace.y[token].double().norm()):.4g}"
        )
    problems.add(f"{what}: {len(beyond)} of {len(y)} tokens are beyond the bound, not explained")
    problems.lines += [f"{what}: {text}" for text in found.lines]


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
        (arrivals + len(b.slot) * (shape.arrivals.columns // 64)) & wrap,
    )
    if bases(op) != wanted:
        problems.add(f"bases: {bases(op)}, wanted {wanted}")
    groups = shape.arrivals.groups
    arrived = [n & wrap for n in view(op, "combine_arrivals", torch.int32, groups).tolist()]
    if arrived != [wanted[3]] * groups:
        problems.add(f"combine arrivals: {arrived}, wanted {wanted[3]} in each of {groups} groups")
    for name in ("work_ticket", "compute_done", "finalize_done", "in_flight", "abort", "fault"):
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
