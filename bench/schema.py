"""The form of a record, in one place; everything that reads records checks them here first.

A record is a JSON object with the fields of :data:`RECORD`; its rows have those of :data:`ROW`.
Times are microseconds of one layer, on the slowest rank. Fields that are not listed may stand in a
row: they belong to its implementation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 2

NUMBER: tuple[type, ...] = (int, float)
NULLABLE_NUMBER = (*NUMBER, type(None))


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an object.

    Args:
        types: accepted types; a bool is no number.
        required: whether it must be there.
        means: what it holds.
    """

    types: tuple[type, ...]
    means: str
    required: bool = True


RECORD = {
    "schema_version": Field((int,), f"{VERSION}"),
    "created": Field((str,), "UTC, ISO 8601"),
    "command": Field((list,), "arguments of the run"),
    "commit": Field((str,), "of the package, with + for local changes; may be empty"),
    "source": Field((str,), "SHA-256 of the protocol's and the kernels' source"),
    "gpu": Field((str,), "name of the device"),
    "driver": Field((str,), "version; empty where nvidia-smi is missing"),
    "versions": Field((dict,), "of packages, by name"),
    "ranks": Field((int,), "R"),
    "clocks_before": Field((dict,), "what nvidia-smi said when the run began"),
    "clocks_after": Field((dict,), "and when it ended; empty if it did not", required=False),
    "options": Field((dict,), "layers, replays, seed and the like"),
    "implementations": Field((dict,), "present, absent or unfit, reason, install line, by name"),
    "skipped": Field((list,), "what was asked for and not run, each with its reason"),
    "ended": Field((str,), "complete, or why the run stopped early"),
    "rows": Field((list,), "see ROW"),
}
ROW = {
    "model": Field((str,), "key of gcmoe.models.MODELS"),
    "tokens_per_rank": Field((int,), "T"),
    "ranks": Field((int,), "R"),
    "share_of": Field((int,), "expert-parallel width whose one rank is one rank here"),
    "variant": Field((str,), "of the implementation"),
    "impl": Field((str,), "gcmoe, mega_moe_sm90, humming_w4a8 or torch_unfused"),
    "whole_layer": Field((bool,), "False: a part of the layer only"),
    "median_us": Field(NULLABLE_NUMBER, "null where it was not timed"),
    "p10_us": Field(NULLABLE_NUMBER, "10th percentile"),
    "p90_us": Field(NULLABLE_NUMBER, "90th percentile"),
    "one_layer_us": Field(NUMBER, "of a graph with one layer", required=False),
    "sustained_us": Field(NUMBER, "mean under sustained load", required=False),
    "sustained_s": Field(NUMBER, "seconds of that load", required=False),
    "floor_us": Field(NUMBER, "reading the touched experts at 4.40 TB/s"),
    "touched_experts": Field(NUMBER, "of the rank with most, mean over the layers"),
    "layers": Field((int,), "L of the graph"),
    "weight_sets": Field((int,), "distinct weights among them"),
    "per_rank": Field((list,), "rank, rows and touched experts by layer, median"),
    "correct": Field((bool,), "the result held against the oracle"),
    "finite": Field((bool,), "no NaN, no infinity", required=False),
    "cosine": Field(NULLABLE_NUMBER, "smallest of a token", required=False),
    "relative_l2": Field(NULLABLE_NUMBER, "largest of a token", required=False),
    "check": Field((dict,), "rule, and tokens checked", required=False),
    "samples_us": Field((list,), "of each replay", required=False),
    "graph_us": Field((list,), "median of the whole graph by rank", required=False),
    "foreign_us": Field((list,), "median of the foreign kernels by rank", required=False),
    "clocks": Field((dict,), "what nvidia-smi said right after the timing", required=False),
    "trace_us": Field((dict,), "phases by role", required=False),
    "plan": Field((dict,), "SM split, ring and tiles", required=False),
    "fingerprint": Field((dict,), "what all ranks compare, by name", required=False),
    "error": Field((str,), "why there is no time", required=False),
}
TIMES = ("median_us", "p10_us", "p90_us")


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types) and not (isinstance(value, float) and not math.isfinite(value))


def _problems(value: Any, fields: Mapping[str, Field], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: an object is required, got {type(value).__name__}"]
    found = []
    for name, one in fields.items():
        if name not in value:
            if one.required:
                found.append(f"{where}: {name} is missing ({one.means})")
        elif not _fits(value[name], one.types):
            found.append(f"{where}: {name} = {value[name]!r} does not fit: {one.means}")
    return found


def problems_of(record: Any) -> list[str]:
    """What is wrong with a record; empty if nothing is."""
    found = _problems(record, RECORD, "record")
    if found:
        return found
    if record["schema_version"] != VERSION:
        return [f"record: schema version {record['schema_version']}, this code reads {VERSION}"]
    for n, row in enumerate(record["rows"]):
        where = f"row {n}"
        wrong = _problems(row, ROW, where)
        found += wrong
        if wrong:
            continue
        untimed = [name for name in TIMES if row[name] is None]
        if untimed and (row["correct"] or not row.get("error")):
            found.append(f"{where}: {untimed[0]} is null, yet no error is given")
        if not untimed and not row["p10_us"] <= row["median_us"] <= row["p90_us"]:
            found.append(f"{where}: percentiles are out of order")
    return found


def validate(record: Any) -> None:
    """Raises ValueError with everything that is wrong with a record."""
    found = problems_of(record)
    if found:
        raise ValueError("not a record: " + "; ".join(found))


def write(record: dict[str, Any], path: Path) -> None:
    """Write a record whole or not at all.

    Raises:
        ValueError: it does not have the form.
    """
    validate(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A record from a file.

    Raises:
        ValueError: it is no JSON, or does not have the form.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    try:
        validate(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dict(record)
