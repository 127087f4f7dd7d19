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

LANE_COLUMNS = 16
LANE_WORDS = LANE_COLUMNS // 2
WINDOW_LANES = WINDOW_COLUMNS // LANE_COLUMNS
WARP_WINDOWS = WARP // WINDOW_LANES
LOADS_IN_FLIGHT = 2
NOT_FINITE = 0x7F80


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
def quantise(words: tuple, lanes: cutlass.Constexpr):
    """Codes of a lane's columns, four in a word, and the scale byte of ``lanes`` lanes' columns.

    Args:
        words: pairs of BF16 values.
    """
    mask = U32(0x7FFF_7FFF)
    pairs = words[0] & mask
    for i in cutlass.range_constexpr(1, len(words)):
        pairs = ptx.umax_u16x2(pairs, words[i] & mask)
    amax = ptx.umax(pairs & U32(0xFFFF), pairs >> 16)
    has_special = amax >= U32(NOT_FINITE)
    if has_special:
        amax = U32(0)
        for half in halves(words):
            amax = ptx.umax(amax, finite_bits(half))
    for i in cutlass.range_constexpr(lanes.bit_length() - 1):
        amax = ptx.umax(amax, cute.arch.shuffle_sync_bfly(amax, (lanes // 2) >> i))
    # ceil(log2(amax / 448)) from the bits: 448 = 1.75 * 2^8, and 9 keeps 2^-e a normal number.
    t = ptx.umax(((amax << 16) + U32(0x1F_FFFF)) >> 23, U32(9))
    inverse = ptx.float_of((U32(262) - t) << 23)
    codes = cute.make_rmem_tensor(cute.make_layout(len(words) // 2), U32)
    for i in cutlass.range_constexpr(len(words) // 2):
        codes[i] = four_codes(words[2 * i], words[2 * i + 1], inverse)
    if has_special:
        magnitudes = halves(words)
        for i in cutlass.range_constexpr(len(words) // 2):
            codes[i] = mark_special(codes[i], magnitudes[4 * i : 4 * i + 4])
    return codes, t - U32(8)


class SendSteps:
    """Steps route, stage and send of :class:`gcmoe.kernels.dispatch.DispatchKernel`.

    An architecture says which columns of a window a lane quantises, so that its codes are 16
    consecutive bytes of the staged row, and how many lanes share a scale.
    """

    scale_lanes = WINDOW_LANES

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

    def window_of(self, s: dict[str, Any], turn: Any, place: Any) -> Any:
        """The window that the lanes of ``place`` quantise in their ``turn``; consecutive ones in
        different CTAs, so that few tokens spread over all SMs."""
        ctas = self.spec.dispatch_ctas
        return (U32(turn) * (WARPS * WARP_WINDOWS) + place) * ctas + s["cta"]

    def load_columns(self, window: Any, lane: Any) -> list[Any]:
        """A lane's columns of the window at address ``window``: lane 2i + q has columns
        32t + 8i + 4q + b, which lie at 32i + 16q + 4t + b of the staged window."""
        words = []
        for t in range(WINDOW_COLUMNS // 32):
            pair = ptx.load_u64(window + I64(lane) * 8 + 64 * t)
            words += [U32(pair), U32(pair >> U64(32))]
        return words

    @cute.jit
    def load_window(self, s: dict, windows: cute.Tensor, turn: Any, u: cutlass.Constexpr):
        """Begin to load this lane's part of a window; zero beyond the last one."""
        for i in cutlass.range_constexpr(LANE_WORDS):
            windows[i, u] = U32(0)
        group = self.window_of(s, turn, s["tid"] // U32(WINDOW_LANES))
        if group < s["num_windows"]:
            window = s["x"] + I64(group) * (2 * WINDOW_COLUMNS)
            words = self.load_columns(window, s["tid"] & U32(WINDOW_LANES - 1))
            for i in cutlass.range_constexpr(LANE_WORDS):
                windows[i, u] = words[i]

    @cute.jit
    def load_windows(self, s: dict):
        """Loads for the first turns, all in flight together."""
        windows = cute.make_rmem_tensor(cute.make_layout((LANE_WORDS, LOADS_IN_FLIGHT)), U32)
        for u in cutlass.range_constexpr(LOADS_IN_FLIGHT):
            self.load_window(s, windows, U32(u), u)
        return windows

    @cute.jit
    def stage(self, s: dict, windows: cute.Tensor):
        """Quantise all windows of this CTA; the first ones are loaded already, and each place in
        ``windows`` is loaded again once it is quantised."""
        turn = U32(0)
        while self.window_of(s, turn, U32(0)) < s["num_windows"]:
            for u in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                self.stage_window(s, turn + U32(u), windows, u)
                self.load_window(s, windows, turn + U32(LOADS_IN_FLIGHT + u), u)
            turn += U32(LOADS_IN_FLIGHT)

    @cute.jit
    def stage_window(self, s: dict, turn: Any, windows: cute.Tensor, u: cutlass.Constexpr):
        """Quantise a window of each eight lanes."""
        shape = self.spec.shape
        # The condition is the warp's: all 32 lanes take part in the shuffles.
        if self.window_of(s, turn, s["warp"] * WARP_WINDOWS) < s["num_windows"]:
            words = tuple(windows[i, u] for i in range(LANE_WORDS))
            codes, scale = quantise(words, self.scale_lanes)
            group = self.window_of(s, turn, s["tid"] // U32(WINDOW_LANES))
            if group < s["num_windows"]:
                token = group // U32(shape.num_windows)
                window = group - token * shape.num_windows
                lane = s["tid"] & U32(WINDOW_LANES - 1)
                row = at(s["workspace"], shape.offsets["staged_x"], token, shape.row_stride)
                place = I64(window * WINDOW_COLUMNS + lane * LANE_COLUMNS)
                ptx.store_u32x4(row + place, codes[0], codes[1], codes[2], codes[3])
                if (lane & U32(self.scale_lanes - 1)) == U32(0):
                    scales = WINDOW_LANES // self.scale_lanes
                    index = window * scales + lane // U32(self.scale_lanes)
                    ptx.store_u8(row + I64(index + U32(shape.hidden)), scale)

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
