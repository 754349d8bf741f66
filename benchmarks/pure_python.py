"""What several threads gain where samples are pure Python, of the Python that runs this.

    python benchmarks/pure_python.py [--threads 2] [--json FILE]

Loading only, no device. Run it with a Python that has the interpreter's lock and with one that has none.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiment import figure
from output import check_files, finish, start
from python_samples import SAMPLES
from report import columns
from target import describe, find_target, headline
from workloads import make_loader

BATCH_SIZE = 16
SECONDS = 0.5  # at least, of one run


def seconds_of(make: Callable[[int], float], batches: int, threads: int) -> float:
    """Of an epoch. Raises ValueError if a sample is wrong."""
    from gpuprefetch import PrefetchIterator

    loader = make_loader(make, BATCH_SIZE, batches)  # type: ignore[arg-type]
    begin = time.perf_counter()
    with PrefetchIterator(loader, "cpu", num_threads=threads) as prefetched:
        made = [values for values, _ in prefetched]
    took = time.perf_counter() - begin
    if [value for values in made for value in values.tolist()] != [make(i) for i in range(batches * BATCH_SIZE)]:
        raise ValueError("a sample is not what one thread makes of it")
    return took


def measure(threads: int, repeats: int) -> list[dict[str, Any]]:
    cells = [(name, number) for name in SAMPLES for number in (1, threads)]
    raw: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    batches = {}
    for name, (_, make) in SAMPLES.items():
        seconds_of(make, 2, threads)  # warms up
        batches[name] = max(2, round(2 * SECONDS / seconds_of(make, 2, 1)))
    for repeat in range(repeats):
        for name, number in random.Random(repeat).sample(cells, len(cells)):
            took = seconds_of(SAMPLES[name][1], batches[name], number)
            raw[name, number].append(batches[name] * BATCH_SIZE / took)
    return [
        {
            "row": name,
            "description": description,
            "samples_per_second": {str(number): figure(raw[name, number]) for number in (1, threads)},
            "gain": figure([more / one for more, one in zip(raw[name, threads], raw[name, 1], strict=True)]),
        }
        for name, (description, _) in SAMPLES.items()
    ]


def table(result: dict[str, Any]) -> list[list[str]]:
    """A line for each row, the first one its head."""
    threads = result["settings"]["threads"]
    lines = [["samples/s", "1 thread", f"{threads} threads", "gain"]]
    for row in result["rows"]:
        rates = [f"{row['samples_per_second'][str(number)]['median']:.0f}" for number in (1, threads)]
        lines.append([row["row"], *rates, f"{row['gain']['median']:.2f}x"])
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, choices=range(2, 65), metavar="N", help="beside 1 (2)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    check_files(parser, options)
    warnings.filterwarnings("ignore", "with several num_threads", RuntimeWarning)
    environment = describe(find_target("cpu"))
    settings = {"threads": options.threads, "repeats": options.repeats, "batch_size": BATCH_SIZE}
    rows = measure(options.threads, options.repeats)
    result = {"benchmark": "pure_python", "format": 1, "environment": environment, "settings": settings, "rows": rows}
    lock = f"the interpreter's lock: {'on' if environment['gil'] else 'off'}"
    text = "\n".join(["", *headline(environment), lock, "", *columns(table(result))])
    return 0 if finish(text, result, options) else 1


if __name__ == "__main__":
    start(main)
