"""What an adapter of an implementation offers to the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case
from bench.checks import Rule
from bench.data import Inputs
from bench.world import World
from gcmoe.numerics import ExpertWeights, Packed


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights of this rank, in our packed form and as a checkpoint has them.

    The checkpoint form lives only while peers convert it.
    """

    packed: Packed
    checkpoint: ExpertWeights | None

    @property
    def experts(self) -> ExpertWeights:
        """The checkpoint form, which is made if any peer takes part."""
        assert self.checkpoint is not None
        return self.checkpoint


class Session(ABC):
    """One implementation and variant, ready to run the layers of one case."""

    rule: Rule

    @abstractmethod
    def layer(self, n: int) -> None:
        """Enqueue layer n on the current stream: read ``inputs[n].x``, write its results."""

    @abstractmethod
    def result(self, n: int) -> Tensor:
        """y of layer n, bf16 [T, H], after the device has finished. May compute, is never timed."""

    @abstractmethod
    def clear(self) -> None:
        """Overwrite all results, so that only what is computed later can pass the check."""

    def check(self) -> None:
        """Wait for the device; raise what it reports."""
        torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        """Columns of the row beyond the common ones."""
        return {}

    def close(self) -> None:  # noqa: B027 (optional)
        """Free what the session owns. Its graphs are gone already."""


class Impl(ABC):
    """An implementation of the layer."""

    name: str
    install: str
    """How to get it."""
    whole_layer = True
    """False: only a part of the layer, which its rows say."""

    @abstractmethod
    def absent(self) -> str:
        """Why it cannot run here; empty if it can. Looks at packages only, not at the GPU."""

    @abstractmethod
    def unfit(self, case: Case, variant: str = "") -> str:
        """Why it does not offer the case, or a variant of it; empty if it does."""

    @abstractmethod
    def variants(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """Its variants in a run that wants these of our own layer."""

    @abstractmethod
    def bytes_per_layer(self, case: Case) -> float:
        """Device memory of the converted weights of one layer."""

    def prepare(self, cases: list[Case], limit_s: float) -> str:
        """Compile ahead what the cases need, within a time limit; returns what is missing."""
        return ""

    @abstractmethod
    def convert(self, case: Case, weights: LayerWeights) -> Any:
        """The weights as it wants them."""

    @abstractmethod
    def open(
        self, case: Case, variant: str, weights: list[Any], inputs: list[Inputs], world: World
    ) -> Session:
        """A session; collective where there are several ranks.

        Args:
            weights: what :meth:`convert` returned for each layer; sets may recur.
        """

    def release(self) -> None:  # noqa: B027 (optional)
        """Free what sessions of one model share."""


def missing_package(package: str, version: str) -> str:
    """What is wrong with an installed package; empty if it has the known version."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"
    return "" if found == version else f"{package} is {found}, the bench knows {version}"
