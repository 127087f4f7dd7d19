"""The launcher and the table of scenarios, without a GPU."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pair_cases import CASES, GPU_SCENARIOS, GROUPS, RANKS, case_plan, case_specs
from pair_launch import descendants, report_of, run_group

from gcmoe.protocol import Role

HERE = Path(__file__).parent


def test_every_scenario_has_a_function() -> None:
    found = set()
    for path in HERE.glob("scenarios_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert [name for _, name in GPU_SCENARIOS if name not in found] == []


CLASSES = {
    "flash-256": 3,
    "odd-33": 2,
    "odd-256": 4,
    "odd-256-one": 4,
    "top-8": 4,
    "top-8-one": 2,
    "tiny": 4,
    "tiny-late": 4,
    "small-ring-late": 2,
}
"""Classes of tiles; the other cases have one, and so three kernels."""


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_plan(name: str) -> None:
    specs = case_specs(name)
    classes = len(case_plan(name).classes)
    roles = [spec.role for spec in specs]
    for role, count in ((Role.DISPATCH, classes), (Role.COMPUTE, classes), (Role.FINALIZE, 1)):
        assert roles.count(role) == count
    assert len(set(specs)) == len(specs) == 2 * classes + 1
    assert classes == CLASSES.get(name, 1)
    assert {spec.shape.num_ranks for spec in specs} == {CASES[name].ranks}
    assert {spec.jitter_ns for spec in specs} == {CASES[name].jitter_ns}


def test_a_failure_of_one_rank_does_not_end_the_group() -> None:
    report = run_group("selftest")
    assert not report.expired
    assert report.problem("selftest", "passes") == ""
    assert [line["details"] for line in report.lines["passes"]] == [{"ranks": [0, 1]}] * 2
    problem = report.problem("selftest", "fails_on_one_rank")
    assert "rank 1: ValueError: on purpose" in problem
    assert report.problem("selftest", "meets_again") == ""


def test_a_group_that_hangs_is_killed_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each process takes its time to start, as on a machine with a cold disk."""
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    report = run_group("selftest-hang")
    assert "ranks reported" in report.problem("selftest-hang", "hangs")
    assert "in hangs" in report.output
    assert report.seconds < 45
    assert descendants(os.getpid()) == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_launcher_leaves_no_process_behind() -> None:
    """Workers would keep the GPUs, whatever runs there next."""
    code = "from pair_launch import run_group; run_group('selftest-hang')"
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=HERE)
    try:
        wanted, tree, deadline = RANKS + 1, [], time.monotonic() + 30
        while len(tree) < wanted and time.monotonic() < deadline:
            time.sleep(0.2)
            tree = descendants(launcher.pid)
        assert len(tree) >= wanted
    finally:
        launcher.terminate()
        launcher.wait(timeout=10)
    deadline = time.monotonic() + 10
    while any(map(is_alive, tree)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in tree if is_alive(pid)] == []


@pytest.mark.parametrize("scenario", GROUPS["cpu"].scenarios)
def test_creation_and_reset_of_two_processes(scenario: str) -> None:
    problem = report_of("cpu").problem("cpu", scenario)
    if problem:
        pytest.fail(problem, pytrace=False)
