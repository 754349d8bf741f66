"""What is left to pay for each batch where the loader costs nothing and the device is busy.

    python benchmarks/ready_batches.py [--json FILE]

The loader has all of its batches in memory. A step is a kernel that does nothing for a given time, and a look at the
batch. Rows are ways to get the batches to the device; over the repeats they take turns, in an order that is shuffled
each time. Exit status 1 if a row gave other batches than the loader.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from experiment import figure
from output import check_files, finish, start
from report import columns, interval
from target import Target, describe, find_target, headline

Batch = list[torch.Tensor]
Loaded = Callable[[int], Iterable[Batch]]  # so many batches

DISTINCT = 8  # batches in memory, in turn
LED_IN = 8  # steps of an epoch before time counts: threads start, the queue fills
LED_OUT = 8  # batches that are loaded but not asked for: who loads must not be at its end while time counts
POOL_THREAD = "gpuprefetch-mem"


@dataclass(frozen=True)
class Case:
    """`waits`: the loop waits for each step, so that the next batch is ready when it is asked for."""

    description: str
    shapes: tuple[tuple[int, ...], ...]
    step_ms: float
    steps: int
    waits: bool


CASES = {
    "next": Case(
        "a pair of dense tensors, waited for every step: what next() takes", ((64, 3, 224, 224), (64,)), 5.0, 100, True
    ),
    "small": Case("batches of 4 KiB, steps of 0.2 ms: what a step takes", ((1024,),), 0.2, 1000, False),
    "idle": Case("batches of 4 KiB, steps of 12.8 ms: the processor time of threads", ((1024,),), 12.8, 100, False),
}


class Ready:
    """A loader that costs nothing. The tensors of batch n are filled with n % DISTINCT."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.batches = [[torch.full(shape, float(n)) for shape in shapes] for n in range(DISTINCT)]

    def __call__(self, count: int) -> Iterable[Batch]:
        return itertools.islice(itertools.cycle(self.batches), count)


@dataclass(frozen=True)
class Way:
    description: str
    make: Callable[[Ready, Target], AbstractContextManager[Loaded]]


WAYS: dict[str, Way] = {}
CALLER = "pin_memory()"  # whose times the others are compared with
OURS = ("gpuprefetch0", "gpuprefetch")


def way(name: str, description: str) -> Callable[[Callable[[Ready, Target], Iterator[Loaded]]], None]:
    """Registers the decorated function, which yields once: how to get so many batches, on the device."""

    def register(make: Callable[[Ready, Target], Iterator[Loaded]]) -> None:
        WAYS[name] = Way(description, contextmanager(make))

    return register


@way("resident", "batches that are on the device already: what the loop takes by itself")
def _resident(ready: Ready, target: Target) -> Iterator[Loaded]:
    batches = [[tensor.to(target.device) for tensor in batch] for batch in ready.batches]
    yield lambda count: itertools.islice(itertools.cycle(batches), count)


@way(CALLER, "tensor.pin_memory().to(device, non_blocking=True) in the loop")
def _pin_memory(ready: Ready, target: Target) -> Iterator[Loaded]:
    yield lambda count: (
        [tensor.pin_memory().to(target.device, non_blocking=True) for tensor in batch] for batch in ready(count)
    )


@way("pinned before", "tensor.to(device, non_blocking=True) in the loop, of tensors that are pinned")
def _pinned_before(ready: Ready, target: Target) -> Iterator[Loaded]:
    batches = [[tensor.pin_memory() for tensor in batch] for batch in ready.batches]
    yield lambda count: (
        [tensor.to(target.device, non_blocking=True) for tensor in batch]
        for batch in itertools.islice(itertools.cycle(batches), count)
    )


def _prefetched(num_threads: int, ready: Ready, target: Target) -> Iterator[Loaded]:
    from gpuprefetch import PrefetchIterator

    class Batches:
        length = 0

        def __iter__(self) -> Iterator[Batch]:
            return iter(ready(self.length))

    loader = Batches()
    with PrefetchIterator(loader, target.device, num_threads=num_threads) as prefetched:

        def load(count: int) -> Iterable[Batch]:
            loader.length = count
            return iter(prefetched)

        yield load


