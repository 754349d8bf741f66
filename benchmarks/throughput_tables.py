"""What pages show of the results of throughput.py."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

import in_process  # noqa: F401  (registers the rows: so do the next two)
import ours  # noqa: F401
import peers  # noqa: F401
from page_text import (
    command,
    described,
    labelled,
    markdown,
    one_digit,
    origin,
    paragraph,
    parts_alone,
    ranged,
)
from report import mebibytes, setting_line, unless_apart, why_below_bound, wrongly
from result_files import Unwritable, cells, find, ratios, read
from rows import ROWS, rows_called, split_name

COLUMNS = {  # of README's table: cell and heading
    "memory-kernels": "ready samples, GPU-bound step",
    "memory-resnet50": "ready samples, ResNet-50",
    "memory-resnet50-sync": "the same, loss read in each step",
    "jpeg-kernels": "JPEG, GPU-bound step",
    "jpeg-resnet50": "JPEG, ResNet-50",
    "python-resnet50": "pure Python, ResNet-50",
}
README_ROWS = {
    "dataloader": "`DataLoader`, 0 workers, `.to`",
    "pinned": "+ `pin_memory`, `non_blocking`",
    "thread": "one background thread that pins and copies",
    "nodes8": "torchdata.nodes, 8 threads",
    "spdl8": "SPDL, 8 threads",
    "workers4": "`DataLoader`, 4 worker processes, pinned",
    "workers8": "`DataLoader`, 8 worker processes, pinned",
    "gpuprefetch": "**gpuprefetch**",
    "gpuprefetch0": "**gpuprefetch**, `num_threads=0`",
    "gpuprefetch8": "**gpuprefetch**, `num_threads=8`",
    "gpuprefetch-workers8": "**gpuprefetch** around the 8 worker processes",
}
DECODERS = {  # in the order of their tables
    "opencv": "OpenCV",
    "torchvision-io": "torchvision.io",
    "torchvision": "torchvision.io, transforms",
    "torchvision-uint8": "the same in uint8",
    "pil": "PIL",
}
WAYS = {"gpuprefetch": "threads", "workers": "processes"}
BELOW_BOUND = r"\*"


def steps(folder: str = ".") -> str:
    """README's table: ms a step, of a few rows in a few cells."""
    found = cells(folder)
    results = {heading: found[name] for name, heading in COLUMNS.items() if name in found}
    lines = [["ms a step", *results]]
    lines.append(["compute alone, on the device", *(one_digit(r["parts_ms"]["compute"]) for r in results.values())])
    for name, label in README_ROWS.items():
        figures = [_ms_and_wrong(find(result, name)) for result in results.values()]
        if any(figures):  # older results lack a row
            lines.append([label, *figures])
    return markdown(lines)


def ms_a_step(row: dict[str, Any] | None) -> str:
    return "" if row is None else one_digit(row["ms_per_step"]) + BELOW_BOUND * row["below_bound"]


def cell(name: str) -> str:
    """docs/performance.md: everything that one run says of its rows."""
    result = read(name)
    head = "row|ms a step|lowest to highest|bound|x bound|x compute|waited|first ms|host|pinned|device"
    lines = [head.split("|")]
    for row in result["rows"]:
        step = row["ms_per_step"]
        lines.append(
            [
                labelled(row["name"]) + wrongly(row),
                *ranged(step),
                f"{row['bound_ms']['median']:.2f}",
                f"{row['multiple_of_bound']['median']:.2f}" + BELOW_BOUND * row["below_bound"],
                f"{over_parts(result, row):.2f}",
                f"{row['waited_share']['median']:.0%}",
                f"{row['first_batch_ms']['median']:.0f}",
                *(mebibytes(row[key]) for key in ("host_bytes", "pinned_bytes", "device_bytes_above_model")),
            ]
        )
    files = f"[JSON](../benchmarks/results/{name}.json), [picture](../benchmarks/results/{name}.png)"
    said = [parts_alone(result), *(f"Note: {note}." for note in result["notes"])]
    if any(row["below_bound"] for row in result["rows"]):
        said.append(f"{BELOW_BOUND}: more than 2 % below its bound: {why_below_bound(result['settings'])}.")
    said.append(f"{files}.")
    settings = paragraph(f"{setting_line(result['settings'])}; {origin(result['environment'])}.", *said)
    return f"    {command(result['environment'])}\n\n{settings}\n\n{markdown(lines)}"


def over_parts(result: dict[str, Any], row: dict[str, Any], parts: tuple[str, ...] = ("compute",)) -> float:
    """A step over the longest of these parts, of each repeat, then median. Of compute a result has it too, but not one
    of an older throughput.py."""
    alone = map(max, zip(*(result["parts_ms"][part]["raw"] for part in parts), strict=True))
    return statistics.median(own / longest for own, longest in zip(row["ms_per_step"]["raw"], alone, strict=True))


def steps_machine(folder: str = ".") -> str:
    """Where the cells of that table were measured."""
    return _machine({name: result for name, result in cells(folder).items() if name in COLUMNS})


def machine() -> str:
    """Where all cells were measured."""
    return _machine(cells())


def _machine(results: dict[str, dict[str, Any]]) -> str:
    """One kind of machine, or a list of kinds with the cells of each; but for those of a Python without the GIL, which
    is another by itself."""
    kinds: dict[str, list[str]] = {}
    for name, result in results.items():
        environment = result["environment"]
        if environment.get("gil", True):
            all_cores = {**environment, "cpus_usable": environment["cpu_count"]}  # some cells were given fewer
            kinds.setdefault(described(all_cores), []).append(name)
    if len(kinds) == 1:
        return paragraph(f"{kinds.popitem()[0]}.")
    return "\n".join(
        textwrap.fill(f"- {kind}: {'; '.join(names)}.", 120, subsequent_indent="  ", break_on_hyphens=False)
        for kind, names in kinds.items()
    )


