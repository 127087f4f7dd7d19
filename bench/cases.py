"""What is timed: models, tokens per rank, variants of the layer, and named presets of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gcmoe.config import MoEConfig
from gcmoe.models import Model, get_model, share
from gcmoe.plan import make_plan, predict
from gcmoe.plan.gpus import get_gpu
from gcmoe.plan.layer import USUAL_CAPACITIES, capacity_for
from gcmoe.plan.routing import expected_routing

SHARE_OF = 8
"""The expert-parallel width whose one rank is one rank here."""
MODELS = ("deepseek-v4-flash", "deepseek-v4.1-flash", "glm-5.2", "deepseek-v4-pro")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GPU = get_gpu("h200")
"""Whose read rate gives the floor."""


@dataclass(frozen=True, slots=True)
class Case:
    """One rank's share of a model, on each of R ranks, with T tokens each.

    Args:
        model: key of ``gcmoe.models.MODELS``.
        tokens: T, tokens of each rank.
        ranks: R. The layer has R times the experts of a share, so rows per expert do not depend
            on R.
    """

    model: str
    tokens: int
    ranks: int = 1

    @property
    def share(self) -> Model:
        return share(self.model, SHARE_OF)

    @property
    def local_experts(self) -> int:
        """EL, the experts of one rank."""
        return self.share.num_experts

    def config(self, capacity: int | None = None) -> MoEConfig:
        """The layer at a capacity, by default the smallest usual one."""
        model = replace(self.share, num_experts=self.ranks * self.local_experts)
        return model.config(capacity or capacity_for(self.tokens))

    @property
    def expert_bytes(self) -> float:
        """MXFP4 bytes of one expert."""
        return predict.mxfp4_bytes(self.config())

    def floor_us(self, touched_experts: float) -> float:
        """Microseconds to read the touched experts of one rank."""
        return predict.floor_us(self.config(), touched_experts, GPU)

    @property
    def expected_touched(self) -> float:
        """Local experts that uniform routing touches, in the mean."""
        return expected_routing(make_plan(self.config(), self.ranks), self.tokens).touched


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the layer.

    Args:
        options: keyword arguments of ``gcmoe.MoE``.
        capacity: ``max_tokens`` as a multiple of the live tokens; None is the usual capacity.
        why: what the comparison with the default says.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    capacity: int | None = None
    why: str = ""

    def config(self, case: Case) -> MoEConfig:
        return case.config(self.capacity and self.capacity * case.tokens)


DEFAULT = "default"
VARIANTS: dict[str, Variant] = {
    DEFAULT: Variant(why="what a user gets"),
    "dispatch-8": Variant({"dispatch_sms": 8}, why="SMs of dispatch"),
    "dispatch-16": Variant({"dispatch_sms": 16}, why="SMs of dispatch"),
    "dispatch-24": Variant({"dispatch_sms": 24}, why="SMs of dispatch"),
    "dispatch-32": Variant({"dispatch_sms": 32}, why="SMs of dispatch"),
    "serial": Variant({"serial": True}, why="compute starts when dispatch has ended"),
    "green-contexts": Variant({"green_contexts": True}, why="disjoint SMs by two green contexts"),
    "late-compute": Variant({"late_compute": True}, why="compute takes over the dispatch SMs"),
    "no-late-compute": Variant({"late_compute": False}, why="the dispatch SMs idle afterwards"),
    "no-prefetch": Variant({"prefetch": False}, why="no weights before the routes are known"),
    "capacity-1x": Variant(capacity=1, why="max_tokens equals the live tokens"),
    "capacity-8x": Variant(capacity=8, why="max_tokens is 8 times the live tokens"),
    "capacity-64x": Variant(capacity=64, why="max_tokens is 64 times the live tokens"),
}
"""Variants of ``gcmoe`` by name."""
ABLATIONS = tuple(name for name in VARIANTS if name != DEFAULT)
CUSTOM = "custom"


def custom_variant(words: Sequence[str]) -> Variant:
    """A variant from words like ``dispatch_sms=16``; ``capacity`` is a multiple of the live tokens.

    Raises:
        ValueError: a word has no ``=`` or its value is no integer.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not text.lstrip("-").isdigit():
            raise ValueError(f"{word!r}: must be NAME=INTEGER")
        options[name] = int(text)
    return Variant(options, capacity=options.pop("capacity", None), why=" ".join(words))


@dataclass(frozen=True, slots=True)
class Preset:
    """A named selection."""

    models: tuple[str, ...]
    tokens: tuple[int, ...]
    impls: tuple[str, ...]
    variants: tuple[str, ...] = (DEFAULT,)


PEERS = ("mega_moe_sm90", "humming_w4a8")
PRESETS = {
    "smoke": Preset(MODELS[:1], (1, 8, 64), ("gcmoe",)),
    "peers": Preset(MODELS[:2], TOKENS, ("gcmoe", *PEERS)),
    "models": Preset(MODELS, TOKENS, ("gcmoe",)),
    "ablation": Preset(MODELS[:1], (1, 8, 64, 256), ("gcmoe",), (DEFAULT, *ABLATIONS)),
    "full": Preset(MODELS, TOKENS, ("gcmoe", *PEERS, "torch_unfused")),
}


def make_cases(models: tuple[str, ...], tokens: tuple[int, ...], ranks: int) -> list[Case]:
    """All cases of a run, model by model.

    Raises:
        ValueError: a model is unknown, or a number of tokens is outside [1, 4096].
    """
    for name in models:
        get_model(name)
    for count in tokens:
        if not 1 <= count <= USUAL_CAPACITIES[-1]:
            raise ValueError(f"tokens = {count}: from 1 to {USUAL_CAPACITIES[-1]}")
    return [Case(model, count, ranks) for model in models for count in tokens]
