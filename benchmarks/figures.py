"""Puts the figures of benchmarks/results into README.md and docs/, between the marks that are there for them.

python benchmarks/figures.py            # after new results
python benchmarks/figures.py --check    # exit status 1 where a page does not say what the results say
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import setting_line, why_below_bound
from rows import split_name
from target import headline

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LANES = ("memory-kernels", "docs/lanes.png")  # the cell whose timeline docs/how-it-works.md shows, and where it goes

BEGIN = "<!-- figures: "
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w -]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

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
    "workers8": "`DataLoader`, 8 worker processes, pinned",
    "gpuprefetch": "**gpuprefetch**",
    "gpuprefetch0": "**gpuprefetch**, `num_threads=0`",
    "gpuprefetch8": "**gpuprefetch**, `num_threads=8`",
}


DECODERS = {"opencv": "OpenCV", "torchvision": "torchvision.io", "pil": "PIL"}  # in the order of their tables
WAYS = {"gpuprefetch": "threads", "workers": "processes"}


class Unwritable(Exception):
    """A page and the results do not fit together; the text says where."""


def pages() -> list[str]:
    """Those that have a place for figures."""
    every = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    return [name for name in every if BEGIN in (ROOT / name).read_text(encoding="utf-8")]


def read(name: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    if not file.is_file():
        raise Unwritable(f"there is no {file.name} in benchmarks/results")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def cells() -> dict[str, dict[str, Any]]:
    """Every result of throughput.py that is there, by the name of its file."""
    named = {path.stem: read(path.stem) for path in sorted(RESULTS.glob("*.json"))}
    return {name: result for name, result in named.items() if result["benchmark"] == "throughput"}


def markdown(lines: list[list[str]]) -> str:
    """A table, the first line its head."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])


def paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def steps() -> str:
    """README's table: ms a step, of a few rows in a few cells."""
    results = {heading: cells()[name] for name, heading in COLUMNS.items() if name in cells()}
    lines = [["ms a step", *results]]
    lines.append(["compute alone, on the device", *(one_digit(r["parts_ms"]["compute"]) for r in results.values())])
    for name, label in README_ROWS.items():
        lines.append(
            [label, *(one_digit(row["ms_per_step"]) if (row := find(r, name)) else "" for r in results.values())]
        )
    return markdown(lines)


def one_digit(figure: dict[str, Any]) -> str:
    return f"{figure['median']:.1f}"


def find(result: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((row for row in result["rows"] if row["name"] == name), None)


def cell(name: str) -> str:
    """docs/performance.md: everything that one run says of its rows."""
    result = read(name)
    parts = ", ".join(f"{part} {figure['median']:.1f}" for part, figure in result["parts_ms"].items())
    head = "row|ms a step|lowest to highest|x bound|x compute|waited|first ms|host|pinned|device"
    lines = [head.split("|")]
    computes = result["parts_ms"]["compute"]["raw"]
    for row in result["rows"]:
        wrong = len(row["wrong_repeats"])
        step = row["ms_per_step"]
        over_compute = statistics.median(own / alone for own, alone in zip(step["raw"], computes, strict=True))
        lines.append(
            [
                f"**{row['name']}**" if row["ours"] else row["name"] + f" (wrong in {wrong})" * bool(wrong),
                f"{step['median']:.2f}",
                f"{step['low']:.2f} to {step['high']:.2f}",
                f"{row['multiple_of_bound']['median']:.2f}" + r"\*" * row["below_bound"],
                f"{over_compute:.2f}",
                f"{row['waited_share']['median']:.0%}",
                f"{row['first_batch_ms']['median']:.0f}",
                *(mebibytes(row[key]) for key in ("host_bytes", "pinned_bytes", "device_bytes_above_model")),
            ]
        )
    files = f"[JSON](../benchmarks/results/{name}.json), [picture](../benchmarks/results/{name}.png)"
    said = [f"ms a batch, each part alone: {parts}.", *(f"Note: {note}." for note in result["notes"])]
    if any(row["below_bound"] for row in result["rows"]):
        said.append(rf"\*: more than 2 % below its bound: {why_below_bound(result['settings'])}.")
    said.append(f"{files}.")
    settings = paragraph(setting_line(result["settings"]) + ".", *said)
    return f"    {command(result['environment'])}\n\n{settings}\n\n{markdown(lines)}"


def command(environment: dict[str, Any]) -> str:
    """What was typed, without the files it wrote, and before it what gave it fewer processors than there are."""
    usable = environment["cpus_usable"]
    affinity = f"taskset -c 0-{usable - 1} " * (usable < environment["cpu_count"])
    return affinity + re.sub(r" --(json|plot) \S+", "", environment["command"])


def earlier() -> str:
    """docs/performance.md: rows over compute alone, as they were measured earlier and as they are."""
    before = read("earlier")["ms_per_step"]
    results = {name: read(name) for name in before}
    lines = [["ms a step over compute alone", "earlier", "now", "waited for: earlier", "now"], ["compute alone, ms"]]
    for name, result in results.items():
        lines[-1] += [f"{before[name]['compute']:.1f}", one_digit(result["parts_ms"]["compute"])]
    for row_name in [name for name in before["memory-resnet50"] if name != "compute"]:
        lines.append([row_name])
        for name, result in results.items():
            row = find(result, row_name)
            now = "" if row is None else f"{row['ms_per_step']['median'] / result['parts_ms']['compute']['median']:.2f}"
            lines[-1] += [f"{before[name][row_name] / before[name]['compute']:.2f}", now]
    return markdown(lines)


def rows() -> str:
    """What each row is, of the cell that has most of them."""
    fullest = max(cells().values(), key=lambda result: len(result["rows"]))
    return markdown([["row", "what it is"], *([row["name"], row["description"]] for row in fullest["rows"])])


def mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}"


