"""Dispatch: stage this rank's rows, tell every rank, sort and pull what is routed here.

Steps and barriers are in the docstring of :class:`DispatchKernel`; the order, scope and fences of
each hand-off are the rows of ``gcmoe.protocol.edges``.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.dispatch_memory import (
    THREADS,
    WARP,
    WARPS,
    RowPlace,
    SharedMap,
    Word,
    at,
    word_at,
)
from gcmoe.kernels.dispatch_send import SendSteps
from gcmoe.kernels.dispatch_sort import SortSteps
from gcmoe.kernels.params import PeerTable
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import TRACE_WORDS
from gcmoe.kernels.trace_words import DispatchTrace as Trace
from gcmoe.protocol import (
    Cell,
    Entry,
    FaultKind,
    RecvHeader,
    RoutesHeader,
    RowMeta,
    fragment_position,
    is_less,
    ring_row,
    tile_width,
)
from gcmoe.protocol.edges import CLAIM, EMPTY, FULL, HEADER, ROUTES
from gcmoe.protocol.faults import NO_PEER
from gcmoe.protocol.workspace import LINE

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64


@cute.jit
def await_header(address: Any, is_mine: Any, index: Any, peer: Any, env: dict):
    """Wait for one header word per lane by a whole warp. Returns (ok, word); ok is the same in all
    lanes, and 0 when the wait ended by abort or by its budget."""
    word = U64(0)
    ok = I32(1)
    go = I32(1)
    is_waiting = is_mine
    start = ptx.global_timer()
    polls = I32(0)
    while go != 0:
        if is_waiting != U32(0):
            word = sync.observe(HEADER, address)
            if U32(word >> U64(32)) == env["generation"]:
                is_waiting = U32(0)
        waiting = ptx.ballot(is_waiting)
        polls += 1
        if waiting == U32(0):
            go = I32(0)
        elif (polls & (sync.POLLS_PER_CHECK - 1)) == 0:
            aborted = ptx.ballot(sync.read_abort(env))
            expired = ptx.ballot(U32(ptx.global_timer() - start > env["budget_ns"]))
            if (aborted | expired) != U32(0):
                ok = I32(0)
                go = I32(0)
                # The lowest waiting lane reports; an abort has been reported before.
                lowest = waiting & (U32(0) - waiting)
                lane_bit = U32(1) << U32(cute.arch.lane_idx())
                if (aborted == U32(0)) & (lowest == lane_bit):
                    sync.raise_fault(
                        FaultKind.TIMEOUT,
                        Cell.RECV_HEADER,
                        index,
                        env["generation"],
                        U32(word >> U64(32)),
                        peer,
                        env,
                    )
    return ok, word


class DispatchKernel:
    """CTAs of 1024 threads, one on an SM, which wait for each other.

    =====  ==========================================================================  ==========
    step   what                                                                        barriers
    =====  ==========================================================================  ==========
    start  loads of ids, weights and x are issued; thread 0 reads bases and abort      1
    route  every CTA finds every entry's rank and position, stores its own share       2 a round
    stage  eight lanes quantise a 128-column window into ``staged_x``
    send   warp 0 releases and stores this CTA's header words at all ranks             1
    await  a lane per header word of every source                                      2
    count  every CTA counts the rows of each expert                                    1
    scan   warp 0 finds first row and first block of each expert                       1
    place  stable counting sort; a CTA keeps every D-th row in shared memory           2 a round
    routes the last CTA writes the block table (before place) and publishes it         1
    pull   a warp per row: peer -> shared memory -> ring, published row by row; when each warp has
           one row at most, its load is under way since the step count
    =====  ==========================================================================  ==========

    Timeline of a rank with few tokens (loads are 0.6 us, a fence 0.7, the wire 1.4)::

        ids, x, bases | route | stage | fence | wire, await | count, scan, place | pull | publish
                                                                       routes ----^

    A CTA whose claim, header wait or entry check fails leaves all later steps out and publishes
    nothing. When a warp's wait for a slot fails, no warp of its CTA begins another row.
    """

    threads = THREADS

    def __init__(self, spec: KernelSpec) -> None:
        shape = spec.shape
        if spec.dispatch_ctas > shape.header_words:
            raise ValueError(
                f"dispatch_ctas = {spec.dispatch_ctas}: at most header_words = "
                f"{shape.header_words}, because each CTA sends one"
            )
        if shape.max_blocks > RowPlace.BLOCK.limit:
            raise ValueError(f"max_blocks = {shape.max_blocks}: at most {RowPlace.BLOCK.limit}")
        self.spec = spec
        self.map = SharedMap.of(spec)
        self.sending = SendSteps(spec, self.map)
        self.sorting = SortSteps(spec, self.map)
        # The mbarriers follow the map; a line for alignment.
        self.smem_bytes = self.map.num_bytes + 8 * WARPS + LINE
        self.kernel.set_name_prefix(
            spec.symbol.removesuffix("_0"), remove_cutlass_symbol=True, keep_mangled_name=False
        )

    def example_arguments(self) -> tuple[Any, ...]:
        pointers = [I64(0)] * 6
        scalars = [I32(0), I64(0), I32(0), I32(0), I32(0)]
        return (PeerTable(self.spec.shape.num_ranks), *pointers, *scalars, cuda.CUstream(0))

    @cute.jit
    def __call__(
        self,
        peers: PeerTable,
        workspace: I64,
        x: I64,
        topk_ids: I64,
        topk_weights: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        num_tokens: I32,
        ids_are_int64: I32,
        call: I32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            peers,
            workspace,
            x,
            topk_ids,
            topk_weights,
            fault_record,
            trace,
            rank,
            spin_budget_ns,
            num_tokens,
            ids_are_int64,
            call,
        ).launch(grid=[self.spec.dispatch_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        peers: PeerTable,
        workspace: I64,
        x: I64,
        topk_ids: I64,
        topk_weights: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        num_tokens: I32,
        ids_are_int64: I32,
        call: I32,
    ):
        allocator = cutlass.memory.SmemAllocator()
        memory = allocator.allocate_array(cutlass.Uint8, self.map.num_bytes, byte_alignment=LINE)
        mbarriers = allocator.allocate_array(cutlass.Int64, WARPS, byte_alignment=8)
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tid // WARP)
        s = {
            "workspace": workspace,
            "x": x,
            "ids": topk_ids,
            "weights": topk_weights,
            "fault_record": fault_record,
            "trace": trace,
            "rank": U32(rank),
            "budget_ns": spin_budget_ns,
            "num_ids": U32(num_tokens) * self.spec.shape.top_k,
            "num_windows": U32(num_tokens) * self.spec.shape.num_windows,
            "ids_are_int64": ids_are_int64,
            "call": U32(call),
            "smem": memory.toint(),
            "mbarrier": mbarriers + warp,
            "tid": U32(tid),
            "lane": U32(tid % WARP),
            "warp": U32(warp),
            "cta": U32(cta),
        }
        # Compute may start: every CTA of dispatch has its SM.
        ptx.release_dependents()
        sync.jitter(self.spec, s["tid"], s["cta"])
        self.record_start(s)
        # Everything that does not depend on the generation is loaded first.
        low, high, weight = self.sending.load_route(s, s["tid"])
        windows = self.sending.load_windows(s)
        self.prepare_shared(s)
        cute.arch.sync_threads()
        if ptx.shared_load(word_at(s, 4 * Word.ABORT)) == U32(0):
            self.replay(s, low, high, weight, windows)
        sync.stamp(self.spec, s, Trace.END)

    # ----------------------------------------------------------------------- start

    @cute.jit
    def record_start(self, s: dict):
        if cutlass.const_expr(self.spec.trace):
            if s["tid"] == 0:
                record = at(s["trace"], 0, s["cta"], 8 * TRACE_WORDS)
                ptx.store_u64(record + 8 * int(Trace.SM), U64(ptx.sm_id()))
                ptx.store_u64(record + 8 * int(Trace.FIRST_ROW), U64(0))
        sync.stamp(self.spec, s, Trace.START)

    @cute.jit
    def prepare_shared(self, s: dict):
        """Thread 0 broadcasts the bases; arrays that are added to start at zero."""
        m = self.map
        if s["tid"] == 0:
            bases = s["workspace"] + self.spec.shape.offsets["bases"]
            generation, epoch_base, slot_base, _ = ptx.load_u32x4(bases)
            abort = sync.read_abort(self.wait_env(s, U32(0)))
            for word in cutlass.range_constexpr(Word.CLAIM_LOST, len(Word)):
                ptx.shared_store(word_at(s, 4 * word), U32(0))
            ptx.shared_store(word_at(s, 4 * Word.GENERATION), generation)
            ptx.shared_store(word_at(s, 4 * Word.EPOCH_BASE), epoch_base)
            ptx.shared_store(word_at(s, 4 * Word.SLOT_BASE), slot_base)
            ptx.shared_store(word_at(s, 4 * Word.ABORT), abort)
        if s["lane"] == 0:
            cute.arch.mbarrier_init(s["mbarrier"], 1)
            cute.arch.mbarrier_init_fence()
        self.fill(s, m.dest_total, self.spec.shape.num_ranks)
        self.fill(s, m.source_count, self.spec.shape.num_ranks)
        self.fill(s, m.tally, WARP * m.lane_experts)
        self.fill(s, m.row_place, m.rows)

    @cute.jit
    def fill(self, s: dict, offset: cutlass.Constexpr, count: cutlass.Constexpr):
        """Zero ``count`` words of shared memory by the whole CTA."""
        index = s["tid"]
        while index < U32(count):
            ptx.shared_store(word_at(s, offset, index), U32(0))
            index += U32(THREADS)

    def wait_env(self, s: dict[str, Any], generation: Any) -> dict[str, Any]:
        return sync.wait_env(
            self.spec, s["workspace"], s["fault_record"], s["rank"], generation, s["budget_ns"]
        )

    # ----------------------------------------------------------------------- the replay

    @cute.jit
    def replay(self, s: dict, low: Any, high: Any, weight: Any, windows: Any):
        """All steps behind the abort check. Every branch around a barrier is the CTA's."""
        generation = ptx.shared_load(word_at(s, 4 * Word.GENERATION))
        env = self.wait_env(s, generation)
        parity = generation & U32(1)
        self.claim(s, env)
        self.sending.route(s, parity, low, high, weight)
        self.sending.stage(s, windows)
        # The rows are pulled by bulk copies: each writer passes its stores to the async proxy.
        sync.proxy_release(HEADER)
        cute.arch.sync_threads()
        sync.stamp(self.spec, s, Trace.STAGED)
        if ptx.shared_load(word_at(s, 4 * Word.CLAIM_LOST)) == U32(0):
            self.sending.send_headers(s, parity, generation)
            self.await_headers(s, parity, env)
            cute.arch.sync_threads()
            sync.stamp(self.spec, s, Trace.HEADERS)
            if ptx.shared_load(word_at(s, 4 * Word.BAD_HEADER)) == U32(0):
                sync.after_observe(HEADER)
                self.receive(s, parity, env)

    @cute.jit
    def receive(self, s: dict, parity: Any, env: dict):
        """Sort the entries of all sources by expert and pull this CTA's rows."""
        num_rows = self.sorting.list_sources(s)
        cute.arch.sync_threads()
        is_loaded = self.load_early(s, parity, num_rows)
        low, weight, src = self.sorting.count_entries(s, parity, num_rows, env)
        cute.arch.sync_threads()
        is_last = s["cta"] == U32(self.spec.dispatch_ctas - 1)
        if ptx.shared_load(word_at(s, 4 * Word.BAD_ENTRY)) == U32(0):
            self.sorting.scan_experts(s)
            cute.arch.sync_threads()
            if is_last:
                self.sorting.write_block_table(s)
            self.sorting.place_rows(s, parity, num_rows, low, weight, src)
            # Orders the block table before its flag and the sorted rows before the pulls.
            cute.arch.sync_threads()
            if is_last & (s["tid"] == U32(THREADS - WARP)):
                num_blocks = ptx.shared_load(word_at(s, 4 * Word.NUM_BLOCKS))
                header = RoutesHeader.pack(U64(env["generation"]), U64(num_blocks))
                sync.publish(ROUTES, s["workspace"] + self.spec.shape.offsets["routes"], header)
            sync.stamp(self.spec, s, Trace.BINNED)
        # In any case, because the load writes to this CTA.
        if is_loaded != U32(0):
            ptx.mbarrier_wait(s["mbarrier"].toint(), U32(0))
        if ptx.shared_load(word_at(s, 4 * Word.BAD_ENTRY)) == U32(0):
            self.pull_rows(s, num_rows, is_loaded, env)
            if is_last:
                self.sorting.add_stats(s)
            if cutlass.const_expr(self.spec.trace):
                cute.arch.sync_threads()
                sync.stamp(self.spec, s, Trace.LAST_ROW)

    @cute.jit
    def claim(self, s: dict, env: dict):
        """CTA 0 claims the workspace; the answer is looked at only before the headers, and the
        last warp asks because it has the least to stage."""
        if (s["cta"] == 0) & (s["tid"] == U32(THREADS - WARP)):
            cell = s["workspace"] + self.spec.shape.offsets["in_flight"]
            # generation | 1: 0 means free, also when the generation wraps
            seen = sync.atomic(CLAIM, cell, U32(0), env["generation"] | U32(1))
            if seen != U32(0):
                sync.raise_fault(
                    FaultKind.OVERLAPPING_REPLAYS,
                    Cell.IN_FLIGHT,
                    U32(0),
                    U32(0),
                    seen,
                    U32(NO_PEER),
                    env,
                )
                ptx.shared_store(word_at(s, 4 * Word.CLAIM_LOST), U32(1))

    # ----------------------------------------------------------------------- headers

    @cute.jit
    def await_headers(self, s: dict, parity: Any, env: dict):
        """All words of all sources, this rank's too: a lane per word, in as few warps as that
        takes. One warp with several words a lane would add a load's latency for each."""
        shape = self.spec.shape
        words = shape.num_ranks * shape.header_words
        pollers = min(WARPS, -(-words // WARP))
        if s["warp"] < U32(pollers):
            for turn in cutlass.range_constexpr(-(-words // (WARP * pollers))):
                index = s["tid"] + U32(turn * WARP * pollers)
                src = index // U32(shape.header_words)
                is_mine = is_less(index, words)
                cell = at(s["workspace"], shape.offsets["recv_header"], parity * words + index, 8)
                ok, word = await_header(cell, is_mine, index, src, env)
                if ok == 0:
                    ptx.shared_store(word_at(s, 4 * Word.BAD_HEADER), U32(1))
                elif is_mine != U32(0):
                    self.check_header(s, word, index, src, env)

    @cute.jit
    def check_header(self, s: dict, word: Any, index: Any, src: Any, env: dict):
        """Only a header of this layer call with a possible count is believed."""
        shape = self.spec.shape
        count = U32(RecvHeader.COUNT.get(word))
        call = U32(RecvHeader.CALL.get(word))
        if call != s["call"]:
            sync.raise_fault(
                FaultKind.CALL_MISMATCH, Cell.RECV_HEADER, index, s["call"], call, src, env
            )
            ptx.shared_store(word_at(s, 4 * Word.BAD_HEADER), U32(1))
        elif count > U32(shape.entry_capacity):
            sync.raise_fault(
                FaultKind.BAD_COUNT,
                Cell.RECV_HEADER,
                index,
                U32(shape.entry_capacity),
                count,
                src,
                env,
            )
            ptx.shared_store(word_at(s, 4 * Word.BAD_HEADER), U32(1))
        elif index == src * shape.header_words:
            ptx.shared_store(word_at(s, self.map.source_count, src), count)

    # ----------------------------------------------------------------------- pull

    @cute.jit
    def load_early(self, s: dict, parity: Any, num_rows: Any):
        """Begin to load the only row of this warp, before it is known where it goes. Returns 1 if
        a load is under way, the same in all lanes."""
        is_loaded = U32(0)
        listed = s["warp"] * U32(self.spec.dispatch_ctas) + s["cta"]
        is_puller = (s["warp"] < U32(self.map.pullers)) & (s["lane"] == 0)
        if self.sorting.is_early(num_rows) & is_puller & (listed < num_rows):
            low, _, src = self.sorting.load_entry(s, parity, listed, num_rows)
            if self.sorting.is_entry(low, src):
                is_loaded = U32(1)
                self.begin_load(s, src, Entry.TOKEN.get(low))
        return cute.arch.shuffle_sync(is_loaded, 0)

    @cute.jit
    def pull_rows(self, s: dict, num_rows: Any, is_loaded: Any, env: dict):
        """A warp takes every W-th row of this CTA, one after the other through its own buffer."""
        m, ctas = self.map, self.spec.dispatch_ctas
        mine = (num_rows + U32(ctas - 1) - s["cta"]) // U32(ctas)
        epoch_base = ptx.shared_load(word_at(s, 4 * Word.EPOCH_BASE))
        slot_base = ptx.shared_load(word_at(s, 4 * Word.SLOT_BASE))
        ring = self.spec.shape.ring
        index = s["warp"]
        go = s["warp"] < U32(m.pullers)
        phase = U32(0)
        while go & (index < mine):
            meta = ptx.shared_load(word_at(s, m.row_meta, index))
            weight = ptx.shared_load(word_at(s, m.row_weight, index))
            packed = ptx.shared_load(word_at(s, m.row_place, index))
            rows = RowPlace.ROWS.get(packed)
            ok = I32(0)
            if rows != U32(0):
                place = ring.place(slot_base, RowPlace.BLOCK.get(packed))
                slot = ring.slot(place)
                ok = self.load_row(
                    s, meta, slot, ring.epoch(epoch_base, place), phase, is_loaded, env
                )
                phase = phase ^ U32(1)
                if index == 0:
                    sync.stamp(self.spec, s, Trace.ROW_LOADED)
                if ok != 0:
                    self.store_row(s, meta, weight, slot, RowPlace.ROW.get(packed), rows)
                    if index == 0:
                        sync.stamp(self.spec, s, Trace.FIRST_ROW)
            elif s["lane"] == 0:
                # No entry claimed this place: the list changed since it was counted.
                sync.raise_fault(
                    FaultKind.BAD_COUNT, Cell.RECV_HEADER, U32(0), mine, index, U32(NO_PEER), env
                )
            if ok == 0:
                ptx.shared_store(word_at(s, 4 * Word.STOPPED), U32(1))
            # By ballot, so that all lanes of the warp see the same.
            go = ptx.ballot(ptx.shared_load(word_at(s, 4 * Word.STOPPED))) == U32(0)
            index += U32(m.pullers)
            # The next row is loaded over the scales that each lane has read.
            ptx.fence("proxy.async.shared::cta", "row_buffer read")
            cute.arch.sync_warp()

    def buffer(self, s: dict[str, Any]) -> Any:
        """Shared address of this warp's row."""
        return s["smem"] + I32(self.map.buffers) + I32(s["warp"]) * self.spec.shape.row_stride

    def begin_load(self, s: dict[str, Any], src: Any, token: Any) -> None:
        """Pull a staged row from its source into this warp's buffer."""
        shape, mbarrier = self.spec.shape, s["mbarrier"]
        peer = ptx.parameter_u64(self.spec.peers_symbol, I32(src))
        row = at(peer, shape.offsets["staged_x"], token, shape.row_stride)
        cute.arch.mbarrier_arrive_and_expect_tx(mbarrier, shape.row_stride)
        ptx.bulk_load(self.buffer(s), row, I32(shape.row_stride), mbarrier.toint())

    @cute.jit
    def load_row(
        self, s: dict, meta: Any, slot: Any, epoch: Any, phase: Any, is_loaded: Any, env: dict
    ):
        """Load a row, if it is not there, and wait until its slot is free. Returns 0 if that wait
        failed; the load is awaited in any case, because it writes to this CTA."""
        shape = self.spec.shape
        ok = I32(1)
        if s["lane"] == 0:
            if is_loaded == U32(0):
                self.begin_load(s, RowMeta.SRC.get(meta), RowMeta.TOKEN.get(meta))
            ok = sync.await_reached(
                EMPTY,
                at(s["workspace"], shape.offsets["token_ring_empty"], slot, 4),
                shape.ring.empty_target(epoch),
                slot,
                U32(NO_PEER),
                env,
            )
        ok = cute.arch.shuffle_sync(ok, 0)
        # Passes the acquire of lane 0 on to the lanes that store scales.
        cute.arch.sync_warp()
        if is_loaded == U32(0):
            ptx.mbarrier_wait(s["mbarrier"].toint(), phase)
        return ok

    def weight_row(self, row: Any, rows: Any) -> Any:
        """Where the routing weight of row ``row`` of ``rows`` lies among those of its slot."""
        return fragment_position(row, tile_width(self.spec.tiles.widths, rows))

    def window_scale(
        self, buffer: Any, slot: Any, window: Any, row: Any, rows: Any
    ) -> tuple[Any, Any]:
        """(word, index) in ``ring_scale`` of a row's scale in a window, expanded to FP32; from the
        row in ``buffer``."""
        shape, width = self.spec.shape, tile_width(self.spec.tiles.widths, rows)
        scale = ptx.shared_load_u8(buffer + I32(window) + I32(shape.hidden))
        index = slot * (shape.num_windows * shape.block_rows) + window * width
        return scale << 23, index + fragment_position(row, width)

    @cute.jit
    def store_row(self, s: dict, meta: Any, weight: Any, slot: Any, row: Any, rows: Any):
        """The row by a bulk copy; its scales, weight and origin by plain stores. All of it is
        complete before the row is counted in ``token_ring_full``."""
        shape = self.spec.shape
        workspace, windows, block_rows = s["workspace"], shape.num_windows, shape.block_rows
        buffer, lane = self.buffer(s), s["lane"]
        weight_row = self.weight_row(row, rows)
        sync.after_observe(EMPTY)
        if lane == 0:
            place = slot * block_rows + ring_row(row, rows, block_rows)
            target = at(workspace, shape.offsets["ring_rows"], place, shape.row_stride)
            ptx.bulk_store(target, buffer, I32(shape.row_stride))
            ptx.bulk_commit()
            cell = at(workspace, shape.offsets["ring_meta"], slot * block_rows + row, 4)
            ptx.store_u32(cell, meta)
            cell = at(workspace, shape.offsets["ring_weight"], slot * block_rows + weight_row, 4)
            ptx.store_u32(cell, weight)
        for turn in cutlass.range_constexpr(-(-windows // WARP)):
            window = lane + U32(turn * WARP)
            if window < U32(windows):
                word, index = self.window_scale(buffer, slot, window, row, rows)
                ptx.store_u32(at(workspace, shape.offsets["ring_scale"], index, 4), word)
        sync.proxy_release(FULL)
        if lane == 0:
            sync.complete(FULL)
        cute.arch.sync_warp()
        sync.stamp(self.spec, s, Trace.ROW_STORED)
        if lane == 0:
            cell = at(workspace, shape.offsets["token_ring_full"], slot, 4)
            sync.publish(FULL, cell, shape.ring.full_increment(row, rows))
