"""Dispatch for Hopper, run on the CPU by the machine for its PTX: what it leaves in the ring.

The kernel is what ``gcmoe compile`` makes for sm_90a. Every byte that it writes for compute is
compared with the routing; loads and stores of all ranks interleave by chance, and the machine
raises when an access is not ordered behind what it needs.
"""

from __future__ import annotations

from typing import Any

import blackwell_layer as layers
import numpy as np
import pytest
import torch
from ptx_machine import Launch, Machine

from gcmoe.config import MoEConfig
from gcmoe.kernels.dispatch_memory import PULLING_WARPS
from gcmoe.numerics import permute_window, quantize_input
from gcmoe.plan import make_plan
from gcmoe.plan.layer import round_width
from gcmoe.protocol import (
    BlockEntry,
    Cell,
    Entry,
    FaultKind,
    FaultRecord,
    RecvHeader,
    Role,
    RoutesHeader,
    RowMeta,
    fragment_position,
)

SMS = 8
EARLY_ROWS = SMS * PULLING_WARPS
"""With so many rows a rank loads them before it sorts them."""


def config(tokens: int, ranks: int, experts: int = 3, top_k: int = 2) -> MoEConfig:
    return MoEConfig(256, 128, experts * ranks, top_k, tokens)


def dispatch(
    cfg: MoEConfig, ranks: int, batches: list[layers.Batch], seed: int
) -> list[layers.Rank]:
    """All ranks after dispatch has ended everywhere."""
    machine = Machine(seed, ordered=True)
    plan = make_plan(cfg, ranks, 132, dispatch_sms=SMS)
    assert plan.workspace.num_slots >= plan.workspace.max_blocks  # nobody empties a slot here
    found = layers.make_ranks(machine, plan, None, "sm_90a")
    launches = []
    for rank, batch in zip(found, batches, strict=True):
        rank.plan = plan.for_tokens(len(batch.x))
        tensors = batch.x, batch.ids, batch.weights
        x, ids, weights = (machine.memory.map(layers.flat(t)) for t in tensors)
        call = {"num_tokens": len(batch.x), "ids_are_int64": 0, "call": 0}
        own = {"x": x, "topk_ids": ids, "topk_weights": weights, **call}
        launches.append(rank.launch(Role.DISPATCH, SMS, **own))
    machine.run(*launches)
    return found


def routed(batches: list[layers.Batch], expert: int) -> list[tuple[int, int, int]]:
    """(source, token, slot) of an expert's rows, in the order in which they lie in the ring."""
    return [
        (source, *pair)
        for source, batch in enumerate(batches)
        for pair in layers.expert_rows(batch, expert)
    ]


def check_rank(rank: layers.Rank, batches: list[layers.Batch]) -> int:
    """Compare everything that compute reads; the number of rows."""
    shape = rank.shape
    assert not rank.fault.any()
    generation, epoch_base, slot_base, _ = (int(word) for word in rank.view("bases", "u4"))
    u = shape.block_rows
    rows = rank.slots("ring_rows", "u1", u, shape.row_stride)
    scales = rank.slots("ring_scale", "u4", shape.num_windows * u)
    meta = rank.slots("ring_meta", "u4", u)
    weights = rank.slots("ring_weight", "f4", u)
    quantised = [quantize_input(batch.x) if len(batch.x) else None for batch in batches]
    block, count = 0, 0
    for expert in range(shape.local_experts):
        wanted = routed(batches, rank.rank * shape.local_experts + expert)
        count += len(wanted)
        for first in range(0, len(wanted), shape.block_rows):
            part = wanted[first : first + shape.block_rows]
            assert rank.view("block_table", "u4")[block] == BlockEntry.pack(expert, len(part))
            place = shape.ring.place(slot_base, block)
            slot, epoch = shape.ring.slot(place), shape.ring.epoch(epoch_base, place)
            assert rank.view("token_ring_full", "u4")[slot] == shape.ring.full_target(epoch)
            width = round_width(rank.plan.tiles, len(part))
            for row, (source, token, k) in enumerate(part):
                both = quantised[source]
                assert both is not None
                codes, exponents = both[0][token], both[1][token]
                fragment = fragment_position(row, width)
                assert meta[slot, row] == RowMeta.pack(source, token, k)
                assert weights[slot, fragment] == float(batches[source].weights[token, k])
                own = torch.from_numpy(rows[slot, u - len(part) + row, : shape.hidden])
                assert torch.equal(own, permute_window(codes[None])[0])
                tile = scales[slot, : shape.num_windows * width].reshape(-1, width)
                bits = torch.from_numpy(tile[:, fragment].astype("int64"))
                assert torch.equal(bits, exponents.to(torch.int64) << 23)
            block += 1
    assert rank.view("routes", "u8")[0] == RoutesHeader.pack(generation, block)
    return count