@way("gpuprefetch0", "PrefetchIterator(loader, num_threads=0)")
def _gpuprefetch0(ready: Ready, target: Target) -> Iterator[Loaded]:
    yield from _prefetched(0, ready, target)


@way("gpuprefetch", "PrefetchIterator(loader)")
def _gpuprefetch(ready: Ready, target: Target) -> Iterator[Loaded]:
    yield from _prefetched(1, ready, target)


class Spin:
    """A step on the device that lasts so many milliseconds, and needs no core of the host."""

    def __init__(self, target: Target) -> None:
        self._cycles_a_ms = 0.0
        if target.accelerated:
            cycles = 20_000_000
            for _ in range(2):  # the first one loads the kernel, and wakes the clock
                start = target.mark()
                torch.cuda._sleep(cycles)
                end = target.mark()
                target.synchronize()
            self._cycles_a_ms = cycles / (target.seconds_between(start, end) * 1e3)

    def __call__(self, milliseconds: float) -> None:
        if self._cycles_a_ms:
            torch.cuda._sleep(int(milliseconds * self._cycles_a_ms))
        else:
            time.sleep(milliseconds * 1e-3)


def own_threads_ns() -> int | None:
    """Nanoseconds on a processor that the package's live threads have had; None where the system does not tell."""
    if not Path("/proc/self/schedstat").exists():
        return None
    python = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("gpuprefetch-")}
    taken = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if int(task.name) in python or (task / "comm").read_text().strip() == POOL_THREAD:
                taken += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return taken


class WrongBatches(Exception):
    """What the steps saw is not what the loader gave."""


def run_epoch(load: Loaded, case: Case, spin: Spin, target: Target) -> dict[str, float | None]:
    """ms_per_step, next_us (median of the steps), and the shares of a core that our threads and the caller took."""
    seen = torch.zeros(DISTINCT, device=target.device)
    waits = []
    batches = iter(load(LED_IN + case.steps + LED_OUT))
    for number in range(LED_IN + case.steps):
        if number == LED_IN:
            target.synchronize()
            own, caller, start = own_threads_ns(), time.thread_time_ns(), time.perf_counter_ns()
        asked = time.perf_counter_ns()
        batch = next(batches)
        waits.append(time.perf_counter_ns() - asked)
        spin(case.step_ms)
        for tensor in batch:
            seen[number % DISTINCT].add_(tensor.view(-1)[-1])
        del batch, tensor
        if case.waits:
            target.synchronize()
    target.synchronize()
    took = time.perf_counter_ns() - start
    caller_ns, own_after = time.thread_time_ns() - caller, own_threads_ns()
    if hasattr(batches, "close"):
        batches.close()

    count = LED_IN + case.steps
    turns = [len(range(n, count, DISTINCT)) * len(case.shapes) for n in range(DISTINCT)]
    if seen.tolist() != [float(n * turn) for n, turn in enumerate(turns)]:
        raise WrongBatches(f"the steps saw {seen.tolist()}")
    return {
        "ms_per_step": took * 1e-6 / case.steps,
        "next_us": statistics.median(waits[LED_IN:]) * 1e-3,
        "own_threads_share": None if own is None or own_after is None else (own_after - own) / took,
        "caller_share": caller_ns / took,
    }


def measure_case(
    case: Case, names: list[str], spin: Spin, target: Target, repeats: int, chance: random.Random
) -> list[dict[str, Any]]:
    """The rows of one case. Raises WrongBatches."""
    ready = Ready(case.shapes)
    epochs: dict[str, list[dict[str, float | None]]] = {name: [] for name in names}
    order = list(names)
    for repeat in range(-1, repeats):  # the first one is not kept
        chance.shuffle(order)
        for name in order:
            gc.collect()
            # Opened anew: threads of a row must not run beside another one.
            with WAYS[name].make(ready, target) as load:
                try:
                    epoch = run_epoch(load, case, spin, target)
                except WrongBatches as error:
                    raise WrongBatches(f"{name}: {error}") from None
            if repeat >= 0:
                epochs[name].append(epoch)
    return [{"row": name, **_figures(epochs[name], epochs[CALLER])} for name in names]


