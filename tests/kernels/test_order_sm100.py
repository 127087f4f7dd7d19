"""The fences of the Blackwell kernels are needed: without one a rule of order is broken.

The rules are those of :mod:`ptx_order`; ``test_run_sm100`` holds the kernels to them. One fence of
dispatch is missing below: it passes staged rows to the other proxy before the header words, and
every thread fences again when it has seen the headers, so only the rare schedule would tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import blackwell_layer as layers
import pytest
from ptx_machine import Machine
from ptx_order import OutOfOrder

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import dsl_version
from gcmoe.numerics import quantize_input
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
    "origins of the next item": (
        r"fence\.proxy\.async\.shared::cta; // gcmoe row words read",
        0,
    ),
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


def without(ptx: str, pattern: str, number: int) -> str:
    """The text without one line."""
    matches = list(re.finditer(pattern, ptx))
    assert number < len(matches)
    start, end = matches[number].span()
    return ptx[:start] + ptx[end:]


@pytest.fixture
def compile_without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Compiles the kernel of one role without one of its lines from now on."""
    plain = layers.compile_kernel

    def change(role: Role, pattern: str, number: int) -> None:
        entry = f".entry gcmoe_{role.name.lower()}_0("

        def compile_kernel(kernel: object, arch: str) -> tuple[str, bytes]:
            ptx, cubin = plain(kernel, arch)
            return (without(ptx, pattern, number) if entry in ptx else ptx), cubin

        monkeypatch.setattr(layers, "compile_kernel", compile_kernel)
        layers.compiled.cache_clear()

    yield change
    layers.compiled.cache_clear()


def make_rank(max_tokens: int, hidden: int = 256) -> tuple[layers.Rank, layers.Batch]:
    cfg = MoEConfig(hidden, intermediate=128, num_experts=3, top_k=2, max_tokens=max_tokens)
    plan = make_plan(cfg, 1, 148, dispatch_sms=16, family="sm100")
    experts = layers.random_experts(cfg, 1)
    rank = layers.Rank(Machine(3, ordered=True), plan, 0, experts, "sm_103a")
    return rank, layers.random_batch(cfg, max_tokens, 2)


def run_compute() -> None:
    """Two CTAs; and one alone, whose queue entries of W2 items are filled again."""
    for hidden, ctas in ((256, 2), (512, 1)):
        rank, batch = make_rank(20, hidden)
        codes, exponents = quantize_input(batch.x, "sm100")
        layers.fill_ring(rank, batch, codes, exponents)
        rank.machine.run(rank.launch(Role.COMPUTE, ctas))


def run_layer(max_tokens: int = 150) -> None:
    """Dispatch beside compute; with 150 tokens some warps of dispatch pull two rows."""
    rank, batch = make_rank(max_tokens)
    memory, grid = rank.machine.memory, rank.plan.dispatch_sms
    x, ids, weights = (memory.map(layers.flat(t)) for t in (batch.x, batch.ids, batch.weights))
    call = {"num_tokens": len(batch.x), "ids_are_int64": 0, "topk_ids": ids, "call": 0}
    dispatch = rank.launch(Role.DISPATCH, grid, x=x, topk_weights=weights, **call)
    rank.machine.run(dispatch, rank.launch(Role.COMPUTE, 2))


@pytest.mark.parametrize("name", COMPUTE_FENCES)
def test_a_fence_of_compute(name: str, compile_without: Callable[..., None]) -> None:
    compile_without(Role.COMPUTE, *COMPUTE_FENCES[name])
    with pytest.raises(OutOfOrder):
        run_compute()


@pytest.mark.parametrize("name", DISPATCH_FENCES)
def test_a_fence_of_dispatch(name: str, compile_without: Callable[..., None]) -> None:
    compile_without(Role.DISPATCH, *DISPATCH_FENCES[name])
    with pytest.raises(OutOfOrder):
        run_layer()


def test_with_all_fences_nothing_is_out_of_order() -> None:
    run_compute()
    run_layer()
