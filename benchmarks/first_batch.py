"""How long an epoch's first batch takes, from `iter()` until it is on the device, above what loading it takes.

    python benchmarks/first_batch.py [--workload memory] [--threads 1,8] [--json FILE]

An epoch runs to its end, and the next one begins with a device that has nothing to do: so a row shows what it takes to
start its threads, or to wake its processes, and to bring one batch there. Worker processes start only where a row of
theirs is named.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import in_process  # noqa: F401  (registers the rows: so do the next two)
import ours  # noqa: F401
import peers  # noqa: F401
import torch
from decoders import DECODERS
from epoch import Batch, Checksum, time_epoch
from experiment import figure
from output import check_files, finish, start
from report import columns, interval
from rows import MOST_THREADS, ROWS, Loader, Row, choose_rows, rows_called, split_name
from steps import Nothing
from target import Target, Unusable, describe, find_target, headline
from workloads import DESCRIPTIONS, DISTINCT_SAMPLES, make_loader, make_workload

LOAD = "load"
ROWS_BY_DEFAULT = "gpuprefetch,gpuprefetchN,workersN"


def seconds_of_loading(loader: Loader) -> float:
    """Of the first batch, by the plain loader, on the host. With one thread for an operation, as in a worker process:
    how long it takes to wake one a core depends on what other rows have left awake."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    batch = next(iter(loader))
    seconds = time.perf_counter() - start
    del batch  # freeing it is no part of making it
    return seconds


def seconds_until_first(source: Iterable[Batch], steps: int, target: Target) -> tuple[float, Checksum]:
    epoch = time_epoch(source, steps, Nothing(), target, sync_every_step=False)
    return epoch.first_batch_seconds, epoch.checksum


def measure(rows: list[Row], loader: Loader, target: Target, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each repeat, by row, LOAD among them. They take turns in an order of chance. Raises Unusable if a row
    gave other batches than the plain loader."""
    _, expected = seconds_until_first(in_process.Epochs(lambda: _moved(loader, target)), options.steps, target)
    seconds: dict[str, list[float]] = {name: [] for name in [LOAD, *(row.name for row in rows)]}
    chance = random.Random(options.seed)
    with ExitStack() as open_rows:
        sources = {
            row.name: open_rows.enter_context(row.make(loader, target, options.prefetch_batches)) for row in rows
        }
        for repeat in range(-1, options.repeats):  # the one before the first is not kept
            for name in chance.sample(list(seconds), len(seconds)):
                gc.collect()
                target.restore_intra_op_threads()
                if name == LOAD:
                    took = seconds_of_loading(loader)
                else:
                    took, checksum = seconds_until_first(sources[name], options.steps, target)
                    if checksum != expected:
                        raise Unusable(f"{name} gave other batches than the plain loader")
                if repeat >= 0:
                    seconds[name].append(took)
    return seconds


def _moved(loader: Loader, target: Target) -> Any:
    return in_process.on_device(loader, target, non_blocking=False)


def over_load(row: Row, seconds: list[float], loads: list[float]) -> dict[str, Any]:
    """Milliseconds of a row, above those of loading, and above that shared by the threads of ours."""
    threads = split_name(row.name)[1] if row.is_ours else 1
    return {
        "name": row.name,
        "description": row.description,
        "first_ms": figure([1e3 * took for took in seconds]),
        "over_load_ms": figure([1e3 * (took - load) for took, load in zip(seconds, loads, strict=True)]),
        "over_shared_load_ms": figure(
            [1e3 * (took - load / threads) for took, load in zip(seconds, loads, strict=True)]
        ),
    }


def table(result: dict[str, Any]) -> list[list[str]]:
    """A line for each row, the first one its head."""
    lines = [["row", "first ms", "[min .. max]", "over load", "[min .. max]", "over load / threads"]]
    load = result["load_ms"]
    lines.append([LOAD, f"{load['median']:.2f}", interval(load, 2), "", "", ""])
    for row in result["rows"]:
        first, over = row["first_ms"], row["over_load_ms"]
        lines.append([row["name"], f"{first['median']:.2f}", interval(first, 2), f"{over['median']:.2f}"])
        lines[-1] += [interval(over, 2), f"{row['over_shared_load_ms']['median']:.2f}"]
    return lines


def report(result: dict[str, Any]) -> str:
    settings = result["settings"]
    return "\n".join(
        [
            f"workload {settings['workload']}, batch {settings['batch_size']}, epochs of {settings['steps']} batches, "
            f"median of {settings['repeats']}",
            *headline(result["environment"]),
            "",
            *(line.rstrip() for line in columns(table(result))),
            *(f"{row['name']}  left out: {row['reason']}" for row in result["left_out"]),
        ]
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    target = find_target(options.device)
    rows, left_out = choose_rows(options.rows, target)
    make = make_workload(options.workload, DISTINCT_SAMPLES[options.workload], options.seed, None, options.decoder)
    seconds = measure(rows, make_loader(make, options.batch_size, options.steps), target, options)
    return {
        "benchmark": "first_batch",
        "format": 1,
        "environment": describe(target),
        "settings": {
            name: getattr(options, name)
            for name in ("workload", "decoder", "batch_size", "steps", "repeats", "prefetch_batches", "seed")
        },
        "load_ms": figure([1e3 * took for took in seconds[LOAD]]),
        "rows": [over_load(row, seconds[row.name], seconds[LOAD]) for row in rows],
        "left_out": left_out,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", choices=DESCRIPTIONS, default="memory", help="as throughput.py has them (memory)")
    add("--decoder", choices=DECODERS, default="pil")
    add("--device", help="the current accelerator, or cpu where there is none")
    add("--batch-size", type=int, default=64)
    add("--steps", type=int, default=20, help="batches of an epoch, more than any row keeps ahead (20)")
    add("--repeats", type=int, default=30, help="epochs of each row (30)")
    add("--loaders", default=ROWS_BY_DEFAULT, help=f"comma list of throughput.py's rows ({ROWS_BY_DEFAULT})")
    add("--threads", default="8", help="comma list of numbers for the rows called ..N (8)")
    add("--prefetch-batches", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    check_files(parser, options)
    for name in ("batch_size", "steps", "repeats", "prefetch_batches"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(options, name)}")
    counts = options.threads.split(",")
    if not all(count.isdecimal() and 1 <= int(count) <= MOST_THREADS for count in counts):
        parser.error(f"--threads must be numbers from 1 to {MOST_THREADS}, as in 1,8; got {options.threads!r}")
    names = options.loaders.split(",")
    if unknown := [name for name in names if not rows_called(name, [1])]:
        parser.error(f"--loaders: no row is called {', '.join(unknown)}; there are {', '.join(ROWS)}")
    found = [row for name in names for row in rows_called(name, [int(count) for count in counts])]
    options.rows = list({row.name: row for row in found}.values())
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        result = run(options)
    except Unusable as error:
        print(f"first_batch.py: {error}", file=sys.stderr)
        return 1
    return 0 if finish(report(result), result, options) else 1


if __name__ == "__main__":
    start(main)
