"""The hand-off probe: at creation all ranks replay the graph of a full batch once, with no tokens.

What it shows. Compute waits for ``routes``, which dispatch publishes in every replay, and dispatch
waits for the header words of all ranks. So the replay ends only if dispatch runs while compute
waits, and if every rank's stores reach every other rank's workspace under the mapping that the
creation has just made.

What it does not show. Were dispatch run to its end before compute, the replay would end as well.
With a ring that holds every block of a replay this is only slow: it is what ``serial = True`` does.
With a smaller ring dispatch would wait for slots that compute cannot free, in the first replay with
more blocks than slots, and raise ``PeerTimeout`` on ``token_ring_empty``.

Compute waits half as long as dispatch here, so that a compute kernel that keeps dispatch away is
the one that expires: it then finds ``in_flight`` unclaimed, because no CTA of dispatch has begun.
That can happen in green contexts only: in one context compute hangs on dispatch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch

from gcmoe.errors import GCMoEError, PeerTimeout, UnsupportedConcurrency
from gcmoe.protocol import Cell, Role, WorkspaceShape
from gcmoe.protocol.faults import RECORD_WORDS
from gcmoe.protocol.ring import WINDOW_COLUMNS
from gcmoe.runtime import device as devices
from gcmoe.runtime import faults
from gcmoe.runtime.graph import LayerGraph, ReplayOrder
from gcmoe.runtime.group import RankGroup

BUDGETS_S = (0.2, 2.0)
"""Of compute, in turn: the second is for ranks that were late in the first."""

WINDOW_BYTES = 4 * 4352
"""Packed weights of 256 rows x 128 columns, of which a tile of W1 has H/128: codes and scales, in
one piece or in two."""

Kind = Literal["passed", "serialised", "late"]
FEW_CONNECTIONS = tuple(str(n) for n in range(1, 8))
TOOL_VARIABLES = (
    "CUDA_INJECTION64_PATH",
    "NV_SANITIZER_INJECTION_PORT_BASE",
    "NVTX_INJECTION64_PATH",
)


@dataclass(frozen=True)
class Verdict:
    """What a rank saw.

    Args:
        text: one sentence, empty if it passed.
        cause: :func:`likely_cause` of that rank; empty if it passed.
    """

    kind: Kind
    text: str = ""
    cause: str = ""


def weight_bytes(shape: WorkspaceShape, compute_ctas: int) -> int:
    """What the first tickets of a replay may read of W1, one tile each."""
    tiles = min(compute_ctas, shape.local_experts * (shape.intermediate // WINDOW_COLUMNS))
    return tiles * shape.num_windows * WINDOW_BYTES


def shares(share: float, serial: bool) -> dict[Role, float]:
    """Shares of the spin budget by role, compute's being ``share``."""
    others = share if serial else 2 * share
    return {Role.DISPATCH: others, Role.COMPUTE: share, Role.FINALIZE: others}


def run(
    make_graph: Callable[[dict[Role, float]], LayerGraph],
    shares: dict[Role, float],
    ranks: RankGroup,
    order: ReplayOrder,
    index: int,
    device: torch.device,
) -> None:
    """One probe; leaves the cells as the replay leaves them. Ranks fail together."""

    def prepare() -> LayerGraph:
        graph = make_graph(shares)
        stack.callback(graph.close)
        graph.instantiate()
        return graph

    def replay() -> None:
        with stack.pop_all():
            ranks.barrier("the hand-off probe")  # so that no rank spends its budget waiting
            handle = devices.stream_handle(index)
            stream = order.enter(handle)
            graph.launch(stream)
            order.leave(handle, stream)
            devices.synchronize(device)

    with ExitStack() as stack:
        graph = ranks.together("preparing the hand-off probe", prepare)
        ranks.together("the hand-off probe", replay)


