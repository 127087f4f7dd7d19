"""A small layer in the memory of :mod:`ptx_machine`: weights, workspace, launches, batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import mx_datapath as mx
import numpy as np
import torch
from checkpoints import random_weights
from compiler_output import compile_kernel
from ptx_machine import Launch, Machine, TensorMap
from ptx_text import Program, parse
from torch import Tensor

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import kernel_class
from gcmoe.kernels.spec import KernelSpec, kernel_spec
from gcmoe.numerics import ExpertWeights, pack_sm100
from gcmoe.plan import LayerPlan
from gcmoe.protocol import BlockEntry, Role, RoutesHeader, RowMeta, WorkspaceShape, ring_row

SPIN_BUDGET = 1 << 40
FAULT_BYTES = 64


@cache
def compiled(spec: KernelSpec) -> tuple[Program, int, int]:
    """(program, threads, bytes of shared memory) of a kernel."""
    kernel = kernel_class(spec.role, spec.family)(spec)
    ptx, _ = compile_kernel(kernel, spec.arch)
    return parse(ptx), int(kernel.threads), int(kernel.smem_bytes)


def flat(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor, shared; some bytes for an empty one."""
    if not tensor.numel():
        return np.zeros(16, dtype=np.uint8)
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


class Rank:
    """One rank's memory and launches.

    Args:
        plan: of the operator or of a call; may become that of another call.
        experts: all E experts, of which this rank takes its share; None for dispatch alone.
    """

    def __init__(
        self, machine: Machine, plan: LayerPlan, rank: int, experts: ExpertWeights | None, arch: str
    ) -> None:
        self.machine, self.plan, self.rank, self.arch = machine, plan, rank, arch
        self.bytes = np.random.default_rng(rank).integers(
            0, 256, self.shape.num_bytes, dtype=np.uint8
        )
        for region in self.shape.regions:
            if region.is_cell:
                self.view(region.name)[:] = 0
        self.cells(self.shape.initial_cells())
        self.workspace = machine.memory.map(self.bytes)
        self.fault = np.zeros(FAULT_BYTES, dtype=np.uint8)
        self.fault_address = machine.memory.map(self.fault)
        self.weights: dict[str, int] = {}
        if experts is not None:
            local = self.shape.local_experts
            mine = slice(rank * local, (rank + 1) * local)
            names = ("w13", "w13_scale", "w2", "w2_scale")
            self.packed = pack_sm100(*(getattr(experts, name)[mine] for name in names), plan.config)
            self.weights = {
                name: machine.memory.map(flat(getattr(self.packed, name))) for name in names
            }
        self.peers = [self.workspace]

    @property
    def shape(self) -> WorkspaceShape:
        return self.plan.workspace

    def view(self, name: str, dtype: str = "u1") -> np.ndarray[Any, Any]:
        """A region of the workspace, shared."""
        region = self.shape.region(name)
        return self.bytes[region.offset : region.offset + region.num_bytes].view(f"<{dtype}")

    def slots(self, name: str, dtype: str, *per_slot: int) -> np.ndarray[Any, Any]:
        """[S, *per_slot] of a region of the ring, shared: slots as a replay packs them."""
        shape = self.shape.num_slots, *per_slot
        return self.view(name, dtype)[: math.prod(shape)].reshape(shape)

    def cells(self, values: dict[str, list[int]]) -> None:
        for name, words in values.items():
            self.view(name, f"u{self.shape.region(name).item_bytes}")[:] = words

    def launch(self, role: Role, grid: int, prefetch: bool = True, **own: int) -> Launch:
        """The launch of a role; ``own`` are the arguments that only it has."""
        spec = kernel_spec(self.plan, role, self.arch, prefetch=prefetch)
        program, threads, shared_bytes = compiled(spec)
        values: dict[str, Any] = {
            "peers": self.peers,
            "workspace": self.workspace,
            "fault_record": self.fault_address,
            "trace": 0,
            "rank": self.rank,
            "spin_budget_ns": SPIN_BUDGET,
        }
        values |= self.weights | own
        arguments = [
            self.tensor_map(p.name) if p.kind == "tensor_map" else values[p.name]
            for p in spec.parameters
        ]
        return Launch(program, grid, threads, shared_bytes, arguments)

    def tensor_map(self, name: str) -> TensorMap:
        """As the runtime encodes it (tests/runtime/test_launch.py)."""
        shape = self.shape
        if name.endswith("_codes"):
            matrix = name.removesuffix("_codes")
            rows = getattr(self.packed, matrix).numel() // 64
            return TensorMap(self.weights[matrix], (128, rows), (64,), (128, 256), nibbles=True)
        return TensorMap(
            self.workspace + shape.offsets["ring_rows"],
            *shape.ring_tensor,
            (128, int(name.rpartition("_")[2]), 1, 1),
            nibbles=False,
        )


