"""The fences of the Blackwell kernels are needed: without one a rule of order is broken.

The rules are those of :mod:`ptx_order`; ``test_run_sm100`` holds the kernels to them. One fence of
dispatch is missing below: it passes staged rows to the other proxy before the header words, and
every thread fences again when it has seen the headers, so only the rare schedule would tell.
"""

from __future__ import annotations

import re

import blackwell_layer as layers
import pytest
from ptx_machine import Launch, Machine
from ptx_order import OutOfOrder

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import dsl_version
from gcmoe.kernels.spec import kernel_spec
from gcmoe.plan import make_plan
from gcmoe.protocol import Role

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(dsl_version() is None, reason="nvidia-cutlass-dsl is not installed"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

# Of either kernel: the text of the line, its number among the lines of that text.
COMPUTE_FENCES = {
    "tile to the publisher": (r"fence\.proxy\.async\.shared::cta; // gcmoe stage write", 0),
    "ring block": (r"fence\.proxy\.async\.global; // gcmoe token_ring_full read", 0),
    "block of a": (r"fence\.proxy\.async\.global; // gcmoe w1_bitmap read", 0),
    "epilogue behind its wait": (r"tcgen05\.fence::after_thread_sync;", 1),
    "MMAs behind their waits": (r"tcgen05\.fence::after_thread_sync;", 2),
    "tensor memory is freed behind the barrier": (r"tcgen05\.fence::after_thread_sync;", 3),
    "accumulators back to the MMAs": (r"tcgen05\.fence::before_thread_sync;", 1),
}
DISPATCH_FENCES = {
    "rows of a peer": (r"fence\.proxy\.async\.global; // gcmoe recv_header read", 0),
    "an empty slot": (r"fence\.proxy\.async\.global; // gcmoe token_ring_empty read", 0),
    "scales and weights of a row": (
        r"fence\.proxy\.async\.global; // gcmoe token_ring_full write",
        0,
    ),
    "the next row": (r"fence\.proxy\.async\.shared::cta; // gcmoe row_buffer read", 0),
}
CFG = MoEConfig(hidden=256, intermediate=128, num_experts=3, top_k=2, max_tokens=150)


def without(ptx: str, pattern: str, number: int) -> str:
    """The text without one line."""
    matches = list(re.finditer(pattern, ptx))
    assert number < len(matches)
    start, end = matches[number].span()
    return ptx[:start] + ptx[end:]


def run_layer(monkeypatch: pytest.MonkeyPatch, role: Role, pattern: str, number: int) -> None:
    """Dispatch beside compute, one of them without one fence."""
    plan = make_plan(CFG, 1, 148, family="sm100")
    wanted = kernel_spec(plan, role, "sm_103a")
    plain = layers.compile_kernel

    def compile_kernel(kernel: object, arch: str) -> tuple[str, bytes]:
        ptx, cubin = plain(kernel, arch)
        return (without(ptx, pattern, number), cubin) if wanted.symbol in ptx else (ptx, cubin)

    monkeypatch.setattr(layers, "compile_kernel", compile_kernel)
    machine = Machine(3, ordered=True)
    rank = layers.Rank(machine, plan, 0, layers.random_experts(CFG, 1), "sm_103a")
    batch = layers.random_batch(CFG, CFG.max_tokens, 2)
    x, ids, weights = (
        machine.memory.map(layers.flat(t)) for t in (batch.x, batch.ids, batch.weights)
    )
    call = {"num_tokens": len(batch.x), "ids_are_int64": 0, "topk_ids": ids, "call": 0}
    launches: list[Launch] = [
        rank.launch(Role.DISPATCH, plan.dispatch_sms, x=x, topk_weights=weights, **call),
        rank.launch(Role.COMPUTE, 2),
    ]
    machine.run(*launches)


@pytest.fixture
def fresh_kernels() -> object:
    layers.compiled.cache_clear()
    yield
    layers.compiled.cache_clear()


@pytest.mark.parametrize("name", COMPUTE_FENCES)
def test_a_fence_of_compute(
    name: str, monkeypatch: pytest.MonkeyPatch, fresh_kernels: object
) -> None:
    with pytest.raises(OutOfOrder):
        run_layer(monkeypatch, Role.COMPUTE, *COMPUTE_FENCES[name])


@pytest.mark.parametrize("name", DISPATCH_FENCES)
def test_a_fence_of_dispatch(
    name: str, monkeypatch: pytest.MonkeyPatch, fresh_kernels: object
) -> None:
    with pytest.raises(OutOfOrder):
        run_layer(monkeypatch, Role.DISPATCH, *DISPATCH_FENCES[name])


def test_with_all_fences_nothing_is_out_of_order(
    monkeypatch: pytest.MonkeyPatch, fresh_kernels: object
) -> None:
    run_layer(monkeypatch, Role.FINALIZE, "", 0)
