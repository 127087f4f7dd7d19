"""What a dispatch CTA sends: entries, staged rows and header words."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.dispatch_memory import (
    ALL_ONES,
    THREADS,
    UNROLL,
    WARP,
    WARPS,
    SharedMap,
    Word,
    at,
    word_at,
)
from gcmoe.kernels.expert_ids import classify_id, load_expert_id
from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol import Entry, RecvHeader, is_less
from gcmoe.protocol.edges import HEADER
from gcmoe.protocol.ring import WINDOW_COLUMNS

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64

HALF_WARPS = THREADS // 16
LOADS_IN_FLIGHT = 4
NOT_FINITE = 0x7F80


@cute.jit
def load_window(x: Any, group: Any, lane: Any, num_groups: Any):
    """A lane's 8 of the 128 columns of window ``group``, as four words; zero beyond the end."""
    a, b, c, d = U32(0), U32(0), U32(0), U32(0)
    if group < num_groups:
        address = x + I64(group) * (2 * WINDOW_COLUMNS) + I64(lane) * 16
        a, b, c, d = ptx.load_u32x4(address)
    return a, b, c, d


def finite_bits(half: Any) -> Any:
    """The magnitude bits of a BF16 value, 0 for NaN and Inf."""
    return half * is_less(half, NOT_FINITE)


def halves(words: tuple[Any, ...]) -> list[Any]:
    """The magnitude bits of the BF16 values in ``words``, in order."""
    out = []
    for word in words:
        out += [word & U32(0x7FFF), (word >> 16) & U32(0x7FFF)]
    return out


def four_codes(low: Any, high: Any, inverse: Any) -> Any:
    """E4M3 codes of the four BF16 values in two words, scaled by ``inverse``."""
    codes = []
    for word in (low, high):
        first = ptx.float_of(word << 16) * inverse
        second = ptx.float_of(word & U32(0xFFFF_0000)) * inverse
        codes.append(ptx.e4m3x2(second, first))
    return codes[0] | (codes[1] << 16)


def mark_special(codes: Any, magnitudes: list[Any]) -> Any:
    """Write the NaN code where the BF16 value is NaN or Inf."""
    for b, half in enumerate(magnitudes):
        special = U32(1) - is_less(half, NOT_FINITE)
        codes = ptx.and_or(codes, (special * U32(0xFF << 8 * b)) ^ U32(ALL_ONES), U32(0))
        codes = codes | (special * U32(0x7F << 8 * b))
    return codes


