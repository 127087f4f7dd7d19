"""Hooks of the two-rank suite: ``--compile-only``, and the folder of its helpers on the path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Under ``--compile-only`` a GPU test is that the kernels of the suite can be had: the first
    one fills the cache from the table of cases, a line per kernel."""
    is_gpu = pyfuncitem.get_closest_marker("gpu") is not None
    if not (is_gpu and pyfuncitem.config.getoption("--compile-only")):
        return None
    from pair_cases import compile_cases

    manager: Any = pyfuncitem.config.pluginmanager.getplugin("capturemanager")
    with manager.global_and_fixture_disabled():
        compile_cases()
    return True
