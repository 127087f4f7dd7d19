"""Dispatch for Hopper, run on the CPU by the machine for its PTX: what it leaves in the ring.

The kernel is what ``gcmoe compile`` makes for sm_90a. Every byte that it writes for compute is
compared with the routing; loads and stores of all ranks interleave by chance, and the machine
raises when an access is not ordered behind what it needs.
"""

from __future__ import annotations

import blackwell_layer as layers
import pytest
import torch
from ptx_machine import Machine

from gcmoe.config import MoEConfig
from gcmoe.kernels.dispatch_memory import PULLING_WARPS
from gcmoe.numerics import permute_window, quantize_input
from gcmoe.plan import make_plan
from gcmoe.protocol import BlockEntry, Role, RoutesHeader, RowMeta, fragment_position

SMS = 8
EARLY_ROWS = SMS * PULLING_WARPS
"""With so many rows a rank loads them before it sorts them."""


def config(tokens: int, ranks: int, experts: int = 3, top_k: int = 2) -> MoEConfig:
    return MoEConfig(256, 128, experts * ranks, top_k, tokens)


def dispatch(cfg: MoEConfig, ranks: int, batches: list[layers.Batch], seed: int) -> list:
    """All ranks after dispatch has ended everywhere."""
    machine = Machine(seed, ordered=True)
    plan = make_plan(cfg, ranks, 132, dispatch_sms=SMS)
    assert plan.workspace.num_slots >= plan.workspace.max_blocks  # nobody empties a slot here
    found = [layers.Rank(machine, plan, n, None, "sm_90a") for n in range(ranks)]
    launches = []
    for rank, batch in zip(found, batches, strict=True):
        rank.peers = [other.workspace for other in found]
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
    s, u, windows = shape.num_slots, shape.slot_rows, shape.num_windows
    rows = rank.view("ring_rows").reshape(s, u, shape.row_stride)
    scales = rank.view("ring_scale", "u4").reshape(s, windows, u)
    meta = rank.view("ring_meta", "u4").reshape(s, u)
    weights = rank.view("ring_weight", "f4").reshape(s, u)
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
            for row, (source, token, k) in enumerate(part):
                both = quantised[source]
                assert both is not None
                codes, exponents = both[0][token], both[1][token]
                fragment = fragment_position(row, u)
                assert meta[slot, row] == RowMeta.pack(source, token, k)
                assert weights[slot, fragment] == float(batches[source].weights[token, k])
                own = torch.from_numpy(rows[slot, row, : shape.hidden])
                assert torch.equal(own, permute_window(codes[None])[0])
                bits = torch.from_numpy(scales[slot, :, fragment].astype("int64"))
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


def test_a_list_of_several_rounds() -> None:
    """More entries than a CTA has threads."""
    cfg = config(300, 2, top_k=4)
    batches = [layers.random_batch(cfg, 300, n) for n in range(2)]
    for batch in batches:
        batch.ids[batch.ids >= 0] %= 3
    counts = [check_rank(rank, batches) for rank in dispatch(cfg, 2, batches, 9)]
    assert counts[0] > 1024
    assert counts[1] == 0
