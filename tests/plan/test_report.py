"""What ``gcmoe plan`` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from gcmoe import cli
from gcmoe.models import get_model, share
from gcmoe.plan import make_plan
from gcmoe.plan.fitted import CONSTANTS
from gcmoe.plan.gpus import GPUS, get_gpu
from gcmoe.plan.layer import SPLIT_TABLE, TILE_TABLE
from gcmoe.plan.predict import predict
from gcmoe.plan.published import PUBLISHED
from gcmoe.plan.report import COLUMNS, difference

RECORDS = Path(__file__).parents[2] / "bench" / "results"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["plan", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_prints_partition_tiles_ring_and_parts(capsys):
    lines = printed(capsys, "--model", "glm-5.2", "--share", "--tokens", "8", "64")
    model = share("glm-5.2", 8)
    for num_tokens in (8, 64):
        plan = make_plan(model.config(num_tokens))
        text = "\n".join(lines)
        assert f"capacity {num_tokens}: {plan.dispatch_sms} SMs dispatch" in text
        assert f"ring of {plan.workspace.num_slots} slots" in text
        assert f"workspace {plan.workspace.num_bytes:,} bytes" in text
        (row,) = [line.split() for line in lines if line.split()[:1] == [str(num_tokens)]]
        assert len(row) == len(COLUMNS)
        found = predict(plan, get_gpu("h200"), num_tokens, CONSTANTS)
        assert row[-2:] == [f"{found.total_us:.1f}", f"{found.floor_us / found.total_us:.2f}"]
        assert row[4] == f"{found.weight_bytes / 1e6:.1f}"
    heads = [line.split() for line in lines if line.lstrip().startswith("T ")]
    assert heads == [" ".join(name for name, _ in COLUMNS).split()] * 2


@pytest.mark.parametrize("gpu", sorted(GPUS))
@pytest.mark.parametrize("model", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_every_gpu_has_a_plan(gpu, model, capsys):
    lines = printed(capsys, "--model", model, "--gpu", gpu.upper(), "--tokens", "1", "256")
    assert GPUS[gpu].sources in "\n".join(lines)
    assert any(f"{get_gpu(gpu).sms} SMs, reads" in line for line in lines)


def test_published_points_stand_beside_their_prediction(capsys):
    lines = printed(capsys, "--published")
    assert len(lines) == 1 + len(PUBLISHED)
    for point, line in zip(PUBLISHED, lines[1:], strict=True):
        gpu = get_gpu(point.gpu)
        config = get_model(point.model).config(8)
        time = predict(make_plan(config, 8, gpu.sms), gpu, point.num_tokens, CONSTANTS).total_us
        assert line.split()[:6] == [
            gpu.name, point.model, "8", str(point.num_tokens), f"{point.time_us:.1f}", f"{time:.1f}"
        ]  # fmt: skip
        assert difference(time, point.time_us) in line
    lines = printed(capsys, "--model", "deepseek-v4.1-flash", "--gpu", "h20", "--tokens", "8", "16")
    assert [line for line in lines if "published" in line] == [
        line for line in lines if line.split()[:1] == ["8"]
    ]
    assert any("published 284.3" in line for line in lines)


def test_compares_with_records(capsys):
    lines = printed(capsys, "--records", *map(str, sorted(RECORDS.glob("*.json"))))
    assert any(line.startswith("deepseek-v4.1-flash") and " %  " in line for line in lines[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "tokens = 0: from 1 to max_tokens = 8"),
        (["--tokens", "9", "--capacity", "8"], "tokens = 9: from 1 to"),
        (["--ranks", "7"], "must be a multiple of the 7 ranks"),
        (["--ranks", "128", "--share"], "leaves 2 experts, fewer than k = 6"),
    ],
)
def test_names_what_is_wrong(words, message, capsys):
    assert cli.main(["plan", *words]) == 2
    assert message in capsys.readouterr().out


def test_choices_are_tables_whose_rows_name_gpu_and_measurement():
    for row in (*SPLIT_TABLE, *TILE_TABLE):
        assert row.gpu.lower() in GPUS
        assert len(row.measurement) > 20
    limits = [row.max_tokens for row in SPLIT_TABLE]
    assert limits == sorted(set(limits))
    means = [row.mean_rows for row in TILE_TABLE]
    assert means == sorted(set(means))
    assert means[-1] == float("inf")
