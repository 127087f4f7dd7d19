"""The command ``gcmoe``.

Only the module of the sub-command that runs is imported, so ``gcmoe --help`` needs neither torch
nor a GPU. Such a module offers ``main(namespace) -> int | None`` and, where it has options,
``add_arguments(parser)``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from gcmoe import __version__
from gcmoe.errors import GCMoEError


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command and the module that carries it out."""

    name: str
    module: str
    summary: str
    function: str = "main"

    def load(self) -> ModuleType:
        return import_module(self.module)


COMMANDS = (
    Command("doctor", "gcmoe.runtime.doctor", "check GPU, driver and kernel cache"),
    Command(
        "demo", "gcmoe.demo", "one layer against the oracle: on the GPU, else simulated", "run"
    ),
    Command("tile", "gcmoe.tile", "the compute kernel alone on a Blackwell GPU, step by step"),
    Command("sim", "gcmoe.sim.report", "run the protocol on the CPU under chosen interleavings"),
    Command("compile", "gcmoe.kernels.compile", "compile kernels into the cache; needs no GPU"),
    Command("bench", "gcmoe.cli", "time the layer and its peers: python -m bench of a checkout"),
    Command("plan", "gcmoe.plan.report", "SM split, tiles, ring and predicted time; needs no GPU"),
    Command("trace", "gcmoe.trace", "timeline of one replay, as a Perfetto trace and a PNG"),
)
CHECKOUT = Path(__file__).resolve().parents[1]

# Modules that an optional dependency provides, and how to get it.
REMEDIES = {
    "cutlass": "pip install 'gc-moe[compile]'",
    "cuda": "pip install cuda-bindings",
    "torch": "pip install torch",
    "matplotlib": "pip install 'gc-moe[bench]'",
}


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the options of the one sub-command that ``argv`` names."""
    parser = argparse.ArgumentParser(prog="gcmoe", description="Tools of the GC-MoE layer.")
    parser.add_argument("--version", action="version", version=f"gcmoe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.summary, description=command.summary)
        if command.name == chosen:
            module = command.load()
            if hasattr(module, "add_arguments"):
                module.add_arguments(sub)
            sub.set_defaults(run=getattr(module, command.function))
    return parser


def run_bench(words: Sequence[str]) -> int:
    """``python -m bench`` of the checkout around this package, as a process; its exit status."""
    if not (CHECKOUT / "bench" / "__main__.py").is_file():
        print(f"gcmoe: bench comes with a checkout, there is none at {CHECKOUT}", file=sys.stderr)
        return 2
    known = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(CHECKOUT), known))),
    }
    command = [sys.executable, "-P", "-m", "bench", *words]
    return subprocess.run(command, env=environment, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; its exit status, 1 for a reported error, 2 for a missing dependency."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:
        return run_bench(words[1:])
    try:
        namespace = build_parser(words).parse_args(words)
        return int(namespace.run(namespace) or 0)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in REMEDIES:
            raise
        print(f"gcmoe: {missing} is not installed: {REMEDIES[missing]}", file=sys.stderr)
        return 2
    except GCMoEError as error:
        print(f"gcmoe: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
