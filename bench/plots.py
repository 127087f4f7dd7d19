"""``python -m bench.plots``: pictures and a page of numbers, from records only."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench import records
from bench.cases import DEFAULT
from bench.page import write_page
from bench.records import OWN, Selection

ROOT = Path(__file__).resolve().parents[1]
# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
FLOOR_COLOUR = "#7F7F7F"
SALT = "gcmoe"
"""Makes the ids in an SVG the same on every run."""
ABLATION_TOKENS = (1, 8, 64, 256)


def label_of(impl: str, variant: str, *, whole_layer: bool) -> str:
    if impl == OWN and variant == DEFAULT:
        return "GC-MoE"
    return f"{impl} {variant}" + ("" if whole_layer else ", GEMMs only")


def title_of(one: Selection) -> str:
    ranks = "one rank's share of EP8" if one.ranks == 1 else f"EP{one.ranks}"
    return f"{one.model}, {ranks}, {one.head['gpu']}"


def make_axes(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": SALT,
            "svg.fonttype": "path",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def token_axis(axes: Any, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens per rank")


def draw_latency(one: Selection, path: Path) -> Path:
    """Medians against T with the 10th to 90th percentile, and the floor."""
    figure, axes = make_axes(6.4, 4.0)
    floors = [one.own[t]["floor_us"] for t in one.tokens]
    axes.plot(one.tokens, floors, color=FLOOR_COLOUR, linestyle=":", label="floor, MXFP4 bytes")
    pairs = [(i, v) for i, v in one.series if i != OWN or v == DEFAULT]
    for n, (impl, variant) in enumerate(pairs):
        rows = one.of(impl, variant)
        tokens = sorted(rows)
        values = {
            name: [rows[t][name] for t in tokens] for name in ("median_us", "p10_us", "p90_us")
        }
        whole = all(rows[t]["whole_layer"] for t in tokens)
        axes.plot(
            tokens,
            values["median_us"],
            marker="o",
            markersize=3,
            color=COLOURS[n % len(COLOURS)],
            linestyle="-" if whole else "--",
            label=label_of(impl, variant, whole_layer=whole),
        )
        axes.fill_between(
            tokens, values["p10_us"], values["p90_us"], color=COLOURS[n % len(COLOURS)], alpha=0.2
        )
    token_axis(axes, one.tokens)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("us of one layer, in a graph")
    axes.set_title(title_of(one))
    axes.legend(frameon=False)
    return save(figure, path)


def grouped_bars(axes: Any, groups: list[str], bars: dict[str, list[float | None]]) -> None:
    """Bars side by side at each group; None leaves a gap."""
    width = 0.8 / max(len(bars), 1)
    for n, (label, values) in enumerate(bars.items()):
        places = [g - 0.4 + (n + 0.5) * width for g, v in enumerate(values) if v is not None]
        heights = [v for v in values if v is not None]
        axes.bar(places, heights, width, label=label, color=COLOURS[(n + 1) % len(COLOURS)])
    axes.set_xticks(range(len(groups)), groups)


def ratios(one: Selection, impl: str, variant: str, tokens: list[int]) -> list[float | None]:
    """Time over our own default, at each T."""
    rows = one.of(impl, variant)
    return [rows[t]["median_us"] / one.own[t]["median_us"] if t in rows else None for t in tokens]


def percent(ratio: float | None) -> float | None:
    """A ratio as what it lies above 1, in percent."""
    return None if ratio is None else 100 * (ratio - 1)


def draw_speedup(one: Selection, path: Path) -> Path:
    """How many times our time each peer takes."""
    figure, axes = make_axes(6.4, 3.2)
    bars = {}
    for impl, variant in one.series:
        if impl != OWN:
            whole = all(row["whole_layer"] for row in one.of(impl, variant).values())
            label = label_of(impl, variant, whole_layer=whole)
            bars[label] = ratios(one, impl, variant, one.tokens)
    grouped_bars(axes, [str(t) for t in one.tokens], bars)
    axes.axhline(1.0, color=COLOURS[0], linewidth=1)
    axes.set_xlabel("tokens per rank")
    axes.set_ylabel("time over GC-MoE's")
    axes.set_title(title_of(one))
    figure.legend(frameon=False, ncols=2, loc="outside lower center")
    return save(figure, path)


def draw_ablation(one: Selection, path: Path) -> Path:
    """What each variant takes more or less than the default."""
    figure, axes = make_axes(8.0, 3.4)
    tokens = [t for t in one.tokens if t in ABLATION_TOKENS] or one.tokens
    variants = [v for i, v in one.series if i == OWN and v != DEFAULT]
    by_tokens = {
        f"{t} tokens": [percent(ratios(one, OWN, v, [t])[0]) for v in variants] for t in tokens
    }
    grouped_bars(axes, variants, by_tokens)
    axes.axhline(0.0, color=COLOURS[0], linewidth=1)
    axes.tick_params(axis="x", rotation=30)
    axes.set_ylabel("time, % over the default's")
    axes.set_title(title_of(one))
    figure.legend(frameon=False, ncols=len(tokens), loc="outside lower center")
    return save(figure, path)


def draw_fractions(chosen: list[Selection], path: Path) -> Path:
    """Floor over time of our own layer, all models."""
    figure, axes = make_axes(6.4, 3.6)
    for n, one in enumerate(chosen):
        values = [one.own[t]["floor_us"] / one.own[t]["median_us"] for t in one.tokens]
        axes.plot(
            one.tokens,
            values,
            marker="o",
            markersize=3,
            color=COLOURS[n % len(COLOURS)],
            label=one.model if one.ranks == 1 else f"{one.model}, EP{one.ranks}",
        )
    token_axis(axes, sorted({t for one in chosen for t in one.tokens}))
    axes.set_ylim(0, 1.05)
    axes.axhline(1.0, color=FLOOR_COLOUR, linestyle=":")
    axes.set_ylabel("floor / time")
    axes.legend(frameon=False)
    return save(figure, path)


def stem(kind: str, one: Selection) -> str:
    ranks = "" if one.ranks == 1 else f"-r{one.ranks}"
    return f"{kind}-{one.model}{ranks}.svg"


def draw_all(found: list[Selection], folder: Path) -> list[Path]:
    """All pictures that the records allow."""
    paths = []
    own = records.newest_of_each(found, records.has_own)
    compared = records.newest_of_each(found, records.has_peers)
    for one in compared or own:
        paths.append(draw_latency(one, folder / stem("latency", one)))
    for one in compared:
        paths.append(draw_speedup(one, folder / stem("speedup", one)))
    for one in records.newest_of_each(found, records.has_ablations):
        paths.append(draw_ablation(one, folder / stem("ablation", one)))
    if own:
        paths.append(draw_fractions(own, folder / "fraction.svg"))
    return paths


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description="Draw records.")
    parser.add_argument("records", nargs="*", type=Path, help="(bench/results/*.json)")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", metavar="DIR")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    ns = parser.parse_args(arguments)
    paths = ns.records or list((ROOT / "bench" / "results").glob("*.json"))
    loaded, passed_over = records.load(paths)
    for line in passed_over:
        print(f"passed over {line}")
    found = records.selections(loaded)
    if not found:
        print("no records to draw")
        return 0
    drawn = draw_all(found, ns.figures)
    write_page(found, drawn, ns.page)
    for path in (*drawn, ns.page):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
