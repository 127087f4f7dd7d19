"""GC-MoE: an expert-parallel FP8 x MXFP4 mixture-of-experts layer for decode.

Public names are loaded on first use: importing this package imports neither torch nor the kernel
language and touches no GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcmoe.config import MoEConfig
    from gcmoe.errors import (
        CallMismatch,
        CaptureError,
        DeviceFault,
        GCMoEError,
        KernelCacheCorrupt,
        KernelNotCached,
        OperatorClosed,
        OverlappingReplays,
        PeerTimeout,
        UnsupportedConcurrency,
        UnsupportedDevice,
        UnsupportedError,
        WeightFormatError,
    )
    from gcmoe.numerics import pack, quantize_mxfp4, unpack
    from gcmoe.operator import MoE

__version__ = "0.1.0"

__all__ = [
    "CallMismatch",
    "CaptureError",
    "DeviceFault",
    "GCMoEError",
    "KernelCacheCorrupt",
    "KernelNotCached",
    "MoE",
    "MoEConfig",
    "OperatorClosed",
    "OverlappingReplays",
    "PeerTimeout",
    "UnsupportedConcurrency",
    "UnsupportedDevice",
    "UnsupportedError",
    "WeightFormatError",
    "__version__",
    "pack",
    "quantize_mxfp4",
    "unpack",
]

_MODULES = {
    "MoE": "gcmoe.operator",
    "MoEConfig": "gcmoe.config",
    "pack": "gcmoe.numerics",
    "quantize_mxfp4": "gcmoe.numerics",
    "unpack": "gcmoe.numerics",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "gcmoe.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
