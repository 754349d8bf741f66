"""The speed of copies, as a picture: GB/s over size, and the link that no method can beat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from copy_report import methods_of, setting_line
from copy_sources import LEAF_BYTES, LEAVES, SOURCES, size_label
from plot import BOUND, OTHERS, OURS
from target import headline

COLOURS = {  # Okabe and Ito's, as in plot.py
    "gpuprefetch": OURS,
    ".to": OTHERS,
    "pin_memory()": "#E69F00",
    "kept pinned": "#009E73",
    "stacked pinned": "#CC79A7",
    "consolidated": "#56B4E9",
    "link": BOUND,
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: a panel for each source, with a line for each method, and bars for the small tensors."""
    import matplotlib

    matplotlib.use("Agg")  # no window, so that it works over ssh and leaves a notebook's backend alone
    from matplotlib import pyplot

    rows = result["rows"]
    figure, grid = pyplot.subplots(2, 2, figsize=(12, 9.5), layout="constrained")
    panels = dict(zip(SOURCES, grid.flat, strict=True))
    for source in ("pinned", "gathered"):
        panels[source].sharey(panels["pageable"])
    for source, axes in panels.items():
        if source == "leaves":
            _bars(axes, [row for row in rows if row["source"] == source])
        else:
            _lines(axes, [row for row in rows if row["source"] == source], source)
        axes.set_title(f"{source}: {SOURCES[source]}", loc="left", fontsize=9, wrap=True)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    title = [
        "How fast a batch gets to the device, with nothing else going on (higher is better; log-log)",
        f"medians, and from lowest to highest of the repeats; {setting_line(result['settings'])}",
        *headline(result["environment"]),
        *result["notes"],
    ]
    figure.suptitle("\n".join(title), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130, format="png")
    pyplot.close(figure)


def _lines(axes: Any, rows: list[dict[str, Any]], source: str) -> None:
    from matplotlib import ticker

    for name in methods_of(rows, source):
        own = [row for row in rows if row["method"] == name]
        sizes = [row["bytes"] for row in own]
        label = "link: from pinned memory, the limit" if name == "link" else name
        style = "--" if name == "link" else "-"
        medians = [row["gb_per_s"]["median"] for row in own]
        axes.plot(sizes, medians, style, marker="o", markersize=3, color=COLOURS[name], label=label)
        low, high = ([row["gb_per_s"][end] for row in own] for end in ("low", "high"))
        axes.fill_between(sizes, low, high, color=COLOURS[name], alpha=0.2, linewidth=0)
    ticks = sorted({row["bytes"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [size_label(size) for size in ticks], rotation=45, ha="right", fontsize=8)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("size of the batch")
    axes.set_ylabel("GB/s (1e9 bytes a second), call to ready")
    axes.legend(fontsize=8, frameon=False)


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of each method, from top to bottom, with a whisker from lowest to highest."""
    figures = [row["ms"] for row in rows]
    names = [row["method"] for row in rows]
    medians = [figure["median"] for figure in figures]
    whiskers = [
        [figure["median"] - figure["low"] for figure in figures],
        [figure["high"] - figure["median"] for figure in figures],
    ]
    axes.barh(names, medians, xerr=whiskers, color=[COLOURS[name] for name in names], error_kw={"capsize": 3})
    for position, figure in enumerate(figures):
        note = f"{figure['median']:.3f} ms"
        axes.annotate(
            note, (figure["high"], position), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * max(figure["high"] for figure in figures))
    axes.set_xlabel(f"ms for {LEAVES} tensors of {size_label(LEAF_BYTES)}, call to ready (shorter is better)")
