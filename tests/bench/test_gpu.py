"""A whole run on a GPU, as a process."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import schema

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path, compile_only):
    command = [sys.executable, "-m", "bench", "--tokens", "1", "8", "--layers", "4"]
    command += ["--replays", "20", "--sustained", "0.1", "--variants", "default", "serial"]
    command += ["--out", str(tmp_path), *(["--compile-only"] if compile_only else [])]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    if compile_only:
        return
    (path,) = tmp_path.glob("bench-*.json")
    record = schema.read(path)
    assert record["ended"] == "complete"
    assert [(r["tokens_per_rank"], r["variant"]) for r in record["rows"]] == [
        (1, "default"),
        (1, "serial"),
        (8, "default"),
        (8, "serial"),
    ]
    for row in record["rows"]:
        assert row["correct"]
        assert 0 < row["floor_us"] < row["median_us"] < 100 * row["floor_us"]
        assert row["sustained_us"] > 0.8 * row["median_us"]