@pytest.mark.parametrize(
    "tokens", [(9,), (1,), (64,), (5, 0), (16, 3), (0, 0), (60, 31), (7, 1, 12), (40, 0, 90)]
)
def test_the_ring_after_dispatch(tokens: tuple[int, ...]) -> None:
    ranks, seed = len(tokens), sum(tokens)
    cfg = config(max(*tokens, 8), ranks)
    batches = [layers.random_batch(cfg, t, 10 * seed + n) for n, t in enumerate(tokens)]
    for rank in dispatch(cfg, ranks, batches, seed):
        check_rank(rank, batches)


@pytest.mark.parametrize("rows", [EARLY_ROWS - 1, EARLY_ROWS, EARLY_ROWS + 1])
def test_rows_at_the_border_of_loading_early(rows: int) -> None:
    """All rows of two ranks go to rank 1, in a row to one expert and then to another."""
    cfg = config(64, 2, top_k=1)
    batches = [layers.random_batch(cfg, t, n) for n, t in enumerate((rows // 2, rows - rows // 2))]
    for n, batch in enumerate(batches):
        batch.ids[:] = 3 + n
        batch.ids[::5] = 5
    counts = [check_rank(rank, batches) for rank in dispatch(cfg, 2, batches, 7)]
    assert counts == [0, rows]


def test_blocks_by_the_size_of_a_call() -> None:
    """Ranks of one replay cut their rows into blocks of other sizes, in workspaces of one shape."""
    cfg = config(200, 2)
    batches = [layers.random_batch(cfg, t, t) for t in (90, 20)]
    for batch in batches:
        batch.ids[:] = torch.tensor([0, 4])
    found = dispatch(cfg, 2, batches, 3)
    shapes = [rank.shape for rank in found]
    assert [shape.block_rows for shape in shapes] == [72, 40]
    assert {shape.slot_rows for shape in shapes} == {72}
    assert [check_rank(rank, batches) for rank in found] == [110, 110]
    blocks = [RoutesHeader.NUM_BLOCKS.get(int(rank.view("routes", "u8")[0])) for rank in found]
    assert blocks == [2, 3]


def test_a_list_of_several_rounds() -> None:
    """More entries than a CTA has threads."""
    cfg = config(300, 2, top_k=4)
    batches = [layers.random_batch(cfg, 300, n) for n in range(2)]
    for batch in batches:
        batch.ids[batch.ids >= 0] %= 3
    counts = [check_rank(rank, batches) for rank in dispatch(cfg, 2, batches, 9)]
    assert counts[0] > 1024
    assert counts[1] == 0


# ------------------------------------------------------------------- a peer that the test plays

WEIGHT_ONE = 0x3F80_0000


class Half:
    """Rank 0 of two, without tokens of its own; the test writes what rank 1 sends it.

    Args:
        experts: of the entries.
        class_of: tokens of a call whose blocks it makes.
    """

    def __init__(
        self,
        experts: list[int],
        ring_slots: int | None = None,
        seed: int = 0,
        class_of: int = 128,
    ) -> None:
        cfg = config(128, 2, experts=6)
        self.machine = Machine(seed, ordered=True)
        plan = make_plan(cfg, 2, 132, dispatch_sms=SMS, ring_slots=ring_slots)
        plan = plan.for_tokens(class_of)
        self.shape = plan.workspace
        self.ranks = layers.make_ranks(self.machine, plan, None, "sm_90a")
        self.own = self.ranks[0]
        self.generation = int(self.own.view("bases", "u4")[0])
        self.num_rows = len(experts)
        for n, expert in enumerate(experts):
            self.entries[n] = Entry.pack(WEIGHT_ONE, n % 128, n // 128, expert)

    def sent(self, region: str, length: int) -> np.ndarray[Any, Any]:
        """What rank 1 stores in a region for this generation."""
        cells = self.own.view(region, "u8").reshape(2, 2, length)
        return cells[self.generation & 1, 1]

    @property
    def entries(self) -> np.ndarray[Any, Any]:
        return self.sent("recv_entries", self.shape.entry_capacity)

    def launch(self, call: int = 0, **own: int) -> Launch:
        header = RecvHeader.pack(self.generation, call, self.num_rows)
        self.sent("recv_header", self.shape.header_words)[:] = header
        empty = self.machine.memory.map(np.zeros(16, dtype=np.uint8))
        tensors = dict.fromkeys(("x", "topk_ids", "topk_weights"), empty)
        return self.own.launch(
            Role.DISPATCH, SMS, num_tokens=0, ids_are_int64=0, call=0, **tensors, **own
        )

    def fault(self) -> FaultRecord:
        return FaultRecord.decode(tuple(self.own.fault.view("<u4").tolist()))

    def require_nothing_published(self) -> None:
        assert not self.own.view("token_ring_full", "u4").any()
        assert self.own.view("routes", "u8")[0] == 0


def experts_of(rows: int) -> list[int]:
    return [n % 3 for n in range(rows)]


@pytest.mark.parametrize(
    ("rows", "where", "fields"),
    [(40, 39, (1, 0, 7)), (64, 0, (1, 5, 1)), (64, 17, (128, 0, 1)), (90, 80, (1, 0, 6))],
    ids=["early, expert", "early, slot", "early, token", "sorted, expert"],
)
def test_an_impossible_entry_is_a_fault_while_loads_are_under_way(
    rows: int, where: int, fields: tuple[int, int, int]
) -> None:
    half = Half(experts_of(rows))
    half.entries[where] = Entry.pack(WEIGHT_ONE, *fields)
    half.machine.run(half.launch())
    assert half.fault().kind == FaultKind.BAD_COUNT
    assert all(rank.view("abort", "u4")[0] == 1 for rank in half.ranks)
    half.require_nothing_published()


@pytest.mark.parametrize("what", ["claim", "call", "abort"])
def test_what_ends_dispatch_before_it_pulls(what: str) -> None:
    half = Half(experts_of(40))
    if what == "claim":
        half.own.view("in_flight", "u4")[0] = 9
    if what == "abort":
        half.own.view("abort", "u4")[0] = 1
    half.machine.run(half.launch(call=3 if what == "call" else 0, spin_budget_ns=200_000))
    if what == "abort":
        assert not half.own.fault.any()
    else:
        kinds = {"claim": FaultKind.OVERLAPPING_REPLAYS, "call": FaultKind.CALL_MISMATCH}
        assert half.fault().kind == kinds[what]
    half.require_nothing_published()


@pytest.mark.parametrize("rows", [40, EARLY_ROWS, 90])
def test_slots_that_are_never_emptied_are_a_fault(rows: int) -> None:
    half = Half(experts_of(rows), ring_slots=2)
    half.machine.run(half.launch(spin_budget_ns=20_000))
    fault = half.fault()
    assert (fault.kind, fault.cell) == (FaultKind.TIMEOUT, Cell.TOKEN_RING_EMPTY)


@pytest.mark.parametrize(
    ("rows", "class_of"),
    [(60, 128), (EARLY_ROWS, 128), (90, 128), (200, 128), (60, 1), (200, 1)],
)
def test_two_slots_serve_all_blocks(rows: int, class_of: int) -> None:
    """Early rows are pulled in the order of the list, whatever their blocks: each warp has one. The
    test empties a slot now and then, block by block, as compute does."""
    experts = np.random.default_rng(rows).integers(0, 6, rows).tolist()
    half = Half(experts, ring_slots=2, seed=rows, class_of=class_of)
    shape, ring = half.shape, half.shape.ring
    counts = np.bincount(experts, minlength=shape.local_experts).tolist()
    num_blocks = sum(-(-count // shape.block_rows) for count in counts)
    assert num_blocks > 2
    full = half.own.view("token_ring_full", "u4")
    empty = half.own.view("token_ring_empty", "u4")
    emptied, work = [], half.machine.work

    def take() -> bool:
        block = len(emptied)
        slot, epoch = block % 2, block // 2
        assert full[slot] <= ring.full_target(epoch)
        if full[slot] < ring.full_target(epoch):
            return False
        emptied.append(block)
        empty[slot] += ring.empty_units
        return True

    def work_and_take(ctas: Any) -> bool:
        moved = work(ctas)
        tries = len(emptied) < num_blocks and half.machine.random.random() < 0.05
        return (tries and take()) or moved

    half.machine.work = work_and_take  # type: ignore[method-assign]
    half.machine.run(half.launch())
    assert not half.own.fault.any()
    while len(emptied) < num_blocks:
        assert take()
