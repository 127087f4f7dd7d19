"""One rank of a group of scenarios; started by torchrun with the name of the group.

    torchrun --nproc-per-node 2 tests/distributed/worker.py faults

Each scenario prints one line of JSON on each rank. A scenario that fails on one rank ends the group
only if the other rank does not come out of it either.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist
from pair_cases import GROUPS
from pair_launch import ENDS_AT, MARK

from gcmoe.errors import GCMoEError
from gcmoe.runtime.group import RankGroup

MODULES = ("layers", "create", "faults", "soak", "speed", "many")
WITHOUT_GPU = ("selftest", "cpu")
PR_SET_PDEATHSIG = 1
EXIT_MARGIN_S = 5.0
AFTER_LIMIT_S = 45.0


def find_scenario(name: str, on_gpu: bool) -> Any:
    """The function of that name."""
    for module in MODULES if on_gpu else WITHOUT_GPU:
        found = getattr(importlib.import_module(f"scenarios_{module}"), name, None)
        if found is not None:
            return found
    raise LookupError(name)


def emit(rank: int, scenario: str, ok: bool, error: str, details: Any, seconds: float) -> None:
    record = {
        "scenario": scenario,
        "rank": rank,
        "ok": ok,
        "error": error,
        "details": details,
        "seconds": round(seconds, 2),
    }
    # One write, so that the lines of two ranks stay whole.
    os.write(1, f"\n{MARK}{json.dumps(record, default=str)}\n".encode())


def main() -> None:
    name = sys.argv[1]
    group = GROUPS[name]
    # Die with torchrun, and tell where it hangs before the launcher's limit.
    ctypes.CDLL("libc.so.6").prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ends_at = float(os.environ.get(ENDS_AT, time.monotonic() + group.limit_s))
    left = max(1.0, ends_at - EXIT_MARGIN_S - time.monotonic())
    faulthandler.dump_traceback_later(left, exit=True)
    device = None
    if group.on_gpu:
        import torch

        gpus = torch.cuda.device_count()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
        torch.cuda.set_device(device)
    dist.init_process_group(group.backend, timeout=timedelta(seconds=group.store_s))
    rank = dist.get_rank()
    world = RankGroup(dist.group.WORLD)
    world.open_barriers()
    pair: Any = world
    if group.on_gpu:
        from pair import Pair

        pair = Pair(world, device)
    for scenario in group.scenarios:
        start = time.monotonic()
        ok, error, details = True, "", None
        try:
            if group.on_gpu:
                pair.begin()
            details = find_scenario(scenario, group.on_gpu)(pair)
        except Exception as failure:
            ok = False
            error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc(limit=-6)}"
        emit(rank, scenario, ok, error, details, time.monotonic() - start)
        if group.reports < world.size:
            os._exit(0)  # the other rank has ended on purpose
        try:
            world.barrier(f"after {scenario}", AFTER_LIMIT_S)
        except GCMoEError as failure:
            print(f"rank {rank} gives up after {scenario}: {failure}", flush=True)
            os._exit(1)
        if group.on_gpu:
            pair.end()
    # Neither the process group nor CUDA has anything left to do.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
