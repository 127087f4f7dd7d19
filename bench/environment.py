"""Where and with what the rows are measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
PACKAGES = (
    "cuda-bindings",
    "nvidia-cutlass-dsl",
    "sgl-deep-gemm",
    "apache-tvm-ffi",
    "humming-kernels",
)
LIMIT_S = 20.0


def output_of(command: list[str]) -> str:
    """What a program prints; empty where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=LIMIT_S, cwd=ROOT
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def commit() -> str:
    """``GCMOE_COMMIT`` where it is set, else what git says; ``+`` behind it for local changes."""
    given = os.environ.get("GCMOE_COMMIT", "")
    if given:
        return given
    head = output_of(["git", "rev-parse", "--short=12", "HEAD"])
    dirty = head and output_of(["git", "status", "--porcelain", "--untracked-files=no"])
    return f"{head}+" if dirty else head


def version_of(package: str) -> str:
    """Version of an installed package; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def query_gpu(fields: str) -> dict[str, str]:
    """What nvidia-smi says of the current GPU; empty where it is missing."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    text = output_of(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={uuid}"]
    )
    values = [value.strip() for value in text.split(",")]
    return dict(zip(fields.split(","), values, strict=False)) if text else {}


def read_clocks() -> dict[str, str]:
    return query_gpu(CLOCKS)


def describe() -> dict[str, Any]:
    """The head of a record."""
    import torch

    import gcmoe
    from gcmoe.kernels.build import source_digest

    versions = {
        "gcmoe": gcmoe.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
    }
    versions |= {name: version_of(name) for name in PACKAGES if version_of(name)}
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "source": source_digest(),
        "gpu": torch.cuda.get_device_name(),
        "driver": query_gpu("driver_version").get("driver_version", ""),
        "versions": versions,
        "clocks_before": read_clocks(),
    }
