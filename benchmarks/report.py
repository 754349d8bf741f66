"""A result, as a table for people."""

from __future__ import annotations

from typing import Any

from target import headline

PART_MEANINGS = {
    "load": "the host makes a batch: samples and collate",
    "fetch": "the part of load before samples are stacked",
    "stage": "the host copies it into pinned memory",
    "copy": "pinned memory to the device",
    "compute": "the step, on batches that are on the device already",
}


def interval(figure: dict[str, Any], digits: int) -> str:
    return f"[{figure['low']:.{digits}f} .. {figure['high']:.{digits}f}]"


def _columns(lines: list[list[str]]) -> list[str]:
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


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """What a reader wants first: how much faster than the plain loader."""
    steps = {row["name"]: row["ms_per_step"]["median"] for row in rows}
    ours = [(name, step) for name, step in steps.items() if name.startswith("gpuprefetch")]
    if "dataloader" not in steps or not ours:
        return []
    name, step = min(ours, key=lambda row: row[1])
    times = steps["dataloader"] / step
    return [f"{name}: {step:.1f} ms a step, {times:.2f}x as fast as dataloader ({steps['dataloader']:.1f})", ""]


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
    lines += [f"{text}   {meaning}".rstrip() for text, meaning in zip(_columns(parts), meanings, strict=True)]
    lines.append("")

    rows = [["row", "ms a step", "[min .. max]", "samples/s", "bound ms", "x bound", "first batch ms", "device MiB"]]
    for row in result["rows"]:
        memory = row["device_bytes_above_model"]
        rows.append(
            [
                row["name"],
                f"{row['ms_per_step']['median']:.2f}",
                interval(row["ms_per_step"], 2),
                f"{row['samples_per_s']['median']:.0f}",
                f"{row['bound_ms']['median']:.2f}",
                f"{row['multiple_of_bound']['median']:.3f}{'*' if row['below_bound'] else ' '}",
                f"{row['first_batch_ms']['median']:.1f}",
                "-" if memory is None else f"{memory / 2**20:.0f}",
            ]
        )
    lines += [*_columns(rows), "", *_verdict(result["rows"])]
    width = max([len(row["name"]) for row in result["rows"]] + [len(row["name"]) for row in result["left_out"]] + [0])
    lines += [f"{row['name'].ljust(width)}  {row['description']}" for row in result["rows"]]
    lines += [f"{row['name'].ljust(width)}  left out: {row['reason']}" for row in result["left_out"]]
    lines += [
        "",
        "ms a step: from iter() until the device has done the last step, first batch included; median of the repeats.",
        "x bound: times the bound, below which no step can be: 1 is the best there is; of each repeat, then median.",
        "bound ms: the host's parts are the least of all repeats, since other work on the machine only adds to them.",
        *_formulas(result["rows"]),
        "first batch ms: from iter() until it is on the device.",
        "device MiB: peak of device memory above what the step needs for itself, the batch in use included.",
    ]
    if any(row["below_bound"] for row in result["rows"]):
        lines.append("*: more than 2 % below its bound, which can't be: the machine was busy while parts were timed.")
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines)
