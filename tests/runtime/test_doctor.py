"""The report never raises."""

import argparse

import pytest

from gcmoe.runtime import doctor


def namespace(tmp_path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(["--cache", str(tmp_path)])


def test_prints_a_line_for_every_subject(tmp_path, capsys):
    status = doctor.main(namespace(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert status in (0, 1)
    assert len(lines) > len(doctor.CHECKS)
    for subject in ("torch", "GPU", "green contexts", "symmetric memory", "kernel cache"):
        assert any(f" {subject} " in line for line in lines), subject
    assert lines[-1].startswith("GC-MoE can")


def test_a_check_that_breaks_is_a_finding(tmp_path, monkeypatch, capsys):
    def broken(ns):
        raise OSError("boom\nsecond line")

    monkeypatch.setattr(doctor, "CHECKS", (("thing", broken, False),))
    assert doctor.main(namespace(tmp_path)) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == "BAD   thing             OSError: boom"
    assert last == "GC-MoE cannot run a layer here: thing"


def test_no_options_at_all(capsys):
    assert doctor.main(argparse.Namespace()) == 1
    assert "AttributeError" in capsys.readouterr().out


def test_a_missing_kernel_language_needs_a_filled_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.build, "dsl_version", lambda: None)
    findings = list(doctor.kernel_cache(namespace(tmp_path)))
    assert [f.level for f in findings] == [doctor.BAD]
    assert "gcmoe compile" in findings[0].text


@pytest.mark.parametrize("needs_gpu", [True, False])
def test_gpu_checks_are_named_when_they_are_left_out(tmp_path, monkeypatch, needs_gpu):
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "CHECKS", (("thing", lambda ns: iter(()), needs_gpu),))
    findings = doctor.examine(namespace(tmp_path))
    assert [f.text for f in findings] == (["not examined: no GPU"] if needs_gpu else [])
