"""Two real processes and real exchanges over gloo, with a recording driver in CUDA's place."""

from __future__ import annotations

import importlib.util
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import scenarios_create
import torch
import torch.distributed as dist
from pair import expect
from pair_cases import CASES

import gcmoe
from gcmoe import operator
from gcmoe.errors import GCMoEError, PeerTimeout, UnsupportedConcurrency
from gcmoe.kernels.build import CompiledKernel, parameter_size
from gcmoe.protocol import Cell, Role
from gcmoe.runtime import device, driver, memory
from gcmoe.runtime.group import RankGroup

LINE = 128
CHOOSE_DEVICE = device.choose_device


def load_stand_in() -> Any:
    """``StandIn`` of the runtime's own tests."""
    path = Path(__file__).resolve().parents[1] / "runtime" / "conftest.py"
    spec = importlib.util.spec_from_file_location("runtime_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runtime_stand_in"] = module
    spec.loader.exec_module(module)
    return module.StandIn()


class CpuPair:
    """As :class:`pair.Pair`, as far as creation needs it."""

    def __init__(self, world: RankGroup) -> None:
        self.group = dist.new_group([0, 1], backend="gloo")
        self.ranks = RankGroup(self.group)
        self.ranks.open_barriers()
        self.rank = world.rank
        self.steps: list[str] = []
        self.stand_in = load_stand_in()
        self._install()

    def meet(self, step: str = "meet") -> None:
        self.ranks.barrier(step, 20.0)

    def _install(self) -> None:
        """The worker's process ends with its group, so nothing is put back."""
        stand_in, steps = self.stand_in, self.steps
        driver.cu = stand_in
        driver.encode_tiled = stand_in.encode_tiled
        device.choose_device = lambda _: torch.device("cpu")
        device.arch_of = lambda _: "sm_90a"
        device.require_device = lambda _: None
        device.guard = lambda _: nullcontext()
        device.is_capturing = lambda: False
        device.stream_handle = lambda _: 0
        device.synchronize = lambda _: steps.append("synchronise")
        operator.device_identity = lambda _: ("host", str(self.rank))
        operator.require_peer_atomics = lambda *_: None

        def get_kernel(spec: Any, cache_dir: Any = None) -> CompiledKernel:
            sizes = [parameter_size(p, spec.shape.num_ranks)[0] for p in spec.parameters]
            stand_in.sizes[spec.symbol] = sizes
            return CompiledKernel(spec.role, spec.symbol, spec.symbol.encode(), 512, 100_000, 64)

        def allocate(workspace: Any, _: Any) -> None:
            room = torch.zeros(workspace.shape.num_bytes + LINE, dtype=torch.uint8)
            skip = -room.data_ptr() % LINE
            workspace.buffer = room[skip : skip + workspace.shape.num_bytes]
            workspace.address = workspace.buffer.data_ptr()

        def map_peers(workspace: Any, group: RankGroup) -> None:
            memory.rendezvous_count.made += 1
            workspace.peers = [1 << 40, 1 << 40]
            workspace.peers[group.rank] = workspace.address

        operator.get_kernel = get_kernel
        memory.Workspace._allocate = allocate  # type: ignore[method-assign]
        memory.Workspace._map_peers = map_peers  # type: ignore[method-assign]
        reset_cells = memory.Workspace.reset_cells
        barrier, clear = RankGroup.barrier, memory.HostRecord.clear

        def record_barrier(ranks: RankGroup, step: str, limit_s: float = 20.0) -> None:
            barrier(ranks, step, limit_s)
            steps.append(step)

        def record_reset(workspace: Any, *words: int) -> None:
            steps.append("zero")
            reset_cells(workspace, *words)

        def record_clear(record: Any) -> None:
            steps.append("clear")
            clear(record)

        RankGroup.barrier = record_barrier  # type: ignore[method-assign]
        memory.Workspace.reset_cells = record_reset  # type: ignore[method-assign]
        memory.HostRecord.clear = record_clear  # type: ignore[method-assign]
        scenarios_create.create_and_call = lambda pair, group=None: make(pair).close()


_pairs: list[CpuPair] = []


def pair_of(world: RankGroup) -> Any:
    if not _pairs:
        _pairs.append(CpuPair(world))
    return _pairs[0]


def make(pair: Any, **options: Any) -> gcmoe.MoE:
    return gcmoe.MoE(CASES["tiny"].config, pair.group, **options)


def cpu_unequal_arguments(world: RankGroup) -> Any:
    return scenarios_create.unequal_arguments(pair_of(world))


