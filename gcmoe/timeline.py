"""Timelines: who ran what, where and when; as a Chrome trace, which Perfetto opens, and as a PNG.

Only the standard library, and matplotlib for the picture. Ranks are processes and SMs are threads
of the trace. Source of the format: "Trace Event Format", Google, complete events (``ph`` = X).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS_OF_AN_SM = 1000
"""Thread ids of an SM's second, third, ... row lie this far apart; they hold what overlaps."""
MAX_ROWS_WITH_GAPS = 40
ROLE_ORDER = {"dispatch": 0, "compute": 1, "finalize": 2}

# Okabe and Ito's colours, which stay apart for colour-blind readers; waiting is grey.
COLOURS = {
    "stage": "#0072B2",
    "headers": "#D9D9D9",
    "sort": "#56B4E9",
    "pull": "#CC79A7",
    "close": "#A6A6A6",
    "routes": "#E8E8E8",
    "wait": "#BFBFBF",
    "W1": "#E69F00",
    "W2": "#009E73",
    "arrivals": "#D9D9D9",
    "sum": "#D55E00",
}
WAITING = {COLOURS[name] for name in ("headers", "routes", "wait", "arrivals")}
ROLE_COLOURS = {"dispatch": "#0072B2", "compute": "#E69F00", "finalize": "#D55E00"}


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a CTA did.

    Args:
        name: what, for example ``W1``.
        role: ``dispatch``, ``compute`` or ``finalize``.
        rank, sm, cta: where; ``cta`` counts within the role's grid.
        start, end: in the unit of the timeline.
        detail: further facts, shown when the span is selected.
    """

    name: str
    role: str
    rank: int
    sm: int
    cta: int
    start: float
    end: float
    detail: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans and where they come from.

    Args:
        title: one line.
        spans: times from 0 on.
        facts: machine, model, versions and the like; JSON values.
        unit: ``us``, or ``steps`` of the simulator, which a trace shows as microseconds.
    """

    title: str
    spans: tuple[Span, ...]
    facts: dict[str, Any] = field(default_factory=dict, hash=False)
    unit: str = "us"

    @property
    def duration(self) -> float:
        """When the last span ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})


# ---------------------------------------------------------------------------------- Chrome trace


def placed_rows(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Each span with its row on its SM: 0 unless it overlaps an earlier one that is still open."""
    ends: dict[tuple[int, int], list[float]] = {}
    placed = []
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        rows = ends.setdefault((span.rank, span.sm), [])
        row = next((n for n, end in enumerate(rows) if end <= span.start), len(rows))
        rows[row : row + 1] = [span.end]
        placed.append((span, row))
    return placed


def metadata(kind: str, process: int, thread: int, value: dict[str, Any]) -> dict[str, Any]:
    """One metadata event."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": value}


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object.

    Process and thread ids are rank and SM plus one, as 0 names the idle task in Perfetto.
    """
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], Span] = {}
    for span, row in placed_rows(timeline.spans):
        process, thread = span.rank + 1, row * ROWS_OF_AN_SM + span.sm + 1
        threads.setdefault((process, thread), span)
        events.append(
            {
                "name": span.name,
                "cat": span.role,
                "ph": "X",
                "ts": round(span.start, 3),
                "dur": round(span.end - span.start, 3),
                "pid": process,
                "tid": thread,
                "args": {"sm": span.sm, "cta": span.cta, **span.detail},
            }
        )
    head = []
    for rank in timeline.ranks:
        head.append(metadata("process_name", rank + 1, 0, {"name": f"rank {rank}"}))
    for (process, thread), first in sorted(threads.items()):
        row = (thread - 1) // ROWS_OF_AN_SM
        name = f"SM {first.sm} {first.role}" if row == 0 else f"SM {first.sm} +{row}"
        order = (0 if first.role == "dispatch" else 1000) + first.sm
        head.append(metadata("thread_name", process, thread, {"name": name}))
        head.append(metadata("thread_sort_index", process, thread, {"sort_index": order}))
    return {
        "traceEvents": head + events,
        "displayTimeUnit": "ns",
        "otherData": {"title": timeline.title, "unit": timeline.unit, **timeline.facts},
    }


