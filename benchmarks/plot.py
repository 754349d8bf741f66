"""A result, as a picture for someone who has never heard of streams."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from report import setting_line
from target import headline

# Okabe and Ito's colours, which colour-blind readers can tell apart.
OURS, OTHERS, PARTS, BOUND = "#0072B2", "#999999", "#E69F00", "#D55E00"

PART_LABELS = {
    "load": "load: make a batch on the host",
    "fetch": "of which fetch: its samples, not yet stacked",
    "stage": "stage: copy it to pinned memory",
    "copy": "copy: pinned memory to the device",
    "compute": "compute: the training step itself",
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: above, the parts of a step, each alone; below, what a step took in every row, and the bound."""
    import matplotlib

    matplotlib.use("Agg")  # no window, so that it works over ssh and leaves a notebook's backend alone
    from matplotlib import pyplot

    parts = result["parts_ms"]
    rows = result["rows"]
    size = (11, 3.4 + 0.4 * len(parts) + 0.6 * len(rows))
    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=size, height_ratios=[len(parts), 1.6 * len(rows)]
    )
    _bars(above, [PART_LABELS[name] for name in parts], list(parts.values()), [PARTS] * len(parts))
    above.set_title(
        "What one step needs, each part measured alone. One after the other they take their sum;\n"
        "done at the same time, while the step before is computed, only as long as the longest.",
        loc="left",
        fontsize=10,
    )

    colours = [OURS if row["name"].startswith("gpuprefetch") else OTHERS for row in rows]
    labels = [f"{row['name']}\n{textwrap.fill(row['description'], 46)}" for row in rows]
    notes = [f"  {row['multiple_of_bound']['median']:.2f}x the bound{'*' * row['below_bound']}" for row in rows]
    _bars(below, labels, [row["ms_per_step"] for row in rows], colours, notes)
    for position, row in enumerate(rows):
        bound = row["bound_ms"]["median"]
        below.plot([bound, bound], [position - 0.5, position + 0.5], color=BOUND, linewidth=2, zorder=3)
    below.plot([], [], color=BOUND, linewidth=2, label="bound: the least a step can take this way")
    below.plot([], [], color="black", linewidth=1, label=result["settings"]["interval"])
    figure.legend(loc="lower right", ncols=2, frameon=False, fontsize=9)
    below.set_title("What one step took with each way of loading (shorter is better)", loc="left", fontsize=10)
    below.set_xlabel("time per training step (ms), median of the repeats, first batch included")
    below.set_xlim(left=0, right=1.35 * _longest(result))

    figure.suptitle(_title(result), fontsize=9, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=130, format="png")
    pyplot.close(figure)


def _title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    lines = [setting_line(settings), f"compute: {settings['step_description']}", *headline(result["environment"])]
    lines += result["notes"]
    if any(row["below_bound"] for row in result["rows"]):
        lines.append("*: below its bound, which can't be: the machine was busy, and this row is not to be trusted")
    return "\n".join(lines)


def _longest(result: dict[str, Any]) -> float:
    figures = [*result["parts_ms"].values(), *(row["ms_per_step"] for row in result["rows"])]
    return max(float(figure["high"]) for figure in figures)


def _bars(
    axes: Any, labels: list[str], figures: list[dict[str, Any]], colours: list[str], notes: list[str] | None = None
) -> None:
    """Horizontal bars from top to bottom: the median, a whisker from lowest to highest, and the value beside it."""
    medians = [figure["median"] for figure in figures]
    whiskers = [
        [figure["median"] - figure["low"] for figure in figures],
        [figure["high"] - figure["median"] for figure in figures],
    ]
    positions = range(len(figures))
    axes.barh(positions, medians, xerr=whiskers, color=colours, height=0.6, error_kw={"capsize": 3, "elinewidth": 1})
    for position, figure in enumerate(figures):
        note = notes[position] if notes else ""
        axes.annotate(
            f"{figure['median']:.1f} ms{note}",
            (figure["high"], position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            zorder=4,
        )
    axes.set_yticks(list(positions), labels, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