def make_ranks(
    machine: Machine, plan: LayerPlan, experts: ExpertWeights | None, arch: str
) -> list[Rank]:
    """All ranks of a plan, which know each other's workspaces."""
    ranks = [Rank(machine, plan, n, experts, arch) for n in range(plan.num_ranks)]
    for rank in ranks:
        rank.peers = [other.workspace for other in ranks]
    return ranks


@dataclass
class Batch:
    """What a rank's caller brings."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def random_experts(config: MoEConfig, seed: int) -> ExpertWeights:
    return random_weights(config, config.num_experts, seed, 116, 124)


def random_batch(config: MoEConfig, num_tokens: int, seed: int) -> Batch:
    """Tokens of several octaves; some slots unused, some experts twice in a token."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn((num_tokens, config.hidden), generator=g)
    groups = torch.randint(-3, 4, (num_tokens, config.hidden // 32, 1), generator=g)
    x = (x.view(num_tokens, config.hidden // 32, 32) * torch.exp2(groups.float())).view(x.shape)
    ids = torch.randint(-1, config.num_experts, (num_tokens, config.top_k), generator=g)
    weights = torch.randn((num_tokens, config.top_k), generator=g)
    return Batch(x.bfloat16(), ids.to(torch.int32), weights)


def expert_rows(batch: Batch, expert: int) -> list[tuple[int, int]]:
    """(token, slot) of the rows of an expert, in the order of one rank's list."""
    return [(int(t), int(k)) for t, k in (batch.ids == expert).nonzero().tolist()]


def fill_ring(rank: Rank, batch: Batch, codes: Tensor, exponents: Tensor) -> int:
    """The ring of a single rank as dispatch leaves it; the number of blocks.

    Args:
        codes, exponents: E4M3 uint8 [T, H], UE8M0 uint8 [T, H/32].
    """
    shape = rank.shape
    generation, epoch_base, slot_base, _ = (int(word) for word in rank.view("bases", "u4"))
    rows = rank.slots("ring_rows", "u1", shape.block_rows, shape.row_stride)
    atoms = rank.view("ring_scale").reshape(shape.num_slots, shape.num_windows, 512)
    meta = rank.slots("ring_meta", "u4", shape.block_rows)
    weights = rank.slots("ring_weight", "f4", shape.block_rows)
    block = 0
    for expert in range(shape.local_experts):
        found = expert_rows(batch, expert)
        for first in range(0, len(found), shape.block_rows):
            part = found[first : first + shape.block_rows]
            place = shape.ring.place(slot_base, block)
            slot, epoch = shape.ring.slot(place), shape.ring.epoch(epoch_base, place)
            for row, (token, k) in enumerate(part):
                in_slot = ring_row(row, len(part), shape.block_rows)
                rows[slot, in_slot, : shape.hidden] = codes[token].numpy()
                meta[slot, row] = RowMeta.pack(rank.rank, token, k)
                weights[slot, row] = float(batch.weights[token, k])
                scales = exponents[token].numpy().reshape(-1, 4)
                for byte in range(4):
                    atoms[slot, :, mx.atom_offset(row, byte)] = scales[:, byte]
            rank.view("block_table", "u4")[block] = BlockEntry.pack(expert, len(part))
            rank.view("token_ring_full", "u4")[slot] = shape.ring.full_target(epoch)
            block += 1
    rank.view("routes", "u8")[0] = RoutesHeader.pack(generation, block)
    return block
