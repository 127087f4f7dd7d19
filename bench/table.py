"""Rows as a table in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TEXTS = {"model", "impl", "variant", "correct"}
HEADINGS = (
    *("model", "T", "impl", "variant", "median", "p10", "p90", "one", "sustained", "floor"),
    *("floor/t", "gcmoe is", "cosine", "correct"),
)


def _number(value: Any, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def own_times(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Median of our default variant, by model, T and R."""
    return {
        (row["model"], row["tokens_per_rank"], row["ranks"]): row["median_us"]
        for row in rows
        if row["impl"] == "gcmoe" and row["variant"] == "default" and row["median_us"]
    }


def cells(row: dict[str, Any], own: dict[tuple[Any, ...], float]) -> list[str]:
    """A row as text; the ratio says how many times the layer's time a rival takes."""
    median = row["median_us"]
    ours = own.get((row["model"], row["tokens_per_rank"], row["ranks"]))
    ratio = f"{median / ours:.2f}x" if median and ours and row["impl"] != "gcmoe" else ""
    part = "" if row["whole_layer"] else " (GEMMs only)"
    return [
        row["model"],
        str(row["tokens_per_rank"]),
        row["impl"],
        row["variant"] + part,
        _number(median),
        _number(row["p10_us"]),
        _number(row["p90_us"]),
        _number(row.get("one_layer_us")),
        _number(row.get("sustained_us")),
        _number(row["floor_us"]),
        _number(row["floor_us"] / median, 2) if median else "",
        ratio,
        _number(row.get("cosine"), 6),
        row["error"][:60] if row.get("error") else "yes" if row["correct"] else "NO",
    ]


def text_table(rows: list[dict[str, Any]]) -> str:
    """All rows, columns aligned."""
    own = own_times(rows)
    lines = [list(HEADINGS), *(cells(row, own) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEADINGS))]

    def form(line: list[str]) -> str:
        parts = [
            text.ljust(width) if name in TEXTS else text.rjust(width)
            for name, text, width in zip(HEADINGS, line, widths, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([form(lines[0]), *(form(line) for line in lines[1:])])
