"""Derives the constants of the model from measurements of one model: DeepSeek-V4-Flash on H200.

    python -m gcmoe.plan.fit [RECORD ...]      # prints; --write rewrites gcmoe/plan/fitted.py

Each constant starts at what a source says (:data:`PRIORS`), with the share by which it may be off.
The fit minimises the squared errors of all rows and of all constants, in units of their
uncertainties, by Gauss-Newton steps on the logarithms of the constants. Without trace phases in the
record a sum of constants is known better than each of them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gcmoe.models import get_model, share
from gcmoe.plan.gpus import Gpu, get_gpu
from gcmoe.plan.layer import LayerPlan, TilePlan, capacity_for, make_plan
from gcmoe.plan.predict import Constants, Prediction, predict

FITTED_MODEL = "deepseek-v4-flash"
ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "bench" / "results"
OUTPUT = Path(__file__).with_name("fitted.py")

# (what a source says, share by which it may be off). H200, 2026-11-29; sources:
# edges       a layer in a graph less its time between the first CTA's start and the last one's end
# dispatch    timestamps of a replay with one token, 8 dispatch SMs
# stage       +9.3 us for 256 tokens of H = 4096 on 8 SMs
# sort        +2.3 us for 1,536 entries
# pull        8.7 ns a row with 16 SMs
# unit, column   the compute kernel with all weights in the L2 cache: 77 to 104 us, T = 16 to 128
# read        a read kernel with 108 to 124 SMs
# hop         epilogue, store, flag, poll and first load
# finalize    kernel end to y, own kernel, without the wire
# wire        a released word of one GPU acquired by another, one way
PRIORS: dict[str, tuple[float, float]] = {
    "edges_us": (2.4, 0.3),
    "dispatch_us": (7.3, 0.15),
    "stage_ns": (0.07, 0.3),
    "sort_ns": (1.5, 0.3),
    "pull_ns": (139.0, 0.3),
    "unit_ns": (680.0, 0.2),
    "column_ns": (9.5, 0.5),
    "read_share": (1.0, 0.02),
    "norm": (6.0, 0.5),
    "hop_us": (1.2, 0.5),
    "finalize_us": (3.7, 0.15),
    "wire_us": (1.2, 0.5),
}
BY_WARPGROUPS = ("unit_ns", "column_ns")
ROW_ERROR, LEAST_ROW_ERROR_US, PHASE_ERROR_US = 0.02, 1.0, 1.0
"""Uncertainty of a median (machines differ by that), and of a phase of a trace."""
LEAST_ROWS = 6
"""Numbers of tokens that a record must have to be fitted or compared."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of a record.

    Args:
        model: key of ``gcmoe.models.MODELS``.
        plan: as recorded.
        num_tokens: T of each rank.
        median_us: of the layer.
        floor_us: bytes of the experts that were touched, at the read rate.
        phases: microseconds of phases, by name, or empty.
        record, created: file name and UTC time of the record.
    """

    model: str
    plan: LayerPlan
    num_tokens: int
    median_us: float
    floor_us: float
    phases: dict[str, float]
    record: str
    created: str


def measured_of(row: dict[str, Any], record: str, created: str) -> Measured | None:
    """A row of the layer as users run it; None for ablations, peers and failed rows."""
    is_default = row.get("variant") in ("overlapped", "default")
    if row.get("impl") != "gcmoe" or not is_default or not row.get("median_us"):
        return None
    if not row.get("correct"):
        return None
    ranks, num_tokens = row["ranks"], row["tokens_per_rank"]
    model = share(get_model(row["model"]), row["share_of"])
    model = replace(model, num_experts=model.num_experts * ranks)
    known = {**row, **row.get("plan", {})}
    config = model.config(known.get("capacity") or capacity_for(num_tokens))
    # What the ranks compared; records from before compute could return to the SMs of dispatch
    # do not name it.
    late = known.get("fingerprint", {}).get("late_compute") == "True"
    plan = make_plan(config, ranks, dispatch_sms=known["dispatch_sms"], late_compute=late)
    tiles = dict(known["tiles"])
    tiles["widths"] = tuple(tiles["widths"])
    plan = plan.with_tiles(TilePlan(**tiles))
    phases = row.get("trace_us") or {}
    times = row["median_us"], row["floor_us"]
    return Measured(row["model"], plan, num_tokens, *times, phases, record, created)


def read_record(path: Path, gpu: str = "H200") -> list[Measured]:
    """The usable rows of a record; none if it is of another GPU."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if gpu not in str(record.get("gpu", "")):
        return []
    created = str(record.get("created", ""))
    rows = [measured_of(row, path.name, created) for row in record.get("rows", [])]
    return [row for row in rows if row is not None]


