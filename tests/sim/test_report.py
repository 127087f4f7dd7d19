"""What ``gcmoe sim`` prints and returns, and the small real layer."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import pytest

from gcmoe.sim import SimConfig, report, simulate
from gcmoe.sim.mutants import hand_mutants
from gcmoe.sim.numbers import Numbers
from gcmoe.sim.schedule import SCHEDULES, schedule_for
from gcmoe.timeline import read_chrome


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args(words)


def test_prints_timeline_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(arguments("--ranks", "3", "--tokens", "2", "--seed", "4")) == 0
    out = capsys.readouterr().out
    assert "rank 2 finalize |" in out
    assert "verdict: ok" in out
    assert "waits that blocked: header" in out


def test_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sim.json"
    words = ("--seed", "2", "--schedules", "5", "--weak", "--json", str(path))
    assert report.main(arguments(*words)) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["run"]["verdict"] == "ok"
    assert found["run"]["config"]["weak"] is True
    assert found["all"]["schedules"] == found["all"]["distinct_traces"] == 5
    assert found["all"]["failures"] == []
    assert "slot_in_use" in found["checks"]
    assert "5 schedules" in capsys.readouterr().out


def test_violation_is_reported_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mutant = next(m for m in hand_mutants() if m.name == "skip_zero_header")
    monkeypatch.setattr(report, "simulate", partial(simulate, variant=mutant.variant))
    path = tmp_path / "sim.json"
    assert report.main_sim(arguments("--schedules", "30", "--json", str(path))) == 1
    out = capsys.readouterr().out
    assert "violation of no_deadlock" in out
    assert "waits for header from rank" in out
    assert "replay it: simulate(config, seed=" in out
    assert "verdict: violation" in out
    assert json.loads(path.read_text(encoding="utf-8"))["all"]["failures"]


def test_impossible_layer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(arguments("--ranks", "0")) == 2
    assert report.main(arguments("--schedule", "nonsense")) == 2
    assert "error:" in capsys.readouterr().out


def test_demo_has_the_bits_of_the_oracle() -> None:
    lines: list[str] = []
    found = report.demo(lines.append, ranks=2)
    assert found["verdict"] == "ok"
    assert found["bitwise"] is True
    assert found["oracle"]["cosine"] > 0.999999
    assert 0.97 < found["unquantized"]["cosine"] < 1.0
    assert any("cosine" in line for line in lines)


@pytest.mark.parametrize("weak", [False, True], ids=["sequential", "weak"])
@pytest.mark.parametrize("seed", range(3))
def test_real_numbers_equal_the_oracle_whatever_the_schedule(seed: int, weak: bool) -> None:
    config = SimConfig(
        ranks=2, experts=4, tokens=2, intermediate=256, w2_columns=(256, 128), block_rows=(1, 2),
        weak=weak, routing="random", replays=2,
    )  # fmt: skip
    numbers = Numbers(config, seed)
    for schedule in SCHEDULES:
        result = simulate(config, seed, schedule, data=numbers)
        assert result.violations == []


def test_real_numbers_show_a_wrong_protocol() -> None:
    mutant = next(m for m in hand_mutants() if m.name == "add_before_scatter")
    config = SimConfig(routing="dense", replays=2)
    numbers = Numbers(config, 0)
    found = {
        name
        for schedule in SCHEDULES
        for name, _ in simulate(config, 0, schedule, mutant.variant, numbers).violations
    }
    assert "y_right" in found


def test_writes_the_run_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sim-trace.json"
    assert report.main(arguments("--ranks", "3", "--seed", "2", "--trace", str(path))) == 0
    timeline = read_chrome(path)
    assert timeline.unit == "steps"
    assert timeline.ranks == [0, 1, 2]
    result = simulate(report.config_of(arguments("--ranks", "3")), 2, schedule_for(2))
    ends = [event for event in result.timeline if event.what == "end"]
    assert len(timeline.spans) == len(ends) > 0
    assert timeline.duration == max(event.step for event in ends)
    for span in timeline.spans:
        assert span.name.split()[0] == span.role
