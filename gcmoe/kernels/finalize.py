"""Finalize: wait for this rank's contributions, sum them, write y, advance the generation."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.dispatch_memory import at
from gcmoe.kernels.expert_ids import classify_id, load_expert_id
from gcmoe.kernels.params import PeerTable
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import TRACE_WORDS
from gcmoe.kernels.trace_words import FinalizeTrace as Trace
from gcmoe.plan.layer import ONE_PASS_TOKENS
from gcmoe.protocol import RoutesHeader, is_reached
from gcmoe.protocol.edges import ARRIVALS, COMPUTE_DONE, DONE
from gcmoe.protocol.faults import NO_PEER

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64

WARP = 32
THREADS = 512
CHUNK_COLUMNS = 8
SLOTS_IN_FLIGHT = 8
NAN_PAIR = 0x7FFF_7FFF


class Word(IntEnum):
    """Words of shared memory. Thread 0 writes them, but all warps count, and who waits may fail."""

    VALID = 0
    FAILED = 1
    GENERATION = 2
    EPOCH_BASE = 3
    SLOT_BASE = 4
    ARRIVALS_BASE = 5


@cute.jit
def load_slot(address: Any, is_used: Any):
    """8 columns of one combine slot as four words; zeros if the slot is unused."""
    a, b, c, d = U32(0), U32(0), U32(0), U32(0)
    if is_used != U32(0):
        a, b, c, d = ptx.load_u32x4(address)
    return a, b, c, d


def load_slots(row: Any, slots: Any, stride: int, count: int) -> list[tuple[Any, ...]]:
    """``count`` slots ``stride`` bytes apart, all loads in flight together."""
    return [load_slot(row + i * stride, slots & U32(1 << i)) for i in range(count)]


def add_slots(sums: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Add the BF16 pairs of each row, in order."""
    out = list(sums)
    for words in rows:
        for i, word in enumerate(words):
            out[2 * i] = out[2 * i] + ptx.float_of(word << 16)
            out[2 * i + 1] = out[2 * i + 1] + ptx.float_of(word & U32(0xFFFF_0000))
    return tuple(out)


