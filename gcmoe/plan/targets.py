"""The targets that kernels are compiled for, and what the plan must know of each."""

from __future__ import annotations

from typing import Literal

Family = Literal["sm90", "sm100"]

FAMILIES: dict[str, Family] = {
    "sm_90a": "sm90",
    "sm_100a": "sm100",
    "sm_100f": "sm100",
    "sm_103a": "sm100",
}
"""By target. Kernels, packed weights and the numerics recipe follow the family; sm_100f is the one
build for B200 and B300."""

USUAL_SMS: dict[Family, int] = {"sm90": 132, "sm100": 148}
"""SMs of H200; of B200 and B300. A device's own number is asked at run time."""


def family_of(arch: str) -> Family:
    """The family of a target.

    Raises:
        ValueError: there are no kernels for it.
    """
    if arch not in FAMILIES:
        raise ValueError(f"arch = {arch!r}: one of {', '.join(FAMILIES)}")
    return FAMILIES[arch]
