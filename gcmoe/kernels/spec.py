"""What a kernel is compiled for and how it is launched; no DSL, as the launcher uses it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from gcmoe.plan import LayerPlan
from gcmoe.plan.targets import Family, family_of
from gcmoe.protocol import Role, WorkspaceShape

ParameterKind = Literal["peers", "u64", "i64", "i32", "tensor_map"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One kernel parameter; ``peers`` is an array of R u64 by value, ``tensor_map`` 128 bytes."""

    name: str
    kind: ParameterKind


def _parameters(*pairs: tuple[str, ParameterKind]) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, kind) for name, kind in pairs)


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The compile-time configuration of the kernels of a layer; part of the cache key.

    Args:
        role: which kernel.
        arch: target, for example ``sm_90a``.
        shape: workspace constants.
        num_experts: E over all ranks.
        clamp: limit of the clamped SwiGLU, None for none.
        tiles: tile plan of the compute kernel, a ``TilePlan`` or ``TilePlanSm100`` by family.
        dispatch_ctas: grid of dispatch, one CTA per SM.
        trace: record in-kernel timestamps; costs nothing when off.
        jitter_ns: for tests, every CTA starts late by a pseudo-random time below this; nothing is
            emitted when 0.
        prefetch: whether compute guesses its first weights before it knows the routes.
    """

    role: Role
    arch: str
    shape: WorkspaceShape
    num_experts: int
    clamp: float | None
    tiles: Any
    dispatch_ctas: int
    trace: bool = False
    jitter_ns: int = 0
    prefetch: bool = True

    def __post_init__(self) -> None:
        if self.shape.has_atoms != (self.family == "sm100"):
            raise ValueError(
                f"arch = {self.arch!r}: the plan is for another family "
                f"(scale_columns = {self.shape.scale_columns})"
            )

    @property
    def family(self) -> Family:
        """The family of kernels of ``arch``."""
        return family_of(self.arch)

    @property
    def symbol(self) -> str:
        """Name of the kernel in its cubin."""
        return f"gcmoe_{self.role.name.lower()}_0"

    @property
    def peers_symbol(self) -> str:
        """Name of the peer table parameter inside the kernel; the first one of every kernel."""
        return f"{self.symbol}_param_0"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In launch order. Every pointer is a device address in a u64.

        ``fault_record`` is host-mapped; ``trace`` is [grid][TRACE_WORDS] u64
        (:mod:`gcmoe.kernels.trace_words`) and unused without ``trace``.
        """
        head: tuple[tuple[str, ParameterKind], ...] = (("peers", "peers"), ("workspace", "u64"))
        tail: tuple[tuple[str, ParameterKind], ...] = (
            ("fault_record", "u64"),
            ("trace", "u64"),
            ("rank", "i32"),
            ("spin_budget_ns", "i64"),
        )
        if self.role == Role.DISPATCH:
            return _parameters(
                *head,
                ("x", "u64"),
                ("topk_ids", "u64"),
                ("topk_weights", "u64"),
                *tail,
                ("num_tokens", "i32"),
                ("ids_are_int64", "i32"),
                ("call", "i32"),
            )
        if self.role == Role.COMPUTE:
            maps: list[tuple[str, ParameterKind]] = [
                (f"ring_rows_{width}", "tensor_map") for width in self.tiles.widths
            ]
            if self.family == "sm100":
                return _parameters(
                    *head,
                    ("w13_scale", "u64"),
                    ("w2_scale", "u64"),
                    *tail,
                    ("w13_codes", "tensor_map"),
                    ("w2_codes", "tensor_map"),
                    *maps,
                )
            return _parameters(
                *head,
                ("w13", "u64"),
                ("w13_row_scale", "u64"),
                ("w2", "u64"),
                ("w2_row_scale", "u64"),
                *tail,
                *maps,
            )
        return _parameters(
            *head,
            ("topk_ids", "u64"),
            ("y", "u64"),
            *tail,
            ("num_tokens", "i32"),
            ("ids_are_int64", "i32"),
            ("compute_ctas", "i32"),
        )


def kernel_spec(
    plan: LayerPlan,
    role: Role,
    arch: str,
    *,
    trace: bool = False,
    jitter_ns: int = 0,
    prefetch: bool = True,
) -> KernelSpec:
    """The spec of one role of a plan; ``prefetch`` concerns compute only."""
    if role == Role.FINALIZE:  # one for all sizes of calls: it knows no blocks
        plan = plan.for_tokens(plan.config.max_tokens)
    return KernelSpec(
        role=role,
        arch=arch,
        shape=plan.workspace,
        num_experts=plan.config.num_experts,
        clamp=plan.config.clamp,
        tiles=plan.tiles,
        dispatch_ctas=plan.dispatch_sms,
        trace=trace,
        jitter_ns=jitter_ns,
        prefetch=prefetch or role != Role.COMPUTE,
    )


def call_specs(plan: LayerPlan, arch: str, **options: Any) -> dict[Role, KernelSpec]:
    """The specs of a call that runs as ``plan`` says, in launch order; options as of
    :func:`kernel_spec`."""
    roles = (Role.DISPATCH, Role.COMPUTE, Role.FINALIZE)
    return {role: kernel_spec(plan, role, arch, **options) for role in roles}


def kernel_specs(plan: LayerPlan, arch: str, **options: Any) -> tuple[KernelSpec, ...]:
    """The specs of all kernels of an operator, each once: of all sizes of calls."""
    specs = (call_specs(each, arch, **options).values() for each in plan.classes)
    return tuple(dict.fromkeys(spec for of_call in specs for spec in of_call))