def judge(record: Sequence[int], abort: bool, has_begun: bool, is_last_turn: bool) -> Verdict:
    """The verdict of one rank.

    Args:
        record: the words of the fault record.
        abort: the sticky abort word is set.
        has_begun: dispatch has claimed the workspace and finalize has not ended the replay; or
            compute could not come before dispatch, as in one context.
        is_last_turn: a rank whose dispatch has not begun this time either was not merely late.
    """
    error = faults.error_of(record)
    if error is None and not abort:
        return Verdict("passed")
    words = dict(zip(RECORD_WORDS, record, strict=False))
    waited_for_routes = (words["role"], words["cell"]) == (Role.COMPUTE, Cell.ROUTES)
    if not has_begun and ((error is not None and waited_for_routes) or is_last_turn):
        text = "dispatch did not begin while compute waited for it"
        return Verdict("serialised", text, likely_cause())
    if error is None:
        return Verdict("late", "another rank aborted the probe", likely_cause())
    return Verdict("late", str(error).partition(". ")[0], likely_cause())


def likely_cause() -> str:
    """The most likely reason in this process why two kernels do not run at once."""
    tools = [name for name in TOOL_VARIABLES if os.environ.get(name)]
    if tools:
        return f"a debugger or profiler that serialises kernels ({tools[0]} is set)"
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None and connections.strip() in FEW_CONNECTIONS:
        return f"CUDA_DEVICE_MAX_CONNECTIONS={connections}, too few work queues"
    found = "not set" if connections is None else connections
    return (
        "a debugger or profiler that serialises kernels, or a work queue that the two green "
        f"contexts share with a busy stream (CUDA_DEVICE_MAX_CONNECTIONS is {found})"
    )


def failure_of(
    verdicts: Sequence[Verdict], serial_budget_s: float | None = None
) -> GCMoEError | None:
    """What every rank raises; None if all passed.

    Args:
        verdicts: of all ranks, in rank order.
        serial_budget_s: ``spin_budget_s`` of a serial operator, whose probe waits that long.
    """
    bad = [(rank, v) for rank, v in enumerate(verdicts) if v.kind != "passed"]
    if not bad:
        return None
    serialised = [(rank, v) for rank, v in bad if v.kind == "serialised"]
    if serialised:
        rank, verdict = serialised[0]
        advice = ". An operator with serial = True works without it, more slowly"
        return UnsupportedConcurrency(
            f"the dispatch and the compute kernel of a replay must run at the same time; in the "
            f"probe of rank {rank} {verdict.text}. Likely cause: {verdict.cause}"
            + (advice if serial_budget_s is None else "")
        )
    # A rank with a record of its own says more than one that was aborted.
    rank, verdict = max(bad, key=lambda item: len(item[1].text))
    limit = (
        f"{BUDGETS_S[-1]:g} s"
        if serial_budget_s is None
        else f"spin_budget_s = {serial_budget_s:g} s"
    )
    return PeerTimeout(
        f"the hand-off probe of the operator did not end on rank {rank}: {verdict.text}. Other "
        f"work of the device or of a peer kept a rank away for more than {limit}, or the "
        f"workspaces are not mapped as they should be. No operator was created; try again"
    )


def require_hand_off(
    replay: Callable[[dict[Role, float]], None],
    verdict: Callable[[bool], Verdict],
    reset: Callable[[], None],
    ranks: RankGroup,
    spin_budget_s: float,
    serial: bool,
) -> None:
    """Probe until one passes, at most twice; collective.

    Args:
        replay: one probe with these shares of the spin budget; see :func:`run`.
        verdict: of this rank, given whether this was the last turn; see :func:`judge`.
        reset: cells as before the probe, on all ranks.

    Raises:
        UnsupportedConcurrency, PeerTimeout: as :func:`failure_of` says, on all ranks.
    """
    budgets = (spin_budget_s,) if serial else BUDGETS_S
    for turn, budget in enumerate(budgets):
        replay(shares(budget / spin_budget_s, serial))
        is_last = turn == len(budgets) - 1 and not serial
        verdicts = ranks.gather(verdict(is_last))
        reset()
        failure = failure_of(verdicts, spin_budget_s if serial else None)
        if failure is None:
            return
        if is_last or serial or isinstance(failure, UnsupportedConcurrency):
            raise failure
