"""What people see: the table, the pictures, the page, the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sample import FACTORS, make_record, make_row

from bench import cases, cli, plots, records, schema
from bench.dry_run import state_text
from bench.impls import IMPLS
from bench.table import text_table
from gcmoe import cli as gcmoe_cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    schema.write(make_record(), tmp_path / "bench-a.json")
    (tmp_path / "speed-old.json").write_text(json.dumps({"schema_version": 1, "rows": []}))
    return tmp_path


def test_the_table_has_times_ratios_and_verdicts():
    rows = make_record()["rows"]
    rows[0]["correct"] = False
    failed = make_row(8, "mega_moe_sm90", "layer") | dict.fromkeys(schema.TIMES)
    rows.append(failed | {"correct": False, "error": "no kernel image"})
    lines = text_table(rows).splitlines()
    assert len(lines) == 1 + len(rows)
    assert lines[1].endswith("NO")
    assert lines[-1].endswith("no kernel image")
    mega = next(line for line in lines if "mega" in line and re.search(r"\s64\s", line))
    ours, theirs = (
        97.3 * FACTORS[p] + 10 for p in (("gcmoe", "default"), ("mega_moe_sm90", "layer"))
    )
    assert f"{theirs / ours:.2f}x" in mega
    assert "GEMMs only" in next(line for line in lines if "humming" in line)


def test_records_of_another_form_are_passed_over(folder):
    loaded, passed_over = records.load(folder.glob("*.json"))
    assert list(loaded) == ["bench-a.json"]
    assert passed_over == ["speed-old.json: schema version 1"]


def test_wrong_rows_are_not_drawn():
    record = make_record()
    for row in record["rows"]:
        row["correct"] = row["impl"] != "mega_moe_sm90"
    (one,) = records.selections({"a": record})
    assert {impl for impl, _ in one.series} == {"gcmoe", "humming_w4a8"}


def test_the_newest_record_counts_if_it_has_as_many_sizes():
    new = make_record("2026-02-01T00:00:00Z")
    few = make_record("2026-03-01T00:00:00Z")
    few["rows"] = [row for row in few["rows"] if row["tokens_per_rank"] == 8]
    found = records.selections({"old": make_record(), "new": new, "few": few})
    assert [one.name for one in records.newest_of_each(found, records.has_own)] == ["new"]


def test_every_set_of_peers_is_shown_and_the_largest_is_drawn():
    """Of the newest record of each set and its sizes; a newer record with fewer peers takes no
    picture."""
    fewer = make_record("2026-02-01T00:00:00Z")
    fewer["rows"] = [row for row in fewer["rows"] if row["impl"] != "humming_w4a8"]
    alone = make_record("2026-03-01T00:00:00Z")
    alone["rows"] = [row for row in alone["rows"] if row["impl"] == "gcmoe"]
    smaller = make_record("2026-04-01T00:00:00Z")
    smaller["rows"] = [row for row in smaller["rows"] if row["tokens_per_rank"] == 8]
    found = records.selections(
        {"all": make_record(), "older": make_record("2025-01-01T00:00:00Z"), "fewer": fewer,
         "alone": alone, "smaller": smaller}
    )  # fmt: skip
    assert [one.name for one in records.newest_of_each(found, records.has_peers)] == ["all"]
    (drawn,) = records.newest_of_each(found, records.has_own)
    shown = records.comparisons(found, drawn.model, drawn.ranks)
    assert [one.name for one in shown] == ["all", "fewer", "smaller"]
    assert records.comparisons(found, drawn.model, 2) == []


def test_pictures_and_page(folder, capsys):
    figures, page = folder / "figures", folder / "docs" / "page.md"
    arguments = [str(folder / "bench-a.json"), "--figures", str(figures), "--page", str(page)]
    assert plots.main(arguments) == 0
    names = {path.name for path in figures.iterdir()}
    model = "deepseek-v4-flash"
    assert names == {
        *(f"{kind}-{model}.svg" for kind in ("latency", "speedup", "ablation")),
        "fraction.svg",
    }
    before = {path.name: path.read_bytes() for path in figures.iterdir()}
    assert plots.main(arguments) == 0
    assert before == {path.name: path.read_bytes() for path in figures.iterdir()}
    text = page.read_text()
    median = make_row(64, "gcmoe", "serial")["median_us"]
    assert f"{median:.1f}" in text
    assert "torch_unfused was absent (too old)" in text
    assert "../figures/fraction.svg" in text
    assert "humming_w4a8 group128 *" in text


def test_without_records_nothing_is_drawn(folder, capsys):
    page = folder / "page.md"
    assert plots.main([str(folder / "speed-old.json"), "--page", str(page)]) == 0
    assert "no records" in capsys.readouterr().out
    assert not page.exists()


@pytest.mark.parametrize("command", [["-m", "bench"], ["-m", "gcmoe", "bench"]])
def test_dry_run_needs_no_gpu(command):
    words = [sys.executable, *command, "--dry-run", "--preset", "full", "--ranks", "2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "36 cases on 2 rank(s)" in done.stdout
    assert re.search(
        r"mega_moe_sm90 +(present|absent: .*; pip install sgl-deep-gemm==)", done.stdout
    )
    assert re.search(r"humming_w4a8 +(unfit: .* one rank|absent: .*; pip install)", done.stdout)
    assert re.search(r"estimated device time: [1-9]\d+ s", done.stdout)


def test_without_a_checkout_the_command_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gcmoe_cli, "CHECKOUT", tmp_path)
    assert gcmoe_cli.main(["bench", "--dry-run"]) == 2
    assert "comes with a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--tokens", "0"], ["--replays", "5"], ["--models", "gpt-2"], ["--layers", "0"]]
)
def test_bad_arguments_exit_with_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.parse(words)
    assert stop.value.code == 2


def test_a_custom_variant():
    ns = cli.parse(["--custom", "dispatch_sms=24", "capacity=2"])
    assert ns.variants == ("default", "custom")
    custom = cases.VARIANTS.pop("custom")
    assert custom.options == {"dispatch_sms": 24}
    assert custom.config(cases.Case("deepseek-v4-flash", 8)).max_tokens == 16
    with pytest.raises(ValueError, match="NAME=INTEGER"):
        cases.custom_variant(["serial=yes"])


def test_arguments_override_the_preset():
    ns = cli.parse(["--preset", "peers", "--tokens", "4", "--variants", "ablations"])
    assert ns.tokens == (4,)
    assert ns.impls[0] == "gcmoe"
    assert ns.variants[0] == "default"
    assert "serial" in ns.variants


def test_absent_and_unfit_peers_are_told_apart(monkeypatch):
    for impl in IMPLS.values():
        monkeypatch.setattr(impl, "absent", lambda: "", raising=True)
    monkeypatch.setattr(IMPLS["mega_moe_sm90"], "absent", lambda: "it is not installed")
    usable, states = cli.survey(cli.parse(["--preset", "full", "--ranks", "2"]))
    assert [impl.name for impl in usable] == ["gcmoe", "torch_unfused"]
    assert states["mega_moe_sm90"]["state"] == "absent"
    assert states["humming_w4a8"]["state"] == "unfit"
    assert "pip install sgl-deep-gemm" in state_text(states["mega_moe_sm90"])
    assert "pip" not in state_text(states["humming_w4a8"])