@cute.jit
def quantise(a: Any, b: Any, c: Any, d: Any, lanes: cutlass.Constexpr = 16):
    """Codes of a lane's 8 columns as two words, and the scale byte of ``lanes`` lanes' columns."""
    mask = U32(0x7FFF_7FFF)
    pairs = ptx.umax_u16x2(ptx.umax_u16x2(a & mask, b & mask), ptx.umax_u16x2(c & mask, d & mask))
    amax = ptx.umax(pairs & U32(0xFFFF), pairs >> 16)
    has_special = amax >= U32(NOT_FINITE)
    if has_special:
        amax = U32(0)
        for half in halves((a, b, c, d)):
            amax = ptx.umax(amax, finite_bits(half))
    for i in cutlass.range_constexpr(lanes.bit_length() - 1):
        amax = ptx.umax(amax, cute.arch.shuffle_sync_bfly(amax, (lanes // 2) >> i))
    # ceil(log2(amax / 448)) from the bits: 448 = 1.75 * 2^8, and 9 keeps 2^-e a normal number.
    t = ptx.umax(((amax << 16) + U32(0x1F_FFFF)) >> 23, U32(9))
    inverse = ptx.float_of((U32(262) - t) << 23)
    first = four_codes(a, b, inverse)
    second = four_codes(c, d, inverse)
    if has_special:
        magnitudes = halves((a, b, c, d))
        first = mark_special(first, magnitudes[:4])
        second = mark_special(second, magnitudes[4:])
    return first, second, t - U32(8)


class SendSteps:
    """Steps route, stage and send of :class:`gcmoe.kernels.dispatch.DispatchKernel`."""

    def __init__(self, spec: KernelSpec, shared_map: SharedMap) -> None:
        self.spec = spec
        self.map = shared_map

    # ----------------------------------------------------------------------- route

    @cute.jit
    def load_route(self, s: dict, index: Any):
        """The id at ``index`` and, where this CTA stores the entry, its routing weight."""
        low, high = load_expert_id(s["ids"], index, s["num_ids"], s["ids_are_int64"])
        weight = U32(0)
        if self.owns_chunk(s, index) & (index < s["num_ids"]):
            weight = ptx.load_u32(s["weights"] + I64(index) * 4)
        return low, high, weight

    def owns_chunk(self, s: dict[str, Any], index: Any) -> Any:
        """32 consecutive entries are stored by one CTA."""
        return ((index >> 5) % U32(self.spec.dispatch_ctas)) == s["cta"]

    @cute.jit
    def route(self, s: dict, parity: Any, low: Any, high: Any, weight: Any):
        """Store this CTA's entries at their ranks. Position = entries before it for the same rank,
        in (token, slot) order: earlier rounds, warps and lanes."""
        shape = self.spec.shape
        num_ranks, local_experts = shape.num_ranks, shape.local_experts
        earlier_lanes = (U32(1) << s["lane"]) - U32(1)
        counts = self.map.scratch + 4 * num_ranks * s["warp"]
        start = U32(0)
        while start < s["num_ids"]:
            index = start + s["tid"]
            next_low, next_high, next_weight = self.load_route(s, index + U32(THREADS))
            valid, too_large = classify_id(low, high, s["ids_are_int64"], self.spec.num_experts)
            dest = U32(num_ranks)
            if valid:
                dest = low // U32(local_experts)
            if cutlass.const_expr(num_ranks == 1):
                same = ptx.ballot(U32(valid))
            else:
                same = ptx.match_any(dest)
            rank_in_warp = ptx.popcount(same & earlier_lanes)
            self.count_too_large(s, too_large)
            # The line is read by other lanes at the end of the round before.
            cute.arch.sync_warp()
            zeroed = s["lane"]
            while zeroed < U32(num_ranks):
                ptx.shared_store(word_at(s, 0, counts // 4 + zeroed), U32(0))
                zeroed += U32(WARP)
            cute.arch.sync_warp()
            if valid & (rank_in_warp == U32(0)):
                ptx.shared_store(word_at(s, 0, counts // 4 + dest), ptx.popcount(same))
            cute.arch.sync_threads()
            self.prefix_destinations(s, s["num_ids"] - start)
            cute.arch.sync_threads()
            if valid & self.owns_chunk(s, index):
                position = ptx.shared_load(word_at(s, 0, counts // 4 + dest)) + rank_in_warp
                token = index // U32(shape.top_k)
                entry = Entry.pack(
                    U64(weight),
                    U64(token),
                    U64(index - token * shape.top_k),
                    U64(low - dest * local_experts),
                )
                peer = ptx.parameter_u64(self.spec.peers_symbol, I32(dest))
                source = (parity * num_ranks + s["rank"]) * shape.entry_capacity
                ptx.store_u64(at(peer, shape.offsets["recv_entries"], source + position, 8), entry)
            low, high, weight = next_low, next_high, next_weight
            start += U32(THREADS)

    @cute.jit
    def count_too_large(self, s: dict, too_large: Any):
        """The last CTA counts ids of experts that do not exist."""
        if s["cta"] == U32(self.spec.dispatch_ctas - 1):
            lanes = ptx.ballot(U32(too_large))
            if (s["lane"] == 0) & (lanes != U32(0)):
                ptx.shared_add(word_at(s, 4 * Word.BAD_IDS), ptx.popcount(lanes))

    @cute.jit
    def prefix_destinations(self, s: dict, num_left: Any):
        """A thread per rank turns the counts of the warps into positions."""
        num_ranks = self.spec.shape.num_ranks
        if s["tid"] < U32(num_ranks):
            total = word_at(s, self.map.dest_total, s["tid"])
            running = ptx.shared_load(total)
            for first in cutlass.range_constexpr(0, WARPS, UNROLL):
                if U32(first * WARP) < num_left:
                    cells = [
                        word_at(s, self.map.scratch, s["tid"] + U32((first + i) * num_ranks))
                        for i in range(UNROLL)
                    ]
                    counts = [ptx.shared_load(cell) for cell in cells]
                    for i in cutlass.range_constexpr(UNROLL):
                        ptx.shared_store(cells[i], running)
                        running = running + counts[i]
            ptx.shared_store(total, running)

    # ----------------------------------------------------------------------- stage

    def window_of(self, s: dict[str, Any], turn: Any, half_warp: Any) -> Any:
        """The window that a half-warp quantises in its ``turn``; consecutive ones in different
        CTAs, so that few tokens spread over all SMs."""
        ctas = self.spec.dispatch_ctas
        return (U32(turn) * HALF_WARPS + half_warp) * ctas + s["cta"]

    @cute.jit
    def load_windows(self, s: dict, turn: Any):
        """Loads for the next four turns, all in flight together."""
        half_warp, lane = s["tid"] >> 4, s["tid"] & U32(15)
        loads = []
        for u in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            group = self.window_of(s, turn + U32(u), half_warp)
            loads.append(load_window(s["x"], group, lane, s["num_windows"]))
        return tuple(loads)

    @cute.jit
    def stage(self, s: dict, windows: tuple):
        """Quantise all windows of this CTA; the first four per half-warp are loaded already."""
        self.stage_windows(s, U32(0), windows)
        turn = U32(LOADS_IN_FLIGHT)
        while self.window_of(s, turn, U32(0)) < s["num_windows"]:
            self.stage_windows(s, turn, self.load_windows(s, turn))
            turn += U32(LOADS_IN_FLIGHT)

    @cute.jit
    def stage_windows(self, s: dict, turn: Any, windows: tuple):
        for u in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            a, b, c, d = windows[u]
            self.stage_window(s, turn + U32(u), a, b, c, d)

    @cute.jit
    def stage_window(self, s: dict, turn: Any, a: Any, b: Any, c: Any, d: Any):
        """Quantise one window of each half-warp. Lane 4t + i holds columns 32t + 8i + 4q + b, which
        lie at 32i + 16q + 4t + b of the staged window."""
        shape = self.spec.shape
        # The condition is the warp's: all 32 lanes take part in the shuffles.
        if self.window_of(s, turn, s["warp"] * 2) < s["num_windows"]:
            first, second, scale = quantise(a, b, c, d)
            group = self.window_of(s, turn, s["tid"] >> 4)
            if group < s["num_windows"]:
                token = group // U32(shape.num_windows)
                window = group - token * shape.num_windows
                lane = s["tid"] & U32(15)
                row = at(s["workspace"], shape.offsets["staged_x"], token, shape.row_stride)
                place = window * WINDOW_COLUMNS + (lane & U32(3)) * 32 + (lane >> 2) * 4
                ptx.store_u32(row + I64(place), first)
                ptx.store_u32(row + I64(place + U32(16)), second)
                if lane == 0:
                    ptx.store_u8(row + I64(window + U32(shape.hidden)), scale)

    # ----------------------------------------------------------------------- headers

    @cute.jit
    def send_headers(self, s: dict, parity: Any, generation: Any):
        """Warp 0 stores the words c, c + D, ... of this rank at every rank, also with count zero.
        Each lane releases for itself: the barrier before has given it the whole CTA's stores."""
        shape = self.spec.shape
        ctas, num_ranks = self.spec.dispatch_ctas, shape.num_ranks
        if s["warp"] == 0:
            sync.release(HEADER)
            words = (U32(shape.header_words + ctas - 1) - s["cta"]) // U32(ctas)
            item = s["lane"]
            while item < words * num_ranks:
                turn = item // U32(num_ranks)
                dest = item - turn * num_ranks
                count = ptx.shared_load(word_at(s, self.map.dest_total, dest))
                line = (parity * num_ranks + s["rank"]) * shape.header_words
                peer = ptx.parameter_u64(self.spec.peers_symbol, I32(dest))
                cell = at(peer, shape.offsets["recv_header"], line + s["cta"] + turn * ctas, 8)
                header = RecvHeader.pack(U64(generation), U64(s["call"]), U64(count))
                sync.publish(HEADER, cell, header)
                item += U32(WARP)
