"""Rules of the house: who imports whom, and a little hygiene."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gcmoe"
MAX_LINES = 600

# What each part may import besides itself and the base parts. Arrows point at the importer:
# protocol <- plan <- kernels <- runtime <- layer <- operator <- integrations, cli
# protocol, numerics <- sim <- cli;  numerics <- operator
BASE = {"gcmoe", "config", "errors", "models"}
KERNELS = {"protocol", "plan"}
RUNTIME = KERNELS | {"kernels"}
OPERATOR = RUNTIME | {"runtime", "numerics"}
TOP = OPERATOR | {"layer", "operator", "sim"}
ARROWS: dict[str, set[str]] = {
    "gcmoe": {"operator", "numerics"},
    "config": set(),
    "errors": set(),
    "models": set(),
    "timeline": set(),
    "protocol": set(),
    "plan": {"protocol"},
    "numerics": set(),
    "kernels": KERNELS,
    "runtime": RUNTIME,
    "layer": OPERATOR,
    "operator": OPERATOR | {"layer"},
    "sim": {"protocol", "numerics", "timeline"},
    "integrations": OPERATOR | {"operator"},
    "demo": TOP,
    "tile": TOP,
    "trace": TOP | {"demo", "timeline"},
    "cli": TOP | {"demo", "tile", "trace"},
    "__main__": {"cli"},
}
# What all architectures have, and what only Blackwell has; both emit through ``ptx.emit``.
PTX_FILES = ("gcmoe/kernels/ptx.py", "gcmoe/kernels/ptx_sm100.py")
BARRIER_CALL = re.compile(r"(^|_)barrier($|_)|NamedBarrier")
# Spelt in two parts, so that this file keeps its own rule.
FORBIDDEN = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")


def python_files(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def part_of(module: str) -> str:
    """``gcmoe.kernels.ptx`` belongs to ``kernels``, ``gcmoe`` to ``gcmoe``."""
    names = module.split(".")
    return names[1] if len(names) > 1 else names[0]


def imported(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, at any depth."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            module = node.module or ""
            if module != "gcmoe":
                yield module
                continue
            for alias in node.names:
                is_module = (PACKAGE / alias.name).is_dir() or (
                    PACKAGE / f"{alias.name}.py"
                ).exists()
                yield f"gcmoe.{alias.name}" if is_module else "gcmoe"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


package_files = pytest.mark.parametrize("path", python_files("gcmoe"), ids=relative)
kernel_files = pytest.mark.parametrize("path", python_files("gcmoe/kernels"), ids=relative)


@package_files
def test_import_arrows(path):
    part = part_of(module_name(path))
    assert part in ARROWS, f"{part} has no place in the house"
    allowed = ARROWS[part] | BASE | {part}
    wrong = [
        name
        for name in imported(path)
        if name.partition(".")[0] == "gcmoe" and part_of(name) not in allowed
    ]
    assert wrong == []


@package_files
def test_nothing_imports_tests_or_bench(path):
    assert [n for n in imported(path) if n.partition(".")[0] in ("tests", "bench")] == []


@pytest.mark.parametrize("path", python_files("gcmoe/protocol"), ids=relative)
def test_protocol_is_standard_library_only(path):
    wrong = [
        name
        for name in imported(path)
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not name.startswith("gcmoe.protocol")
    ]
    assert wrong == []


@package_files
def test_only_kernels_and_runtime_know_cuda(path):
    """The kernel language belongs to kernels; of CUDA, kernels name types and runtime calls it."""
    owners = {"cutlass": {"kernels"}, "cuda": {"kernels", "runtime"}}
    part = part_of(module_name(path))
    wrong = [n for n in imported(path) if part not in owners.get(n.partition(".")[0], {part})]
    assert wrong == []


def run_python(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "text", ["import gcmoe", "import gcmoe; gcmoe.MoEConfig; gcmoe.PeerTimeout; dir(gcmoe)"]
)
def test_importing_the_package_is_light(text):
    loaded = run_python(
        f"import sys\n{text}\n"
        "print([n for n in ('torch', 'cutlass', 'cuda', 'numpy') if n in sys.modules])"
    )
    assert loaded == "[]"


def test_plan_and_protocol_need_no_third_party_module():
    loaded = run_python(
        "import sys\nbefore = set(sys.modules)\n"
        "import gcmoe.plan, gcmoe.protocol\n"
        "new = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'gcmoe'}))"
    )
    assert loaded == "[]"


@package_files
def test_inline_assembly_only_in_the_files_of_ptx(path):
    if relative(path) in PTX_FILES:
        return
    names = [n.id for n in ast.walk(parse(path)) if isinstance(n, ast.Name)]
    names += [n.attr for n in ast.walk(parse(path)) if isinstance(n, ast.Attribute)]
    names += [
        alias.name
        for n in ast.walk(parse(path))
        if isinstance(n, ast.ImportFrom)
        for alias in n.names
    ]
    names = [n.lower() for n in names]
    assert [n for n in names if "inline_asm" in n or "inline_ptx" in n] == []
    assert [n for n in names if n.strip("_") == "emit"] == []


def callee(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


@kernel_files
def test_barrier_ids_have_names(path):
    """A hardware barrier id is typed once, in an enum, and never as a literal at a call."""
    literal = []
    for call in ast.walk(parse(path)):
        if not isinstance(call, ast.Call):
            continue
        values = [k.value for k in call.keywords if k.arg == "barrier_id"]
        if BARRIER_CALL.search(callee(call)):
            values += call.args[:1]
        if any(isinstance(v, ast.Constant) and isinstance(v.value, int) for v in values):
            literal.append(f"{relative(path)}:{call.lineno}")
    assert literal == []


@pytest.mark.parametrize("path", python_files("gcmoe", "tests", "bench"), ids=relative)
def test_file_is_short_and_finished(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert [f"{i}: {line}" for i, line in enumerate(lines, 1) if FORBIDDEN.search(line)] == []


@package_files
def test_modules_say_what_they_are(path):
    assert ast.get_docstring(parse(path)), f"{relative(path)} has no docstring"
