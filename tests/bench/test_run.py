"""A whole run on a CPU: exit status, record, what is skipped."""

import pytest
import torch
from on_cpu import TINY, OracleImpl

from bench import cli, environment, schema
from bench.world import World

HEAD = {
    "created": "2026-01-01T00:00:00Z",
    "commit": "abc",
    "source": "0" * 64,
    "gpu": "none",
    "driver": "",
    "versions": {},
    "clocks_before": {},
}


class Left(BaseException):
    """In the place of ``os._exit``."""


@pytest.fixture
def run(on_cpu, monkeypatch, tmp_path):
    """Run the command with some implementations; (exit status, record)."""
    monkeypatch.setattr(cli, "open_world", lambda: World(0, 1))
    monkeypatch.setattr(cli, "close_world", lambda: None)
    monkeypatch.setattr(environment, "describe", lambda: dict(HEAD))
    monkeypatch.setattr(environment, "read_clocks", dict)

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(cli.os, "_exit", leave)

    def go(*impls, words=()):
        ns = cli.parse(["--layers", "2", "--replays", "20", "--out", str(tmp_path), *words])
        ns.models, ns.tokens = (TINY.name,), (1, 3)
        ns.cases = cli.make_cases(ns.models, ns.tokens, 1)
        states = {i.name: {"state": "present", "reason": "", "install": ""} for i in impls}
        try:
            status = cli.run(ns, list(impls), states)
        except Left as left:
            status = left.args[0]
        (path,) = tmp_path.glob("*.json")
        return status, schema.read(path)

    return go


def test_a_good_run(run, capsys):
    status, record = run(OracleImpl(), OracleImpl("peer"))
    assert status == 0
    assert record["ended"] == "complete"
    assert [(r["tokens_per_rank"], r["impl"]) for r in record["rows"]] == [
        (1, "gcmoe"),
        (1, "peer"),
        (3, "gcmoe"),
        (3, "peer"),
    ]
    out = capsys.readouterr().out
    assert "2/2 tiny T = 3" in out
    assert "x" in out.splitlines()[-2]


@pytest.mark.parametrize("spoil", ["result", "run", "convert"])
def test_a_wrong_or_failed_row_gives_status_1(run, spoil):
    status, record = run(OracleImpl(), OracleImpl("peer", spoil))
    assert status == 1
    assert record["ended"] == "complete"
    assert [row["correct"] for row in record["rows"]] == [True, False] * 2


def test_what_the_budget_leaves_out_is_in_the_record(run):
    status, record = run(OracleImpl(), words=["--budget", "0"])
    assert status == 1
    assert record["rows"] == []
    assert record["skipped"] == [f"tiny T = {t}: the time budget is used up" for t in (1, 3)]


def test_too_little_memory_ends_the_model(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    status, record = run(OracleImpl())
    assert status == 1
    assert "do not fit" in record["ended"]
    assert "do not fit" in record["skipped"][0]


def test_a_lost_device_ends_the_run_with_what_was_measured(run, monkeypatch):
    class Breaking(OracleImpl):
        def open(self, case, variant, weights, inputs, world):
            if case.tokens == 3:

                def broken():
                    raise RuntimeError("an illegal memory access was encountered")

                monkeypatch.setattr(torch.cuda, "synchronize", broken)
                broken()
            return super().open(case, variant, weights, inputs, world)

    status, record = run(Breaking())
    assert status == 1
    assert record["ended"].startswith("the device was lost")
    assert [row["tokens_per_rank"] for row in record["rows"]] == [1]


def test_a_record_does_not_name_the_folder_it_was_written_to():
    words = ["--preset", "peers", "--out", "/somewhere", "--budget", "9", "--out=/elsewhere"]
    assert cli.command_words(words) == ["--preset", "peers", "--budget", "9"]
