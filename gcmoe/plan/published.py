"""Layer times that others published, to stand beside a prediction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """A time of another implementation of the same idea, whole layer.

    Args:
        gpu: key of :data:`gcmoe.plan.gpus.GPUS`.
        model: key of ``gcmoe.models.MODELS``.
        ranks: R.
        num_tokens: T of each rank.
        time_us: microseconds.
        source: who says so.
    """

    gpu: str
    model: str
    ranks: int
    num_tokens: int
    time_us: float
    source: str


PUBLISHED = (
    Published("h20", "deepseek-v4.1-flash", 8, 8, 284.3, "GC-MoE paper, routed experts"),
    Published("b300", "deepseek-v4.1-flash", 8, 1, 59.4, "GC-MoE paper, routed experts"),
)


def find_published(gpu: str, model: str, ranks: int, num_tokens: int) -> Published | None:
    """The point of this case, if there is one."""
    for point in PUBLISHED:
        if (point.gpu, point.model, point.ranks, point.num_tokens) == (
            gpu.lower(),
            model,
            ranks,
            num_tokens,
        ):
            return point
    return None
