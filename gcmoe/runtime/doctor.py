"""``gcmoe doctor``: what this machine offers, a line each, and what it means for GC-MoE."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gcmoe.kernels import build

OK, NOTE, BAD = "ok", "note", "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``level`` is OK, NOTE (works, but know it) or BAD (does not run)."""

    level: str
    subject: str
    text: str

    def line(self) -> str:
        return f"{self.level:<4}  {self.subject:<17} {self.text}"


Findings = Iterator[Finding]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gcmoe doctor``."""
    parser.add_argument("--device", type=int, default=0, metavar="N", help="GPU to examine; 0")
    parser.add_argument(
        "--dispatch-sms",
        type=int,
        default=16,
        metavar="N",
        help="of green contexts, to split off; 16",
    )
    parser.add_argument("--cache", metavar="DIR", help="kernel cache; default: of this user")


def packages(ns: argparse.Namespace) -> Findings:
    import torch

    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding(OK if torch.version.cuda else BAD, "torch", f"{torch.__version__}, {built}")
    import cuda.bindings

    yield Finding(OK, "cuda-bindings", str(cuda.bindings.__version__))


def driver_version(ns: argparse.Namespace) -> Findings:
    from gcmoe.runtime import device, driver

    version = driver.version()
    text = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if version < device.MIN_DRIVER:
        yield Finding(BAD, "driver", f"{text}: 13.0 or newer is required")
    else:
        yield Finding(OK, "driver", text)


def gpu(ns: argparse.Namespace) -> Findings:
    import torch

    from gcmoe.runtime import device

    if not torch.cuda.is_available():
        yield Finding(BAD, "GPU", "none: the layer cannot run here; compile and sim can")
        return
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        arch = device.TARGETS.get((facts.major, facts.minor))
        text = (
            f"{i}: {facts.name}, compute capability {facts.major}.{facts.minor}, "
            f"{facts.multi_processor_count} SMs, {facts.total_memory / 2**30:.0f} GiB"
        )
        if arch is None:
            level = BAD if i == ns.device else NOTE
            yield Finding(level, "GPU", f"{text}: {device.CAPABILITIES} is required")
        elif arch in device.RECORDS:
            yield Finding(OK, "GPU", text)
        else:
            yield Finding(NOTE, "GPU", f"{text}: kernels for {arch} are {device.NOT_YET_RUN}")


def module_loading(ns: argparse.Namespace) -> Findings:
    from gcmoe.runtime import driver

    mode = driver.call("cuModuleGetLoadingMode")
    yield Finding(OK, "module loading", f"{driver.name_of(mode)}: kernels are loaded up front")


def green_contexts(ns: argparse.Namespace) -> Findings:
    """A layer needs none: they are an option, for comparisons."""
    import torch

    from gcmoe.errors import GCMoEError
    from gcmoe.runtime import partition

    device = torch.device("cuda", ns.device)
    with torch.cuda.device(device):
        torch.zeros(1, device=device)
        try:
            report = partition.get_partition(device, ns.dispatch_sms, green_contexts=True).report
        except GCMoEError as error:
            text = f"not for green_contexts = True: {error}".splitlines()[0]
            yield Finding(NOTE, "green contexts", text)
            return
    yield Finding(
        OK,
        "green contexts",
        f"{report.dispatch_sms} + {report.compute_sms} of {report.num_sms} SMs for "
        f"{report.requested} asked, granule {report.granule}; work queues: {report.work_queues}",
    )
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is not None:
        text = f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: replays still overlapped when tried"
        yield Finding(NOTE, "connections", text)


def peers(ns: argparse.Namespace) -> Findings:
    import torch

    from gcmoe.runtime import driver

    count = torch.cuda.device_count()
    if count < 2:
        yield Finding(NOTE, "peers", "one GPU visible: a single rank, or one process per GPU")
        return
    kinds = driver.cu.CUdevice_P2PAttribute
    own = driver.call("cuDeviceGet", ns.device)
    lacking = []
    for i in range(count):
        if i == ns.device:
            continue
        other = driver.call("cuDeviceGet", i)
        for name, kind in (
            ("access", kinds.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED),
            ("atomics", kinds.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED),
        ):
            if not driver.call("cuDeviceGetP2PAttribute", kind, own, other):
                lacking.append(f"no {name} to GPU {i}")
    if lacking:
        text = f"GPU {ns.device}: {', '.join(lacking)}: one rank only, several need NVLink"
        yield Finding(NOTE, "peers", text)
    else:
        yield Finding(OK, "peers", f"GPU {ns.device} reaches {count - 1} others, native atomics")


def symmetric_memory(ns: argparse.Namespace) -> Findings:
    from torch import distributed

    if not distributed.is_available():
        yield Finding(NOTE, "symmetric memory", "torch.distributed is missing: one rank only")
        return
    import torch.distributed._symmetric_memory as module

    missing = [name for name in ("empty", "rendezvous") if not hasattr(module, name)]
    if missing:
        text = f"this torch lacks {', '.join(missing)}: one rank only"
        yield Finding(NOTE, "symmetric memory", text)
    else:
        yield Finding(OK, "symmetric memory", "available; multicast is not used")


def kernel_language(ns: argparse.Namespace) -> Findings:
    version = build.dsl_version()
    if version is None:
        text = f"{build.DSL_PACKAGE} is not installed: kernels must come from the cache"
        yield Finding(NOTE, "kernel language", text)
    else:
        yield Finding(OK, "kernel language", f"{build.DSL_PACKAGE} {version}")


def kernel_cache(ns: argparse.Namespace) -> Findings:
    directory = build.cache_directory(ns.cache)
    manifests = list(directory.glob("*/[!.]*.json"))
    source = build.source_digest()
    current = [path for path in manifests if source in path.read_text(encoding="utf-8")]
    text = f"{directory}: {len(current)} kernels of this source, {len(manifests)} in all"
    missing = not current and build.dsl_version() is None
    if missing:
        text += ": fill it with gcmoe compile where the kernel language is installed"
    yield Finding(BAD if missing else OK, "kernel cache", text)


CHECKS: tuple[tuple[str, Callable[[argparse.Namespace], Findings], bool], ...] = (
    ("packages", packages, False),
    ("driver", driver_version, False),
    ("GPU", gpu, False),
    ("module loading", module_loading, True),
    ("green contexts", green_contexts, True),
    ("peers", peers, True),
    ("symmetric memory", symmetric_memory, False),
    ("kernel language", kernel_language, False),
    ("kernel cache", kernel_cache, False),
)
"""(subject, check, needs a GPU)."""


def has_gpu() -> bool:
    try:
        import torch

        return torch.cuda.is_available()
    except Exception:
        return False


def examine(ns: argparse.Namespace) -> list[Finding]:
    """All findings; a check that breaks is one itself."""
    findings: list[Finding] = []
    available = has_gpu()
    for subject, check, needs_gpu in CHECKS:
        if needs_gpu and not available:
            findings.append(Finding(NOTE, subject, "not examined: no GPU"))
            continue
        try:
            findings.extend(check(ns))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding(BAD, subject, text))
    return findings


def main(ns: argparse.Namespace | Any) -> int:
    """Print the report; 0 if the layer can run here, else 1. Raises nothing."""
    findings = examine(ns)
    for finding in findings:
        print(finding.line())
    broken = [finding.subject for finding in findings if finding.level == BAD]
    if broken:
        print(f"GC-MoE cannot run a layer here: {', '.join(dict.fromkeys(broken))}")
    else:
        print("GC-MoE can run a layer here")
    return 1 if broken else 0
