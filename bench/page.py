"""The page of numbers, written from records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import records
from bench.cases import DEFAULT, VARIANTS
from bench.records import OWN, Selection

HEAD = """\
# Measured

Written by `make plots` from the records in `bench/results/`; do not edit.

Microseconds of one layer, medians. Layer time = (a graph of L layers with a foreign kernel before
each - the same graph with the foreign kernels only) / L, distinct weights and routing for each
layer, random data, slowest rank. The floor is the time to read the MXFP4 bytes of the experts that
were touched at 4.40 TB/s. Implementations of a table took turns in one run, and each result was
compared with the oracle first. Peers marked * do GEMMs and SwiGLU only.
"""


def row_text(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table_text(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(heading) - 1)
    return "\n".join([row_text(heading), row_text(rule), *(row_text(line) for line in lines)])


def values_of(
    rows: dict[int, dict[str, Any]], tokens: Sequence[int], name: str = "median_us"
) -> list[str]:
    return [f"{rows[t][name]:.1f}" if t in rows and rows[t].get(name) else "" for t in tokens]


def describe(one: Selection) -> str:
    """Where a selection comes from."""
    head = one.head
    versions = ", ".join(f"{name} {v}" for name, v in sorted(head["versions"].items()))
    absent = [
        f"{name} was {state['state']} ({state['reason']})"
        for name, state in head["implementations"].items()
        if state["state"] != "present"
    ]
    parts = [f"`{one.name}`: commit {head['commit'] or 'unknown'}, {head['gpu']}"]
    parts += [f"driver {head['driver']}", versions, *absent]
    return "; ".join(parts) + "."


def comparison(one: Selection) -> str:
    """Our layer and its peers, by T."""
    tokens = one.tokens
    floors = [f"{one.own[t]['floor_us']:.1f}" for t in tokens]
    lines = [["floor", *floors]]
    sustained = []
    for impl, variant in one.series:
        if impl == OWN and variant != DEFAULT:
            continue
        rows = one.of(impl, variant)
        mark = "" if all(row["whole_layer"] for row in rows.values()) else " *"
        name = impl if impl == OWN else f"{impl} {variant}{mark}"
        lines.append([name, *values_of(rows, tokens)])
        if any(row.get("sustained_us") for row in rows.values()):
            sustained.append([f"{name}, sustained", *values_of(rows, tokens, "sustained_us")])
    own = [one.own[t]["floor_us"] / one.own[t]["median_us"] for t in tokens]
    lines += [*sustained, ["gcmoe, floor / time", *(f"{value:.2f}" for value in own)]]
    return table_text(["tokens per rank", *map(str, tokens)], lines)


def ablation(one: Selection) -> str:
    """Our variants, by T."""
    tokens = one.tokens
    variants = [v for i, v in one.series if i == OWN]
    lines = [
        [f"{v}: {VARIANTS[v].why}" if v in VARIANTS else v, *values_of(one.of(OWN, v), tokens)]
        for v in variants
    ]
    return table_text(["variant", *map(str, tokens)], lines)


def page_text(found: list[Selection], figures: Sequence[Path], folder: Path) -> str:
    """The whole page.

    Args:
        folder: of the page, which pictures are linked from.
    """
    parts = [HEAD]
    for one in records.newest_of_each(found, records.has_own):
        ranks = "one rank's share of EP8" if one.ranks == 1 else f"{one.ranks} ranks"
        parts.append(f"## {one.model}, {ranks}\n")
        for shown in records.comparisons(found, one.model, one.ranks) or [one]:
            parts.append(f"{describe(shown)}\n\n{comparison(shown)}\n")
    ablations = records.newest_of_each(found, records.has_ablations)
    if ablations:
        parts.append("## Ablations\n")
    for one in ablations:
        parts.append(f"{one.model}, {one.ranks} rank(s). {describe(one)}\n\n{ablation(one)}\n")
    links = [f"![{path.stem}]({os.path.relpath(path, folder)})" for path in figures]
    if links:
        parts.append("## Pictures\n\n" + "\n".join(links) + "\n")
    return "\n".join(parts)


def write_page(found: list[Selection], figures: Sequence[Path], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page_text(found, figures, path.parent), encoding="utf-8")
