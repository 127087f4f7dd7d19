"""``gcmoe compile``: fills the kernel cache for a model. Needs the kernel language, no GPU."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from gcmoe.config import MoEConfig
from gcmoe.errors import KernelNotCached
from gcmoe.kernels.build import DSL_PACKAGE, cache_directory, dsl_version, get_kernel
from gcmoe.kernels.spec import kernel_specs
from gcmoe.models import MODELS, Model, get_model, share
from gcmoe.plan import LayerPlan, make_plan
from gcmoe.plan.targets import FAMILIES, USUAL_SMS, family_of
from gcmoe.protocol import Role

DEFAULT_CAPACITIES = (8, 64, 256)
SHAPE_OPTIONS = ("hidden", "intermediate", "experts", "top_k")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gcmoe compile``."""
    parser.add_argument("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    for name in SHAPE_OPTIONS:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, metavar="N", help="instead of --model, or on top")
    parser.add_argument("--clamp", type=float, metavar="L", help="limit of the clamped SwiGLU")
    parser.add_argument("--ranks", type=int, default=1, metavar="R", help="default: 1")
    parser.add_argument(
        "--share", action="store_true", help="the share of one of R ranks, as a one-GPU layer"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        nargs="+",
        default=list(DEFAULT_CAPACITIES),
        metavar="T",
        help="capacities; default: 8 64 256",
    )
    parser.add_argument("--sms", type=int, metavar="N", help="of the GPU; 132, on Blackwell 148")
    parser.add_argument("--dispatch-sms", type=int, metavar="N", help="default: by capacity")
    parser.add_argument("--ring-slots", type=int, metavar="S", help="default: by capacity")
    parser.add_argument("--arch", default="sm_90a", choices=list(FAMILIES), help="default: sm_90a")
    parser.add_argument("--out", metavar="DIR", help="default: the cache of this user")
    parser.add_argument("--trace", action="store_true", help="kernels with timestamps")


def model_of(ns: argparse.Namespace) -> Model:
    """The layer that the options describe.

    Raises:
        ValueError: the model is unknown, or shape options are missing.
    """
    given = {name: getattr(ns, name) for name in SHAPE_OPTIONS if getattr(ns, name) is not None}
    if "experts" in given:
        given["num_experts"] = given.pop("experts")
    if ns.clamp is not None:
        given["clamp"] = ns.clamp
    if ns.model is not None:
        model = replace(get_model(ns.model), **given)
    elif all(getattr(ns, name) is not None for name in SHAPE_OPTIONS):
        model = Model(name="layer", **given)
    else:
        raise ValueError("give --model, or --hidden, --intermediate, --experts and --top-k")
    return share(model, ns.ranks) if ns.share else model


def plan_of(config: MoEConfig, ranks: int, ns: argparse.Namespace) -> LayerPlan:
    """The plan of one capacity, as the options ask."""
    family = family_of(ns.arch)
    return make_plan(
        config,
        ranks,
        ns.sms or USUAL_SMS[family],
        dispatch_sms=ns.dispatch_sms,
        ring_slots=ns.ring_slots,
        family=family,
    )


def compile_layer(plan: LayerPlan, ns: argparse.Namespace, out: str) -> list[tuple[str, ...]]:
    """Compile or find the kernels of one capacity; a row of the report for each."""
    rows: list[tuple[str, ...]] = []
    for spec in kernel_specs(plan, ns.arch, trace=ns.trace):
        start = time.perf_counter()
        kernel = get_kernel(spec, out)
        seconds = time.perf_counter() - start
        rows.append(
            (
                spec.role.name.lower(),
                str(plan.config.max_tokens),
                "-" if spec.role == Role.FINALIZE else str(spec.shape.block_rows),
                str(kernel.threads),
                str(kernel.registers or "?"),
                str(kernel.smem_bytes),
                str(len(kernel.cubin)),
                f"{seconds:.1f}",
                "cached" if kernel.from_cache else "compiled",
            )
        )
    return rows


def main(ns: argparse.Namespace) -> int:
    """Compile; 0, or 2 when the options name no layer."""
    ranks = 1 if ns.share else ns.ranks
    try:
        model = model_of(ns)
        plans = [plan_of(model.config(tokens), ranks, ns) for tokens in ns.max_tokens]
    except (TypeError, ValueError) as error:
        print(f"gcmoe compile: {error}")
        return 2
    if dsl_version() is None:
        raise KernelNotCached(f"{DSL_PACKAGE} is not installed: pip install 'gc-moe[compile]'")
    out = str(cache_directory(ns.out))
    print(f"{model.name}, R = {ranks}, {ns.arch}, into {out}")
    head = ("role", "tokens", "block", "threads", "regs", "smem", "cubin", "seconds", "")
    line = "{:<9} {:>6} {:>5} {:>7} {:>5} {:>7} {:>8} {:>8}  {}"
    print(line.format(*head).rstrip())
    for plan in plans:
        for row in compile_layer(plan, ns, out):
            print(line.format(*row), flush=True)
    return 0
