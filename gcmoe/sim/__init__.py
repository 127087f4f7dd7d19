"""The simulator: the protocol's own text under any schedule, on any machine."""

from gcmoe.sim.config import SimConfig, random_config
from gcmoe.sim.run import ExploreResult, SimResult, explore, simulate

__all__ = [
    "ExploreResult",
    "SimConfig",
    "SimResult",
    "explore",
    "random_config",
    "simulate",
]
