"""``gcmoe tile``: the compute kernel alone on one block of tokens, on a Blackwell GPU.

The first command on a GPU that has never run the kernels. It needs no dispatch, no peer and no
group: the ring is filled by the host as dispatch would leave it. Five cases go from weights of one
value to random ones, so that the first that fails names the part of the data path that is wrong;
both projections are compared with the oracle one by one. A kernel that hangs is left after a few
seconds with the last mark of its trace.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.errors import UnsupportedDevice
from gcmoe.kernels.build import get_kernel
from gcmoe.kernels.spec import KernelSpec, kernel_spec
from gcmoe.kernels.trace_words import TRACE_WORDS, ComputeTrace
from gcmoe.numerics import (
    ExpertWeights,
    PackedWeightsSm100,
    compare,
    pack_sm100,
    quantize_input,
    requantize,
    swizzle128,
    w1_swiglu,
    w2,
)
from gcmoe.plan import make_plan
from gcmoe.plan.targets import USUAL_SMS
from gcmoe.protocol import (
    BlockEntry,
    Role,
    RoutesHeader,
    RowMeta,
    WorkspaceShape,
    atom_word,
    ring_row,
)
from gcmoe.runtime import device as devices
from gcmoe.runtime import driver, faults
from gcmoe.runtime.graph import node_parameters
from gcmoe.runtime.launch import WEIGHTS, Arguments
from gcmoe.runtime.memory import HostRecord
from gcmoe.runtime.modules import load_kernel
from gcmoe.runtime.partition import get_partition

HIDDEN, INTERMEDIATE, CAPACITY = 512, 256, 20
ROWS = (8, 13, 20)
SECONDS, POLL_SECONDS = 5.0, 0.01
DISPATCH_SMS = 8
MIN_EQUAL_CODES = 0.98
MAX_RELATIVE_L2 = 5e-3
MARKS = {
    ComputeTrace.START: "started",
    ComputeTrace.ROUTES: "saw the routes",
    ComputeTrace.FIRST_BLOCK: "saw the block",
    ComputeTrace.W1_OVER: "left their W1 items",
    ComputeTrace.END: "published everything",
}


class Hang(Exception):
    """The kernel has not ended in time; says how far it came."""


Backend = Callable[[KernelSpec, Tensor, PackedWeightsSm100], Tensor]
"""Runs the compute kernel on a workspace (uint8 on the CPU) and returns what it left there."""


# ------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """One problem.

    Args:
        what: what it adds to the case before it; where to look when it is the first to fail.
        experts: weights of the one expert.
        x: bf16 [T, H].
    """

    name: str
    what: str
    experts: ExpertWeights
    x: Tensor


def constant_weights(code: int, scale: int) -> ExpertWeights:
    """All weights of one code, in both nibbles of a byte, and one scale."""

    def full(rows: int, columns: int, value: int) -> Tensor:
        return torch.full((1, rows, columns), value, dtype=torch.uint8)

    h, i = HIDDEN, INTERMEDIATE
    return ExpertWeights(
        full(2 * i, h // 2, code * 0x11),
        full(2 * i, h // 32, scale),
        full(h, i // 2, code * 0x11),
        full(h, i // 32, scale),
    )


def one_column_a_row(codes: Tensor, step: int) -> None:
    """Leave row r one weight of 1.0, in column ``(step * r + 3) % K``; codes [1, rows, K/2]."""
    rows = torch.arange(codes.shape[1])
    column = (step * rows + 3) % (2 * codes.shape[2])
    codes.zero_()
    codes[0, rows, column // 2] = torch.where(column % 2 == 1, 0x20, 0x02).to(torch.uint8)


def make_cases() -> list[Case]:
    """The ladder; everything in it is a fixed function of nothing."""
    g = torch.Generator().manual_seed(0)
    token = torch.arange(CAPACITY)[:, None]
    column = torch.arange(HIDDEN)[None, :]
    by_token = ((token + 1) / 16).expand(-1, HIDDEN).bfloat16()
    by_place = (((7 * column + 3 * token) % 29 - 14) / 8).bfloat16()
    octaves = torch.exp2(((column // 32 + token) % 7 - 3).float())

    def scales(weights: ExpertWeights) -> ExpertWeights:
        for tensor in (weights.w13_scale, weights.w2_scale):
            tensor[:] = torch.randint(114, 120, tensor.shape, generator=g, dtype=torch.uint8)
        return weights

    columns = constant_weights(2, 127)
    one_column_a_row(columns.w13, 5)
    one_column_a_row(columns.w2, 3)
    random = scales(constant_weights(2, 127))
    for tensor in (random.w13, random.w2):
        tensor[:] = torch.randint(0, 256, tensor.shape, generator=g, dtype=torch.uint8)
    return [
        Case(
            "sums",
            "barriers, transaction bytes, tensor memory, the instruction descriptor",
            constant_weights(2, 118),
            by_token,
        ),
        Case(
            "columns",
            "order of K: nibbles, padded FP4 tiles, swizzles, descriptor advances",
            columns,
            by_place,
        ),
        Case(
            "weight scales",
            "scale atoms of weights: packing, copy to tensor memory, scale ids",
            scales(constant_weights(2, 127)),
            by_token,
        ),
        Case(
            "token scales",
            "scale atoms of tokens, of the ring and of the kernel's own output",
            constant_weights(2, 116),
            (by_place.float() * octaves).bfloat16(),
        ),
        Case(
            "random",
            "accumulation over all of it",
            random,
            torch.randn((CAPACITY, HIDDEN), generator=g).bfloat16(),
        ),
    ]


# ------------------------------------------------------------------------------------ one block


def make_spec(arch: str) -> KernelSpec:
    """The compute kernel of the layer of one expert, with its trace."""
    config = MoEConfig(HIDDEN, INTERMEDIATE, num_experts=1, top_k=1, max_tokens=CAPACITY)
    plan = make_plan(config, 1, USUAL_SMS["sm100"], family="sm100")
    return kernel_spec(plan, Role.COMPUTE, arch, trace=True)


def view(workspace: Tensor, shape: WorkspaceShape, name: str) -> Tensor:
    """A region of a workspace, uint8, shared."""
    region = shape.region(name)
    return workspace[region.offset : region.offset + region.num_bytes]


def fill_block(shape: WorkspaceShape, codes: Tensor, exponents: Tensor) -> Tensor:
    """A workspace with one block of ``len(codes)`` rows in slot 0, as dispatch leaves it.

    Args:
        codes, exponents: E4M3 uint8 [n, H], UE8M0 uint8 [n, H/32].
    """
    workspace = torch.zeros(shape.num_bytes, dtype=torch.uint8)
    n, rows = len(codes), torch.arange(len(codes))

    def words(name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        return view(workspace, shape, name).view(dtype)

    cells = shape.initial_cells()
    words("bases")[:] = torch.tensor(cells["bases"], dtype=torch.int32)
    generation = cells["bases"][0]
    words("routes", torch.int64)[0] = RoutesHeader.pack(generation, 1)
    words("block_table")[0] = BlockEntry.pack(0, n)
    words("token_ring_full")[0] = shape.ring.full_target(0)
    words("ring_meta")[:n] = torch.tensor([RowMeta.pack(0, t, 0) for t in range(n)])
    words("ring_weight", torch.float32)[:n] = 1.0
    ring = view(workspace, shape, "ring_rows").view(-1, shape.row_stride)
    ring[ring_row(rows, n, shape.block_rows), : shape.hidden] = codes
    atoms = view(workspace, shape, "ring_scale").view(shape.num_slots, shape.num_windows, 128, 4)
    places = torch.tensor([atom_word(int(row)) for row in rows])
    atoms[0, :, places] = exponents.view(n, shape.num_windows, 4).transpose(0, 1)
    return workspace


def read_a(workspace: Tensor, shape: WorkspaceShape, n: int) -> tuple[Tensor, Tensor]:
    """(codes [n, I], exponents [n, I/32]) that W1 left for the block in slot 0."""
    windows, tile = shape.intermediate // 128, -(-n // 8) * 8
    rows = view(workspace, shape, "a_rows")[: windows * tile * 128].view(windows, tile, 128)
    codes = swizzle128(rows)[:, :n].transpose(0, 1).reshape(n, -1)
    atoms = view(workspace, shape, "a_scale").view(shape.num_slots, windows, 128, 4)
    places = torch.tensor([atom_word(row) for row in range(n)])
    return codes, atoms[0, :, places].transpose(0, 1).reshape(n, -1)


# -------------------------------------------------------------------------------------- compare


@dataclass(frozen=True)
class Found:
    """What became of one case at one number of rows."""

    line: str
    details: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return not self.details


def first_difference(name: str, found: Tensor, wanted: Tensor) -> str:
    """Where two stages [token, column] first differ."""
    token, column = (int(i) for i in (found != wanted).nonzero()[0])
    count = int((found != wanted).sum())
    return (
        f"{name}: {count} of {found.numel()} differ, first at token {token}, column {column}: "
        f"{int(found[token, column]):#04x}, expected {int(wanted[token, column]):#04x}"
    )


def examine(case: Case, n: int, spec: KernelSpec, run: Backend) -> Found:
    """Run a case with ``n`` rows and compare both projections with the oracle."""
    shape, experts = spec.shape, case.experts
    codes, exponents = quantize_input(case.x[:n], "sm100")
    config = MoEConfig(HIDDEN, INTERMEDIATE, 1, 1, CAPACITY)
    packed = pack_sm100(experts.w13, experts.w13_scale, experts.w2, experts.w2_scale, config)
    left = run(spec, fill_block(shape, codes, exponents), packed)
    weight = torch.ones(n)
    a = w1_swiglu(codes, exponents, experts.w13[0], experts.w13_scale[0], weight, None, "sm100")
    wanted_codes, wanted_exponents = requantize(a, "sm100")
    found_codes, found_exponents = read_a(left, shape, n)
    # From the kernel's own a, so that the second projection is judged alone.
    wanted_rows = w2(found_codes, found_exponents, experts.w2[0], experts.w2_scale[0], "sm100")
    rows = view(left, shape, "combine").view(torch.bfloat16).view(CAPACITY, HIDDEN)[:n]
    equal = float((found_codes == wanted_codes).float().mean())
    worst = compare(rows, wanted_rows).relative_l2
    details = []
    if not torch.equal(found_exponents, wanted_exponents):
        details.append(first_difference("W1 scales", found_exponents, wanted_exponents))
    if equal < MIN_EQUAL_CODES:
        details.append(first_difference("W1 codes", found_codes, wanted_codes))
    if not worst <= MAX_RELATIVE_L2:
        per_token = [compare(rows[t], wanted_rows[t]).relative_l2 for t in range(n)]
        bad = [t for t, error in enumerate(per_token) if not error <= MAX_RELATIVE_L2]
        details.append(f"W2 rows: relative L2 {worst:.4g}, tokens {bad[:8]}")
    units = [shape.arrivals.target(0, n)] * shape.arrivals.groups
    arrived = view(left, shape, "combine_arrivals").view(torch.int32).tolist()
    if arrived != units:
        details.append(f"combine_arrivals is {arrived}, expected {units}")
    verdict = "ok" if not details else "WRONG"
    line = f"{case.name:<14} {n:>2} rows   W1 codes {equal:7.2%}   W2 relative L2 {worst:.5f}"
    return Found(f"{line}   {verdict}", tuple(details))


# ------------------------------------------------------------------------------------ on the GPU


def run_on_gpu(device: torch.device) -> Backend:
    """Runs the kernel on as many SMs of a GPU as compute has in a layer."""

    def run(spec: KernelSpec, workspace: Tensor, packed: PackedWeightsSm100) -> Tensor:
        with devices.guard(device):
            there = workspace.to(device)
            weights = {name: getattr(packed, name).to(device) for name in WEIGHTS["sm100"]}
            partition = get_partition(device, DISPATCH_SMS)
            grid = partition.report.compute_sms
            # Of the host, so that a kernel that hangs can be asked how far it came.
            trace, record = HostRecord(8 * grid * TRACE_WORDS), HostRecord()
            arguments = Arguments(spec)
            arguments.set_peers([there.data_ptr()])
            arguments.set(
                workspace=there.data_ptr(),
                fault_record=record.device_address,
                trace=trace.device_address,
                rank=0,
                spin_budget_ns=round(SECONDS / 2 * 1e9),
            )
            arguments.encode_ring_maps(there.data_ptr())
            arguments.set_weights({name: t.data_ptr() for name, t in weights.items()})
            kernel = load_kernel(spec, get_kernel(spec), device.index or 0, partition)
            graph = driver.call("cuGraphCreate", 0)
            node = node_parameters(kernel, partition.compute.context, grid, arguments)
            driver.call("cuGraphAddKernelNode", graph, [], 0, node)
            executable = driver.call("cuGraphInstantiate", graph, 0)
            devices.synchronize(device)
            stream = driver.cu.CUstream(devices.stream_handle(device.index or 0))
            driver.call("cuGraphLaunch", executable, stream)
            await_end(stream, trace)
            error = faults.error_of(record.read())
            if error is not None:
                raise error
            driver.call("cuGraphExecDestroy", executable)
            driver.call("cuGraphDestroy", graph)
            trace.close()
            record.close()
            return there.cpu()

    return run


def await_end(stream: Any, trace: HostRecord) -> None:
    """Wait until a stream is idle.

    Raises:
        Hang: it is not after :data:`SECONDS`.
        DriverError: the device failed.
    """
    end = time.monotonic() + SECONDS
    while True:
        result = driver.cu.cuStreamQuery(stream)
        if result[0] != driver.cu.CUresult.CUDA_ERROR_NOT_READY:
            driver.check(result, "cuStreamQuery")
            return
        if time.monotonic() > end:
            words = torch.tensor(trace.read(), dtype=torch.int64).view(-1, TRACE_WORDS, 2)
            raise Hang(reached(words.any(dim=2)))
        time.sleep(POLL_SECONDS)


def reached(trace: Tensor) -> str:
    """How far CTAs have come, by their words [CTAs, TRACE_WORDS]; 0 is not yet."""
    parts = []
    for word, text in MARKS.items():
        count = int((trace[:, word] != 0).sum())
        parts.append(f"{count} of {len(trace)} CTAs {text}")
    return "; ".join(parts)


# ------------------------------------------------------------------------------------- command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gcmoe tile``."""
    parser.add_argument("--device", type=int, default=0, metavar="N", help="GPU to run on; 0")


