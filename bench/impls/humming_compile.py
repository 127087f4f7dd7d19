"""Humming's kernels, compiled before they are timed: in parallel, within a limit, into a store.

Humming compiles when a kernel is first used, and files a cubin under the time stamps and folders
of its own installation. The store files it under what it is made of, so that cubins compiled on a
machine without a GPU serve one that has a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cases import Case

STORE = Path(__file__).resolve().parents[2] / ".peers" / "humming"
KERNEL_LIMIT_S = 120.0
"""How long one kernel may compile."""
MAX_ERRORS_SHOWN = 2

H200 = {
    "index": 0,
    "name": "NVIDIA H200",
    "is_ppu": False,
    "sm_count": 132,
    "sm_major": 9,
    "sm_minor": 0,
    "sm_version": 90,
    "max_threads_per_block": 1024,
    "max_threads_per_sm": 2048,
    "max_registers_per_sm": 65536,
    "l2_cache_size": 50 << 20,
    "l1_cache_size": 256 << 10,
    "default_smem_size": 48 << 10,
    "max_smem_size": 227 << 10,
    "memory_clock_khz": 3_201_000,
    "memory_bus_width": 6144,
    "sm_clock_khz": 1_980_000,
}
"""What Humming asks a device for, where there is none: the values of an H200."""

_is_ready = False
_failed: dict[tuple[str, str], str] = {}
"""Why a kernel is missing, by layer and tuning configuration."""


class _NoDevice:
    """``torch.cuda.device`` where there is no device."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _stand_in_for_a_gpu() -> None:
    """Let Humming's host code run where torch has no CUDA. Kernels are compiled, never loaded."""
    import torch._dynamo  # must be complete before an empty triton exists

    module: Any = types.ModuleType("humming._device_info")
    module._DeviceInfo = lambda _: types.SimpleNamespace(**H200)
    sys.modules["humming._device_info"] = module
    sys.modules.setdefault("triton", types.ModuleType("triton"))
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.cuda.device = _NoDevice  # type: ignore[misc, assignment]
    torch.cuda.current_device = lambda: 0

    from humming.kernel.humming import HummingKernel
    from humming.kernel.process_input import ProcessInputKernel

    for kernel in (HummingKernel, ProcessInputKernel):
        kernel.register_kernel = lambda self: setattr(self, "kernel_id", 0)


