"""One small layer for a memory checker: dispatch, then compute, checked against the oracle.

    compute-sanitizer --tool memcheck --report-api-errors no \
        --kernel-name kernel_substring=gcmoe python tests/gpu/sanitizer_case.py
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from helpers import CASES, Problems, make_batch, reference, weights_of
from stages import check_layer

import gcmoe

CASE = "odd-33"
CALLS = (("distinct", 33), ("masked", 7), ("distinct", 1), ("single", 33), ("distinct", 0))


def main() -> int:
    case = CASES[CASE]
    # A checker slows every wait down.
    config = replace(case.config, spin_budget_s=60.0)
    weights = weights_of(config)
    problems = Problems()
    with gcmoe.MoE(config, serial=True, **case.options()) as op:
        layer = op.bind(weights.packed)
        for n, (routing, num_tokens) in enumerate(CALLS):
            batch = make_batch(config, num_tokens, n, routing)
            y = layer(batch.x, batch.ids, batch.weights)
            op.check(synchronize=True)
            trace = reference(batch, weights, config)
            what = f"{routing} T = {num_tokens}"
            check_layer(problems, what, op, batch, y, trace, weights)
        torch.cuda.synchronize()
    for line in problems.lines:
        print(line)
    print("wrong" if problems.lines else "right")
    return 1 if problems.lines else 0


if __name__ == "__main__":
    sys.exit(main())