def climb(spec: KernelSpec, run: Backend) -> int:
    """All cases until one fails; the exit status."""
    for case in make_cases():
        for n in ROWS:
            try:
                found = examine(case, n, spec, run)
            except Hang as hang:
                print(f"{case.name:<14} {n:>2} rows   HANGS after {SECONDS} s: {hang}")
                print(f"look at: {case.what}")
                return 1
            print(found.line, flush=True)
            for text in found.details:
                print(f"    {text}")
            if not found.is_right:
                print(f"look at: {case.what}")
                return 1
    print("the compute kernel agrees with the oracle")
    return 0


def main(ns: argparse.Namespace) -> int:
    """Run the cases; 0 if all agree, 1 if one does not, 2 without a Blackwell GPU."""
    try:
        device = devices.choose_device(ns.device)
        arch = devices.arch_of(device)
    except UnsupportedDevice as error:
        print(f"gcmoe tile: {error}")
        return 2
    if arch == "sm_90a":
        print("gcmoe tile: this GPU is Hopper; gcmoe demo runs a whole layer on it")
        return 2
    devices.require_device(device)
    state = "" if arch in devices.RECORDS else f": {devices.NOT_YET_RUN}"
    print(f"{torch.cuda.get_device_name(device)}, kernels for {arch}{state}")
    status = climb(make_spec(arch), run_on_gpu(device))
    if status:
        # A kernel that hangs would keep the process from ending by itself.
        sys.stdout.flush()
        os._exit(status)
    return status
