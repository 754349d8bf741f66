"""A result, as a table for people."""

from __future__ import annotations

from typing import Any

from decoders import SPLIT
from rows import split_name
from target import headline

WORK = ("workload", "decoder", "step", "step_description", "batch_size", "sync_every_step")  # settings

PART_MEANINGS = {
    "load": "the host makes a batch: samples and collate",
    "fetch": "the part of load before samples are stacked",
    "stage": "the host copies it into pinned memory",
    "copy": "pinned memory to the device",
    "compute": "the step, on batches that are on the device already",
    "rested": "compute, where the host has loaded a batch since the step before",
}


def interval(figure: dict[str, Any], digits: int) -> str:
    return f"[{figure['low']:.{digits}f} .. {figure['high']:.{digits}f}]"


def columns(lines: list[list[str]]) -> list[str]:
    """Left-align the first column and right-align the others."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])  # cells and their widths
        for line in lines
    ]


def _formulas(rows: list[dict[str, Any]]) -> list[str]:
    """Each formula of the bound once, with the rows it is for."""
    formulas = dict.fromkeys(row["bound_formula"] for row in rows)
    names = {formula: [row["name"] for row in rows if row["bound_formula"] == formula] for formula in formulas}
    return [f"bound of {', '.join(names[formula])}: {formula}" for formula in formulas]


def _rows(rows: list[dict[str, Any]], waits: bool) -> list[str]:
    """With the share that the device waited for data if `waits`."""
    memory = ["host MiB", "pinned", "device"]
    times = ["ms a step", "[min .. max]", "samples/s", "bound ms", "x bound", *["waited"] * waits, "first ms", "steady"]
    lines = [["row", *times, *memory]]
    for row in rows:
        waited = [f"{row['waited_share']['median']:.0%}"] if waits else []
        lines.append(
            [
                row["name"] + "!" * bool(row["wrong_repeats"]),
                f"{row['ms_per_step']['median']:.2f}",
                interval(row["ms_per_step"], 2),
                f"{row['samples_per_s']['median']:.0f}",
                f"{row['bound_ms']['median']:.2f}",
                f"{row['multiple_of_bound']['median']:.3f}{'*' if row['below_bound'] else ' '}",
                *waited,
                f"{row['first_batch_ms']['median']:.1f}",
                f"{row['steady_ms_per_step']['median']:.2f}",
                mebibytes(row["host_bytes"]),
                mebibytes(row["pinned_bytes"]),
                mebibytes(row["device_bytes_above_model"]),
            ]
        )
    return columns(lines)


def _multiples(multiples: list[dict[str, Any]]) -> list[str]:
    """Families below each other, their numbers of threads or processes side by side."""
    if not multiples:
        return []
    medians = {split_name(each["name"]): each["median"] for each in multiples}
    bases = {split_name(each["name"])[0]: each["of"] for each in multiples}
    counts = sorted({count for _, count in medians})
    cells = [["threads or processes", *map(str, counts), ""]]
    for family, base in bases.items():
        values = (medians.get((family, count)) for count in counts)
        cells.append([f"{family}N", *("-" if value is None else f"{value:.2f}" for value in values), f"times {base}"])
    return [*(line.rstrip() for line in columns(cells)), ""]


def _over_processes(multiples: list[dict[str, Any]]) -> list[str]:
    """Our rows below each other, those of processes side by side."""
    if not multiples:
        return []
    medians = {(each["name"], each["of"]): f"{each['median']:.2f}" for each in multiples}
    others = list(dict.fromkeys(other for _, other in medians))
    cells = [["ms a step over those of", *others]]
    for name in dict.fromkeys(name for name, _ in medians):
        cells.append([name, *(medians[name, other] for other in others)])
    return [*columns(cells), ""]


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """What a reader wants first: how much faster than the plain loader, and what is faster still."""

    def median(row: dict[str, Any]) -> float:
        return float(row["ms_per_step"]["median"])

    ours = min((row for row in rows if row["ours"]), key=median, default=None)
    if ours is None:
        return []
    lines = []
    for row in rows:
        if row["name"] == "dataloader":
            times = median(row) / median(ours)
            lines.append(
                f"{ours['name']}: {median(ours):.1f} ms a step, {times:.2f}x as fast as dataloader ({median(row):.1f})"
            )
    ahead = sorted((row for row in rows if not row["ours"] and median(row) < median(ours)), key=median)
    if ahead:
        named = (f"{row['name']} {median(row):.1f}{unless_apart(row, ours)}" for row in ahead)
        lines.append(f"ahead of {ours['name']}: {', '.join(named)}")
    return [*lines, ""]


def _over_compute(rows: list[dict[str, Any]]) -> list[str]:
    """What each row adds to the step, in a loop that the device bounds."""
    over = (f"  {row['name']} {row['multiple_of_compute']['median']:.3f}" for row in rows)
    return ["x compute: ms a step over that of compute in the same repeat, median", *over, ""]


def wrongly(row: dict[str, Any]) -> str:
    """In how many repeats a row's batches were wrong, if they were."""
    wrong, of = len(row["wrong_repeats"]), len(row["ms_per_step"]["raw"])
    return f" (wrong in {wrong} of {of})" * bool(wrong)