def _figures(own: list[dict[str, Any]], caller: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        key: None if own[0][key] is None else figure([epoch[key] for epoch in own]) for key in own[0]
    }
    # Compared within a repeat.
    for key in ("ms_per_step", "next_us"):
        figures[f"{key}_over_caller"] = figure([one[key] / other[key] for one, other in zip(own, caller, strict=True)])
    return figures


def best_over_caller(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The faster of our rows, over the caller's copy: by the medians, as a user would choose."""
    best = min((row for row in rows if row["row"] in OURS), key=lambda row: float(row["ms_per_step"]["median"]))
    return {"row": best["row"], **best["ms_per_step_over_caller"]}


def cells(case: dict[str, Any]) -> list[list[str]]:
    """A line for each row of a case, the first one its head."""
    lines = [["row", "ms a step", "[min .. max]", "x caller", "next() us", "[min .. max]", "our threads", "caller"]]
    for row in case["rows"]:
        own, ms, us = row["own_threads_share"], row["ms_per_step"], row["next_us"]
        lines.append(
            [
                row["row"],
                *(f"{ms['median']:.3f}", interval(ms, 3), f"{row['ms_per_step_over_caller']['median']:.3f}"),
                *(f"{us['median']:.1f}", interval(us, 1)),
                *("-" if own is None else f"{own['median']:.1%}", f"{row['caller_share']['median']:.0%}"),
            ]
        )
    return lines


def table(result: dict[str, Any]) -> str:
    lines = ["", f"repeats {result['settings']['repeats']}"]
    lines += [*(f"  {line}" for line in headline(result["environment"])), f"  {result['environment']['command']}"]
    for name, case in result["cases"].items():
        best = case["best_over_caller"]
        lines += ["", f"{name}: {case['description']}", *columns(cells(case))]
        lines.append(f"best of ours, {best['row']}: {best['median']:.3f} of the step with {CALLER} in the caller")
    width = max(map(len, WAYS))
    lines += ["", *(f"{name.ljust(width)}  {WAYS[name].description}" for name in result["settings"]["rows"]), ""]
    return "\n".join(
        [
            *lines,
            f"x caller: ms a step over that of {CALLER} in the same repeat, median. our threads, caller: processor",
            "  time of the package's own threads, and of the loop's, over the time of the epoch: 100% is a core.",
        ]
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma list of {','.join(CASES)} (all)")
    parser.add_argument("--repeats", type=int, default=7, help="epochs of each row (7)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns (0)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    options.cases = options.cases.split(",")
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"--cases: none is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1; got {options.repeats}")
    check_files(parser, options)
    return options


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("ready_batches.py: needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1
    target = find_target("cuda")
    spin, chance, names = Spin(target), random.Random(options.seed), list(WAYS)
    cases: dict[str, Any] = {}
    try:
        for name in options.cases:
            case = CASES[name]
            rows = measure_case(case, names, spin, target, options.repeats, chance)
            cases[name] = {
                "description": case.description,
                "step_ms": case.step_ms,
                "steps": case.steps,
                "waits_for_every_step": case.waits,
                "rows": rows,
                "best_over_caller": best_over_caller(rows),
            }
    except WrongBatches as error:
        print(f"ready_batches.py: wrong batches: {error}", file=sys.stderr)
        return 1
    result = {
        "benchmark": "ready_batches",
        "format": 1,
        "environment": describe(target),
        "settings": {"repeats": options.repeats, "seed": options.seed, "rows": names},
        "cases": cases,
    }
    return 0 if finish(table(result), result, options) else 1


if __name__ == "__main__":
    start(lambda: main(parse_arguments()))