def from_chrome(trace: dict[str, Any]) -> Timeline:
    """The timeline of a trace that :func:`to_chrome` made.

    Raises:
        ValueError: it is another program's trace.
    """
    try:
        facts = dict(trace["otherData"])
        title, unit = facts.pop("title"), facts.pop("unit")
        spans = []
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                detail = dict(event["args"])
                sm, cta = detail.pop("sm"), detail.pop("cta")
                start = float(event["ts"])
                end = start + float(event["dur"])
                rank = event["pid"] - 1
                span = Span(event["name"], event["cat"], rank, sm, cta, start, end, detail)
                spans.append(span)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a trace that gcmoe wrote: {error!r}") from error
    return Timeline(title, tuple(spans), facts, unit)


def write_chrome(timeline: Timeline, path: Path) -> None:
    """Write the trace; opened by ui.perfetto.dev and chrome://tracing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_chrome(timeline)) + "\n", encoding="utf-8")


def read_chrome(path: Path) -> Timeline:
    """Read a trace back.

    Raises:
        ValueError: it is not a trace that gcmoe wrote.
    """
    return from_chrome(json.loads(path.read_text(encoding="utf-8")))


# ------------------------------------------------------------------------------------------- PNG


def colour_of(span: Span) -> str:
    return COLOURS.get(span.name, ROLE_COLOURS.get(span.role, "#000000"))


def rows_of(timeline: Timeline) -> list[tuple[int, int, str]]:
    """(rank, SM, partition) from top to bottom: the ranks, in each the dispatch SMs first."""
    first: dict[tuple[int, int], str] = {}
    for span in timeline.spans:
        role = first.setdefault((span.rank, span.sm), span.role)
        if ROLE_ORDER[span.role] < ROLE_ORDER[role]:
            first[span.rank, span.sm] = span.role
    rows = [
        (rank, sm, "dispatch" if role == "dispatch" else "compute")
        for (rank, sm), role in first.items()
    ]
    return sorted(rows, key=lambda row: (row[0], row[2] != "dispatch", row[1]))


def draw(timeline: Timeline, path: Path, dpi: int = 110) -> None:
    """A picture: time to the right, a line per SM, colours by what it does; every other item of
    an SM is paler.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = rows_of(timeline)
    place = {(rank, sm): n for n, (rank, sm, _) in enumerate(rows)}
    line = min(0.3, max(0.042, 5.5 / max(len(rows), 1)))
    figure = Figure(figsize=(12, min(line * len(rows) + 1.6, 40)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    gap = 0.06 if len(rows) <= MAX_ROWS_WITH_GAPS else 0.0
    bars: dict[tuple[int, str, float], list[tuple[float, float]]] = {}
    legend: dict[str, str] = {}
    for span in sorted(timeline.spans, key=lambda s: (ROLE_ORDER[s.role], s.start)):
        colour = colour_of(span)
        name = span.name if span.name in COLOURS else span.role
        legend.setdefault(f"{span.role}: {name}" if name != span.role else name, colour)
        bar = span.start, span.end - span.start
        shade = 0.7 if span.detail.get("item", 0) % 2 else 1.0
        bars.setdefault((place[span.rank, span.sm], colour, shade), []).append(bar)
    for (row, colour, shade), ranges in bars.items():
        box = row + gap, 1 - 2 * gap
        # Work hides the waiting of a CTA that shares the SM.
        order = 1 if colour in WAITING else 2
        axes.broken_barh(ranges, box, facecolors=colour, alpha=shade, linewidth=0, zorder=order)
    ticks, labels = [], []
    for rank, partition in sorted(
        {(r, p) for r, _, p in rows}, key=lambda g: (g[0], g[1] == "compute")
    ):
        lines = [n for n, (r, _, p) in enumerate(rows) if (r, p) == (rank, partition)]
        ticks.append((lines[0] + lines[-1] + 1) / 2)
        labels.append(f"rank {rank}\n{partition}\n{len(lines)} SMs")
        axes.axhline(lines[-1] + 1, color="black", linewidth=0.6)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.set_ylim(len(rows), 0)
    axes.set_xlim(0, timeline.duration * 1.005 or 1)
    axes.set_xlabel(
        "microseconds after the first CTA's start" if timeline.unit == "us" else "steps"
    )
    axes.set_title(timeline.title, fontsize=11)
    handles = [Patch(facecolor=colour, label=name) for name, colour in legend.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_figure(str(path), dpi=dpi, metadata={"Software": None})


def write(timeline: Timeline, path: str) -> None:
    """Write by the ending of ``path``: ``.png`` the picture, else the trace."""
    where = Path(path)
    draw(timeline, where) if where.suffix == ".png" else write_chrome(timeline, where)
