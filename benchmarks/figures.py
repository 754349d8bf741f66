"""Puts the figures of benchmarks/results into README.md and docs/, between the marks that are there for them.

python benchmarks/figures.py            # after new results
python benchmarks/figures.py --check    # exit status 1 where a page does not say what the results say
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import other_tables
import throughput_tables
from result_files import Unwritable, read

ROOT = Path(__file__).resolve().parent.parent
LANES = ("memory-kernels", "docs/lanes.png")  # whose timeline docs/how-it-works.md shows, and where it goes

BEGIN = "<!-- figures: "
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w -]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def pages() -> list[str]:
    """Those that have a place for figures."""
    every = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    return [name for name in every if BEGIN in (ROOT / name).read_text(encoding="utf-8")]


def block(name: str) -> str:
    """What belongs into the block of this name. Raises Unwritable for a name that stands for nothing."""
    if name.startswith("cell "):
        return throughput_tables.cell(name.removeprefix("cell "))
    writers: dict[str, Callable[[], str]] = {
        "steps": throughput_tables.steps,
        "calls": other_tables.calls,
        "machine": throughput_tables.machine,
        "steps machine": throughput_tables.steps_machine,
        "steps h100": functools.partial(throughput_tables.steps, "h100"),
        "steps machine h100": functools.partial(throughput_tables.steps_machine, "h100"),
        "rows": throughput_tables.rows,
        "earlier": throughput_tables.earlier,
        "windows fix": throughput_tables.windows_fix,
        "threads loading": functools.partial(throughput_tables.threads, "loading"),
        "threads resnet50-graph": functools.partial(throughput_tables.threads, "resnet50-graph"),
        "slow datasets": other_tables.slow_datasets,
        "first batch": other_tables.first_batch,
        "gpu dataset": other_tables.gpu_dataset,
        "streams": other_tables.streams,
        "copies": other_tables.copies,
        "ready batches": other_tables.ready_batches,
        "gil takes": other_tables.gil_takes,
        "pure python": other_tables.pure_python,
        "contention": functools.partial(other_tables.contention, "contention"),
        "resting": functools.partial(other_tables.contention, "resting"),
        "trials": functools.partial(other_tables.contention, "trials"),
        "tasks": functools.partial(other_tables.contention, "tasks"),
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
