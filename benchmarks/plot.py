"""A result, as a picture for someone who has never heard of streams."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

from report import setting_line, why_below_bound, wrongly
from target import headline

# Okabe and Ito's colours, which colour-blind readers can tell apart.
OURS, OTHERS, PARTS, BOUND = "#0072B2", "#999999", "#E69F00", "#D55E00"
DARK = "#444444"
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}

PART_LABELS = {
    "load": "load: make a batch on the host",
    "fetch": "of which fetch: its samples, not yet stacked",
    "stage": "stage: copy it to pinned memory",
    "copy": "copy: pinned memory to the device",
    "compute": "compute: the training step itself",
    "rested": "rested: the same, after the host has loaded a batch",
}


LANES = {  # of a timeline, from top to bottom
    "load": ("load (CPU)", "#E69F00"),
    "stage": ("stage (CPU)", "#56B4E9"),
    "copy": ("copy (bus)", "#009E73"),
    "compute": ("compute (device)", "#0072B2"),
}
NARROWEST = 1 / 500  # of the time shown, so that no bar vanishes
NUMBERED = 0.015  # a bar that wide has its number in it, a narrower one beside it


def draw(result: dict[str, Any], path: Path) -> None:
    """Write a PNG: the parts of a step, each alone; what a step took in every row, and the bound; and a timeline of a
    few steps for some rows."""
    import matplotlib

    matplotlib.use("Agg")  # no window, so that it works over ssh and leaves a notebook's backend alone
    from matplotlib import pyplot

    parts = result["parts_ms"]
    rows = result["rows"]
    timelines = result["timelines"]
    heights = [0.4 * len(parts), 0.62 * len(rows), *(0.3 * len(timeline["lanes"]) + 0.3 for timeline in timelines)]
    figure, (above, below, *panels) = pyplot.subplots(
        len(heights),
        1,
        figsize=(11, 3.4 + sum(heights) + 0.35 * len(timelines)),
        height_ratios=heights,
        layout="constrained",
    )
    above.sharex(below)
    _bars(above, [PART_LABELS[name] for name in parts], list(parts.values()), [PARTS] * len(parts))
    above.set_title(
        "What one step needs, each part measured alone. One after the other, load, stage, copy and\n"
        "compute take their sum; beside the step before, at best as long as the longest of them.",
        loc="left",
        fontsize=10,
    )

    colours = [OURS if row["name"].startswith("gpuprefetch") else OTHERS for row in rows]
    told = [f"{row['description']}. Bound: {row['bound_formula']}" for row in rows]
    labels = [f"{row['name']}\n{textwrap.fill(text, 60)}" for row, text in zip(rows, told, strict=True)]
    notes = [
        f"  {row['multiple_of_bound']['median']:.2f}x the bound{'*' * row['below_bound']}{wrongly(row)}" for row in rows
    ]
    _bars(below, labels, [row["ms_per_step"] for row in rows], colours, notes)
    for position, row in enumerate(rows):
        bound = row["bound_ms"]["median"]
        below.plot([bound, bound], [position - 0.5, position + 0.5], color=BOUND, linewidth=2, zorder=3)
    below.plot([], [], color=BOUND, linewidth=2, label="bound: the least a step can take this way")
    below.plot([], [], color="black", linewidth=1, label=result["settings"]["interval"])
    below.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=9, borderpad=0)
    below.set_title("What one step took with each way of loading (shorter is better)", loc="left", fontsize=10, pad=24)
    below.set_xlabel("time per training step (ms), median of the repeats, first batch included")
    below.set_xlim(left=0, right=1.35 * _longest(result))
    _timelines(panels, timelines)

    figure.suptitle("\n".join([*_title(result), *_marks(result)]), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130, format="png")
    pyplot.close(figure)


def draw_timelines(result: dict[str, Any], path: Path) -> None:
    """Write a PNG of the timelines alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timelines = result["timelines"]
    heights = [0.3 * len(timeline["lanes"]) + 0.7 for timeline in timelines]
    figure, panels = pyplot.subplots(
        len(timelines), 1, figsize=(11, 0.9 + sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    _timelines(list(panels[:, 0]), timelines)
    figure.suptitle("\n".join(_title(result)), fontsize=8, x=0.01, ha="left")
    figure.savefig(path, dpi=130, format="png")
    pyplot.close(figure)


def _timelines(panels: list[Any], timelines: list[dict[str, Any]]) -> None:
    """One panel a row, all over the same time. A batch keeps its number, so that the eye can follow it downwards."""
    from matplotlib import colors

    for axes, timeline in zip(panels, timelines, strict=True):
        lanes = [name for name in LANES if name in timeline["lanes"]]
        shown = timeline["shown_ms"]
        for position, name in enumerate(lanes):
            spans = timeline["lanes"][name]
            colour, edge, ink, behind = LANES[name][1], "white", "white", None
            if name == "compute" and "busy" in timeline:
                shades = colors.LinearSegmentedColormap.from_list("", ["white", colour])
                extent = (0, shown, position + 0.4, position - 0.4)
                axes.imshow([timeline["busy"]], extent=extent, aspect="auto", cmap=shades, vmin=0, vmax=1)
                colour, edge, ink, behind = "none", colour, DARK, BEHIND_TEXT
            axes.broken_barh(
                [(start, max(end - start, NARROWEST * shown)) for _, start, end in spans],
                (position - 0.4, 0.8),
                facecolors=colour,
                edgecolors=edge,
                linewidth=0 if name == "copy" else 0.5,
            )
            if name == "copy":  # one for each piece
                continue
            for (number, start, end), (_, next_start, _) in itertools.pairwise([*spans, (0, 2 * shown, 0.0)]):
                in_it, beside_it = ((start + end) / 2, "center", ink, behind), (end + shown / 300, "left", DARK, None)
                is_wide = end - start > NUMBERED * shown
                if is_wide or next_start - end > NUMBERED * shown:
                    at, side, colour, box = in_it if is_wide else beside_it
                    font = {"fontsize": 7, "color": colour, "bbox": box}
                    axes.text(at, position, number, ha=side, va="center", clip_on=True, **font)
        axes.set_yticks(range(len(lanes)), [LANES[name][0] for name in lanes], fontsize=8)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(0, shown)
        axes.set_title(
            f"{timeline['name']}: what happens when, in the middle of an epoch (numbers are batches)",
            loc="left",
            fontsize=10,
        )
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if panels:
        told = "time (ms), the same in each panel: bars below one another happen at the same time.\n"
        if any("busy" in timeline for timeline in timelines):
            told += "Lowest lane: the darker, the more of a moment the device was busy; white is one that waits.\n"
        else:
            told += "A gap in the lowest lane is a device that waits for data; waits within a step don't show.\n"
        if any("stage" in timeline["lanes"] for timeline in timelines):  # else there was no device to trace
            told += "stage ends when a batch's last copy is queued: from ordinary memory that waits for the device.\n"
            told += "Traced by a profiler in epochs of their own, so that times differ from those that are measured."
        panels[-1].set_xlabel(told.rstrip("\n"))


def _title(result: dict[str, Any]) -> list[str]:
    settings = result["settings"]
    machine = headline(result["environment"])
    return [setting_line(settings), f"compute: {settings['step_description']}", *machine, *result["notes"]]


def _marks(result: dict[str, Any]) -> list[str]:
    """What the marks behind a row's figures mean."""
    lines = []
    if any(row["below_bound"] for row in result["rows"]):
        lines.append(f"*: more than 2 % below its bound: {why_below_bound(result['settings'])}")
    if any(row["wrong_repeats"] for row in result["rows"]):
        lines.append("wrong in so many repeats: its batches were not those of the plain loader, each once and in order")
    return lines


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
            bbox=BEHIND_TEXT,
            zorder=4,
        )
    axes.set_yticks(list(positions), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
