"""Shapes of published MoE models whose experts are plain or clamped SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gcmoe.config import MoEConfig


@dataclass(frozen=True, slots=True)
class Model:
    """The routed experts of one MoE layer of a model.

    Args:
        name: key in :data:`MODELS`, with ``/R`` behind it for the share of one of R ranks.
        hidden, intermediate, num_experts, top_k, clamp: as in :class:`gcmoe.MoEConfig`.
    """

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    clamp: float | None = None

    def config(self, max_tokens: int) -> MoEConfig:
        """The layer at a capacity of ``max_tokens`` tokens a rank.

        Raises:
            ValueError: a limit of :class:`gcmoe.MoEConfig` is exceeded.
        """
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            max_tokens=max_tokens,
            clamp=self.clamp,
        )


_TABLE = (
    Model("deepseek-v3", 7168, 2048, 256, 8),
    Model("deepseek-v4-flash", 4096, 2048, 256, 6, 10.0),
    Model("deepseek-v4.1-flash", 5120, 2304, 384, 6, 10.0),
    # The clamp of V4-Pro is taken from its siblings; its configuration does not state it.
    Model("deepseek-v4-pro", 7168, 3072, 384, 6, 10.0),
    Model("glm-5.2", 6144, 2048, 256, 8),
    Model("glm-5.3-flash", 4096, 2048, 288, 8, 10.0),
    Model("kimi-k2", 7168, 2048, 384, 8),
    Model("minimax-m2", 3072, 1536, 256, 8),
    Model("qwen3.5-397b", 4096, 1024, 512, 10),
)
MODELS: dict[str, Model] = {model.name: model for model in _TABLE}
"""By name, in lower case."""


def get_model(name: str) -> Model:
    """The model called ``name``.

    Raises:
        ValueError: there is none; lists the names.
    """
    if name not in MODELS:
        raise ValueError(f"model = {name!r}: must be one of {', '.join(MODELS)}")
    return MODELS[name]


def share(model: Model | str, ranks: int) -> Model:
    """What one of ``ranks`` ranks computes, as a layer of its own: E = EL, one rank.

    It has the weight bytes, tiles and rows per expert of a rank in the group, without a peer.

    Raises:
        ValueError: ``ranks`` is not positive, does not divide E, or leaves fewer experts than k.
    """
    if isinstance(model, str):
        model = get_model(model)
    if ranks <= 0 or model.num_experts % ranks:
        raise ValueError(f"ranks = {ranks}: must divide the {model.num_experts} experts")
    local = model.num_experts // ranks
    if local < model.top_k:
        raise ValueError(f"ranks = {ranks}: leaves {local} experts, fewer than k = {model.top_k}")
    return replace(model, name=f"{model.name}/{ranks}", num_experts=local)