def read_records(folder: Path = RECORDS) -> list[Measured]:
    """The usable rows of all records of H200 in a folder, by file name."""
    return [row for path in sorted(folder.glob("*.json")) for row in read_record(path)]


# ------------------------------------------------------------------------------------- the fit


def names_of(rows: Sequence[Measured]) -> list[tuple[str, int]]:
    """Constants that the rows can tell something about: name, and warpgroups where that counts."""
    groups = sorted({row.plan.tiles.warpgroups for row in rows})
    return [
        (name, group) for name in PRIORS for group in (groups if name in BY_WARPGROUPS else [0])
    ]


def constants_of(names: Sequence[tuple[str, int]], logs: Sequence[float]) -> Constants:
    """Constants from the fit's variables: logarithms of value over prior, in uncertainties."""
    found: dict[str, Any] = {}
    for (name, group), x in zip(names, logs, strict=True):
        prior, uncertainty = PRIORS[name]
        value = prior * math.exp(uncertainty * x)
        if name in BY_WARPGROUPS:
            found.setdefault(name, {})[group] = value
        else:
            found[name] = value
    return Constants(**found)


def phase_errors(row: Measured, found: Prediction) -> list[float]:
    """Errors of the parts that a trace shows, in uncertainties."""
    seen = row.phases
    pairs = []
    if "compute.first_block" in seen:
        pairs.append((found.dispatch_us, seen["compute.first_block"]))
    if "finalize.end" in seen and "compute.end" in seen:
        pairs.append((found.finalize_us, seen["finalize.end"] - seen["compute.end"]))
    return [(mine - its) / PHASE_ERROR_US for mine, its in pairs]


def errors(rows: Sequence[Measured], gpu: Gpu, constants: Constants) -> list[float]:
    """Errors of all rows, in uncertainties."""
    out = []
    for row in rows:
        found = predict(row.plan, gpu, row.num_tokens, constants)
        uncertainty = max(ROW_ERROR * row.median_us, LEAST_ROW_ERROR_US)
        out.append((found.total_us - row.median_us) / uncertainty)
        out += phase_errors(row, found)
    return out


def solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """x of ``matrix @ x = vector``, symmetric and positive definite: Gauss elimination."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    x = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * x[j] for j in range(i + 1, size))
        x[i] = (rows[i][size] - known) / rows[i][i]
    return x


def minimise(function: Callable[[list[float]], list[float]], x: list[float]) -> list[float]:
    """x with the least sum of squares of ``function(x)``: damped Gauss-Newton steps."""
    step, damping = 1e-4, 1e-3
    value = function(x)
    cost = sum(v * v for v in value)
    for _ in range(200):
        columns = []
        for i in range(len(x)):
            moved = [v + step * (i == j) for j, v in enumerate(x)]
            columns.append([(a - b) / step for a, b in zip(function(moved), value, strict=True)])
        matrix = [[sum(a * b for a, b in zip(p, q, strict=True)) for q in columns] for p in columns]
        slope = [-sum(a * b for a, b in zip(p, value, strict=True)) for p in columns]
        for i, row in enumerate(matrix):
            row[i] *= 1 + damping
        change = solve(matrix, slope)
        trial = [a + b for a, b in zip(x, change, strict=True)]
        found = function(trial)
        better = sum(v * v for v in found)
        if better < cost:
            done = cost - better < 1e-10 * cost
            x, value, cost, damping = trial, found, better, damping / 4
            if done:
                break
        else:
            damping *= 8
            if damping > 1e9:
                break
    return x


def fit(rows: Sequence[Measured], gpu: Gpu) -> Constants:
    """The constants that explain the rows best.

    Raises:
        ValueError: there are no rows, or rows of another model than :data:`FITTED_MODEL`.
    """
    if not rows or any(row.model != FITTED_MODEL for row in rows):
        raise ValueError(f"rows of {FITTED_MODEL} and no others are required")
    names = names_of(rows)

    def residuals(x: list[float]) -> list[float]:
        return [*errors(rows, gpu, constants_of(names, x)), *x]

    x = minimise(residuals, [0.0] * len(names))
    return constants_of(names, x)


# ----------------------------------------------------------------------------------- the command


def rounded(constants: Constants) -> Constants:
    """Five digits: what :mod:`gcmoe.plan.fitted` holds."""

    def five(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: five(one) for key, one in value.items()}
        return float(f"{value:.5g}")

    return Constants(**{name: five(value) for name, value in asdict(constants).items()})


def fitted_text(constants: Constants, records: Sequence[str]) -> str:
    """The text of :mod:`gcmoe.plan.fitted`."""
    lines = [
        '"""Constants of the model, written by ``python -m gcmoe.plan.fit --write``."""',
        "",
        "from gcmoe.plan.predict import Constants",
        "",
        "RECORDS = (",
        *(f'    "{name}",' for name in records),
        ")  # fmt: skip",
        '"""In ``bench/results``: what the constants were derived from."""',
        "",
        "CONSTANTS = Constants(",
        *(f"    {name}={value!r}," for name, value in asdict(constants).items()),
        ")",
        "",
    ]
    return "\n".join(lines)


def newest(rows: Sequence[Measured], model: str) -> list[Measured]:
    """For each number of ranks, the rows of ``model`` in the newest record with at least
    :data:`LEAST_ROWS` of them; none if there is no such record."""
    by_record: dict[int, dict[tuple[str, str], list[Measured]]] = {}
    for row in rows:
        if row.model == model:
            records = by_record.setdefault(row.plan.num_ranks, {})
            records.setdefault((row.created, row.record), []).append(row)
    found = []
    for _, records in sorted(by_record.items()):
        full = {key: its for key, its in records.items() if len(its) >= LEAST_ROWS}
        found += full[max(full)] if full else []
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print, and write on demand."""
    parser = argparse.ArgumentParser(description="Derive the constants of the model.")
    parser.add_argument("records", nargs="*", type=Path, help="default: the newest ones")
    parser.add_argument("--write", action="store_true", help=f"rewrite {OUTPUT.name}")
    ns = parser.parse_args(arguments)
    paths: list[Path] = ns.records
    rows = [row for path in paths for row in read_record(path)] if paths else read_records()
    if paths:
        rows = [row for row in rows if row.model == FITTED_MODEL]
    else:
        rows = newest(rows, FITTED_MODEL)
    gpu = get_gpu("H200")
    constants = rounded(fit(rows, gpu))
    for row in rows:
        found = predict(row.plan, gpu, row.num_tokens, constants).total_us
        where = f"R = {row.plan.num_ranks}, T = {row.num_tokens:<4}"
        print(f"{where} {found:8.1f} us, measured {row.median_us:8.1f}")
    text = fitted_text(constants, sorted({row.record for row in rows}))
    if ns.write:
        OUTPUT.write_text(text, encoding="utf-8")
        print(f"wrote {OUTPUT}")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
