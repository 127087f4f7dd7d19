"""The plan of a run, printed; needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cases import GPU, VARIANTS, Case
from bench.impls import Impl
from bench.runner import Options
from gcmoe.plan import make_plan
from gcmoe.plan.fitted import CONSTANTS
from gcmoe.plan.predict import Prediction, predict

WEIGHTS_S = 12.0
"""Device time to make and convert the weights of a model."""
CASE_S, SESSION_S = 2.0, 1.5
"""Oracle of a case; opening, capturing and checking one implementation and variant."""
PEER_FACTOR = 1.6
"""A session's layer over ours, a mean over peers and variants, for estimates."""


def prediction_of(case: Case) -> Prediction:
    """What the model of the plan says about our own layer on an H200."""
    return predict(make_plan(case.config(), case.ranks), GPU, case.tokens, CONSTANTS)


def session_seconds(case: Case, options: Options) -> float:
    """Estimated device time of one implementation and variant."""
    layer_us = PEER_FACTOR * prediction_of(case).total_us
    replays = (options.replays + 3) * (options.layers + 1)
    return SESSION_S + replays * layer_us * 1e-6 + options.sustained_s


def estimate_seconds(cases: Sequence[Case], usable: Sequence[Impl], options: Options) -> float:
    """Estimated device time of a run."""
    total = WEIGHTS_S * len({case.model for case in cases})
    for case in cases:
        sessions = sum(
            not impl.unfit(case, variant)
            for impl in usable
            for variant in impl.variants(options.variants)
        )
        total += CASE_S + sessions * session_seconds(case, options)
    return total


def state_text(state: dict[str, str]) -> str:
    """Whether an implementation takes part; why not, and how to get it."""
    if state["state"] == "present":
        return "present"
    remedy = f"; {state['install']}" if state["state"] == "absent" else ""
    return f"{state['state']}: {state['reason']}{remedy}"


def show(
    cases: Sequence[Case],
    variants: Sequence[str],
    usable: Sequence[Impl],
    states: dict[str, dict[str, Any]],
    options: Options,
) -> int:
    """Print cases, variants, implementations and the estimated device time."""
    print(f"{len(cases)} cases on {cases[0].ranks} rank(s), {options.layers} layers a graph")
    for case in cases:
        plan, found = make_plan(case.config(), case.ranks), prediction_of(case)
        print(
            f"  {case.model:<22} T = {case.tokens:<4} capacity {plan.config.max_tokens:<5} "
            f"experts {case.local_experts} a rank, about {found.routing.touched:.1f} touched, "
            f"floor {found.floor_us:.0f} us, predicted {found.total_us:.0f} us, "
            f"{plan.dispatch_sms}+{plan.compute_sms} SMs"
        )
    print("variants of gcmoe")
    for name in variants:
        print(f"  {name:<14} {VARIANTS[name].why}")
    print("implementations")
    for name, state in states.items():
        print(f"  {name:<14} {state_text(state)}")
    print(f"estimated device time: {estimate_seconds(cases, usable, options):.0f} s")
    return 0
