"""Host decisions without CUDA: pure functions over tables."""

from gcmoe.plan.layer import LayerPlan, make_plan

__all__ = ["LayerPlan", "make_plan"]
