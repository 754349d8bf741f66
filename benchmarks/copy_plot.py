"""The speed of copies, as a picture: GB/s over size, of methods and the link that none can beat, or of variants."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from copy_report import setting_line
from copy_sources import SOURCES, batch_label
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
NO_LONGER_A_METHOD = "#000000"  # in a result that is kept
VARIANT_COLOURS = (OURS, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", OTHERS)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: a panel for each source, with a line for each method."""
    names = dict.fromkeys(row["method"] for row in result["rows"])
    colours = {name: COLOURS.get(name, NO_LONGER_A_METHOD) for name in names}
    _draw(result, "method", colours, setting_line(result["settings"]), path)


def draw_variants(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: a panel for each source, with a line for each variant."""
    settings = result["settings"]
    names = [variant["name"] for variant in settings["variants"]]
    colours = dict(zip(names, itertools.cycle(VARIANT_COLOURS), strict=False))
    _draw(result, "variant", colours, f"{settings['repeats']} in each of {settings['openings']} openings", path)


def _draw(result: dict[str, Any], key: str, colours: dict[str, str], repeats: str, path: Path) -> None:
    """A panel for each source, with a line for each name that has a colour and is in the rows as their `key`."""
    import matplotlib

    matplotlib.use("Agg")  # no window, so that it works over ssh and leaves a notebook's backend alone
    from matplotlib import pyplot

    rows = result["rows"]
    sources = list(dict.fromkeys(row["source"] for row in rows))
    width = min(len(sources), 2)
    height = math.ceil(len(sources) / width)
    size = (4 + 4 * width, 4.75 * height)  # one panel is as wide as the title
    figure, grid = pyplot.subplots(height, width, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes in grid.flat[len(sources) :]:
        axes.set_axis_off()
    for source, axes in zip(sources, grid.flat, strict=False):
        _lines(axes, [row for row in rows if row["source"] == source], key, colours)
        title = f"{source}: {SOURCES[source]}" if source in SOURCES else source
        axes.set_title(title, loc="left", fontsize=9, wrap=True)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    title = [
        "How fast a batch gets to the device, with nothing else going on (higher is better; log-log)",
        f"medians, and from lowest to highest of the repeats; {repeats}",
        *headline(result["environment"]),
        *result.get("notes", ()),
    ]
    figure.suptitle("\n".join(title), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130, format="png")
    pyplot.close(figure)


def _lines(axes: Any, rows: list[dict[str, Any]], key: str, colours: dict[str, str]) -> None:
    from matplotlib import ticker

    for name, colour in colours.items():
        own = [row for row in rows if row[key] == name]
        if not own:
            continue
        sizes = [row["bytes"] for row in own]
        label = "link: from pinned memory, the limit" if name == "link" else name
        style = "--" if name == "link" else "-"
        medians = [row["gb_per_s"]["median"] for row in own]
        axes.plot(sizes, medians, style, marker="o", markersize=3, color=colour, label=label)
        low, high = ([row["gb_per_s"][end] for row in own] for end in ("low", "high"))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
    ticks = sorted({row["bytes"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    labels = [batch_label(rows[0]["source"], size) for size in ticks]
    axes.set_xticks(ticks, labels, rotation=45, ha="right", fontsize=8)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel("size of the batch")
    axes.tick_params(labelleft=True)
    axes.set_ylabel("GB/s (1e9 bytes a second), call to ready")
    axes.legend(fontsize=8, frameon=False)