def _key(compiler: Any, code: str, options: dict[str, Any]) -> str:
    import humming

    # Not the compiler's version: a machine that runs cubins from the store needs no compiler.
    parts = [humming.__version__, compiler.__name__, code]
    parts += [f"{name}={options[name]}" for name in sorted(options)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _use_store(store: Path) -> None:
    """Make Humming's compiler look into the store first, and bound each run of it."""
    from humming.jit import compiler as jit

    store.mkdir(parents=True, exist_ok=True)
    bounded: Any = types.SimpleNamespace(PIPE=subprocess.PIPE)
    bounded.run = lambda *a, **k: subprocess.run(*a, timeout=KERNEL_LIMIT_S, **k)
    jit.subprocess = bounded
    original = jit.NVRTCCompiler.compile.__func__

    def compile(cls: Any, code: str, **options: Any) -> str:
        named = {k: v for k, v in options.items() if k != "postprocess_cubin"}
        path = store / f"{_key(cls, code, named)}.cubin"
        if not path.exists():
            built = original(cls, code, **options)
            part = path.with_suffix(f".{os.getpid()}")
            shutil.copyfile(built, part)
            part.replace(path)
        return str(path)

    jit.NVRTCCompiler.compile = classmethod(compile)


def make_ready() -> None:
    """Import Humming, with the store, and with a stand-in where there is no GPU. Once."""
    global _is_ready
    if _is_ready:
        return
    os.environ.setdefault("HUMMING_COMPILER", "nvrtc")
    if not torch.cuda.is_available():
        _stand_in_for_a_gpu()
    _use_store(STORE)
    _is_ready = True


def _gemm_jobs(case: Case, variant: str) -> list[tuple[str, str]]:
    from bench.impls.humming_configs import layer_configs, tuning

    configs = layer_configs(case, variant)
    return [(config.to_str(), json.dumps(tuning(config, case))) for config in configs]


def _input_problem(config: Any, activation: str) -> Any:
    """Humming's description of quantising rows, behind SwiGLU if there is an activation."""
    from humming import dtypes
    from humming.config import ProcessInputProblemConfig

    return ProcessInputProblemConfig(
        input_dtype=dtypes.bfloat16,
        hidden_size=config.shape_k,
        quant_mode=config.input_quant_mode.value,
        quant_dtype=config.a_dtype.dtype_str,
        quant_group_size=config.input_scale_group_size or None,
        group_scale_dtype=config.as_dtype.dtype_str,
        activation_type="binary_split" if activation else "none",
        activation_impl=activation or None,
    )


def _compile_inputs(config: Any, activation: str) -> None:
    from humming.kernel.process_input import ProcessInputKernel
    from humming.tune.process_input import get_process_input_tuning_intervals

    problem = _input_problem(config, activation)
    intervals = get_process_input_tuning_intervals(problem, False)
    ProcessInputKernel.prepare_kernels(problem, intervals, torch.cuda.current_device())


def _compile_weight_tools() -> None:
    """The kernels that bring MXFP4 weights into Humming's order, with packed K and without."""
    from humming.kernel.process_mxfp4 import ProcessMxfp4W4A8Kernel
    from humming.kernel.repack_weight import RepackWeightKernel

    ProcessMxfp4W4A8Kernel()
    for packed_k in (False, True):
        RepackWeightKernel(
            weight_bits=4,
            activation_bits=8,
            is_weight_packed=True,
            should_preprocess_for_int2fp=False,
            should_preprocess_with_zp=False,
            use_fused_e8m0_scale=True,
            group_size_zp=0,
            use_packed_k_layout=packed_k,
            use_native_dequant=False,
        )


def _jobs(cases: list[Case]) -> dict[tuple[str, str], Callable[[], object]]:
    """What there is to compile, each kernel once."""
    from humming.kernel.humming import HummingKernel

    from bench.impls.humming_configs import COMPUTE, GROUPS, layer_configs, swiglu_text

    found: dict[tuple[str, str], Callable[[], object]] = {("weights", ""): _compile_weight_tools}
    device = torch.cuda.current_device()
    for case in cases:
        for variant in GROUPS:
            for layer, chosen in _gemm_jobs(case, variant):
                found[layer, chosen] = partial(
                    HummingKernel.prepare_kernels, layer, json.dumps(COMPUTE), chosen, device
                )
            one, two = layer_configs(case, variant)
            act = swiglu_text(case.share.clamp)
            found[one.to_str(), ""] = partial(_compile_inputs, one, "")
            found[two.to_str(), act] = partial(_compile_inputs, two, act)
    return found


def compile_ahead(cases: list[Case], limit_s: float) -> str:
    """Compile what the cases need; what is not ready in time is missing from then on.

    Returns:
        What is missing and why; empty if nothing is.
    """
    make_ready()
    jobs = _jobs(cases)
    start = time.monotonic()
    device = torch.cuda.current_device()

    def work(job: Callable[[], object]) -> None:
        if time.monotonic() - start > limit_s:
            raise TimeoutError(f"not started within {limit_s:.0f} s")
        with torch.cuda.device(device):
            job()

    workers = max(1, len(os.sched_getaffinity(0)) - 1)
    pool = ThreadPoolExecutor(workers)
    futures = {pool.submit(work, job): key for key, job in jobs.items()}
    done, late = wait(futures, timeout=limit_s)
    pool.shutdown(wait=False, cancel_futures=True)
    for future, key in futures.items():
        error = future.exception() if future in done else TimeoutError(f"took over {limit_s:.0f} s")
        if error is not None:
            _failed[key] = f"{type(error).__name__}: {error}"
        else:
            _failed.pop(key, None)
    if not _failed:
        return ""
    shown = "; ".join(list(dict.fromkeys(_failed.values()))[:MAX_ERRORS_SHOWN])
    return f"{len(_failed)} of {len(jobs)} kernels are missing ({len(late)} late): {shown}"


def require_compiled(config: Any, chosen: dict[str, Any]) -> None:
    """Raises RuntimeError if the kernel was not ready in time."""
    why = _failed.get((config.to_str(), json.dumps(chosen)))
    if why:
        raise RuntimeError(f"its kernel is missing: {why}")
