"""Markers and options of the test suite.

``gpu`` tests need one Hopper GPU (compute capability 9.0), ``gpus(n)`` tests n of them. Without
them they are skipped, and the skip names what was found; ``GCMOE_REQUIRE_GPU=1`` makes such a skip
a failure. ``pytest -m gpu --compile-only`` runs the GPU tests everywhere: they then only compile
the kernels that they need.
"""

from __future__ import annotations

import os
from functools import cache

import pytest

HOPPER = (9, 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compile-only",
        action="store_true",
        help="gpu tests compile the kernels they need and stop there; needs no GPU",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``gpus(n)`` implies ``gpu``, before ``-m`` deselects."""
    for item in items:
        if item.get_closest_marker("gpus") and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.gpu)


@cache
def lacking_gpus(wanted: int) -> str:
    """Why this machine lacks ``wanted`` Hopper GPUs, as the probed fact; empty if it has them."""
    import torch

    if not torch.cuda.is_available():
        build = "a CPU build" if torch.version.cuda is None else f"built for {torch.version.cuda}"
        return f"torch.cuda.is_available() is False (torch {torch.__version__}, {build})"
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if found.count(HOPPER) < wanted or HOPPER not in found[:1]:
        names = ", ".join(f"{major}.{minor}" for major, minor in found)
        return f"{wanted} devices of compute capability 9.0 wanted, found [{names}]"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or item.config.getoption("--compile-only"):
        return
    marker = item.get_closest_marker("gpus")
    fact = lacking_gpus(int(marker.args[0]) if marker else 1)
    if fact and os.environ.get("GCMOE_REQUIRE_GPU") == "1":
        pytest.fail(f"GCMOE_REQUIRE_GPU=1, but {fact}", pytrace=False)
    if fact:
        pytest.skip(fact)


@pytest.fixture(scope="session")
def compile_only(request: pytest.FixtureRequest) -> bool:
    """True under ``--compile-only``: compile the kernels of the test, then return."""
    return bool(request.config.getoption("--compile-only"))
