"""The ranks of a run: one process on its own, or the processes that torchrun started."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gcmoe.runtime.group import RankGroup

LIMIT_S = 120.0
"""How long a rank waits for the others."""


@dataclass(frozen=True, slots=True)
class World:
    """This rank among all.

    Attributes:
        group: process group of all ranks; None for a single one.
    """

    rank: int
    size: int
    group: Any | None = None

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        return RankGroup(self.group).gather(value)

    def failures(self, error: str) -> str:
        """What went wrong on any rank, the same text on all; empty if nothing did."""
        texts = self.gather(error)
        return "; ".join(f"rank {n}: {t}" if self.size > 1 else t for n, t in enumerate(texts) if t)


def size_from_environment() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def join(**options: Any) -> Any:
    """The process group of all ranks."""
    device = torch.device("cuda", torch.cuda.current_device())
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("nccl", device_id=device, timeout=limit, **options)
    return dist.group.WORLD


def open_world() -> World:
    """Take a GPU and join the group. Multicast stays off: it is a common cause of failure."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    rank, size = int(os.environ.get("RANK", "0")), size_from_environment()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return World(rank, size, join() if size > 1 else None)


def group_of_one() -> Any:
    """A process group of this process alone, for peers that insist on one."""
    if dist.is_initialized():
        return dist.group.WORLD
    address = f"tcp://127.0.0.1:{free_port()}"
    return join(init_method=address, rank=0, world_size=1)


def close_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
