"""Choosing among records. Ratios hold within one run only, so each picture is of one record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import schema
from bench.cases import DEFAULT

OWN = "gcmoe"


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of one model and number of ranks, of one record.

    Attributes:
        name: file name of the record.
        head: the record without its rows.
        rows: timed and right, by T.
    """

    name: str
    head: dict[str, Any]
    model: str
    ranks: int
    rows: list[dict[str, Any]]

    @property
    def tokens(self) -> list[int]:
        """T of our own default rows, ascending."""
        return sorted(self.own)

    @property
    def own(self) -> dict[int, dict[str, Any]]:
        """Our own rows as a user gets them, by T."""
        return self.of(OWN, DEFAULT)

    def of(self, impl: str, variant: str) -> dict[int, dict[str, Any]]:
        """Rows of an implementation and variant, by T."""
        return {
            row["tokens_per_rank"]: row
            for row in self.rows
            if (row["impl"], row["variant"]) == (impl, variant)
        }

    @property
    def series(self) -> list[tuple[str, str]]:
        """(implementation, variant) pairs, our own first, then in the order of the record."""
        pairs = dict.fromkeys((row["impl"], row["variant"]) for row in self.rows)
        return sorted(pairs, key=lambda pair: pair[0] != OWN)


def load(paths: Iterable[Path]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Records by file name, and a line about each file that is none of this schema."""
    records, passed_over = {}, []
    for path in sorted(paths):
        try:
            version = json.loads(path.read_text(encoding="utf-8")).get("schema_version")
            if version != schema.VERSION:
                passed_over.append(f"{path.name}: schema version {version}")
                continue
            records[path.name] = schema.read(path)
        except (ValueError, AttributeError) as error:
            passed_over.append(f"{path.name}: {error}")
    return records, passed_over


def selections(records: dict[str, dict[str, Any]]) -> list[Selection]:
    """All of them, newest record first; rows that failed or were wrong are left out."""
    found = []
    newest = sorted(records.items(), key=lambda item: item[1]["created"], reverse=True)
    for name, record in newest:
        head = {key: value for key, value in record.items() if key != "rows"}
        good = [row for row in record["rows"] if row["correct"] and row["median_us"]]
        keys = dict.fromkeys((row["model"], row["ranks"]) for row in good)
        for model, ranks in keys:
            rows = [row for row in good if (row["model"], row["ranks"]) == (model, ranks)]
            found.append(Selection(name, head, model, ranks, rows))
    return found


def newest_of_each(found: list[Selection], fits: Callable[[Selection], bool]) -> list[Selection]:
    """Of each model and number of ranks the selection that fits: the most sizes, then the most
    series, then the newest."""
    chosen: dict[tuple[str, int], Selection] = {}
    for one in filter(fits, found):
        key = one.model, one.ranks
        if key not in chosen or extent(one) > extent(chosen[key]):
            chosen[key] = one
    return [chosen[key] for key in sorted(chosen)]


def extent(one: Selection) -> tuple[int, int]:
    """(sizes, series) of a selection."""
    return len(one.tokens), len(one.series)


def comparisons(found: list[Selection], model: str, ranks: int) -> list[Selection]:
    """Of each set of peers and sizes the newest selection of a model, the largest first."""
    chosen: dict[tuple[frozenset[str], tuple[int, ...]], Selection] = {}
    for one in found:
        if (one.model, one.ranks) == (model, ranks) and has_peers(one):
            impls = frozenset(impl for impl, _ in one.series)
            chosen.setdefault((impls, tuple(one.tokens)), one)
    return sorted(chosen.values(), key=extent, reverse=True)


def has_own(one: Selection) -> bool:
    return bool(one.own)


def has_peers(one: Selection) -> bool:
    return has_own(one) and any(impl != OWN for impl, _ in one.series)


def has_ablations(one: Selection) -> bool:
    return has_own(one) and any(impl == OWN and variant != DEFAULT for impl, variant in one.series)
