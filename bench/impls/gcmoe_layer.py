"""Our own layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

import gcmoe
from bench.cases import VARIANTS, Case, Variant
from bench.checks import SAME_ROUNDING
from bench.data import Inputs, device_arch, device_family
from bench.impls.base import Impl, LayerWeights, Session
from bench.world import World
from gcmoe.kernels.build import get_kernel
from gcmoe.kernels.spec import kernel_specs
from gcmoe.numerics import Packed
from gcmoe.plan import LayerPlan, make_plan
from gcmoe.runtime.agreement import arguments_fingerprint, require_whole_ring

PLAN_OPTIONS = ("dispatch_sms", "ring_slots", "late_compute")
KERNEL_OPTIONS = ("prefetch",)


class GcMoESession(Session):
    """An operator with a bound layer for each set of inputs."""

    rule = SAME_ROUNDING

    def __init__(self, op: gcmoe.MoE, packed: list[Packed], inputs: list[Inputs]) -> None:
        self.op = op
        self._inputs = inputs
        self._layers = [op.bind(weights) for weights in packed]

    def layer(self, n: int) -> None:
        one = self._inputs[n]
        self._layers[n](one.x, one.ids, one.weights, out=one.y)

    def result(self, n: int) -> Tensor:
        return self._inputs[n].y

    def clear(self) -> None:
        for one in self._inputs:
            one.y.zero_()

    def check(self) -> None:
        self.op.check(synchronize=True)

    def facts(self) -> dict[str, Any]:
        plan = self.op.plan.for_tokens(len(self._inputs[0].x))
        return {
            "capacity": self.op.config.max_tokens,
            "config": asdict(self.op.config),
            "plan": {
                "dispatch_sms": plan.dispatch_sms,
                "compute_sms": plan.compute_sms,
                "ring_slots": plan.workspace.num_slots,
                "tiles": asdict(plan.tiles),
            },
            "partition": self.op.report.describe(),
            "fingerprint": arguments_fingerprint(plan, serial=self.op.serial),
        }

    def close(self) -> None:
        self.op.close()


def plan_of(case: Case, chosen: Variant) -> LayerPlan:
    """The plan of a variant.

    Raises:
        ValueError: a limit is exceeded.
    """
    options = {k: v for k, v in chosen.options.items() if k in PLAN_OPTIONS}
    return make_plan(chosen.config(case), case.ranks, family=device_family(), **options)


class GcMoE(Impl):
    """Adapter of :class:`gcmoe.MoE`."""

    name = "gcmoe"
    install = "part of this package"

    def absent(self) -> str:
        return ""

    def unfit(self, case: Case, variant: str = "") -> str:
        if not variant:
            return ""
        chosen = VARIANTS[variant]
        try:
            plan = plan_of(case, chosen)
            if chosen.options.get("serial"):
                require_whole_ring(plan)
        except ValueError as error:
            return str(error)
        return ""

    def variants(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        return wanted

    def bytes_per_layer(self, case: Case) -> float:
        return case.local_experts * case.expert_bytes

    def convert(self, case: Case, weights: LayerWeights) -> Packed:
        return weights.packed

    def open(
        self, case: Case, variant: str, weights: list[Any], inputs: list[Inputs], world: World
    ) -> GcMoESession:
        return self.open_traced(case, variant, weights, inputs, world, trace=False)

    def open_traced(
        self,
        case: Case,
        variant: str,
        weights: list[Any],
        inputs: list[Inputs],
        world: World,
        *,
        trace: bool,
    ) -> GcMoESession:
        """A session whose kernels record timestamps, if ``trace``."""
        chosen = VARIANTS[variant]
        op = gcmoe.MoE(chosen.config(case), world.group, trace=trace, **chosen.options)
        try:
            return GcMoESession(op, weights, inputs)
        except BaseException:
            op.close()
            raise


def compile_kernels(
    cases: list[Case], variants: tuple[str, ...], *, trace: bool, say: Callable[[str], None]
) -> int:
    """Fill the kernel cache for these cases; needs no GPU. Returns how many kernels there are."""
    seen = set()
    for case in cases:
        for name in variants:
            chosen: Variant = VARIANTS[name]
            why = GcMoE().unfit(case, name)
            if why:
                say(f"{case.model} T = {case.tokens} {name}: {why}")
                continue
            of_kernel = {k: v for k, v in chosen.options.items() if k in KERNEL_OPTIONS}
            plan = plan_of(case, chosen)
            for traced in (False, True) if trace else (False,):
                for spec in kernel_specs(plan, device_arch(), trace=traced, **of_kernel):
                    if spec in seen:
                        continue
                    seen.add(spec)
                    start = time.perf_counter()
                    kernel = get_kernel(spec)
                    spent = time.perf_counter() - start
                    how = "cached" if kernel.from_cache else f"{spent:.1f} s"
                    say(f"{case.model} T = {case.tokens} {name} {spec.role.name.lower()}: {how}")
    return len(seen)
