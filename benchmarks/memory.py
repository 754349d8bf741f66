"""What gpuprefetch needs of the device and the host, and that it does not grow.

    python benchmarks/memory.py [--json FILE]

Two questions. Peak: how many batches more are active on the device than in the same loop on one batch that stays there?
Growth: do reserved memory, pinned memory, threads and file handles stay flat over 200 epochs of 10 batches, with no
`empty_cache`? Exit status 1 if the peak is above `prefetch_batches + 2` batches or something grows.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from epoch import Batch
from output import check_files, finish, start
from parts import ResidentBatches
from rows import Loader
from steps import Kernels
from target import Target, describe, find_target, headline
from workloads import make_loader, make_workload

PEAK_STEPS = 60
SETTLED_EPOCH = 20  # allocators and caches have their size by then: growth is what comes on top of the highest so far


def active_peak(batches: Iterable[Batch], step: Kernels, target: Target, sync_every_step: bool) -> int:
    """Bytes: the peak of active device memory in a loop over `batches`."""
    gc.collect()
    torch.cuda.synchronize()
    torch.zeros((), device=target.device)  # an allocation after a sync: what was freed before stops counting as active
    torch.cuda.reset_peak_memory_stats()
    for images, labels in batches:
        loss = step(images, labels)
        if sync_every_step:
            loss.item()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["active_bytes.all.peak"])


@contextmanager
def prefetched(loader: Loader, target: Target, options: argparse.Namespace) -> Iterator[Iterable[Batch]]:
    from gpuprefetch import PrefetchIterator

    arguments = {"prefetch_batches": options.prefetch_batches, "num_threads": options.num_threads}
    with PrefetchIterator(loader, target.device, **arguments) as batches:
        yield batches


def measure_peak(loader: Loader, target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """Batches above the loop's own, with a GPU-bound step, so that the host runs ahead as far as it may."""
    step = Kernels(target)
    images, labels = next(iter(loader))
    batch_bytes = images.nbytes + labels.nbytes
    resident = ResidentBatches(loader, target, PEAK_STEPS)
    del resident.pool[1:]
    active_peak(resident, step, target, False)  # the libraries' workspaces, once
    own = {sync: active_peak(resident, step, target, sync) for sync in (False, True)}
    del resident
    above = {}
    for sync in (False, True):
        with prefetched(loader, target, options) as batches:
            peak = active_peak(batches, step, target, sync)
        above["with sync" if sync else "without sync"] = (peak - own[sync]) / batch_bytes
    return {"batch_bytes": batch_bytes, "own_peak_bytes": own[False], "batches_above_own": above}


def _count(folder: str) -> int | None:
    path = Path(folder)
    return sum(1 for _ in path.iterdir()) if path.is_dir() else None


def _pinned_bytes() -> int | None:
    """Pinned memory of torch's host allocator, in use or cached; the name of the figure differs between releases."""
    host_memory_stats = getattr(torch.cuda, "host_memory_stats", None)
    if host_memory_stats is None:
        return None
    stats: dict[str, Any] = host_memory_stats()
    return max((int(value) for name, value in stats.items() if name.endswith("bytes.current")), default=None)


def resources() -> dict[str, int | None]:
    """What an epoch might leave behind; None where the platform or torch can't tell."""
    return {
        "reserved_peak_bytes": int(torch.cuda.memory_stats()["reserved_bytes.all.peak"]),
        "pinned_bytes": _pinned_bytes(),
        "python_threads": threading.active_count(),
        "os_threads": _count("/proc/self/task"),
        "file_handles": _count("/proc/self/fd"),
    }


def measure_growth(loader: Loader, target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """The resources after every epoch; with `--reopen` each epoch has a PrefetchIterator of its own."""
    series: list[dict[str, int | None]] = []
    torch.cuda.reset_peak_memory_stats()

    def epoch(batches: Iterable[Batch]) -> None:
        for images, _ in batches:
            images.sum()
        torch.cuda.synchronize()  # not item(), which pins a few bytes each time
        series.append(resources())

    if options.reopen:
        for _ in range(options.epochs):
            with prefetched(loader, target, options) as batches:
                epoch(batches)
    else:
        with prefetched(loader, target, options) as batches:
            for _ in range(options.epochs):
                epoch(batches)

    def highest(name: str, part: list[dict[str, int | None]]) -> int | None:
        return max((value for values in part if (value := values[name]) is not None), default=None)

    growth = {}
    for name in series[0]:
        before, after = highest(name, series[:SETTLED_EPOCH]), highest(name, series[SETTLED_EPOCH:])
        growth[name] = None if before is None or after is None else after - before
    return {"growth_after_settling": growth, "last": series[-1], "series": series}


def report(result: dict[str, Any]) -> list[str]:
    lines = headline(result["environment"])
    settings, peak, growth = result["settings"], result["peak"], result["growth"]
    size = peak["batch_bytes"] / 2**20
    allowed = settings["allowed_batches"]
    lines.append(f"device memory above the loop's own, in batches of {size:.1f} MiB (allowed: {allowed}):")
    lines += [f"  {name}: {value:.2f}" for name, value in peak["batches_above_own"].items()]
    epochs = f"{settings['epochs']} epochs of {settings['batches']} batches"
    lines.append(f"after {epochs}, and growth since the first {SETTLED_EPOCH}:")
    for name, value in growth["last"].items():
        grown = growth["growth_after_settling"][name]
        lines.append(f"  {name}: not available here" if value is None else f"  {name}: {value:,} ({grown:+,})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=200, help=f"more than {SETTLED_EPOCH} (200)")
    parser.add_argument("--batches", type=int, default=10, help="an epoch (10)")
    parser.add_argument("--prefetch-batches", type=int, default=2)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--reopen", action="store_true", help="a new PrefetchIterator for every epoch")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    check_files(parser, options)
    if options.epochs <= SETTLED_EPOCH:
        parser.error(f"--epochs must be more than {SETTLED_EPOCH}, after which growth counts; got {options.epochs}")
    if not torch.cuda.is_available():
        print("memory.py: needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1

    target = find_target("cuda")
    make = make_workload("memory", samples=256, seed=0, folder=None)
    # Growth first: what the matrices of the other part leave in the allocator's cache would hide it.
    growth = measure_growth(make_loader(make, options.batch_size, options.batches), target, options)
    peak = measure_peak(make_loader(make, options.batch_size, PEAK_STEPS), target, options)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    settings["allowed_batches"] = options.prefetch_batches + 2
    result: dict[str, Any] = {
        "benchmark": "memory",
        "format": 1,
        "environment": describe(target),
        "settings": settings,
        "peak": peak,
        "growth": growth,
    }
    written = finish("\n".join(report(result)), result, options)

    # A tenth of a batch for labels, rounding of the allocator and the step's own scalars.
    too_high = any(value > settings["allowed_batches"] + 0.1 for value in peak["batches_above_own"].values())
    grown = [name for name, value in growth["growth_after_settling"].items() if value is not None and value > 0]
    if too_high:
        print("memory.py: more device memory than prefetch_batches + 2 batches", file=sys.stderr)
    if grown:
        print(f"memory.py: grown after the first {SETTLED_EPOCH} epochs: {', '.join(grown)}", file=sys.stderr)
    return 1 if too_high or grown or not written else 0


if __name__ == "__main__":
    start(main)
