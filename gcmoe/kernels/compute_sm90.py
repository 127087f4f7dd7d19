"""The compute kernel for Hopper: W1 + SwiGLU + re-quantise, then W2, for every ring block."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda_ext
from cutlass.cute.runtime import make_ptr

from gcmoe.kernels import mma_sm90 as mma
from gcmoe.kernels import ptx, sync
from gcmoe.kernels.output_sm90 import STAGE_STRIDE, TILE_ROWS, TileOutput
from gcmoe.kernels.params import PeerTable
from gcmoe.kernels.publisher import Publisher
from gcmoe.kernels.records import QUEUE_ENTRIES, RECORD_WORDS, Kind, Word
from gcmoe.kernels.scheduler import SchedulerSteps
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.tokens_sm90 import TokenFeed, scale_bytes
from gcmoe.kernels.trace_words import TRACE_WORDS, ComputeTrace, ItemTrace
from gcmoe.protocol import WorkOrder, tile_width

U8, U32, U64 = cutlass.Uint8, cutlass.Uint32, cutlass.Uint64
I32, I64, F32, BF16 = cutlass.Int32, cutlass.Int64, cutlass.Float32, cutlass.BFloat16
F8 = cutlass.Float8E4M3FN

NUM_WIDTHS = 5


class ComputeKernel(SchedulerSteps):
    """Persistent CTAs, one per SM, that take whole items by ticket.

    Warps (w4: 16 consumer warps, w2: 8), then four single warps:

        consumers   decode FP4 in registers, QGMMA with register A, promote, epilogue
        weights     item -> units of 256 rows x 256 columns, one bulk load of 34,816 B each
        tokens      waits FULL (W1) or the W1 bitmap (W2); token tiles and scales of each unit
        publisher   moves finished tiles out, completes, fences and publishes
        scheduler   takes tickets, reads the block table, fills the item queue, loads row scales

    Pipelines (producer -> consumer, arrivals):

        full_w[stage]   weights -> consumers    1 + 34,816 B
        full_x[stage]   tokens -> consumers     1 + width * 256 B + scales
        empty[stage]    consumers -> weights, tokens    one per consumer warp; who refills a stage
                        that was read by ordinary loads fences first, so that no consumer waits
        item[q]         scheduler -> all        1
        item_data[q]    scheduler, tokens -> consumers, publisher   2 + row scales, and routing
                        weights (W1) or origins (W2) of the rows
        item_free[q]    consumers, publisher -> scheduler   one per warp
        next_ticket     weights -> scheduler    1, two units before an item's weights end
        ticket_known    scheduler -> weights    1, once: the first ticket, before the routes
        guess           weights -> weights      1 + 34,816 B, a phase per guessed unit
        out_full        consumers -> publisher  one per consumer warp
        out_free        publisher -> consumers  32, every lane for what it has read and copied

    Timeline of a CTA: ticket | routes | W1 items ... | W2 items ... | stop record.
    A wait on memory that ends by abort sets ``poisoned``; every mbarrier hand-shake still
    completes, the publisher publishes nothing more and the scheduler sends the stop record.
    """

    def __init__(self, spec: KernelSpec) -> None:
        shape, tiles = spec.shape, spec.tiles
        if len(tiles.widths) != NUM_WIDTHS:
            raise ValueError(f"widths = {tiles.widths}: {NUM_WIDTHS} widths, a tensor map each")
        self.spec, self.shape, self.tiles = spec, shape, tiles
        self.widths = tiles.widths
        self.max_width = tiles.max_width
        self.warpgroups, self.subtiles, self.stages = (
            tiles.warpgroups,
            tiles.subtiles,
            tiles.stages,
        )
        self.consumer_threads = self.warpgroups * 128
        self.threads = self.consumer_threads + 128
        self.w1_windows = shape.hidden // 128
        self.w2_windows = shape.intermediate // 128
        self.w1_units = self.w1_windows // 2
        self.w2_units = (self.w2_windows + 1) // 2
        self.w1_tiles = shape.intermediate // 128
        self.w2_tiles = shape.hidden // TILE_ROWS
        self.guessed_units = min(self.stages, self.w1_units) if spec.prefetch else 0
        groups = shape.arrivals.groups
        self.order = WorkOrder(shape.num_slots, self.w1_tiles, self.w2_tiles, groups)
        self.feed = TokenFeed(spec)
        self.output = TileOutput(spec)
        self.publisher = Publisher(spec, scale_bytes, STAGE_STRIDE)
        self.fields = self._storage()
        self.Storage = cute.struct(type("Storage", (), {"__annotations__": self.fields}))
        self.smem_bytes = self.Storage.size_in_bytes()
        type(self).kernel.set_name_prefix(
            spec.symbol.removesuffix("_0"), remove_cutlass_symbol=True, keep_mangled_name=False
        )

    def _storage(self) -> dict[str, Any]:
        """Shared memory by name; the order keeps the padding small."""
        stages, width, queue = self.stages, self.max_width, QUEUE_ENTRIES
        array, align = cute.struct.MemRange, cute.struct.Align
        fields = {
            "full_w": array[I64, stages],
            "full_x": array[I64, stages],
            "empty": array[I64, stages],
            "item": array[I64, queue],
            "item_data": array[I64, queue],
            "item_free": array[I64, queue],
            "next_ticket": array[I64, 1],
            "ticket_known": array[I64, 1],
            "guess": array[I64, 1],
            "out_full": array[I64, 1],
            "out_free": array[I64, 1],
            "poisoned": array[U32, 1],
            "first_ticket": array[U32, 1],
            "out_record": array[U32, RECORD_WORDS],
            "lut": align[array[U32, 2 * mma.TABLE_ENTRIES], 128],
            "records": align[array[U32, queue * RECORD_WORDS], 128],
            "row_words": align[array[U32, queue * width], 128],
            "row_scales": align[array[F32, queue * TILE_ROWS], 128],
            "amax": align[array[U32, 2 * width], 128],
            "out_scale": align[array[F32, width], 128],
            "stage": align[array[U8, width * STAGE_STRIDE], 128],
            "x_scale": align[array[F32, stages * 2 * width], 128],
            "x": align[array[F8, stages * width * 256], 1024],
            "w": align[array[U32, stages * mma.UNIT_BYTES // 4], 128],
        }
        if self.spec.trace:
            fields["traced"] = array[U32, len(ItemTrace)]
        return fields

    # ------------------------------------------------------------------- host side

    def example_arguments(self) -> tuple[Any, ...]:
        """Arguments of the right types for a compilation without a GPU."""
        pointer = make_ptr(U8, 128, cute.AddressSpace.gmem, assumed_align=128)
        addresses = [I64(0)] * 7
        return (
            PeerTable(self.shape.num_ranks),
            *addresses,
            I32(0),
            I64(0),
            pointer,
            cuda.CUstream(0),
        )

    @cute.jit
    def __call__(
        self,
        peers: PeerTable,
        workspace: I64,
        w13: I64,
        w13_row_scale: I64,
        w2: I64,
        w2_row_scale: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        rows: cute.Pointer,
        stream: cuda.CUstream,
    ):
        dims, strides = self.shape.ring_tensor
        maps = [
            cuda_ext.create_tensor_map_tiled(
                global_address=rows.toint(),
                dtype=U8,
                global_dims=[I32(extent) for extent in dims],
                global_strides=[I64(stride // 16) for stride in strides],
                box_dims=[128, width, 2, 1],
                swizzle=cuda_ext.TensorMapSwizzle.s128b,
            )
            for width in self.widths
        ]
        self.kernel(
            peers,
            workspace,
            w13,
            w13_row_scale,
            w2,
            w2_row_scale,
            fault_record,
            trace,
            rank,
            spin_budget_ns,
            maps[0],
            maps[1],
            maps[2],
            maps[3],
            maps[4],
        ).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    # ------------------------------------------------------------------- device side

    @cute.kernel
    def kernel(
        self,
        peers: PeerTable,
        workspace: I64,
        w13: I64,
        w13_row_scale: I64,
        w2: I64,
        w2_row_scale: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        map0: cutlass.GridConstant[cuda_ext.TensorMap],
        map1: cutlass.GridConstant[cuda_ext.TensorMap],
        map2: cutlass.GridConstant[cuda_ext.TensorMap],
        map3: cutlass.GridConstant[cuda_ext.TensorMap],
        map4: cutlass.GridConstant[cuda_ext.TensorMap],
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        pointers = {name: getattr(storage, name).data_ptr() for name in self.fields}
        at = {name: pointer.toint() for name, pointer in pointers.items()}
        events = trace + I64(cta) * (TRACE_WORDS * 8)
        sync.jitter(self.spec, tid, cta)
        self.prepare(tid, warp, pointers, at, events)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        first_warp = self.warpgroups * 4
        if warpgroup == self.warpgroups:
            cute.arch.setmaxregister_decrease(self.tiles.producer_registers)
            base = (workspace, fault_record, rank, spin_budget_ns, events)
            if warp == first_warp:
                self.weights_warp(at, w13, w2)
            elif warp == first_warp + 1:
                maps = [m.get_ptr().toint() for m in (map0, map1, map2, map3, map4)]
                self.feed.tokens_warp(at, base, maps)
            elif warp == first_warp + 2:
                self.publisher.publisher_warp(at, workspace, tid % 32, events)
            else:
                self.scheduler_warp(at, base, w13_row_scale, w2_row_scale)
        else:
            cute.arch.setmaxregister_increase(self.tiles.consumer_registers)
            self.consumer_warps(at, pointers, tid, warpgroup, events)

    @cute.jit
    def prepare(self, tid, warp, pointers, at, events):
        """mbarriers, decode table, zeroed maxima."""
        consumer_warps = self.warpgroups * 4
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(pointers["full_w"] + i, 1)
                    cute.arch.mbarrier_init(pointers["full_x"] + i, 1)
                    cute.arch.mbarrier_init(pointers["empty"] + i, consumer_warps)
                for i in cutlass.range_constexpr(QUEUE_ENTRIES):
                    cute.arch.mbarrier_init(pointers["item"] + i, 1)
                    cute.arch.mbarrier_init(pointers["item_data"] + i, 2)
                    cute.arch.mbarrier_init(pointers["item_free"] + i, consumer_warps + 1)
                cute.arch.mbarrier_init(pointers["next_ticket"], 1)
                cute.arch.mbarrier_init(pointers["ticket_known"], 1)
                cute.arch.mbarrier_init(pointers["guess"], 1)
                cute.arch.mbarrier_init(pointers["out_full"], consumer_warps)
                cute.arch.mbarrier_init(pointers["out_free"], 32)
        if tid == 0:
            ptx.shared_store(at["poisoned"], U32(0))
            if cutlass.const_expr(self.spec.trace):
                ptx.store_u64(events, U64(ptx.sm_id()))
                for word in cutlass.range_constexpr(len(ItemTrace)):
                    ptx.shared_store(at["traced"] + 4 * word, U32(0))
            sync.mark(self.spec, events, ComputeTrace.START)
        if tid < 2 * self.max_width:
            ptx.shared_store(at["amax"] + tid * 4, U32(0))
        mma.fill_decode_table(at["lut"], tid)

    # ------------------------------------------------------------------- scheduler

    @cute.jit
    def load_item(self, at, q, kind, expert, tile, w13_row_scale, w2_row_scale):
        """The row scales of the item's tile, which only the epilogue needs."""
        scales = w13_row_scale + I64(expert * self.w1_tiles + tile) * (TILE_ROWS * 4)
        if kind == U32(int(Kind.W2)):
            scales = w2_row_scale + I64(expert * self.w2_tiles + tile) * (TILE_ROWS * 4)
        ptx.mbarrier_expect(at["item_data"] + q * 8, TILE_ROWS * 4)
        ptx.bulk_load(
            at["row_scales"] + q * (TILE_ROWS * 4),
            scales,
            TILE_ROWS * 4,
            at["item_data"] + q * 8,
        )

    def tile_width(self, rows):
        return tile_width(self.widths, rows)

    # ------------------------------------------------------------------- weights

    @cute.jit
    def weights_warp(self, at, w13, w2):
        """One bulk load per unit; never waits for tokens."""
        with cute.arch.elect_one():
            num_guessed, guessed = self.guess(at, w13)
            q, item_parity, s, parity, go = I32(0), U32(0), I32(0), U32(1), I32(1)
            while go != 0:
                ptx.mbarrier_wait(at["item"] + q * 8, item_parity)
                record = at["records"] + q * (RECORD_WORDS * 4)
                kind = ptx.shared_load(record + int(Word.KIND) * 4)
                # Units of this item that lie in their stages already: of the first one at most.
                expert = ptx.shared_load(record + int(Word.EXPERT) * 4)
                tile = ptx.shared_load(record + int(Word.TILE) * 4)
                num_loaded = num_guessed
                if (kind != U32(int(Kind.W1))) | (expert * self.w1_tiles + tile != guessed):
                    num_loaded = I32(0)
                num_guessed = I32(0)
                if kind == U32(int(Kind.STOP)):
                    # Consumers look ahead into the next stage: give them a phase to see.
                    go = I32(0)
                    ptx.mbarrier_wait(at["empty"] + s * 8, parity)
                    ptx.mbarrier_arrive(at["full_w"] + s * 8)
                else:
                    units, source = self.weights_of(record, kind, w13, w2)
                    s, parity = self.load_units(at, units, source, num_loaded, s, parity)
                q, item_parity = sync.advance(q, item_parity, QUEUE_ENTRIES)

    @cute.jit
    def guess(self, at, w13):
        """Fill the stages before the routes are known, as if each expert had one block.

        The loads complete on a barrier of their own: when the guess is right, the stages are handed
        over as they are, else they are loaded again. One unit is in flight at a time: more would
        fill the memory's queues and delay every load, store and fence of dispatch by microseconds.
        """
        ptx.mbarrier_wait(at["ticket_known"], U32(0))
        ticket = ptx.shared_load(at["first_ticket"])
        num_loaded = I32(0)
        if ticket < U32(self.shape.local_experts * self.w1_tiles):
            num_loaded = I32(self.guessed_units)
            source = w13 + I64(ticket) * (self.w1_units * mma.UNIT_BYTES)
            for k in cutlass.range_constexpr(self.guessed_units):
                ptx.mbarrier_expect(at["guess"], mma.UNIT_BYTES)
                ptx.bulk_load(
                    at["w"] + k * mma.UNIT_BYTES,
                    source + k * mma.UNIT_BYTES,
                    mma.UNIT_BYTES,
                    at["guess"],
                    evict_first=True,
                )
                ptx.mbarrier_wait(at["guess"], U32(k & 1))
        return num_loaded, ticket

    @cute.jit
    def weights_of(self, record, kind, w13, w2):
        """(number of units, address) of an item's weights."""
        expert = ptx.shared_load(record + int(Word.EXPERT) * 4)
        tile = ptx.shared_load(record + int(Word.TILE) * 4)
        units = I32(self.w1_units)
        unit = I64(expert * self.w1_tiles + tile) * self.w1_units
        source = w13
        if kind == U32(int(Kind.W2)):
            units = I32(self.w2_units)
            unit = I64(expert * self.w2_tiles + tile) * self.w2_units
            source = w2
        return units, source + unit * mma.UNIT_BYTES

    @cute.jit
    def load_units(self, at, units, source, num_loaded, s, parity):
        """All units of an item; the first ``num_loaded`` are only handed over."""
        claim = units - 2
        if claim < 0:
            claim = I32(0)
        for k in cutlass.range(units, unroll=1):
            if k == claim:
                ptx.mbarrier_arrive(at["next_ticket"])
            ptx.mbarrier_wait(at["empty"] + s * 8, parity)
            if k < num_loaded:
                ptx.mbarrier_arrive(at["full_w"] + s * 8)
            else:
                sync.refill(at["full_w"] + s * 8, mma.UNIT_BYTES)
                ptx.bulk_load(
                    at["w"] + s * mma.UNIT_BYTES,
                    source + I64(k) * mma.UNIT_BYTES,
                    mma.UNIT_BYTES,
                    at["full_w"] + s * 8,
                    evict_first=True,
                )
            s, parity = sync.advance(s, parity, self.stages)
        return s, parity

    # ------------------------------------------------------------------- consumers

    @cute.jit
    def consumer_warps(self, at, pointers, tid, warpgroup, events):
        """Items through the tensor core; all consumer warps do the same."""
        t, lane = tid % 128, tid % 32
        ahead = mma.make_ahead(self.subtiles)
        # parities: staging buffer free, item, amax buffer
        phases = cute.make_rmem_tensor(cute.make_layout(3), U32)
        phases[0], phases[1], phases[2] = U32(1), U32(0), U32(0)
        s, parity, q, go = I32(0), U32(0), I32(0), I32(1)
        view = mma.weight_view(pointers["w"], self.subtiles, self.warpgroups, self.stages)
        ptx.mbarrier_wait(at["full_w"], parity)
        for m in cutlass.range_constexpr(self.subtiles):
            mma.load_words(view, ahead, t, warpgroup, m, 0, s)
            mma.load_codes(pointers["lut"], ahead, m)
        mma.decode(ahead.words[0], ahead.codes[0], ahead.decoded)
        was_w1 = I32(1)
        while go != 0:
            ptx.mbarrier_wait(at["item"] + q * 8, phases[1])
            record = at["records"] + q * (RECORD_WORDS * 4)
            kind = ptx.shared_load(record + int(Word.KIND) * 4)
            width = ptx.shared_load(record + int(Word.WIDTH) * 4)
            slot = ptx.shared_load(record + int(Word.SLOT) * 4)
            tile = ptx.shared_load(record + int(Word.TILE) * 4)
            rows = ptx.shared_load(record + int(Word.ROWS) * 4)
            if cutlass.const_expr(self.spec.trace):
                if (tid == 0) & (kind != U32(int(Kind.W1))) & (was_w1 != 0):
                    sync.mark(self.spec, events, ComputeTrace.W1_OVER)
                    was_w1 = I32(0)
                if (tid == 0) & (kind != U32(int(Kind.STOP))):
                    what = U64(kind) | (U64(rows) << U64(8)) | (U64(tile) << U64(24))
                    what = what | (U64(slot) << U64(40))
                    sync.record_item(self.spec, at, events, ItemTrace.WHAT, what)
                    sync.mark_item(self.spec, at, events, ItemTrace.START)
            if kind == U32(int(Kind.STOP)):
                go = I32(0)
            units = I32(self.w1_units)
            if kind == U32(int(Kind.W2)):
                units = I32(self.w2_units)
            for i in cutlass.range_constexpr(len(self.widths)):
                if (width == U32(self.widths[i])) & (go != 0):
                    s, parity = self.item(
                        self.widths[i],
                        at,
                        pointers,
                        (t, lane, warpgroup, q, units, kind, slot, tile, rows, events),
                        ahead,
                        phases,
                        s,
                        parity,
                    )
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                ptx.mbarrier_arrive(at["item_free"] + q * 8)
            q, phases[1] = sync.advance(q, phases[1], QUEUE_ENTRIES)
        ptx.mbarrier_wait(at["out_free"], phases[0])
        if tid == 0:
            ptx.shared_store(at["out_record"] + int(Word.KIND) * 4, U32(int(Kind.STOP)))
            if cutlass.const_expr(self.spec.trace):
                count = ptx.shared_load(at["traced"] + 4 * int(ItemTrace.END))
                ptx.store_u64(events + 8 * int(ComputeTrace.ITEMS), U64(count))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(at["out_full"])

    @cute.jit
    def item(self, width: cutlass.Constexpr, at, pointers, what, ahead, phases, s, parity):
        """One whole item of token width ``width``: main loop, epilogue, hand-over."""
        t, lane, warpgroup, q, units, kind, slot, tile, rows, events = what
        tiles = mma.TileMma(width, self.tiles, pointers, ahead, t, lane)
        s, parity = tiles.main_loop(at, units, ahead, warpgroup, s, parity)
        ptx.mbarrier_wait(at["item_data"] + q * 8, phases[1])
        ptx.mbarrier_wait(at["out_free"], phases[0])
        if kind == U32(int(Kind.W1)):
            self.output.w1_epilogue(width, at, pointers, tiles, t, lane, warpgroup, q, phases)
        else:
            self.output.w2_epilogue(width, at, pointers, tiles, t, lane, warpgroup, q)
        if t + warpgroup == 0:
            record = at["out_record"]
            ptx.shared_store(record + int(Word.KIND) * 4, kind)
            ptx.shared_store(record + int(Word.SLOT) * 4, slot)
            ptx.shared_store(record + int(Word.TILE) * 4, tile)
            ptx.shared_store(record + int(Word.ROWS) * 4, rows)
            ptx.shared_store(record + int(Word.WIDTH) * 4, U32(width))
            # Before the publisher has it, which records its own end.
            sync.mark_item(self.spec, at, events, ItemTrace.END)
        ptx.fence("proxy.async.shared::cta", "stage write")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(at["out_full"])
        phases[0] = phases[0] ^ 1
        return s, parity