def rows() -> str:
    """What each row of any cell is, in the order of the registry, whose text it is where cells differ."""
    texts: dict[str, set[str]] = {}
    for row in (row for result in cells().values() for row in result["rows"]):
        texts.setdefault(row["name"], set()).add(row["description"])
    counts = sorted({split_name(name)[1] for name in texts} - {0})  # gpuprefetch0 is registered by itself
    registered = {row.name: row.description for name in ROWS for row in rows_called(name, counts)}
    if unknown := sorted(texts.keys() - registered):
        raise Unwritable(f"benchmarks/results has rows that are not registered: {', '.join(unknown)}")
    lines = [["row", "what it is"]]
    for name, newest in registered.items():
        if name in texts:
            lines.append([name, newest if len(texts[name]) > 1 else texts[name].pop()])
    return markdown(lines)


def earlier() -> str:
    """docs/performance.md: rows over the longer of loading and computing, as they were measured earlier and as they
    are; a table for each cell that there is, with its twin that waits."""
    before, measured = read("earlier")["ms_per_step"], cells()
    names = [name for name in before if not name.endswith("-sync") and name in measured]
    return "\n\n".join(_earlier(name, before, measured) for name in names)


def _earlier(name: str, before: dict[str, dict[str, float]], measured: dict[str, Any]) -> str:
    pair = [each for each in (name, f"{name}-sync") if each in measured]
    settings = measured[name]["settings"]
    lines = [["ms a step over the longer part", "earlier", "now", "waited for: earlier", "now"][: 1 + 2 * len(pair)]]
    for part in ("load", "compute"):
        now = [one_digit(measured[each]["parts_ms"][part]) for each in pair]
        lines.append([f"{part} alone, ms", *_in_turn([f"{before[each][part]:g}" for each in pair], now)])
    for row_name in [row for row in before[name] if row not in ("load", "compute")]:
        then, now = [], []
        for each in pair:
            row, took = find(measured[each], row_name), before[each].get(row_name)
            then.append("" if took is None else f"{took / max(before[each]['load'], before[each]['compute']):.2f}")
            now.append("" if row is None else f"{over_parts(measured[each], row, ('load', 'compute')):.2f}")
        lines.append([row_name, *_in_turn(then, now)])
    return f"Workload {settings['workload']}, batch {settings['batch_size']}:\n\n{markdown(lines)}"


def _in_turn(ones: list[str], others: list[str]) -> list[str]:
    return [each for pair in zip(ones, others, strict=True) for each in pair]


def windows_fix() -> str:
    """docs/migrate.md: ms a step with FastReID's fix for Windows, with what FastReID has elsewhere, and with ours."""
    names = ["windows-fix", "fastreid", "gpuprefetch-x", "gpuprefetch", "gpuprefetch0"]
    lines = [["ms a step", *names, "gpuprefetch-x over fastreid", "windows-fix over gpuprefetch-x"]]
    notes = []
    results = cells()
    order = [name for name in dict.fromkeys([*COLUMNS, *results]) if name in results]  # "the same" is of the one before
    for name in order:
        found = [find(results[name], each) for each in names]
        fix, fastreid, gpuprefetch_x, *_ = found
        if fix is None or not any(found[2:]):
            continue
        label = COLUMNS.get(name, name)
        lines.append([label, *map(_ms_and_wrong, found), _over(gpuprefetch_x, fastreid), _over(fix, gpuprefetch_x)])
        notes += [paragraph(f"Note, {label}: {note}.") for note in results[name]["notes"]]
    return "\n\n".join([markdown(lines), *notes])


def _over(row: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    if row is None or other is None:
        return ""
    return f"{statistics.median(ratios(row, other)):.2f}{unless_apart(row, other)}"


def _ms_and_wrong(row: dict[str, Any] | None) -> str:
    return "" if row is None else ms_a_step(row) + wrongly(row)


def threads(step: str) -> str:
    """docs/choosing-threads.md: samples/s (without a step: `loading`) or ms a step, by decoder and number of threads or
    processes, and the quotient of both with 8."""
    found = {label: cells().get(f"threads-{decoder}-{step}") for decoder, label in DECODERS.items()}
    results = {label: result for label, result in found.items() if result is not None}
    if not results:
        raise Unwritable(f"there is no threads-DECODER-{step}.json in benchmarks/results")
    counts = sorted({split_name(row["name"])[1] for result in results.values() for row in result["rows"]})
    key, digits = ("samples_per_s", 0) if step == "loading" else ("ms_per_step", 1)
    lines = [["samples/s" if step == "loading" else "ms a step", "", *map(str, counts), "time of 8 over 8 processes"]]
    for label, result in results.items():
        ratios = {(each["name"], each["of"]): f"{each['median']:.2f}" for each in result["over_processes"]}
        for family, way in WAYS.items():
            rows = [
                find(result, "gpuprefetch" if (family, count) == ("gpuprefetch", 1) else f"{family}{count}")
                for count in counts
            ]
            figures = ["" if row is None else f"{row[key]['median']:.{digits}f}" for row in rows]
            lines.append([label, way, *figures, ratios.get((f"{family}8", "workers8"), "")])
    notes = [paragraph(f"Note, {label}: {note}.") for label, result in results.items() for note in result["notes"]]
    return "\n\n".join([markdown(lines), *notes])
