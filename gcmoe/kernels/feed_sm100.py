"""What fills the stages of the Blackwell compute kernel: the weight warp and the token warp."""

import cutlass
import cutlass.cute as cute

from gcmoe.kernels import ptx, sync
from gcmoe.kernels import ptx_sm100 as ptx100
from gcmoe.kernels.layout_sm100 import (
    ATOM_BYTES,
    CODE_SHARED_BYTES,
    SCALE_BYTES,
    TILE_ROWS,
    WEIGHT_BYTES,
    WINDOW,
    token_bytes,
)
from gcmoe.kernels.records import QUEUE_ENTRIES, RECORD_WORDS, Kind, Word
from gcmoe.kernels.spec import KernelSpec
from gcmoe.kernels.tokens import TokenSteps
from gcmoe.protocol import ring_row

U32, U64, I32, I64 = cutlass.Uint32, cutlass.Uint64, cutlass.Int32, cutlass.Int64

CLAIM_WINDOWS = 4
"""Windows before the end of an item's weights at which the next ticket is taken."""


class WeightFeed:
    """The weight warp: a burst of codes and two scale atoms per window, whoever wants them.

    It never waits for tokens. Before the routes are known it fills the stages as if each expert had
    one block; a guess that fails is loaded over.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.spec, self.shape, self.stages = spec, spec.shape, spec.tiles.stages
        self.w1_windows = spec.shape.hidden // WINDOW
        self.w2_windows = spec.shape.intermediate // WINDOW
        self.w1_tiles = spec.shape.intermediate // WINDOW
        self.w2_tiles = spec.shape.hidden // TILE_ROWS
        self.guessed_windows = min(self.stages, self.w1_windows) if spec.prefetch else 0

    @cute.jit
    def weights_warp(self, at, maps, scales):
        """Item after item; ``maps`` and ``scales`` are those of w13 and w2."""
        with cute.arch.elect_one():
            num_guessed, guessed = self.guess(at, maps, scales)
            q, item_parity, s, parity, go = I32(0), U32(0), I32(0), U32(1), I32(1)
            while go != 0:
                ptx.mbarrier_wait(at["item"] + q * 8, item_parity)
                record = at["records"] + q * (RECORD_WORDS * 4)
                kind = ptx.shared_load(record + int(Word.KIND) * 4)
                expert = ptx.shared_load(record + int(Word.EXPERT) * 4)
                tile = ptx.shared_load(record + int(Word.TILE) * 4)
                # Windows of this item that lie in their stages already: of the first at most.
                num_loaded = num_guessed
                if (kind != U32(int(Kind.W1))) | (expert * self.w1_tiles + tile != guessed):
                    num_loaded = I32(0)
                num_guessed = I32(0)
                if kind == U32(int(Kind.STOP)):
                    go = I32(0)
                else:
                    windows = I32(self.w1_windows)
                    item = expert * self.w1_tiles + tile
                    tensor_map, atoms = maps[0], scales[0]
                    if kind == U32(int(Kind.W2)):
                        windows = I32(self.w2_windows)
                        item = expert * self.w2_tiles + tile
                        tensor_map, atoms = maps[1], scales[1]
                    first = I32(item) * windows
                    s, parity = self.load_item(
                        at, tensor_map, atoms, first, windows, num_loaded, s, parity
                    )
                q, item_parity = sync.advance(q, item_parity, QUEUE_ENTRIES)
            # No commit may arrive in shared memory that the CTA has left.
            for _ in cutlass.range_constexpr(self.stages):
                ptx.mbarrier_wait(at["empty"] + s * 8, parity)
                s, parity = sync.advance(s, parity, self.stages)

    @cute.jit
    def load_item(self, at, tensor_map, atoms, first, windows, num_loaded, s, parity):
        """All windows of an item; the first ``num_loaded`` are only handed over."""
        claim = windows - CLAIM_WINDOWS
        if claim < 0:
            claim = I32(0)
        for k in cutlass.range(windows, unroll=1):
            if k == claim:
                ptx.mbarrier_arrive(at["next_ticket"])
            ptx.mbarrier_wait(at["empty"] + s * 8, parity)
            if k < num_loaded:
                ptx.mbarrier_arrive(at["full_w"] + s * 8)
            else:
                self.load_window(at, tensor_map, atoms, first + k, s, at["full_w"] + s * 8)
            s, parity = sync.advance(s, parity, self.stages)
        return s, parity

    @cute.jit
    def load_window(self, at, tensor_map, atoms, burst, s, mbarrier):
        """Burst number ``burst`` of a matrix, counted over its experts, items and windows."""
        ptx.mbarrier_expect(mbarrier, WEIGHT_BYTES)
        ptx100.tensor_load_2d_once(
            at["w"] + s * CODE_SHARED_BYTES, tensor_map, I32(0), burst * TILE_ROWS, mbarrier
        )
        ptx.bulk_load(
            at["w_scale"] + s * SCALE_BYTES,
            atoms + I64(burst) * SCALE_BYTES,
            SCALE_BYTES,
            mbarrier,
            evict_first=True,
        )

    @cute.jit
    def guess(self, at, maps, scales):
        """Fill the stages before the routes are known; (windows loaded, number of the W1 item).

        The loads complete on a barrier of their own, one window at a time, so that dispatch does
        not find the memory's queues full (measured on H200).
        """
        ptx.mbarrier_wait(at["ticket_known"], U32(0))
        ticket = ptx.shared_load(at["first_ticket"])
        num_loaded = I32(0)
        if ticket < U32(self.shape.local_experts * self.w1_tiles):
            num_loaded = I32(self.guessed_windows)
            first = I32(ticket) * self.w1_windows
            for k in cutlass.range_constexpr(self.guessed_windows):
                self.load_window(at, maps[0], scales[0], first + k, k, at["guess"])
                ptx.mbarrier_wait(at["guess"], U32(k & 1))
            # The hand-over is an ordinary arrival, and the MMA reads by the async proxy.
            ptx.fence("proxy.async.shared::cta", "stage guess")
        return num_loaded, ticket


class TokenFeed(TokenSteps):
    """A unit is one window and its scale atom."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec, windows_per_unit=1)

    @cute.jit
    def unit_bits(self, k):
        """Bits of the W1 bitmap that unit ``k`` of a W2 item reads."""
        return self.shape.bitmap.window_bits(U64(1), U64(k))

    @cute.jit
    def load_tokens(self, at, workspace, maps, s, slot, rows, n, k):
        """A window of a ring block by the narrowest box that holds ``n`` rows, and its atom."""
        full = at["full_x"] + s * 8
        loaded = I32(0)
        for i in cutlass.range_constexpr(len(self.widths)):
            if (loaded == 0) & (n <= U32(self.widths[i])):
                loaded = I32(1)
                ptx.mbarrier_expect(full, token_bytes(self.widths[i]))
                ptx.tensor_load_4d(
                    at["x"] + s * (self.max_width * WINDOW),
                    maps[i],
                    I32(0),
                    ring_row(I32(0), I32(rows), self.max_width),
                    k,
                    I32(slot),
                    full,
                )
        atom = I64(slot) * self.w1_windows + k
        source = workspace + self.shape.offsets["ring_scale"] + atom * ATOM_BYTES
        ptx.bulk_load(at["x_scale"] + s * ATOM_BYTES, source, ATOM_BYTES, full)

    @cute.jit
    def load_activations(self, at, workspace, s, slot, n, k):
        """A window of ``a``, swizzled as it was stored, and its atom."""
        full, offsets = at["full_x"] + s * 8, self.shape.offsets
        num_bytes = I32(n) * WINDOW
        source = workspace + offsets["a_rows"]
        source += I64(slot) * (self.w2_windows * self.max_width * WINDOW)
        source += I64(k) * I64(num_bytes)
        atom = workspace + offsets["a_scale"] + (I64(slot) * self.w2_windows + k) * ATOM_BYTES
        ptx.mbarrier_expect(full, token_bytes(I32(n)))
        ptx.bulk_load(at["x"] + s * (self.max_width * WINDOW), source, num_bytes, full)
        ptx.bulk_load(at["x_scale"] + s * ATOM_BYTES, atom, ATOM_BYTES, full)
