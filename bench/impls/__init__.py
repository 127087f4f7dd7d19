"""Implementations of the layer that are timed: ours and its peers, an adapter each."""

from bench.impls.base import Impl, Session
from bench.impls.gcmoe_layer import GcMoE
from bench.impls.humming_w4a8 import HummingW4A8
from bench.impls.mega_moe_sm90 import MegaMoESm90
from bench.impls.torch_unfused import TorchUnfused

IMPLS: dict[str, Impl] = {
    impl.name: impl for impl in (GcMoE(), MegaMoESm90(), HummingW4A8(), TorchUnfused())
}
"""By name, in the order in which they are shown."""

__all__ = ["IMPLS", "Impl", "Session"]