class FinalizeKernel:
    """Any number of CTAs of 512 threads.

    1. Thread 0 reads bases and abort while all threads count the valid ids. Barriers.
    2. Pass by pass, one for each group of columns: a lane waits until that many rows have arrived
       in the group. Barrier. Every thread sums its share of (token, 8 columns): FP32, ascending
       slots, one rounding to BF16. After a failed wait, or with abort set, the share is NaN. For
       few tokens one pass takes all groups, a lane waits for each.
    3. A thread of the last warp, whose share is the smallest, counts its CTA as done, also a
       poisoned one, while others still sum: all have read the bases, and the next replay comes
       behind the end of the grid. The last CTA of the grid waits until no CTA of compute takes
       tickets, and for the end of the compute node that it hangs on, and advances the bases, unless
       abort is set.

    It may start while compute runs, on the SMs that compute has left: compute ends the groups one
    after the other, so that at best only the last one is summed behind it. The sum of few tokens
    takes a latency, as would each further pass.

    Timeline::

        bases, ids | count | wait, sum ... | wait -- arrivals | combine rows | y
                                                              | done | advance

    The ids of a thread's first share are read before the wait, so that only the combine rows lie
    behind it.
    """

    threads = THREADS

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.smem_bytes = 128
        self.chunks = spec.shape.hidden // CHUNK_COLUMNS
        self.arrivals = spec.shape.arrivals
        self.group_chunks = self.chunks // self.arrivals.groups
        self.kernel.set_name_prefix(
            spec.symbol.removesuffix("_0"), remove_cutlass_symbol=True, keep_mangled_name=False
        )

    def example_arguments(self) -> tuple[Any, ...]:
        pointers = [I64(0)] * 5
        scalars = [I32(0), I64(0), I32(0), I32(0), I32(0)]
        return (PeerTable(self.spec.shape.num_ranks), *pointers, *scalars, cuda.CUstream(0))

    @cute.jit
    def __call__(
        self,
        peers: PeerTable,
        workspace: I64,
        topk_ids: I64,
        y: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        num_tokens: I32,
        ids_are_int64: I32,
        compute_ctas: I32,
        stream: cuda.CUstream,
    ):
        self.kernel(
            peers,
            workspace,
            topk_ids,
            y,
            fault_record,
            trace,
            rank,
            spin_budget_ns,
            num_tokens,
            ids_are_int64,
            compute_ctas,
        ).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        peers: PeerTable,
        workspace: I64,
        topk_ids: I64,
        y: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        num_tokens: I32,
        ids_are_int64: I32,
        compute_ctas: I32,
    ):
        memory = cutlass.memory.SmemAllocator().allocate_array(
            cutlass.Uint32, len(Word), byte_alignment=16
        )
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        s = {
            "workspace": workspace,
            "ids": topk_ids,
            "y": y,
            "fault_record": fault_record,
            "trace": trace,
            "rank": U32(rank),
            "budget_ns": spin_budget_ns,
            "num_ids": U32(num_tokens) * self.spec.shape.top_k,
            "ids_are_int64": ids_are_int64,
            "compute_ctas": U32(compute_ctas),
            "smem": memory.toint(),
            "tid": U32(tid),
            "cta": U32(cta),
            "ctas": U32(ctas),
        }
        s["row_chunks"] = U32(self.group_chunks)
        if num_tokens <= ONE_PASS_TOKENS:
            s["row_chunks"] = U32(self.chunks)
        s["num_chunks"] = U32(num_tokens) * s["row_chunks"]
        sync.jitter(self.spec, tid, cta)
        if cutlass.const_expr(self.spec.trace):
            if tid == 0:
                record = at(trace, 0, cta, 8 * TRACE_WORDS)
                ptx.store_u64(record + 8 * int(Trace.SM), U64(ptx.sm_id()))
        sync.stamp(self.spec, s, Trace.START)
        if tid == 0:
            self.read_bases(s)
        early = self.look_early(s)
        count = self.count_valid(s)
        share = self.first_share(s)
        slots = self.valid_slots(s, share)
        cute.arch.sync_threads()
        lane = U32(tid % WARP)
        if lane == 0:
            ptx.shared_add(self.word(s, Word.VALID), count)
        cute.arch.sync_threads()
        first = U32(0)
        while first < U32(self.chunks):
            self.await_arrivals(s, first, early)
            cute.arch.sync_threads()
            # A later pass that fails may show here early: NaN is right then too.
            if ptx.shared_load(self.word(s, Word.FAILED)) == U32(0):
                # Behind the load, else the compiler reads the clock before the barrier.
                sync.stamp(self.spec, s, Trace.ARRIVED)
                self.write_sums(s, first, share, slots)
            else:
                self.write_nan(s, first, share)
            first += s["row_chunks"]
        sync.stamp(self.spec, s, Trace.END)
        if tid == THREADS - WARP:
            self.finish(s)

    def word(self, s: dict[str, Any], word: int) -> Any:
        """Shared address of a word."""
        return s["smem"] + I32(4 * int(word))

    def wait_env(self, s: dict[str, Any], generation: Any) -> dict[str, Any]:
        return sync.wait_env(
            self.spec, s["workspace"], s["fault_record"], s["rank"], generation, s["budget_ns"]
        )

    # ----------------------------------------------------------------------- before the wait

    @cute.jit
    def read_bases(self, s: dict):
        """Thread 0, before the first barrier."""
        bases = s["workspace"] + self.spec.shape.offsets["bases"]
        generation, epoch_base, slot_base, arrivals_base = ptx.load_u32x4(bases)
        abort = sync.read_abort(self.wait_env(s, U32(0)))
        ptx.shared_store(self.word(s, Word.VALID), U32(0))
        ptx.shared_store(self.word(s, Word.FAILED), abort)
        ptx.shared_store(self.word(s, Word.GENERATION), generation)
        ptx.shared_store(self.word(s, Word.EPOCH_BASE), epoch_base)
        ptx.shared_store(self.word(s, Word.SLOT_BASE), slot_base)
        ptx.shared_store(self.word(s, Word.ARRIVALS_BASE), arrivals_base)

    def waits_for(self, s: dict[str, Any]) -> tuple[Any, Any, Any]:
        """(whether this thread is one that waits, the group of columns, its cell): the first lane
        of each warp behind the first."""
        group = s["tid"] // U32(WARP) - U32(1)
        is_waiter = (s["tid"] % U32(WARP) == 0) & (group < U32(self.arrivals.groups))
        cell = s["workspace"] + self.spec.shape.offsets["combine_arrivals"] + I64(group) * 4
        return is_waiter, group, cell

    @cute.jit
    def look_early(self, s: dict):
        """One look at the arrivals while the ids are counted: often all have come already."""
        is_waiter, _, cell = self.waits_for(s)
        early = U32(0)
        if is_waiter:
            early = sync.observe(ARRIVALS, cell)
        return early

    @cute.jit
    def count_valid(self, s: dict):
        """Valid ids that this warp reads, the same in all lanes; the CTA reads all ids."""
        count = U32(0)
        index = s["tid"]
        while index < s["num_ids"]:
            low, high = load_expert_id(s["ids"], index, s["num_ids"], s["ids_are_int64"])
            valid, _ = classify_id(low, high, s["ids_are_int64"], self.spec.num_experts)
            count += U32(valid)
            index += U32(THREADS)
        for i in cutlass.range_constexpr(5):
            count += cute.arch.shuffle_sync_bfly(count, 16 >> i)
        return count

    def first_share(self, s: dict[str, Any]) -> Any:
        """A thread's first chunk. Consecutive warps lie in different CTAs: few tokens then use all
        SMs."""
        warp = s["tid"] // U32(WARP)
        return (warp * s["ctas"] + s["cta"]) * WARP + s["tid"] % U32(WARP)

    @cute.jit
    def valid_slots(self, s: dict, chunk: Any):
        """One bit per slot of the chunk's token that has an expert."""
        top_k = self.spec.shape.top_k
        slots = U32(0)
        if chunk < s["num_chunks"]:
            first = chunk // s["row_chunks"] * U32(top_k)
            for start in cutlass.range_constexpr(0, top_k, SLOTS_IN_FLIGHT):
                end = min(start + SLOTS_IN_FLIGHT, top_k)
                ids = [
                    load_expert_id(s["ids"], first + U32(i), s["num_ids"], s["ids_are_int64"])
                    for i in range(start, end)
                ]
                for i in cutlass.range_constexpr(start, end):
                    low, high = ids[i - start]
                    valid, _ = classify_id(low, high, s["ids_are_int64"], self.spec.num_experts)
                    slots = slots | (U32(valid) << i)
        return slots

    @cute.jit
    def await_arrivals(self, s: dict, first: Any, early: Any):
        """Wait for one contribution of every valid slot to the groups of a pass, a thread for each;
        with abort set for nothing."""
        is_waiter, group, cell = self.waits_for(s)
        # Columns of this group less those before the pass, as chunks: negative ones are large.
        ahead = group * self.group_chunks - first
        if is_waiter & (ahead < s["row_chunks"]):
            target = self.arrivals_target(s)
            has_failed = ptx.shared_load(self.word(s, Word.FAILED)) != U32(0)
            if (not has_failed) & (not is_reached(early, target)):
                generation = ptx.shared_load(self.word(s, Word.GENERATION))
                env = self.wait_env(s, generation)
                ok = sync.await_reached(ARRIVALS, cell, target, group, U32(NO_PEER), env)
                if ok == 0:
                    ptx.shared_store(self.word(s, Word.FAILED), U32(1))

    def arrivals_target(self, s: dict[str, Any]) -> Any:
        base = ptx.shared_load(self.word(s, Word.ARRIVALS_BASE))
        valid = ptx.shared_load(self.word(s, Word.VALID))
        return self.arrivals.target(base, valid)

    # ----------------------------------------------------------------------- after the wait

    def place(self, s: dict[str, Any], first: Any, chunk: Any) -> tuple[Any, Any]:
        """(token, byte offset in its row) of a chunk of the pass whose first chunk of a row is
        ``first``."""
        token = chunk // s["row_chunks"]
        column = first + chunk - token * s["row_chunks"]
        return token, I64(column) * (2 * CHUNK_COLUMNS)

    @cute.jit
    def write_sums(self, s: dict, first: Any, share: Any, slots: Any):
        chunk = share
        while chunk < s["num_chunks"]:
            self.write_sum(s, first, chunk, slots)
            chunk += s["ctas"] * THREADS
            slots = self.valid_slots(s, chunk)

    @cute.jit
    def write_sum(self, s: dict, first: Any, chunk: Any, slots: Any):
        """Sum 8 columns of a token. An unused slot adds +0, which changes no sum that began at +0;
        its memory is not read."""
        shape = self.spec.shape
        top_k = shape.top_k
        token, offset = self.place(s, first, chunk)
        row = at(s["workspace"], shape.offsets["combine"], token * top_k, 2 * shape.hidden) + offset
        sums = tuple(cutlass.Float32(0.0) for _ in range(CHUNK_COLUMNS))
        if cutlass.const_expr(top_k <= SLOTS_IN_FLIGHT):
            rows = load_slots(row, slots, 2 * shape.hidden, top_k)
            sums = add_slots(sums, rows)
        else:
            # A loop, because unrolled it would load all slots at once and run out of registers.
            for _ in cutlass.range(-(-top_k // SLOTS_IN_FLIGHT), unroll=1):
                rows = load_slots(row, slots, 2 * shape.hidden, SLOTS_IN_FLIGHT)
                sums = add_slots(sums, rows)
                row += I64(SLOTS_IN_FLIGHT * 2 * shape.hidden)
                slots = slots >> SLOTS_IN_FLIGHT
        pairs = [ptx.bf16x2(sums[2 * i + 1], sums[2 * i]) for i in range(CHUNK_COLUMNS // 2)]
        ptx.store_u32x4(at(s["y"], 0, token, 2 * shape.hidden) + offset, *pairs)

    @cute.jit
    def write_nan(self, s: dict, first: Any, share: Any):
        """This CTA's share of y is not known."""
        chunk = share
        while chunk < s["num_chunks"]:
            token, offset = self.place(s, first, chunk)
            pairs = [U32(NAN_PAIR)] * (CHUNK_COLUMNS // 2)
            ptx.store_u32x4(at(s["y"], 0, token, 2 * self.spec.shape.hidden) + offset, *pairs)
            chunk += s["ctas"] * THREADS

    @cute.jit
    def finish(self, s: dict):
        """One thread, behind the barrier of the last pass. The counter wraps to zero with the last
        CTA, which advances the replay."""
        offsets, ring = self.spec.shape.offsets, self.spec.shape.ring
        workspace = s["workspace"]
        last = s["ctas"] - U32(1)
        if sync.atomic(DONE, workspace + offsets["finalize_done"], last) == last:
            generation = ptx.shared_load(self.word(s, Word.GENERATION))
            ok = I32(0)
            if ptx.shared_load(self.word(s, Word.FAILED)) == U32(0):
                ok = sync.await_reached(
                    COMPUTE_DONE,
                    workspace + offsets["compute_done"],
                    s["compute_ctas"],
                    U32(0),
                    U32(NO_PEER),
                    self.wait_env(s, generation),
                )
            # Compute has no other edge to the end of the graph: its last items, for other ranks
            # perhaps, may still run. PTX also demands this of a kernel behind a programmatic edge.
            ptx.await_prerequisites()
            if (ok != 0) & (sync.read_abort(self.wait_env(s, U32(0))) == U32(0)):
                # Every CTA of compute has seen these routes before it was counted.
                routes = ptx.load_u64(workspace + offsets["routes"])
                epoch_base = ptx.shared_load(self.word(s, Word.EPOCH_BASE))
                slot_base = ptx.shared_load(self.word(s, Word.SLOT_BASE))
                num_blocks = U32(RoutesHeader.NUM_BLOCKS.get(routes))
                ptx.store_u32x4(
                    workspace + offsets["bases"],
                    generation + U32(1),
                    ring.next_epoch_base(epoch_base, slot_base, num_blocks),
                    ring.next_slot_base(slot_base, num_blocks),
                    self.arrivals_target(s),
                )
                ptx.store_u32(workspace + offsets["work_ticket"], U32(0))
                ptx.store_u32(workspace + offsets["compute_done"], U32(0))
                ptx.store_u32(workspace + offsets["in_flight"], U32(0))
