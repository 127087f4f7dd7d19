"""The runner on a CPU: what becomes a row, and when a row counts as right."""

import math

import pytest
from on_cpu import OracleImpl

from bench.cases import Case
from bench.schema import ROW, Field

CASE = Case("tiny", 3)


def run(make_runner, *impls, case=CASE, **options):
    runner = make_runner(list(impls), **options)
    bank = runner.open_bank([case])
    return runner.run_case(case, bank)


def test_right_results_are_timed(make_runner):
    (row,) = run(make_runner, OracleImpl())
    assert row["correct"]
    assert row["p10_us"] <= row["median_us"] <= row["p90_us"]
    assert len(row["samples_us"]) == 20
    assert row["per_rank"][0]["rows"] == [6, 6]
    assert row["weight_sets"] == 2
    assert row["floor_us"] == pytest.approx(CASE.floor_us(row["touched_experts"]))


def test_a_mix_up_of_weights_is_found(make_runner):
    (row,) = run(make_runner, OracleImpl(spoil="result"))
    assert not row["correct"]
    assert row["median_us"] is not None


@pytest.mark.parametrize("spoil", ["run", "convert"])
def test_a_failing_peer_is_a_row_and_the_rest_runs(make_runner, spoil):
    rows = run(make_runner, OracleImpl(), OracleImpl("peer", spoil))
    good, bad = sorted(rows, key=lambda row: row["impl"])
    assert good["correct"]
    assert "error" not in good
    assert bad["median_us"] is None
    assert not bad["correct"]
    assert {"run": "no kernel image", "convert": "span too much"}[spoil] in bad["error"]


def test_rows_have_the_required_fields(make_runner):
    for row in run(make_runner, OracleImpl(), OracleImpl("peer", "run")):
        required = {name for name, one in ROW.items() if isinstance(one, Field) and one.required}
        assert required <= row.keys()


def test_the_budget_ends_a_run(make_runner):
    runner = make_runner([OracleImpl()], budget_s=math.inf)
    assert runner.has_time()
    assert not make_runner([OracleImpl()], budget_s=0.0).has_time()
