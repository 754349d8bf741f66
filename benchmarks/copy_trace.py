"""What the link does while a batch is copied to a CUDA device: when its first copy begins, and how fast each one is.

    python benchmarks/copy_trace.py [--json FILE]

torch's profiler tells when each copy ran on the device. Beside the copying part of PrefetchIterator, driven by hand as
in copy_speed.py, stand copies from memory that is pinned already: of all bytes at once, in pieces of several lengths,
and of all at once while the host copies other memory.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from copy_methods import METHODS, Copy
from copy_sources import make_source, size_label
from copy_speed import parse_sizes
from copy_timing import UNTIMED_COPIES, bring_to_speed
from experiment import figure
from output import check_files, finish, start
from report import columns
from target import Target, Unusable, describe, find_target, headline
from torch.profiler import ProfilerActivity, profile

SIZES = "16M,38.5M,64M,256M"
PIECES = [mib << 20 for mib in (1, 2, 4, 8)]
COPIES = 5  # in a row, whose medians are one repeat
LOAD_BYTES = 64 << 20  # more than a core's caches hold
Span = tuple[int, int]  # nanoseconds of the system's clock


class MemoryLoad:
    """Inside the `with` statement a thread copies host memory to host memory, by torch with its intra-op threads."""

    def __init__(self) -> None:
        self._source = torch.ones(LOAD_BYTES, dtype=torch.uint8)
        self._destination = torch.empty_like(self._source)
        self._stopping = threading.Event()
        self.gb_per_s: list[float] = []  # of each statement

    def __enter__(self) -> None:
        self._stopping.clear()
        self._executor = ThreadPoolExecutor(1, "memory-load")
        self._done = self._executor.submit(self._run)

    def __exit__(self, *exception: object) -> None:
        self._stopping.set()
        self._executor.shutdown()
        self.gb_per_s.append(self._done.result())

    def _run(self) -> float:
        begin, copied = time.perf_counter(), 0
        while not self._stopping.is_set() or copied == 0:
            self._destination.copy_(self._source)
            copied += LOAD_BYTES
        return copied / (time.perf_counter() - begin) / 1e9


def in_pieces(size: int, piece: int, target: Target) -> Copy:
    """Copies `size` bytes that are pinned already, `piece` at a time."""
    sources = torch.ones(size, dtype=torch.uint8).pin_memory().split(piece)
    copies = torch.empty(size, dtype=torch.uint8, device=target.device).split(piece)

    def copy() -> Any:
        for to, source in zip(copies, sources, strict=True):
            to.copy_(source, non_blocking=True)

    return copy


@contextmanager
def opened(size: int, seed: int, load: MemoryLoad, target: Target) -> Iterator[dict[str, tuple[Copy, Any]]]:
    """By name, what copies `size` bytes once a call, and what goes on beside it."""
    whole = in_pieces(size, size, target)
    with METHODS["gpuprefetch"].make(make_source("pageable", size, seed), target) as ours:
        ways: dict[str, tuple[Copy, Any]] = {"gpuprefetch": (ours, nullcontext()), "one copy": (whole, nullcontext())}
        for piece in PIECES:
            if piece < size:
                ways[f"copies of {size_label(piece)}"] = (in_pieces(size, piece, target), nullcontext())
        ways["one copy, busy memory"] = (whole, load)
        yield ways


def trace(copy: Copy, target: Target) -> list[dict[str, float]]:
    """Of each of COPIES in a row, to a device that has nothing to do before."""
    batches: list[Span] = []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(COPIES):
            begin = time.time_ns()
            copied = copy()
            target.synchronize()
            batches.append((begin, time.time_ns()))
            del copied
            target.synchronize()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_device = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    spans = [(event.start_ns(), event.end_ns()) for event in on_device if event.name().startswith("Memcpy HtoD")]
    return [what_ran(batch, spans) for batch in batches]


def what_ran(batch: Span, spans: list[Span]) -> dict[str, float]:
    """Number and microseconds of the copies that began during `batch`. first_us: until the first of them began;
    busy_us: in which one ran; gaps_us: between them; tail_us: from the end of the last until the host knew."""
    begin, end = batch
    ran = sorted(span for span in spans if begin <= span[0] < end)
    if not ran:
        raise Unusable("torch's profiler shows no copy to the device")
    busy = sum(after - before for before, after in ran)
    first, last = ran[0][0], max(after for _, after in ran)
    parts = {"us": end - begin, "first_us": first - begin, "busy_us": busy, "gaps_us": last - first - busy}
    parts["tail_us"] = end - last
    return {"copies": len(ran), **{name: ns / 1e3 for name, ns in parts.items()}}


def measure(options: argparse.Namespace, target: Target) -> list[dict[str, Any]]:
    chance, load = random.Random(options.seed), MemoryLoad()
    rows = []
    for size in options.sizes:
        repeats: dict[str, list[dict[str, float]]] = {}
        load.gb_per_s.clear()
        with opened(size, options.seed, load, target) as ways:
            for copy, _ in ways.values():
                for _ in range(UNTIMED_COPIES):
                    copy()
            bring_to_speed(ways["one copy"][0], target)
            names = list(ways)
            for _ in range(options.repeats):
                chance.shuffle(names)
                for name in names:
                    copy, beside = ways[name]
                    with beside:
                        traced = trace(copy, target)
                    middle = {key: statistics.median(each[key] for each in traced) for key in traced[0]}
                    repeats.setdefault(name, []).append(middle)
            for name, (_, beside) in ways.items():
                row = {key: figure([each[key] for each in repeats[name]]) for key in repeats[name][0]}
                row["gb_per_s"] = figure([size / each["busy_us"] / 1e3 for each in repeats[name]])
                if beside is load:
                    row["host_gb_per_s"] = figure(list(load.gb_per_s))
                rows.append({"way": name, "bytes": size, **row})
    return rows


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "copies": lambda row: f"{row['copies']['median']:.0f}",
    "us": lambda row: f"{row['us']['median']:.0f}",
    "[min .. max]": lambda row: f"[{row['us']['low']:.0f} .. {row['us']['high']:.0f}]",
    "first us": lambda row: f"{row['first_us']['median']:.0f}",
    "busy us": lambda row: f"{row['busy_us']['median']:.0f}",
    "GB/s busy": lambda row: f"{row['gb_per_s']['median']:.1f}",
    "gaps us": lambda row: f"{row['gaps_us']['median']:.0f}",
    "tail us": lambda row: f"{row['tail_us']['median']:.0f}",
    "host GB/s": lambda row: f"{row['host_gb_per_s']['median']:.1f}" if "host_gb_per_s" in row else "",
}


def table(result: dict[str, Any]) -> str:
    lines = [f"repeats {result['settings']['repeats']}, of {COPIES} copies in a row each"]
    lines += [f"  {line}" for line in headline(result["environment"])]
    lines.append(f"  {result['environment']['command']}")
    for size, rows in itertools.groupby(result["rows"], lambda row: row["bytes"]):
        grid = [[row["way"], *(cell(row) for cell in COLUMNS.values())] for row in rows]
        lines += ["", *columns([[size_label(size), *COLUMNS], *grid])]
    lines += [
        "",
        "us: from the call until the device, idle before, is done; first: until its first copy began; busy: in",
        "which a copy ran, and GB/s in that time; gaps: between copies; tail: until the host knew of the end; host:",
        "other memory that it copied meanwhile.",
        "Under a profiler all takes longer than in copy_speed.py.",
    ]
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=parse_sizes, default=SIZES, metavar="LIST", help=f"comma list ({SIZES})")
    add("--repeats", type=int, default=7, help="turns of each way (7)")
    add("--seed", type=int, default=0, help="of the data, and of the order of turns (0)")
    add("--json", type=Path, metavar="FILE", help="write every figure, with raw repeats")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1; got {options.repeats}")
    check_files(parser, options)
    return options


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        print("copy_trace.py: needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1
    target = find_target("cuda")
    try:
        rows = measure(options, target)
    except (Unusable, ImportError, torch.OutOfMemoryError) as error:
        print(f"copy_trace.py: {error}", file=sys.stderr)
        return 1
    result = {
        "benchmark": "copy_trace",
        "format": 1,
        "environment": describe(target),
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "rows": rows,
    }
    return 0 if finish(table(result), result, options) else 1


if __name__ == "__main__":
    start(lambda: main(parse_arguments()))
