"""Finalize, run on the CPU by the machine for its PTX: its passes, and what a failed one leaves.

The kernel is what ``gcmoe compile`` makes for sm_90a, the same text as for Blackwell. Combine slots
and counters are as compute leaves them; the machine raises when an access is not ordered behind
what it needs.
"""

from __future__ import annotations

import blackwell_layer as layers
import pytest
import torch
from ptx_machine import Machine
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import dsl_version
from gcmoe.numerics import finalize
from gcmoe.plan import make_plan
from gcmoe.plan.layer import ONE_PASS_TOKENS
from gcmoe.protocol import Cell, FaultKind, FaultRecord, Role, RoutesHeader

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(dsl_version() is None, reason="nvidia-cutlass-dsl is not installed"),
]

COMPUTE_CTAS, NUM_BLOCKS = 5, 3
MANY, FEW = ONE_PASS_TOKENS + 3, ONE_PASS_TOKENS
GROUPS = 2


class Call:
    """One launch of finalize on one rank, all rows arrived but for what the test withholds."""

    def __init__(self, num_tokens: int, top_k: int = 3, groups: int = GROUPS) -> None:
        config = MoEConfig(256 * groups, 128, 8, top_k, num_tokens)
        self.machine = Machine(num_tokens, ordered=True)
        self.rank = layers.Rank(self.machine, make_plan(config, 1, 132), 0, None, "sm_90a")
        assert self.rank.shape.arrivals.groups == groups
        self.batch = layers.random_batch(config, num_tokens, seed=top_k)
        generator = torch.Generator().manual_seed(5)
        shape = (num_tokens, top_k, config.hidden)
        combine = torch.randn(shape, generator=generator).bfloat16()
        valid = self.batch.ids >= 0
        self.wanted = finalize(combine, valid)
        # Nobody reads a slot without an expert.
        combine[~valid] = torch.nan
        self.rank.view("combine")[:] = layers.flat(combine)
        arrivals = self.rank.shape.arrivals
        base = (1 << 32) - 7
        self.target = (base + int(valid.sum()) * (arrivals.columns // 64)) & 0xFFFF_FFFF
        self.rank.cells(self.rank.shape.initial_cells(generation=9, arrivals=base))
        self.rank.view("combine_arrivals", "u4")[:] = self.target
        self.rank.view("routes", "u8")[0] = RoutesHeader.pack(9, NUM_BLOCKS)
        self.rank.view("compute_done", "u4")[0] = COMPUTE_CTAS

    def run(self, ctas: int) -> Tensor:
        y = torch.full_like(self.wanted, 7.0)
        launch = self.rank.launch(
            Role.FINALIZE,
            ctas,
            num_tokens=len(y),
            ids_are_int64=0,
            topk_ids=self.machine.memory.map(layers.flat(self.batch.ids)),
            y=self.machine.memory.map(layers.flat(y)),
            compute_ctas=COMPUTE_CTAS,
            spin_budget_ns=20_000,
        )
        self.machine.run(launch)
        return y

    def bases(self) -> list[int]:
        return [int(word) for word in self.rank.view("bases", "u4")]


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, FEW, MANY])
@pytest.mark.parametrize("ctas", [1, 3])
def test_sums_and_bases(num_tokens: int, groups: int, ctas: int) -> None:
    call = Call(num_tokens, groups=groups)
    assert torch.equal(call.run(ctas), call.wanted)
    assert call.bases() == [10, 0, NUM_BLOCKS, call.target]
    assert not call.rank.fault.any()
    for name in ("work_ticket", "compute_done", "finalize_done", "in_flight"):
        assert not call.rank.view(name).any()


def test_more_slots_than_loads_in_flight() -> None:
    call = Call(MANY, top_k=19)
    assert torch.equal(call.run(2), call.wanted)


@pytest.mark.parametrize("num_tokens", [FEW, MANY])
@pytest.mark.parametrize("late", range(GROUPS))
def test_a_group_that_never_comes(num_tokens: int, late: int) -> None:
    """It and the groups behind it are NaN, of few tokens all; the bases stay."""
    call = Call(num_tokens)
    before = call.bases()
    call.rank.view("combine_arrivals", "u4")[late] -= 1
    y = call.run(2)
    columns = call.rank.shape.arrivals.columns
    right = late * columns if num_tokens > ONE_PASS_TOKENS else 0
    assert torch.equal(y[:, :right], call.wanted[:, :right])
    assert y[:, right:].isnan().all()
    record = FaultRecord.decode(tuple(call.rank.fault.view("<u4").tolist()))
    assert record is not None
    assert (record.kind, record.role, record.cell, record.index) == (
        FaultKind.TIMEOUT,
        Role.FINALIZE,
        Cell.COMBINE_ARRIVALS,
        late,
    )
    assert (record.wanted, record.seen) == (call.target, call.target - 1)
    assert call.rank.view("abort", "u4").tolist() == [1]
    assert call.bases() == before


def test_an_aborted_rank_writes_nan() -> None:
    call = Call(MANY)
    before = call.bases()
    call.rank.view("abort", "u4")[0] = 1
    assert call.run(2).isnan().all()
    assert call.bases() == before