def cpu_a_rank_fails(world: RankGroup) -> Any:
    """Whatever is wrong on one rank, the other is told at once."""
    pair = pair_of(world)
    found = scenarios_create.a_rank_fails(pair)
    config = CASES["tiny"].config
    bad: dict[str, Any] = {
        "config must be a MoEConfig": lambda: gcmoe.MoE({}, pair.group),  # type: ignore[arg-type]
        "initial must be": lambda: gcmoe.MoE(config, pair.group, initial=(1, 2)),  # type: ignore[arg-type]
        "must be a CUDA device": lambda: gcmoe.MoE(config, pair.group, device="cpu"),
        "inside a graph capture": lambda: make(pair),
        "cuGraphInstantiate failed": lambda: make(pair),
        "cuGraphAddKernelNode failed": lambda: make(pair),
    }
    for text, create in bad.items():
        start = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if pair.rank == 1 and "device" in text:
                patch.setattr(device, "choose_device", CHOOSE_DEVICE)
            if pair.rank == 1 and "capture" in text:
                patch.setattr(device, "is_capturing", lambda: True)
            if pair.rank == 1 and text.startswith("cu"):
                code = driver.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
                patch.setitem(pair.stand_in.failing, text.split()[0], code)
            error = scenarios_create.refusal(pair, create if pair.rank else lambda: make(pair))
        expect(text in str(error), f"{text!r} is not in: {error}")
        if pair.rank == 0:
            expect("failed on rank 1" in str(error), f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - start
        expect(seconds < 5.0, f"{text}: took {seconds:.1f} s")
        make(pair).close()
    return found


def cpu_rendezvous_counts(world: RankGroup) -> Any:
    return scenarios_create.rendezvous_counts(pair_of(world))


def cpu_reset(world: RankGroup) -> Any:
    """The order of its steps; a rank that is alone is told so, and may come again."""
    pair = pair_of(world)
    op = make(pair)
    pair.meet("created")
    pair.steps.clear()
    if pair.rank == 0:
        start = time.monotonic()
        try:
            op.reset(timeout_s=0.3)
        except GCMoEError as error:
            text = str(error)
        expect(time.monotonic() - start < 2.0, "the limit was not kept")
        expect("rank 0 waited 0.3 s for rank 1 of 2 in vain" in text, text)
        expect(pair.steps == ["synchronise"], f"a reset that failed did {pair.steps}")
    pair.meet("alone")
    pair.steps.clear()
    op.reset(timeout_s=10.0)
    wanted = [
        "synchronise",
        "reset, own calls ended",
        "zero",
        "clear",
        "synchronise",
        "reset, own cells zeroed",
    ]
    expect(pair.steps == wanted, f"{pair.steps}")
    op.reset(timeout_s=10.0)
    late_in_the_second_barrier(pair, op)
    op.close()
    return pair.steps


def late_in_the_second_barrier(pair: Any, op: gcmoe.MoE) -> None:
    """Rank 0 has zeroed its cells when it gives up; its next reset waits in the same barrier."""

    def reset_alone() -> str:
        try:
            op.reset(timeout_s=0.3)
        except GCMoEError as error:
            return str(error)
        raise AssertionError("a rank that was alone was reset")

    first = ["synchronise", "reset, own calls ended", "zero", "clear", "synchronise"]
    pair.meet("before")
    pair.steps.clear()
    if pair.rank == 1:
        text = reset_alone()
        expect(text.startswith("reset, own calls ended: rank 1 waited"), text)
    pair.meet("rank 1 has come and gone")
    if pair.rank == 0:
        pair.steps.clear()
        text = reset_alone()
        expect(text.startswith("reset, own cells zeroed: rank 0 waited"), text)
        expect(pair.steps == first, f"rank 0 did {pair.steps}")
    pair.meet("rank 0 has zeroed")
    pair.steps.clear()
    op.reset(timeout_s=10.0)
    last = "reset, own cells zeroed"
    wanted = [last] if pair.rank == 0 else [*first, last]
    expect(pair.steps == wanted, f"the second reset did {pair.steps}")
    # The ranks are in step again.
    for _ in range(2):
        pair.steps.clear()
        op.reset(timeout_s=10.0)
        expect(pair.steps == [*first, last], f"{pair.steps}")


def cpu_probe_serialised(world: RankGroup) -> Any:
    """The driver of rank 1 runs compute alone until it gives up: refused on both ranks. In one
    context that cannot happen, so there the same record says that a rank was late."""
    pair = pair_of(world)
    launch = type(pair.stand_in)._call
    found: list[Any] = []
    allocate = memory.HostRecord.__init__

    def remember(record: Any) -> None:
        allocate(record)
        found.append(record)

    def serialised(stand_in: Any, name: str, arguments: Any) -> Any:
        if name == "cuGraphLaunch" and pair.rank == 1:
            words = (1, Role.COMPUTE, 1, Cell.ROUTES, 0, 1, 0, 1, 0xFFFFFFFF)
            for i, word in enumerate(words):
                found[-1].words[i] = int(word)
        return launch(stand_in, name, arguments)

    memory.HostRecord.__init__ = remember  # type: ignore[method-assign]
    type(pair.stand_in)._call = serialised
    try:
        error = scenarios_create.refusal(pair, lambda: make(pair, green_contexts=True))
        late = scenarios_create.refusal(pair, lambda: make(pair))
    finally:
        type(pair.stand_in)._call = launch
        memory.HostRecord.__init__ = allocate  # type: ignore[method-assign]
    expect(type(error) is UnsupportedConcurrency, f"{type(error).__name__}: {error}")
    expect("rank 1 dispatch did not begin" in str(error), str(error))
    expect(type(late) is PeerTimeout, f"{type(late).__name__}: {late}")
    make(pair).close()
    return str(error)
