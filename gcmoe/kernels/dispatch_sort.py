"""How a dispatch CTA sorts the entries of all sources by expert."""

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
    RowPlace,
    SharedMap,
    Word,
    at,
    word_at,
)
from gcmoe.kernels.spec import KernelSpec
from gcmoe.protocol import BlockEntry, Cell, Entry, FaultKind, RowMeta, smaller

U32, U64, I32 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32


class SortSteps:
    """Steps count, scan, place and routes of :class:`gcmoe.kernels.dispatch.DispatchKernel`."""

    def __init__(self, spec: KernelSpec, shared_map: SharedMap) -> None:
        self.spec = spec
        self.map = shared_map

    @cute.jit
    def list_sources(self, s: dict):
        """First row of each source in the list of all sources; returns the number of rows."""
        num_ranks = self.spec.shape.num_ranks
        first = U32(0)
        total = U32(0)
        for r in cutlass.range(num_ranks, unroll=UNROLL):
            if U32(r) == s["tid"]:
                first = total
            total += ptx.shared_load(word_at(s, self.map.source_count, r))
        if s["tid"] < U32(self.map.sources):
            if s["tid"] >= U32(num_ranks):
                first = U32(ALL_ONES)
            ptx.shared_store(word_at(s, self.map.source_first, s["tid"]), first)
        return total

    @cute.jit
    def load_entry(self, s: dict, parity: Any, row: Any, num_rows: Any):
        """Low word, weight and source of row ``row`` of the list; source R beyond the end."""
        shape, m = self.spec.shape, self.map
        low, weight, src = U32(0), U32(0), U32(shape.num_ranks)
        if row < num_rows:
            found = U32(0)
            first = U32(0)
            for step in cutlass.range_constexpr(m.sources.bit_length() - 1):
                candidate = found + U32(m.sources >> (step + 1))
                start = ptx.shared_load(word_at(s, m.source_first, candidate))
                if start <= row:
                    found = candidate
                    first = start
            line = (parity * shape.num_ranks + found) * shape.entry_capacity
            entry = ptx.load_u64(
                at(s["workspace"], shape.offsets["recv_entries"], line + row - first, 8)
            )
            low = U32(entry)
            weight = U32(entry >> U64(32))
            src = found
        return low, weight, src

    def is_early(self, num_rows: Any) -> Any:
        """Whether each pulling warp has one row at most. Then its place in the list, not in the
        sorted order, says whose a row is, so that it can be loaded before it is sorted."""
        return num_rows <= U32(self.map.pullers * self.spec.dispatch_ctas)

    def is_entry(self, low: Any, src: Any) -> Any:
        """A row of the list whose fields are within their bounds."""
        shape = self.spec.shape
        bounds = ((Entry.EXPERT, shape.local_experts), (Entry.SLOT, shape.top_k))
        ok = src < U32(shape.num_ranks)
        for field, bound in (*bounds, (Entry.TOKEN, shape.max_tokens)):
            if bound < field.limit:
                ok = ok & (field.get(low) < U32(bound))
        return ok

    @cute.jit
    def count_entries(self, s: dict, parity: Any, num_rows: Any, env: dict):
        """Rows of each expert. Rounds run backwards, so that the entries of the first one are in
        registers when the rows are placed."""
        shape, m = self.spec.shape, self.map
        span = U32(m.chunks * WARP)
        low, weight, src = U32(0), U32(0), U32(shape.num_ranks)
        rounds = (num_rows + span - U32(1)) // span
        while (rounds > U32(0)) & (s["tid"] < span):
            rounds -= U32(1)
            low, weight, src = self.load_entry(s, parity, rounds * span + s["tid"], num_rows)
            if self.is_entry(low, src):
                ptx.shared_add(word_at(s, m.tally, Entry.EXPERT.get(low)), U32(1))
            elif src < U32(shape.num_ranks):
                sync.raise_fault(
                    FaultKind.BAD_COUNT,
                    Cell.RECV_HEADER,
                    src * shape.header_words,
                    U32(shape.entry_capacity),
                    low,
                    src,
                    env,
                )
                ptx.shared_store(word_at(s, 4 * Word.BAD_ENTRY), U32(1))
        return low, weight, src

    @cute.jit
    def scan_experts(self, s: dict):
        """Warp 0: first row and first block of each expert. A lane sums consecutive experts."""
        m, block_rows = self.map, self.spec.shape.block_rows
        if s["warp"] == 0:
            mine = s["lane"] * m.lane_experts
            rows, blocks = U32(0), U32(0)
            for i in cutlass.range(m.lane_experts, unroll=4):
                count = ptx.shared_load(word_at(s, m.tally, mine + U32(i)))
                rows += count
                blocks += (count + U32(block_rows - 1)) // U32(block_rows)
            own_rows, own_blocks = rows, blocks
            for i in cutlass.range_constexpr(5):
                lower_rows = cute.arch.shuffle_sync_up(rows, 1 << i)
                lower_blocks = cute.arch.shuffle_sync_up(blocks, 1 << i)
                if s["lane"] >= U32(1 << i):
                    rows += lower_rows
                    blocks += lower_blocks
            if s["lane"] == U32(WARP - 1):
                ptx.shared_store(word_at(s, m.first_row, WARP * m.lane_experts), rows)
                ptx.shared_store(word_at(s, 4 * Word.NUM_BLOCKS), blocks)
            rows -= own_rows
            blocks -= own_blocks
            for i in cutlass.range(m.lane_experts, unroll=4):
                expert = mine + U32(i)
                count = ptx.shared_load(word_at(s, m.tally, expert))
                ptx.shared_store(word_at(s, m.first_row, expert), rows)
                ptx.shared_store(word_at(s, m.first_block, expert), blocks)
                # From here on the rows of this expert that earlier rounds have placed.
                ptx.shared_store(word_at(s, m.tally, expert), U32(0))
                rows += count
                blocks += (count + U32(block_rows - 1)) // U32(block_rows)

    def expert_rows(self, s: dict[str, Any], expert: Any) -> tuple[Any, Any]:
        """(first row, number of rows) of an expert."""
        first = ptx.shared_load(word_at(s, self.map.first_row, expert))
        end = ptx.shared_load(word_at(s, self.map.first_row, expert + U32(1)))
        return first, end - first

    @cute.jit
    def write_block_table(self, s: dict):
        """A thread per expert; the flag follows after a later barrier."""
        shape = self.spec.shape
        expert = s["tid"]
        while expert < U32(shape.local_experts):
            _, left = self.expert_rows(s, expert)
            block = ptx.shared_load(word_at(s, self.map.first_block, expert))
            while left > U32(0):
                rows = smaller(left, U32(shape.block_rows))
                cell = at(s["workspace"], shape.offsets["block_table"], block, 4)
                ptx.store_u32(cell, BlockEntry.pack(expert, rows))
                left -= rows
                block += U32(1)
            expert += U32(THREADS)

    @cute.jit
    def place_rows(self, s: dict, parity: Any, num_rows: Any, low: Any, weight: Any, src: Any):
        """Stable counting sort by expert: a row's place is its expert's rows of earlier rounds,
        warps and lanes. A line of the histogram is one warp's but for the prefix."""
        m, num_experts = self.map, self.spec.shape.local_experts
        span = U32(m.chunks * WARP)
        earlier_lanes = (U32(1) << s["lane"]) - U32(1)
        line = m.scratch + 2 * m.pitch * I32(s["warp"])
        start = U32(0)
        while start < num_rows:
            next_low, next_weight, next_src = U32(0), U32(0), U32(self.spec.shape.num_ranks)
            if s["tid"] < span:
                next_low, next_weight, next_src = self.load_entry(
                    s, parity, start + span + s["tid"], num_rows
                )
            is_row = self.is_entry(low, src)
            expert = U32(num_experts)
            if is_row:
                expert = Entry.EXPERT.get(low)
            same = ptx.match_any(expert)
            rank = ptx.popcount(same & earlier_lanes)
            cell = s["smem"] + line + I32(expert) * 2
            # The line is read by other lanes at the end of the round before.
            cute.arch.sync_warp()
            if s["warp"] < U32(m.chunks):
                zeroed = s["lane"]
                while zeroed < U32(m.pitch // 2):
                    ptx.shared_store(s["smem"] + line + I32(zeroed) * 4, U32(0))
                    zeroed += U32(WARP)
                cute.arch.sync_warp()
                if is_row & (rank == U32(0)):
                    ptx.shared_store_u16(cell, ptx.popcount(same))
            cute.arch.sync_threads()
            self.prefix_experts(s, num_rows - start)
            cute.arch.sync_threads()
            if is_row:
                row = ptx.shared_load(word_at(s, m.base, expert)) + rank
                row += ptx.shared_load_u16(cell)
                listed = start + s["tid"]
                self.keep_row(s, expert, row, listed, self.is_early(num_rows), low, weight, src)
            low, weight, src = next_low, next_weight, next_src
            start += span

    @cute.jit
    def prefix_experts(self, s: dict, num_left: Any):
        """A thread per expert turns the counts of the chunks into places within the round."""
        m, num_experts = self.map, self.spec.shape.local_experts
        for turn in cutlass.range_constexpr(-(-num_experts // THREADS)):
            expert = s["tid"] + U32(turn * THREADS)
            if expert < U32(num_experts):
                tally = word_at(s, m.tally, expert)
                base = ptx.shared_load(tally)
                running = U32(0)
                for first in cutlass.range_constexpr(0, m.chunks, UNROLL):
                    if U32(first * WARP) < num_left:
                        cells = [
                            s["smem"] + I32(m.scratch + 2 * m.pitch * chunk) + I32(expert) * 2
                            for chunk in range(first, min(first + UNROLL, m.chunks))
                        ]
                        counts = [ptx.shared_load_u16(cell) for cell in cells]
                        for i in cutlass.range_constexpr(len(cells)):
                            ptx.shared_store_u16(cells[i], running)
                            running = running + counts[i]
                ptx.shared_store(word_at(s, m.base, expert), base)
                ptx.shared_store(tally, base + running)

    @cute.jit
    def keep_row(
        self,
        s: dict,
        expert: Any,
        row: Any,
        listed: Any,
        is_early: Any,
        low: Any,
        weight: Any,
        src: Any,
    ):
        """Row ``row`` of ``expert``: every D-th row of the sorted list is this CTA's, so that the
        first blocks are full first; of few rows, every D-th of the list."""
        m, block_rows, ctas = self.map, self.spec.shape.block_rows, self.spec.dispatch_ctas
        first, count = self.expert_rows(s, expert)
        place = first + row
        if is_early:
            place = listed
        index = place // U32(ctas)
        # A list that changed since it was counted must not reach beyond the arrays.
        if (row < count) & (place - index * ctas == s["cta"]):
            blocks_before = row // U32(block_rows)
            in_block = row - blocks_before * block_rows
            rows = smaller(count - (row - in_block), U32(block_rows))
            block = ptx.shared_load(word_at(s, m.first_block, expert))
            block += blocks_before
            meta = RowMeta.pack(src, Entry.TOKEN.get(low), Entry.SLOT.get(low))
            ptx.shared_store(word_at(s, m.row_meta, index), meta)
            ptx.shared_store(word_at(s, m.row_weight, index), weight)
            ptx.shared_store(word_at(s, m.row_place, index), RowPlace.pack(block, in_block, rows))

    @cute.jit
    def add_stats(self, s: dict):
        """Rows of each expert and ids of none; this CTA is the only writer."""
        shape = self.spec.shape
        expert = s["tid"]
        while expert <= U32(shape.local_experts):
            count = ptx.shared_load(word_at(s, 4 * Word.BAD_IDS))
            if expert < U32(shape.local_experts):
                _, count = self.expert_rows(s, expert)
            if count > U32(0):
                cell = at(s["workspace"], shape.offsets["stats"], expert, 8)
                ptx.store_u64(cell, ptx.load_u64(cell) + U64(count))
            expert += U32(THREADS)
