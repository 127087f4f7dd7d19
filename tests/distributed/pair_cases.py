"""What the suite of several ranks runs: layers, groups of scenarios, and their kernels.

Importing this module touches no GPU and no process group.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import get_kernel
from gcmoe.kernels.spec import kernel_specs
from gcmoe.plan import LayerPlan, make_plan

ARCH = "sm_90a"
RANKS = 2
SPIN_BUDGET_S = 3.0
JITTER_NS = 20_000


@dataclass(frozen=True)
class PairCase:
    """A layer and what its kernels are compiled for.

    Args:
        ranks: R, or 1 for the layer of one rank that results are compared with.
    """

    config: MoEConfig
    ranks: int = RANKS
    ring_slots: int | None = None
    jitter_ns: int = 0

    def options(self) -> dict[str, Any]:
        return {"ring_slots": self.ring_slots, "jitter_ns": self.jitter_ns}

    def with_budget(self, seconds: float) -> MoEConfig:
        """The configuration with another spin budget, which needs no other kernels."""
        return replace(self.config, spin_budget_s=seconds)


def _layer(h: int, i: int, e: int, k: int, tokens: int, clamp: float | None) -> MoEConfig:
    return MoEConfig(h, i, e, k, tokens, clamp, SPIN_BUDGET_S)


def _flash(experts: int, tokens: int) -> MoEConfig:
    return _layer(4096, 2048, experts, 6, tokens, 10.0)


ODD, ODD_256 = (512, 384, 6, 3, 33, None), (512, 384, 6, 3, 256, None)
TOP = (1024, 640, 16, 8, 64, 10.0)
TINY = (256, 128, 4, 2, 64, 2.0)

CASES: dict[str, PairCase] = {
    # 64 experts of DeepSeek-V4-Flash over two ranks.
    "flash-8": PairCase(_flash(64, 8)),
    "flash-64": PairCase(_flash(64, 64)),
    "flash-256": PairCase(_flash(64, 256)),
    # Odd shapes, and the same layers on one rank with all experts.
    "odd-33": PairCase(_layer(*ODD)),
    "odd-33-one": PairCase(_layer(*ODD), 1),
    # Calls of every class of tiles; ranks whose T differs run different ones.
    "odd-256": PairCase(_layer(*ODD_256)),
    "odd-256-one": PairCase(_layer(*ODD_256), 1),
    "top-8": PairCase(_layer(*TOP)),
    "top-8-one": PairCase(_layer(*TOP), 1),
    # One rank with half of the experts: as many rows per expert as two ranks have.
    "flash-8-one": PairCase(_flash(32, 8), 1),
    "flash-64-one": PairCase(_flash(32, 64), 1),
    # Faults and many replays; "late" kernels start at random times.
    "tiny": PairCase(_layer(*TINY)),
    "tiny-late": PairCase(_layer(*TINY), jitter_ns=JITTER_NS),
    "small-ring-late": PairCase(
        _layer(512, 384, 32, 2, 256, None), ring_slots=2, jitter_ns=JITTER_NS
    ),
    "ranks-4": PairCase(_layer(256, 128, 8, 2, 24, 2.0), 4),
    "ranks-8": PairCase(_layer(256, 128, 16, 2, 24, 2.0), 8),
}


def case_plan(name: str) -> LayerPlan:
    """The plan of a case."""
    case = CASES[name]
    return make_plan(case.config, case.ranks, ring_slots=case.ring_slots)


def case_specs(name: str) -> tuple[Any, ...]:
    """The kernels of a case."""
    return kernel_specs(case_plan(name), ARCH, jitter_ns=CASES[name].jitter_ns)


@cache
def compile_cases() -> None:
    """Compile what is missing in the kernel cache; a line per kernel."""
    print()
    for name in CASES:
        for spec in case_specs(name):
            start = time.perf_counter()
            kernel = get_kernel(spec)
            how = "cached" if kernel.from_cache else f"{time.perf_counter() - start:.1f} s"
            print(
                f"{name:<16} R = {spec.shape.num_ranks} {spec.role.name.lower():<9} {how}",
                flush=True,
            )


# ------------------------------------------------------------------------------------- scenarios


def count(name: str, default: int) -> int:
    """A number of replays, from the environment."""
    return int(os.environ.get(name, default))


def soak_replays() -> int:
    return count("GCMOE_SOAK_REPLAYS", 4000)


def soak_flash_replays() -> int:
    return count("GCMOE_SOAK_FLASH_REPLAYS", 500)


@dataclass(frozen=True)
class Group:
    """Scenarios that one torchrun runs, in order.

    Args:
        scenarios: names of functions of the ``scenarios_*`` modules.
        limit_s: seconds until the processes are killed.
        backend: of WORLD.
        store_s: time-out of the process group and its store.
        ranks: processes; where there are fewer GPUs they share them, which is slow.
        reports: ranks that live to report.
        environment: on top of the caller's.
        on_gpu: needs a GPU for each rank.
    """

    scenarios: tuple[str, ...]
    limit_s: float
    backend: str = "gloo"
    store_s: float = 40.0
    ranks: int = RANKS
    reports: int = RANKS
    environment: dict[str, str] = field(default_factory=dict)
    on_gpu: bool = True


MANY = ("many_ranks", "many_ranks_in_a_graph", "many_ranks_skip")
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
GROUPS: dict[str, Group] = {
    "layers": Group(
        ("small_shapes", "flash_layer", "two_layers_in_a_graph", "two_streams", "two_operators"),
        180.0,
    ),
    "create": Group(
        (
            "unequal_arguments",
            "a_rank_fails",
            "world_and_subgroup",
            "rendezvous_counts",
            "probe_in_wrong_order",
            "foreign_rendezvous",
        ),
        150.0,
        backend="nccl",
        store_s=12.0,
    ),
    "faults": Group(
        (
            "skipped_call",
            "skipped_layer",
            "delayed_role",
            "calls_after_abort",
            "reset_while_spinning",
            "reset_names_missing_ranks",
            "overlapping_graphs",
            "squatters",
            "squatters_in_green_contexts",
        ),
        150.0,
    ),
    "death": Group(("peer_killed",), 60.0, reports=1),
    "connections": Group(
        ("tiny_eager_and_graphs", "squatters", "squatters_in_green_contexts", "two_streams"),
        90.0,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    "soak": Group(
        ("soak_tiny", "soak_small_ring", "soak_flash"),
        120.0 + 0.002 * soak_replays() + 0.01 * soak_flash_replays(),
    ),
    "speed": Group(("speed",), 150.0),
    "ranks-4": Group(MANY, 150.0, ranks=4, reports=4, environment=SHARED),
    "ranks-8": Group(MANY, 200.0, ranks=8, reports=8, environment=SHARED),
    # Without a GPU: the launcher itself.
    "selftest": Group(("passes", "fails_on_one_rank", "meets_again"), 60.0, on_gpu=False),
    "cpu": Group(
        (
            "cpu_unequal_arguments",
            "cpu_a_rank_fails",
            "cpu_rendezvous_counts",
            "cpu_reset",
            "cpu_probe_serialised",
        ),
        90.0,
        on_gpu=False,
    ),
    "selftest-hang": Group(("hangs",), 25.0, on_gpu=False),
}
GPU_SCENARIOS = [
    (group, name) for group, what in GROUPS.items() if what.on_gpu for name in what.scenarios
]