def threads(step: str) -> str:
    """docs/choosing-threads.md: samples/s (without a step: `loading`) or ms a step, by decoder and number of threads or
    processes, and the quotient of both with 8."""
    found = {label: cells().get(f"threads-{decoder}-{step}") for decoder, label in DECODERS.items()}
    results = {label: result for label, result in found.items() if result is not None}
    if not results:
        raise Unwritable(f"there is no threads-DECODER-{step}.json in benchmarks/results")
    counts = sorted({split_name(row["name"])[1] for result in results.values() for row in result["rows"]})
    key, digits = ("samples_per_s", 0) if step == "loading" else ("ms_per_step", 1)
    lines = [["samples/s" if step == "loading" else "ms a step", "", *map(str, counts), "8 over 8 processes"]]
    for label, result in results.items():
        ratios = {(each["name"], each["of"]): f"{each['median']:.2f}" for each in result["over_processes"]}
        for family, way in WAYS.items():
            rows = [find(result, family if count == 1 else f"{family}{count}") for count in counts]
            figures = ["" if row is None else f"{row[key]['median']:.{digits}f}" for row in rows]
            lines.append([label, way, *figures, ratios.get((f"{family}8", "workers8"), "")])
    return markdown(lines)


def slow_datasets() -> str:
    """docs/slow-datasets.md: what each way of storing photos gives."""
    from slow_datasets import table

    result = read("slow-datasets")
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    where = paragraph(
        f"{described(result['environment'])}; {packages}. Median of {result['settings']['repeats']} repeats."
    )
    return f"    {command(result['environment'])}\n\n{where}\n\n{markdown(table(result))}"


def described(environment: dict[str, Any]) -> str:
    """Device and software, without the kernel's build."""
    device, software = headline(environment)
    return f"{device}; {software.rsplit(', ', 1)[0]}"


def machine() -> str:
    """Where the cells were measured, but for those of a Python without the GIL, which is another by itself: one kind of
    machine, or a list of kinds with the cells of each."""
    kinds: dict[str, list[str]] = {}
    for name, result in cells().items():
        environment = result["environment"]
        if environment.get("gil", True):
            all_cores = {**environment, "cpus_usable": environment["cpu_count"]}  # some cells were given fewer
            kinds.setdefault(described(all_cores), []).append(COLUMNS.get(name, name))
    if len(kinds) == 1:
        return paragraph(f"{kinds.popitem()[0]}.")
    return "\n".join(
        textwrap.fill(f"- {kind}: {'; '.join(names)}.", 120, subsequent_indent="  ", break_on_hyphens=False)
        for kind, names in kinds.items()
    )


def calls() -> str:
    handover, memory = read("handover"), read("memory")
    took, size = handover["next_us"], memory["peak"]["batches_above_own"]
    return paragraph(
        f"With a batch ready, `next()` takes {took['median']:.0f} us (median of {handover['settings']['calls']}; p99 "
        f"{took['p99']:.0f} us).",
        f"Device memory above the loop's own: {max(size.values()):.1f} batches.",
        f"Pinned memory: {memory['growth']['last']['pinned_bytes'] >> 20} MiB.",
    )


def block(name: str) -> str:
    """What belongs into the block of this name. Raises Unwritable for a name that stands for nothing."""
    if name.startswith("cell "):
        return cell(name.removeprefix("cell "))
    writers: dict[str, Callable[[], str]] = {
        "steps": steps,
        "calls": calls,
        "machine": machine,
        "rows": rows,
        "earlier": earlier,
        "threads loading": functools.partial(threads, "loading"),
        "threads resnet50": functools.partial(threads, "resnet50"),
        "threads resnet50-graph": functools.partial(threads, "resnet50-graph"),
        "slow datasets": slow_datasets,
    }
    if name not in writers:
        raise Unwritable(f"there are no figures called {name!r}; there are {', '.join(writers)} and cell NAME")
    return writers[name]()


def written(text: str) -> str:
    """The text of a page, its blocks filled."""
    marks = text.count(BEGIN)
    filled, found = BLOCK.subn(lambda match: f"{match[1]}{block(match['name'])}\n{match[3]}", text)
    if found != marks:
        raise Unwritable(f"of {marks} blocks of figures {found} have an end")
    return filled


def draw_lanes() -> None:
    from plot import draw_timelines

    name, picture = LANES
    draw_timelines(read(name), ROOT / picture)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    old = {name: (ROOT / name).read_text(encoding="utf-8") for name in pages()}
    try:
        new = {name: written(text) for name, text in old.items()}
    except Unwritable as error:
        print(f"figures.py: {error}", file=sys.stderr)
        return 1
    changed = [name for name in old if new[name] != old[name]]
    if options.check:
        for name in changed:
            print(f"figures.py: {name} does not say what benchmarks/results says", file=sys.stderr)
        return 1 if changed else 0
    for name in changed:
        (ROOT / name).write_text(new[name], encoding="utf-8", newline="\n")
    draw_lanes()
    return 0


if __name__ == "__main__":
    sys.exit(main())