def is_apart(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if no repeat of the one took as long as any of the other."""
    one, two = row["ms_per_step"], other["ms_per_step"]
    return bool(one["high"] < two["low"] or two["high"] < one["low"])


def unless_apart(row: dict[str, Any], other: dict[str, Any]) -> str:
    """What goes behind the difference of two rows."""
    return "" if is_apart(row, other) else " (within the spread)"


def why_below_bound(settings: dict[str, Any]) -> str:
    """What can make a row take less time than its bound, which the parts would not allow."""
    if settings.get("decoder") in SPLIT:
        return "torch splits the operations of a sample over all its threads in the part load, over fewer in a row"
    return (
        "its parts took longer alone (on a busy machine, with a step that moves from one repeat to the next, or where "
        "a batch takes a fraction of a millisecond), so the row is not to be trusted"
    )


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def setting_line(settings: dict[str, Any]) -> str:
    waits = ", waits for every step" if settings["sync_every_step"] else ""
    return (
        f"workload {settings['workload']}, step {settings['step']}, batch {settings['batch_size']}, "
        f"{settings['steps']} steps, repeats {settings['repeats']}{waits}"
    )


def table(result: dict[str, Any]) -> str:
    """Header, parts, rows and what they mean, as text of at most about 120 columns."""
    settings, notes = result["settings"], result["notes"]
    lines = [
        "",
        setting_line(settings),
        f"  data:    {settings['workload_description']}",
        f"  compute: {settings['step_description']}",
        *(f"  {line}" for line in headline(result["environment"])),
        f"  {result['environment']['command']}",
        "",
    ]
    parts = [["part, alone", "ms a batch", "[min .. max]"]]
    for name, figure in result["parts_ms"].items():
        parts.append([name, f"{figure['median']:.2f}", interval(figure, 2)])
    meanings = ["", *(PART_MEANINGS[name] for name in result["parts_ms"])]
    lines += [f"{text}   {meaning}".rstrip() for text, meaning in zip(columns(parts), meanings, strict=True)]
    lines.append("")

    waits = settings["step"] != "none"  # the device has no work that could wait for a batch
    lines += [*_rows(result["rows"], waits), "", *_multiples(result["multiples_of_one"])]
    if waits:
        lines += _over_compute(result["rows"])
    lines += _over_processes(result["over_processes"])
    lines += [f"note: {note}" for note in notes]
    if settings["on_accelerator"]:  # else a note says that the figures show nothing of the kind
        lines += _verdict(result["rows"])
    width = max([len(row["name"]) for row in result["rows"]] + [len(row["name"]) for row in result["left_out"]] + [0])
    lines += [f"{row['name'].ljust(width)}  {row['description']}" for row in result["rows"]]
    lines += [f"{row['name'].ljust(width)}  left out: {row['reason']}" for row in result["left_out"]]
    lines += [
        "",
        "ms a step: from iter() until the device has done the last step, first batch included; median of the repeats.",
        "x bound: times the bound, below which no step can be: 1 is the best there is; of each repeat, then median.",
        "bound ms: of the host's parts the least that each batch took in any repeat: other work only adds to them.",
        *_formulas(result["rows"]),
    ]
    if not settings["on_accelerator"]:
        lines.append("on the CPU nothing is staged or copied, and fetch is load.")
    if settings["repeats"] < 3:
        lines.append("with fewer than 3 repeats lowest and highest say little of the spread.")
    if result["multiples_of_one"]:
        lines.append("threads or processes: samples/s with so many, over those of the row named, which loads with one.")
    if result["over_processes"]:
        lines.append("over those of processes: in the same repeat, then median; below 1 the row is the faster.")
    if waits:
        lines += [
            "waited: share of the time in which the device had no step to work on, as the next batch was not there;",
            f"  with batches that are on the device already it is {result['compute_waited_share']['median']:.0%}.",
            "  Waits within a step, for launches beside a thread that holds the GIL, are in x compute.",
        ]
    lines += [
        "first ms: from iter() until the first batch is on the device; steady: ms a step after that.",
        "host MiB: of this process and its children, above what they held before the row was opened; pinned: what",
        "  torch's allocator has page-locked; device: peak above what the step needs, the batch in use included.",
    ]
    if any(row["below_bound"] for row in result["rows"]):
        lines.append(f"*: more than 2 % below its bound: {why_below_bound(settings)}.")
    for row in result["rows"]:
        if row["wrong_repeats"]:
            lines.append(
                f"!: {row['name']} gave other batches than the plain loader in {len(row['wrong_repeats'])} of "
                f"{settings['repeats']} repeats: lost, doubled, out of place, or overwritten while in use."
            )
    return "\n".join(lines)


def _marked(row: dict[str, Any]) -> str:
    return f"{row['ms_per_step']['median']:.2f}{'*' * row['below_bound']}{'!' * bool(row['wrong_repeats'])}"


def comparison(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Two results side by side, row by row, after whatever differs in their settings and environments."""
    lines = [f"{name}: {setting_line(result['settings'])}" for name, result in (("first", first), ("second", second))]
    if any(first["settings"].get(name) != second["settings"].get(name) for name in WORK):
        lines.append("note: they did different work, so that a ratio tells of the work as well")
    for title in ("settings", "environment"):
        for name in first[title] | second[title]:
            value, other = first[title].get(name), second[title].get(name)
            if value != other:
                lines.append(f"{name}: {value}  ->  {other}")
    cells = [["row", "first: ms", "[min .. max]", "second: ms", "[min .. max]", "ratio", ""]]
    others = {row["name"]: row for row in second["rows"]}
    for row in first["rows"]:
        if (other := others.get(row["name"])) is None:
            continue
        one, two = row["ms_per_step"], other["ms_per_step"]
        told_apart = "apart" if is_apart(row, other) else "within the spread"
        cells.append(
            [
                row["name"],
                *(_marked(row), interval(one, 2), _marked(other), interval(two, 2)),
                f"{two['median'] / one['median']:.3f}",
                "one repeat" if len(one["raw"]) == len(two["raw"]) == 1 else told_apart,
            ]
        )
    names = {cell[0] for cell in cells}
    compared = [row for row in [*first["rows"], *second["rows"]] if row["name"] in names]
    left_out = [row["name"] for row in [*first["rows"], *second["rows"]] if row["name"] not in names]
    lines += [
        "",
        *columns(cells),
        "",
        "ratio: second over first; apart: no repeat of one took as long as any of the other",
    ]
    if any(row["below_bound"] for row in compared):
        lines.append("*: more than 2 % below its bound, so not to be trusted")
    if any(row["wrong_repeats"] for row in compared):
        lines.append("!: gave other batches than the plain loader in some repeats")
    if left_out:
        lines.append(f"only in one of them: {', '.join(left_out)}")
    return "\n".join(lines)
