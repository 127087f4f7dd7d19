"""The scheduler warp of compute, the same on all architectures."""

from abc import ABC, abstractmethod
from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.records import QUEUE_ENTRIES, RECORD_WORDS, Kind, Word
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import ComputeTrace
from gcmoe.protocol import BlockEntry, WorkOrder, WorkspaceShape
from gcmoe.protocol.edges import COMPUTE_DONE, ROUTES, TICKET

U32, I32, I64 = cutlass.Uint32, cutlass.Int32, cutlass.Int64


class SchedulerSteps(ABC):
    """The scheduler warp of a compute kernel: takes tickets, reads the block table, fills the item
    queue; releases finalize when there are no more tickets."""

    spec: KernelSpec
    shape: WorkspaceShape
    order: WorkOrder

    @cute.jit
    def scheduler_warp(self, at, base, *sources):
        """Tickets to queue records, one item ahead of the consumers; ``sources`` are what
        ``load_item`` needs."""
        workspace, fault_record, rank, budget_ns, events = base
        offsets = self.shape.offsets
        with cute.arch.elect_one():
            ticket = sync.atomic(TICKET, workspace + offsets["work_ticket"], U32(1))
            ptx.shared_store(at["first_ticket"], ticket)
            ptx.mbarrier_arrive(at["ticket_known"])
            generation, epoch_base, slot_base, _ = ptx.load_u32x4(workspace + offsets["bases"])
            env = sync.wait_env(self.spec, workspace, fault_record, rank, generation, budget_ns)
            ok = I32(1)
            num_blocks = U32(0)
            if sync.read_abort(env) != U32(0):
                ok = I32(0)
            else:
                ok, routes = sync.await_generation(ROUTES, workspace + offsets["routes"], env)
                num_blocks = U32(routes)
            sync.mark(self.spec, events, ComputeTrace.ROUTES)
            if ok == 0:
                num_blocks = U32(0)
                ptx.shared_store(at["poisoned"], U32(1))
            num_items = self.order.num_items(num_blocks)
            recurs = self.order.slot_recurs(num_blocks)
            q, free_parity, taken_parity, go = I32(0), U32(1), U32(0), I32(1)
            while go != 0:
                kind = U32(int(Kind.STOP))
                slot, expert, tile, rows, width, epoch = (
                    U32(0),
                    U32(0),
                    U32(0),
                    U32(0),
                    U32(0),
                    U32(0),
                )
                if (ticket < num_items) & (ptx.shared_load(at["poisoned"]) == U32(0)):
                    item = self.order.item(ticket, num_blocks)
                    kind, tile = item.is_w2, item.tile
                    place = self.shape.ring.place(slot_base, item.block)
                    slot = self.shape.ring.slot(place)
                    epoch = self.shape.ring.epoch(epoch_base, place)
                    entry = ptx.load_u32(workspace + offsets["block_table"] + I64(item.block) * 4)
                    expert, rows = BlockEntry.EXPERT.get(entry), BlockEntry.ROWS.get(entry)
                    width = self.tile_width(rows)
                ptx.mbarrier_wait(at["item_free"] + q * 8, free_parity)
                record = at["records"] + q * (RECORD_WORDS * 4)
                for word, value in (
                    (Word.KIND, kind),
                    (Word.SLOT, slot),
                    (Word.EXPERT, expert),
                    (Word.TILE, tile),
                    (Word.ROWS, rows),
                    (Word.WIDTH, width),
                    (Word.EPOCH, epoch),
                    (Word.SLOT_RECURS, recurs),
                ):
                    ptx.shared_store(record + int(word) * 4, value)
                ptx.mbarrier_arrive(at["item"] + q * 8)
                if kind == U32(int(Kind.STOP)):
                    go = I32(0)
                    # Dispatch has ended long ago; now its end is before ours also for the graph.
                    ptx.await_prerequisites()
                    sync.publish(COMPUTE_DONE, workspace + offsets["compute_done"], U32(1))
                    ptx.release_dependents()
                else:
                    self.load_item(at, q, kind, expert, tile, *sources)
                    ptx.mbarrier_wait(at["next_ticket"], taken_parity)
                    taken_parity ^= 1
                    ticket = sync.atomic(TICKET, workspace + offsets["work_ticket"], U32(1))
                q, free_parity = sync.advance(q, free_parity, QUEUE_ENTRIES)

    @abstractmethod
    def tile_width(self, rows: Any) -> Any:
        """Token columns of the tile of a block of ``rows`` rows."""

    @abstractmethod
    def load_item(self, at: Any, q: Any, kind: Any, expert: Any, tile: Any, *sources: Any) -> None:
        """Loads of the scheduler itself for the item in queue entry ``q``, if any."""
