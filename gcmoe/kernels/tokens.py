"""The token warp of compute, the same on all architectures: what it waits for, and when."""

from abc import ABC, abstractmethod
from typing import Any

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels.records import QUEUE_ENTRIES, RECORD_WORDS, Kind, Word
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.trace_words import ComputeTrace, ItemTrace
from gcmoe.protocol.edges import FULL, W1_DONE
from gcmoe.protocol.faults import NO_PEER
from gcmoe.protocol.ring import WINDOW_COLUMNS

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64


class TokenSteps(ABC):
    """The token warp: for each unit of an item, its activations and their scales.

    It is the only warp that waits for other CTAs while items run: for a full ring block before a
    W1 item, for the bits of the windows that it reads in a W2 item. An architecture says how many
    windows of 128 columns a unit has, which bits those of a W2 unit are, and how they are loaded.
    """

    def __init__(self, spec: KernelSpec, windows_per_unit: int) -> None:
        self.spec, self.shape = spec, spec.shape
        self.widths, self.max_width = spec.tiles.widths, spec.tiles.max_width
        self.stages = spec.tiles.stages
        self.w1_windows = spec.shape.hidden // WINDOW_COLUMNS
        self.w2_windows = spec.shape.intermediate // WINDOW_COLUMNS
        self.w1_units = self.w1_windows // windows_per_unit
        self.w2_units = -(-self.w2_windows // windows_per_unit)

    @cute.jit
    def tokens_warp(self, at, base, maps):
        """Item after item; every hand-shake completes also after a failed wait."""
        workspace, fault_record, rank, budget_ns, events = base
        offsets = self.shape.offsets
        with cute.arch.elect_one():
            generation = ptx.load_u32(workspace + offsets["bases"])
            env = sync.wait_env(self.spec, workspace, fault_record, rank, generation, budget_ns)
            q, item_parity, s, parity, go = I32(0), U32(0), I32(0), U32(1), I32(1)
            ok, first = I32(1), I32(1)
            while go != 0:
                ptx.mbarrier_wait(at["item"] + q * 8, item_parity)
                record = at["records"] + q * (RECORD_WORDS * 4)
                kind = ptx.shared_load(record + int(Word.KIND) * 4)
                slot = ptx.shared_load(record + int(Word.SLOT) * 4)
                rows = ptx.shared_load(record + int(Word.ROWS) * 4)
                width = ptx.shared_load(record + int(Word.WIDTH) * 4)
                epoch = ptx.shared_load(record + int(Word.EPOCH) * 4)
                recurs = ptx.shared_load(record + int(Word.SLOT_RECURS) * 4)
                if kind == U32(int(Kind.STOP)):
                    go = I32(0)
                else:
                    is_w1 = kind == U32(int(Kind.W1))
                    if (is_w1 | (recurs != U32(0))) & (ok != 0):
                        ok = self.await_block(at, workspace, slot, epoch, env)
                    if is_w1:
                        self.load_row_words(at, workspace, "ring_weight", q, slot, ok)
                        if first != 0:
                            sync.mark(self.spec, events, ComputeTrace.FIRST_BLOCK)
                            first = I32(0)
                        sync.mark_item(self.spec, at, events, ItemTrace.FED)
                        s, parity = self.feed_w1(
                            at, workspace, maps, s, parity, slot, rows, width, ok
                        )
                    else:
                        s, parity, ok = self.feed_w2(
                            at, workspace, q, s, parity, slot, width, epoch, ok, env, events
                        )
                q, item_parity = sync.advance(q, item_parity, QUEUE_ENTRIES)

    @cute.jit
    def await_block(self, at, workspace, slot, epoch, env):
        """Wait until the block of this epoch lies in its slot.

        A W2 item needs this too when a slot recurs within the replay: its bitmap tells only the
        parity of an epoch, and a block that is full says that all bits of the epoch before are
        flipped (it waited for the slot to be empty).
        """
        ok = sync.await_reached(
            FULL,
            workspace + self.shape.offsets["token_ring_full"] + I64(slot) * 4,
            self.shape.ring.full_target(epoch),
            slot,
            U32(NO_PEER),
            env,
        )
        self.poison_unless(ok, at)
        sync.after_observe(FULL)
        return ok

    @cute.jit
    def poison_unless(self, ok, at):
        """After a failed wait: nothing of this CTA is published any more."""
        if ok == 0:
            ptx.shared_store(at["poisoned"], U32(1))

    @cute.jit
    def load_row_words(self, at, workspace, region: cutlass.Constexpr, q, slot, ok):
        """A word of each row of the block to the queue entry: routing weights for the epilogue of
        W1, origins for the publisher of W2."""
        data, num_bytes = at["item_data"] + q * 8, self.max_width * 4
        if ok != 0:
            source = workspace + self.shape.offsets[region] + I64(slot) * num_bytes
            ptx.mbarrier_expect(data, num_bytes)
            ptx.bulk_load(at["row_words"] + q * num_bytes, source, num_bytes, data)
        else:
            ptx.mbarrier_arrive(data)

    @cute.jit
    def feed_w1(self, at, workspace, maps, s, parity, slot, rows, width, ok):
        """The units of a W1 item; returns the next stage and its parity."""
        for k in cutlass.range(self.w1_units, unroll=1):
            ptx.mbarrier_wait(at["empty"] + s * 8, parity)
            if ok != 0:
                self.load_tokens(at, workspace, maps, s, slot, rows, width, k)
            else:
                ptx.mbarrier_arrive(at["full_x"] + s * 8)
            s, parity = sync.advance(s, parity, self.stages)
        return s, parity

    @cute.jit
    def feed_w2(self, at, workspace, q, s, parity, slot, width, epoch, ok, env, events):
        """The units of a W2 item, each once its bits are flipped; also returns ok. The origins of
        the rows come behind the first wait: bits flip only once the block is full."""
        bitmap_cell = workspace + self.shape.offsets["w1_bitmap"] + I64(slot) * 8
        odd = U64(epoch & 1)
        flips = odd * U64(0xFFFF_FFFF_FFFF_FFFF)
        seen = U64(0)
        for k in cutlass.range(self.w2_units, unroll=1):
            ptx.mbarrier_wait(at["empty"] + s * 8, parity)
            bits = self.unit_bits(k)
            if ((seen & bits) != bits) & (ok != 0):
                ok, bitmap = sync.await_bits(W1_DONE, bitmap_cell, bits, odd, slot, env)
                self.poison_unless(ok, at)
                sync.after_observe(W1_DONE)
                seen = bitmap ^ flips
            if k == 0:
                self.load_row_words(at, workspace, "ring_meta", q, slot, ok)
                sync.mark_item(self.spec, at, events, ItemTrace.FED)
            if ok != 0:
                self.load_activations(at, workspace, s, slot, width, k)
            else:
                ptx.mbarrier_arrive(at["full_x"] + s * 8)
            s, parity = sync.advance(s, parity, self.stages)
        return s, parity, ok

    @abstractmethod
    def unit_bits(self, k: Any) -> Any:
        """Bits of the W1 bitmap that unit ``k`` of a W2 item reads."""

    @abstractmethod
    def load_tokens(
        self, at: Any, workspace: Any, maps: Any, s: Any, slot: Any, rows: Any, width: Any, k: Any
    ) -> None:
        """Unit ``k`` of the ``rows`` rows of a ring block, zeros up to the width of the tile, and
        their scales, to stage ``s``."""

    @abstractmethod
    def load_activations(
        self, at: Any, workspace: Any, s: Any, slot: Any, width: Any, k: Any
    ) -> None:
        """Unit ``k`` of ``a`` of a ring block, and its scales, to stage ``s``."""
