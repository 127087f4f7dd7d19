"""The compute kernel for Blackwell: W1 + SwiGLU + re-quantise, then W2, for every ring block."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda_ext
from cutlass.cute.runtime import make_ptr

from gcmoe.kernels import layout_sm100 as layout
from gcmoe.kernels import ptx, sync
from gcmoe.kernels import ptx_sm100 as ptx100
from gcmoe.kernels.feed_sm100 import TokenFeed, WeightFeed
from gcmoe.kernels.mma_sm100 import MmaIssuer
from gcmoe.kernels.output_sm100 import EPILOGUE_WARPS, WARP, Epilogue
from gcmoe.kernels.params import PeerTable
from gcmoe.kernels.publisher import Publisher
from gcmoe.kernels.records import QUEUE_ENTRIES, RECORD_WORDS
from gcmoe.kernels.scheduler import SchedulerSteps
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import TRACE_WORDS, ComputeTrace, ItemTrace
from gcmoe.plan.tiles_sm100 import MMA_COLUMNS
from gcmoe.protocol import WorkOrder

U8, U32 = cutlass.Uint8, cutlass.Uint32
I32, I64 = cutlass.Int32, cutlass.Int64

MMA_WARP = EPILOGUE_WARPS
WEIGHTS_WARP = MMA_WARP + 1
TOKENS_WARP = MMA_WARP + 2
PUBLISHER_WARP = MMA_WARP + 3
SCHEDULER_WARP = MMA_WARP + 4
THREADS = WARP * (SCHEDULER_WARP + 1)


class ComputeKernelSm100(SchedulerSteps):
    """Persistent CTAs, one per SM, that take whole items by ticket.

    An item is 256 weight rows (gate and up of 128 features, or 256 output columns) times the N
    tokens of a block, N rounded up to 8. The weights are the M operand of a block-scaled MMA, in
    two halves with an accumulator each; a unit of work is one 128-column window. Warps:

        0-3 epilogue    tensor memory -> SwiGLU, scale, E4M3, or BF16 -> staging buffer
        4 mma           one thread: scale copies and 8 MMAs per window
        5 weights       item -> windows; one tensor load of 16,384 B and a bulk load of two atoms
        6 tokens        waits FULL (W1) or the W1 bitmap (W2); token rows and atom of each window
        7 publisher     moves finished tiles out, completes, fences and publishes
        8 scheduler     takes tickets, reads the block table, fills the item queue; releases
                        finalize when there are no more

    Pipelines (producer -> consumer, arrivals):

        full_w[stage]   weights -> mma          1 + 17,408 B
        full_x[stage]   tokens -> mma           1 + rows * 128 B + 512 B
        empty[stage]    mma -> weights, tokens  1, a commit: the MMAs have read the stage
        acc_full[b]     mma -> epilogue         2: a commit, and the thread itself
        acc_free[b]     epilogue -> mma         one per epilogue warp
        item[q]         scheduler -> all        1
        item_data[q]    tokens -> epilogue, publisher   1 + routing weights (W1) or origins (W2)
        item_free[q]    epilogue, publisher -> scheduler    one per warp
        next_ticket     weights -> scheduler    1, four windows before an item's weights end
        ticket_known    scheduler -> weights    1, once: the first ticket, before the routes
        guess           weights -> weights      1 + 17,408 B, a phase per guessed window
        out_full        epilogue -> publisher   one per epilogue warp
        out_free        publisher -> epilogue   32, every lane for what it has read and copied

    Timeline of a CTA (two accumulators)::

        weights    guess | item 0 .............. | item 1 ..............
        tokens     wait routes, FULL | item 0 .. | item 1 ..............
        mma                          | item 0 ... | item 1 ..............
        epilogue                                  | item 0 |   ...  | item 1 |
        publisher                                          | item 0 |

    A wait on memory that ends by abort sets ``poisoned``; every mbarrier hand-shake still
    completes, the publisher publishes nothing more and the scheduler sends the stop record.
    """

    threads = THREADS

    def __init__(self, spec: KernelSpec) -> None:
        shape, tiles = spec.shape, spec.tiles
        self.spec, self.shape, self.tiles = spec, shape, tiles
        self.w1_tiles = shape.intermediate // layout.WINDOW
        self.w2_tiles = shape.hidden // layout.TILE_ROWS
        groups = shape.arrivals.groups
        self.order = WorkOrder(shape.num_slots, self.w1_tiles, self.w2_tiles, groups)
        self.memory = layout.TensorMemory(tiles.max_width, tiles.stages, tiles.accumulators)
        self.weights = WeightFeed(spec)
        self.tokens = TokenFeed(spec)
        self.mma = MmaIssuer(spec, self.memory)
        self.epilogue = Epilogue(spec, self.memory)
        self.publisher = Publisher(spec, lambda _: layout.ATOM_BYTES, layout.OUTPUT_STRIDE)
        self.fields = self._storage()
        self.Storage = cute.struct(type("Storage", (), {"__annotations__": self.fields}))
        self.smem_bytes = self.Storage.size_in_bytes()
        type(self).kernel.set_name_prefix(
            spec.symbol.removesuffix("_0"), remove_cutlass_symbol=True, keep_mangled_name=False
        )

    def _barriers(self) -> dict[str, tuple[int, int]]:
        """(number, arrivals of a phase) of the mbarriers, by name."""
        stages, accumulators = self.tiles.stages, self.tiles.accumulators
        return {
            "full_w": (stages, 1),
            "full_x": (stages, 1),
            "empty": (stages, 1),
            "acc_full": (accumulators, 2),
            "acc_free": (accumulators, EPILOGUE_WARPS),
            "item": (QUEUE_ENTRIES, 1),
            "item_data": (QUEUE_ENTRIES, 1),
            "item_free": (QUEUE_ENTRIES, EPILOGUE_WARPS + 1),
            "next_ticket": (1, 1),
            "ticket_known": (1, 1),
            "guess": (1, 1),
            "out_full": (1, EPILOGUE_WARPS),
            "out_free": (1, WARP),
        }

    def _storage(self) -> dict[str, Any]:
        """Shared memory by name; the order keeps the padding small."""
        stages, width, queue = self.tiles.stages, self.tiles.max_width, QUEUE_ENTRIES
        array, align = cute.struct.MemRange, cute.struct.Align
        barriers = {name: array[I64, count] for name, (count, _) in self._barriers().items()}
        traced = {"traced": array[U32, len(ItemTrace)]} if self.spec.trace else {}
        return (
            barriers
            | traced
            | {
                "poisoned": array[U32, 1],
                "first_ticket": array[U32, 1],
                "columns": array[U32, 1],
                "out_record": array[U32, RECORD_WORDS],
                "records": align[array[U32, queue * RECORD_WORDS], 128],
                "row_words": align[array[U32, queue * width], 128],
                "out_scale": align[array[U32, layout.ATOM_BYTES // 4], 128],
                "w_scale": align[array[U8, stages * layout.SCALE_BYTES], 128],
                "x_scale": align[array[U8, stages * layout.ATOM_BYTES], 128],
                "stage": align[array[U8, width * layout.OUTPUT_STRIDE], 128],
                "w": align[array[U8, stages * layout.CODE_SHARED_BYTES], 1024],
                "x": align[array[U8, stages * width * layout.WINDOW], 1024],
            }
        )

    # ------------------------------------------------------------------- host side

    def example_arguments(self) -> tuple[Any, ...]:
        """Arguments of the right types for a compilation without a GPU."""
        pointer = make_ptr(U8, 128, cute.AddressSpace.gmem, assumed_align=128)
        addresses = [I64(0)] * 5
        return (
            PeerTable(self.shape.num_ranks),
            *addresses,
            I32(0),
            I64(0),
            pointer,
            pointer,
            cuda.CUstream(0),
        )

    @cute.jit
    def __call__(
        self,
        peers: PeerTable,
        workspace: I64,
        w13_scale: I64,
        w2_scale: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        codes: cute.Pointer,
        rows: cute.Pointer,
        stream: cuda.CUstream,
    ):
        shape = self.shape
        code_map = cuda_ext.create_tensor_map_tiled(
            global_address=codes.toint(),
            dtype=cutlass.Float4E2M1FN,
            global_dims=[
                I32(layout.WINDOW),
                I32(shape.local_experts * self.w1_tiles * shape.num_windows * layout.TILE_ROWS),
            ],
            global_strides=[I64(layout.WINDOW // 2 // 16)],
            box_dims=[layout.WINDOW, layout.TILE_ROWS],
            swizzle=cuda_ext.TensorMapSwizzle.s128b,
        )
        dims, strides = shape.ring_tensor
        maps = [
            cuda_ext.create_tensor_map_tiled(
                global_address=rows.toint(),
                dtype=U8,
                global_dims=[I32(extent) for extent in dims],
                global_strides=[I64(stride // 16) for stride in strides],
                box_dims=[128, width, 1, 1],
                swizzle=cuda_ext.TensorMapSwizzle.s128b,
            )
            for width in self.tiles.widths
        ]
        self.kernel(
            peers,
            workspace,
            w13_scale,
            w2_scale,
            fault_record,
            trace,
            rank,
            spin_budget_ns,
            code_map,
            code_map,
            maps[0],
            maps[1],
            maps[2],
            maps[3],
        ).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream)

    # ------------------------------------------------------------------- device side

    @cute.kernel
    def kernel(
        self,
        peers: PeerTable,
        workspace: I64,
        w13_scale: I64,
        w2_scale: I64,
        fault_record: I64,
        trace: I64,
        rank: I32,
        spin_budget_ns: I64,
        w13_codes: cutlass.GridConstant[cuda_ext.TensorMap],
        w2_codes: cutlass.GridConstant[cuda_ext.TensorMap],
        map0: cutlass.GridConstant[cuda_ext.TensorMap],
        map1: cutlass.GridConstant[cuda_ext.TensorMap],
        map2: cutlass.GridConstant[cuda_ext.TensorMap],
        map3: cutlass.GridConstant[cuda_ext.TensorMap],
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.Storage)
        pointers = {name: getattr(storage, name).data_ptr() for name in self.fields}
        at = {name: pointer.toint() for name, pointer in pointers.items()}
        events = trace + I64(cta) * (TRACE_WORDS * 8)
        base = (workspace, fault_record, rank, spin_budget_ns, events)
        sync.jitter(self.spec, tid, cta)
        self.prepare(tid, warp, pointers, at, events)
        cute.arch.mbarrier_init_fence()
        ptx100.fence_before_sync()
        cute.arch.sync_threads()
        ptx100.fence_after_sync()
        columns = ptx.shared_load(at["columns"])
        if warp < EPILOGUE_WARPS:
            self.epilogue.epilogue_warps(at, columns, tid, events)
        elif warp == MMA_WARP:
            self.mma.mma_warp(at, columns)
        elif warp == WEIGHTS_WARP:
            code_maps = [m.get_ptr().toint() for m in (w13_codes, w2_codes)]
            self.weights.weights_warp(at, code_maps, (w13_scale, w2_scale))
        elif warp == TOKENS_WARP:
            maps = [m.get_ptr().toint() for m in (map0, map1, map2, map3)]
            self.tokens.tokens_warp(at, base, maps)
        elif warp == PUBLISHER_WARP:
            self.publisher.publisher_warp(at, workspace, tid % WARP, events)
        else:
            self.scheduler_warp(at, base)
        cute.arch.sync_warp()
        # Every accumulator has been read and no MMA is under way.
        ptx100.fence_before_sync()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            ptx100.fence_after_sync()
            ptx100.tensor_memory_free(columns, self.memory.allocated)

    @cute.jit
    def prepare(self, tid, warp, pointers, at, events):
        """mbarriers, tensor memory, a zeroed scale atom."""
        barriers = [
            (pointers[name] + i, arrivals)
            for name, (count, arrivals) in self._barriers().items()
            for i in range(count)
        ]
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(len(barriers)):
                    cute.arch.mbarrier_init(barriers[i][0], barriers[i][1])
        if warp == MMA_WARP:
            ptx100.tensor_memory_alloc(at["columns"], self.memory.allocated)
        if tid == 0:
            ptx.shared_store(at["poisoned"], U32(0))
            if cutlass.const_expr(self.spec.trace):
                ptx.store_u64(events, cutlass.Uint64(ptx.sm_id()))
                for word in cutlass.range_constexpr(len(ItemTrace)):
                    ptx.shared_store(at["traced"] + 4 * word, U32(0))
            sync.mark(self.spec, events, ComputeTrace.START)
        if tid < layout.ATOM_BYTES // 4:
            ptx.shared_store(at["out_scale"] + tid * 4, U32(0))

    # ------------------------------------------------------------------- scheduler

    def tile_width(self, rows: Any) -> Any:
        """Token columns of the tile of a block of ``rows`` rows: N goes in steps of 8."""
        return (rows + U32(MMA_COLUMNS - 1)) & U32(256 - MMA_COLUMNS)

    def load_item(self, *_: Any) -> None:
        """Nothing: scales come with the weights."""
