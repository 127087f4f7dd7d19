"""One small layer of two ranks for a memory checker: dispatch, then compute, against the oracle.

    torchrun --no-python --nproc-per-node 2 compute-sanitizer --tool memcheck \
        --report-api-errors no --kernel-name kernel_substring=gcmoe \
        python tests/distributed/sanitizer_pair.py
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from pair import Pair
from pair_cases import CASES
from pair_oracle import Problems, check_layer

from gcmoe.runtime.group import RankGroup

CASE = "odd-33"
CALLS = (
    ((33, "distinct"), (33, "distinct")),
    ((7, "masked"), (33, "duplicates")),
    ((0, "distinct"), (1, "distinct")),
    ((33, "single"), (0, "distinct")),
)
# A checker slows every wait down.
BUDGET_S = 60.0


def main() -> int:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    world = RankGroup(dist.group.WORLD)
    world.open_barriers()
    pair = Pair(world, device)
    pair.begin()
    experts, packed = pair.weights(CASE)
    op = pair.operator(CASE, BUDGET_S, serial=True)
    layer = op.bind(packed)
    problems = Problems()
    for n, mine in enumerate(CALLS):
        num_tokens, routing = mine[pair.rank]
        batch = pair.batch(CASE, num_tokens, routing, n)
        y = layer(batch.x, batch.ids, batch.weights)
        op.check(synchronize=True)
        what = f"rank {pair.rank} {routing} T = {num_tokens}"
        check_layer(problems, what, y, batch, experts, CASES[CASE].config)
    for line in problems.lines:
        print(line)
    print("wrong" if problems.lines else "right", flush=True)
    world.barrier("all calls", 120.0)
    pair.end()
    world.barrier("all closed", 120.0)
    return 1 if problems.lines else 0


if __name__ == "__main__":
    sys.exit(main())
