"""What ranks derive from their arguments alike, and what they compare before they share memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gcmoe.config import MoEConfig
from gcmoe.kernels.build import source_digest
from gcmoe.plan import LayerPlan, make_plan
from gcmoe.plan.targets import Family
from gcmoe.protocol import FIRST_GENERATION, Role
from gcmoe.runtime.modules import LoadedKernel

FINALIZE_ELEMENTS = 8 * 512  # of y, per CTA: 16 bytes a thread
# Dispatch waits for peers and compute for dispatch, both from the start: the one that knows the
# peer expires first and writes the fault record.
BUDGET_SHARE = {Role.DISPATCH: 1.0, Role.COMPUTE: 1.25, Role.FINALIZE: 1.25}


def finalize_grid(config: MoEConfig, sms: int) -> int:
    """CTAs of finalize: enough for a full batch, at most one per SM; constant per operator."""
    work = -(-config.max_tokens * config.hidden // FINALIZE_ELEMENTS)
    return max(1, min(sms, work))


def initial_words(initial: Any) -> tuple[int, int, int]:
    """(generation, epoch, arrivals) that an operator's counters start at.

    Raises:
        TypeError: not three integers.
    """
    if initial is None:
        return FIRST_GENERATION, 0, 0
    if (
        not isinstance(initial, tuple | list)
        or len(initial) != 3
        or not all(isinstance(word, int) for word in initial)
    ):
        raise TypeError(f"initial must be (generation, epoch, arrivals), got {initial!r}")
    return initial[0], initial[1], initial[2]


def require_config(config: Any) -> None:
    """Raises TypeError for anything but a :class:`MoEConfig`."""
    if not isinstance(config, MoEConfig):
        raise TypeError(f"config must be a MoEConfig, got {type(config).__name__}")


def arguments_fingerprint(plan: LayerPlan, **others: Any) -> dict[str, str]:
    """What all ranks must ask for alike, by name; compared before any kernel is loaded."""
    values = {"config." + name: str(value) for name, value in asdict(plan.config).items()}
    values["dispatch_sms"] = str(plan.dispatch_sms)
    values["ring_slots"] = str(plan.workspace.num_slots)
    values["late_compute"] = str(plan.late_ctas > 0)
    values |= {name: str(value) for name, value in others.items()}
    values["protocol and kernel source"] = source_digest()[:16]
    return values


def build_fingerprint(
    plan: LayerPlan, kernels: Sequence[Mapping[Role, LoadedKernel]]
) -> dict[str, str]:
    """What all ranks must have got alike, by name; long values as checksums.

    Args:
        plan: of the operator.
        kernels: of each class of calls, by role.
    """
    text = json.dumps(asdict(plan), sort_keys=True, default=str)
    values = {"SMs": str(plan.num_sms), "dispatch_sms": str(plan.dispatch_sms)}
    values["plan"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    for n, of_call in enumerate(kernels):
        for role, kernel in of_call.items():
            values[f"kernel {role.name.lower()} {n}"] = kernel.checksum[:16]
    return values


def draft_plan(
    config: MoEConfig,
    num_ranks: int,
    dispatch_sms: int | None,
    ring_slots: int | None,
    late_compute: bool | None,
    serial: bool,
    family: Family,
) -> LayerPlan:
    """The plan before the driver has split the SMs; arguments as of the operator.

    Raises:
        ValueError: a limit is exceeded.
    """
    plan = make_plan(
        config,
        num_ranks,
        dispatch_sms=dispatch_sms,
        ring_slots=ring_slots,
        late_compute=late_compute,
        family=family,
    )
    if serial:
        require_whole_ring(plan)
    return plan


def require_whole_ring(plan: LayerPlan) -> None:
    """The token ring holds every block of a replay.

    Raises:
        ValueError: it does not.
    """
    shape = plan.workspace
    if shape.max_blocks > shape.num_slots:
        raise ValueError(
            f"serial = True needs a ring for all {shape.max_blocks} blocks of a replay, it has "
            f"{shape.num_slots} slots: dispatch would wait for compute, which waits for dispatch"
        )
