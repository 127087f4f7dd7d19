"""What the scenarios of one rank share: operators, weights, inputs, comparisons, squatting."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from cuda.bindings import nvrtc
from pair_cases import CASES, PairCase
from pair_oracle import Batch, make_batch, random_experts
from torch import Tensor

import gcmoe
from gcmoe.config import MoEConfig
from gcmoe.errors import DeviceFault
from gcmoe.numerics import ExpertWeights, PackedWeights, pack
from gcmoe.runtime import driver
from gcmoe.runtime.group import RankGroup
from gcmoe.runtime.partition import Part, Partition

GROUP_LIMIT_S = 30.0
MEET_LIMIT_S = 30.0
RECOVERY_REPLAYS = 100
SQUAT_BYTES = 227 << 10
SQUAT_SOURCE = rb"""
extern "C" __global__ void squat(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
"""


def expect(ok: bool, text: str) -> None:
    """An assertion that also holds under ``python -O`` and says what it is about."""
    if not ok:
        raise AssertionError(text)


def differences(y: Tensor, wanted: Tensor) -> Tensor:
    """Elements whose bits differ; asking for it does not wait."""
    return (y.view(torch.int16) != wanted.view(torch.int16)).sum()


class Squatter:
    """A kernel that holds whole SMs of a part: each CTA takes all shared memory of its SM."""

    def __init__(self, partition: Partition, index: int) -> None:
        self.partition = partition
        image = self._compile()
        library = driver.call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
        kernel = driver.call("cuLibraryGetKernel", library, b"squat")
        attribute = driver.cu.CUfunction_attribute
        smem = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        gpu = driver.call("cuDeviceGet", index)
        driver.call("cuKernelSetAttribute", smem, SQUAT_BYTES, kernel, gpu)
        self._functions = {}
        for context in partition.contexts:
            with driver.current(context):
                function = driver.call("cuKernelGetFunction", kernel)
                driver.call("cuFuncLoad", function)
                driver.call("cuFuncSetAttribute", function, smem, SQUAT_BYTES)
            self._functions[int(context)] = function
        self._own = torch.cuda.Stream(index)

    @staticmethod
    def _compile() -> bytes:
        def check(result: tuple[Any, ...]) -> Any:
            expect(int(result[0]) == 0, f"nvrtc: {result[0]!r}")
            return result[1] if len(result) > 1 else None

        program = check(nvrtc.nvrtcCreateProgram(SQUAT_SOURCE, b"squat.cu", 0, [], []))
        check(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90a"]))
        image = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, image))
        return image

    def hold(self, part: Part, ctas: int, seconds: float) -> None:
        """Occupy ``ctas`` SMs of a part's context; returns when the kernel surely runs."""
        value = ctypes.c_uint64(round(seconds * 1e9))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        with driver.current(part.context):
            driver.call(
                "cuLaunchKernel",
                self._functions[int(part.context)],
                *(ctas, 1, 1, 32, 1, 1, SQUAT_BYTES),
                part.stream if part.stream is not None else self._own.cuda_stream,
                ctypes.addressof(pointers),
                0,
            )
        time.sleep(0.01)


@cache
def experts_of(h: int, i: int, e: int, seed: int) -> ExpertWeights:
    """All experts of a layer; the same on every rank."""
    return random_experts(h, i, e, seed)


@cache
def packed_of(h: int, i: int, e: int, seed: int, first: int, count: int) -> PackedWeights:
    """Some consecutive experts, packed."""
    w = experts_of(h, i, e, seed)
    some = slice(first, first + count)
    return pack(
        w.w13[some],
        w.w13_scale[some],
        w.w2[some],
        w.w2_scale[some],
        MoEConfig(h, i, count, 1, 1),
    )


class Pair:
    """This rank of a scenario.

    Attributes:
        peer: the other one of two ranks.
        group: a process group of the scenario's own, so that a failure spoils no other scenario.
    """

    def __init__(self, world: RankGroup, device: torch.device) -> None:
        self.world, self.device = world, device
        self.rank = world.rank
        self.peer = 1 - world.rank
        self.group: Any = None
        self.ranks = world
        self._operators: list[gcmoe.MoE] = []
        self._squatters: dict[int, Squatter] = {}
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def begin(self) -> None:
        limit = timedelta(seconds=GROUP_LIMIT_S)
        self.group = dist.new_group(backend="gloo", timeout=limit)
        self.ranks = RankGroup(self.group)
        self.ranks.open_barriers()

    def end(self) -> None:
        """Both ranks are through: nobody uses this rank's memory any more."""
        with suppress(RuntimeError):
            torch.cuda.synchronize()
        self.graphs.clear()
        while self._operators:
            with suppress(Exception):
                self._operators.pop().close()

    def meet(self, step: str = "meet") -> None:
        """Wait for the other rank, on the host."""
        self.ranks.barrier(step, MEET_LIMIT_S)

    # -------------------------------------------------------------------------- operators

    def operator(
        self, name: str, budget_s: float | None = None, group: Any = None, **options: Any
    ) -> gcmoe.MoE:
        """An operator of a case; closed when the scenario is over."""
        case = CASES[name]
        config = case.config if budget_s is None else case.with_budget(budget_s)
        group = (group or self.group) if case.ranks > 1 else None
        op = gcmoe.MoE(config, group, **(case.options() | options))
        self._operators.append(op)
        return op

    def weights(self, name: str, seed: int = 1) -> tuple[ExpertWeights, PackedWeights]:
        """(all experts for the oracle, this rank's packed ones)."""
        case: PairCase = CASES[name]
        c = case.config
        local = c.local_experts(case.ranks)
        first = self.rank * local if case.ranks > 1 else 0
        shape = c.hidden, c.intermediate, c.num_experts, seed
        packed = packed_of(*shape, first, local)
        return experts_of(*shape), packed

    def layer(self, name: str, budget_s: float | None = None, **options: Any) -> Any:
        """A bound layer of an operator of its own."""
        return self.operator(name, budget_s, **options).bind(self.weights(name)[1])

    def batch(self, name: str, num_tokens: int, routing: str, seed: int) -> Batch:
        """This rank's input, another one on each rank."""
        seed = self.world.size * seed + self.rank
        return make_batch(CASES[name].config, num_tokens, seed, routing)

    # -------------------------------------------------------------------------- calls

    def capture(self, call: Any) -> torch.cuda.CUDAGraph:
        """A graph of what ``call`` enqueues; dropped before the operators are closed."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        self.graphs.append(graph)
        return graph

    def squatter(self, op: gcmoe.MoE) -> Squatter:
        """Of the operator's partition."""
        key = id(op._partition)
        if key not in self._squatters:
            index = 0 if self.device.index is None else self.device.index
            self._squatters[key] = Squatter(op._partition, index)
        return self._squatters[key]

    def replay_checked(
        self, layer: Any, batches: list[Batch], wanted: list[Tensor], replays: int
    ) -> None:
        """Eager calls in turn, all equal to what is wanted."""
        counts = []
        for n in range(replays):
            batch = batches[n % len(batches)]
            y = layer(batch.x, batch.ids, batch.weights)
            counts.append(differences(y, wanted[n % len(batches)]))
        layer.op.check(synchronize=True)
        bad = [n for n, count in enumerate(torch.stack(counts).tolist()) if count]
        expect(not bad, f"{len(bad)} of {replays} replays differ, first {bad[:5]}")

    def recover(self, layer: Any, batches: list[Batch], wanted: list[Tensor]) -> None:
        """``reset()``, then correct replays."""
        layer.op.reset()
        self.replay_checked(layer, batches, wanted, RECOVERY_REPLAYS)


def fault_of(call: Any) -> tuple[DeviceFault | None, float]:
    """(the fault that ``call`` raises or None, seconds)."""
    start = time.monotonic()
    try:
        call()
    except DeviceFault as fault:
        return fault, time.monotonic() - start
    return None, time.monotonic() - start
