"""What a step takes where the dataset computes on the GPU: super-resolution in `__getitem__`, beside training.

    python benchmarks/gpu_dataset.py [--json FILE]

Sample i is a photo that is decoded and shrunk to [3, 32, 32], and that a net on the device makes [3, 128, 128], one by
one in `__getitem__` or a batch at once in `collate_fn`. They are loaded by the plain loader, by PrefetchIterator with
no, one and several threads, and as tensors in host memory that were computed beforehand.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from epoch import Batch, Checksum, Epoch, time_epoch
from experiment import figure
from gpu_dataset_parts import Parts, Resident, Shrunk, Upscaled, UpscaledApart, measure_parts
from in_process import Epochs, on_device
from output import check_files, finish, start
from steps import Step, Wait, make_step
from target import Target, Unusable, describe, find_target, headline
from torch.utils.data import DataLoader, TensorDataset

from gpuprefetch import PrefetchIterator

CPU_STEP_SECONDS = 0.005
SPEED_SECONDS = 0.25
NET_IN = {"__getitem__": Upscaled, "__getitem__-apart": UpscaledApart}
ON_THE_CPU = "no accelerator: both nets share the cores, and a timed wait stands for the step. No claim rests on it"


@dataclass(frozen=True)
class Row:
    name: str
    description: str
    batches: Iterable[Batch]
    computes: bool = True
    """The dataset's net, in the epoch."""

    @property
    def bound_formula(self) -> str:
        return "max(loading, step, made + stepped)" if self.computes else "step"

    def bound(self, parts: Parts) -> float:
        if not self.computes:
            return parts.step
        return max(parts.loading, parts.step, parts.made + parts.stepped)


def make_rows(loader: DataLoader[Batch], precomputed: DataLoader[Batch], target: Target, threads: int) -> list[Row]:
    ours = functools.partial(PrefetchIterator, device=target.device)
    rows = [
        Row("plain", "DataLoader, 0 workers", Epochs(lambda: on_device(loader, target, non_blocking=False))),
        *(
            Row(f"gpuprefetch{count}", f"PrefetchIterator, num_threads={count}", ours(loader, num_threads=count))
            for count in (0, 1, threads)
        ),
        Row(
            "precomputed",
            "DataLoader, 0 workers, of pictures in host memory, .to(device)",
            Epochs(lambda: on_device(precomputed, target, non_blocking=False)),
            computes=False,
        ),
        Row(
            "precomputed-gpuprefetch",
            "PrefetchIterator, num_threads=1, of pictures in host memory",
            ours(precomputed, num_threads=1),
            computes=False,
        ),
    ]
    return rows


def run(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    notes = [] if target.accelerated else [ON_THE_CPU]
    count = options.batch_size * options.steps
    made_of = (count, options.photo_pixels, options.channels, options.layers, target)
    loader: DataLoader[Batch]
    if options.net_in == "collate_fn":
        dataset, at_once = Shrunk(*made_of), options.batch_size
        loader = DataLoader(dataset, batch_size=options.batch_size, collate_fn=dataset.collate)
    else:
        dataset, at_once = NET_IN[options.net_in](*made_of), 1
        loader = DataLoader(dataset, batch_size=options.batch_size)
    pictures = torch.cat([batch.cpu() for batch, _ in loader])
    ready = TensorDataset(pictures, torch.arange(len(dataset)))
    precomputed: DataLoader[Batch] = DataLoader(ready, batch_size=options.batch_size)
    step = make_step(options.step, target) if target.accelerated else Wait(CPU_STEP_SECONDS)
    resident = Resident(loader, options.steps, target)
    parts: list[Parts] = []
    epochs: dict[str, list[Epoch]] = {}
    with ExitStack() as opened:
        rows = {row.name: row for row in make_rows(loader, precomputed, target, options.threads)}
        for row in rows.values():
            if isinstance(row.batches, PrefetchIterator):
                opened.callback(row.batches.close)
        for row in rows.values():  # untimed: caches, choice of kernels
            epochs[row.name] = []
            time_epoch(row.batches, options.steps, step, target, options.sync_every_step)
        cells = ["parts", *rows]
        for repeat in range(options.repeats):
            for cell in random.Random(repeat).sample(cells, len(cells)):
                bring_to_speed(resident, step, target)
                if cell == "parts":
                    parts.append(measure_parts(dataset, at_once, loader, resident, step, target))
                else:
                    batches = rows[cell].batches
                    epochs[cell].append(time_epoch(batches, options.steps, step, target, options.sync_every_step))
    expected = epochs["plain"][0].checksum
    return {
        "benchmark": "gpu_dataset",
        "format": 1,
        "environment": describe(target),
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "step": step.description,
        "notes": notes,
        "parts_ms": {
            name: figure([getattr(part, name) * 1e3 for part in parts])
            for name in Parts.__dataclass_fields__
            if getattr(parts[0], name) is not None
        },
        "rows": [row_result(row, epochs[row.name], epochs["plain"], parts, expected) for row in rows.values()],
    }


def bring_to_speed(resident: Resident, step: Step, target: Target) -> None:
    """Some untimed steps, since a device that was idle before runs at another clock than one that was not."""
    end = time.perf_counter() + (SPEED_SECONDS if target.accelerated else 0.0)
    while time.perf_counter() < end:
        step(*resident.pool[0]).item()


def row_result(
    row: Row, epochs: list[Epoch], plain: list[Epoch], parts: list[Parts], expected: Checksum
) -> dict[str, Any]:
    """What is compared is of one repeat, then the median."""
    seconds = [epoch.step_seconds for epoch in epochs]
    bounds = [row.bound(part) for part in parts]
    plain_seconds = [epoch.step_seconds for epoch in plain]
    return {
        "name": row.name,
        "description": row.description,
        "ms_per_step": figure([value * 1e3 for value in seconds]),
        "bound_formula": row.bound_formula,
        "bound_ms": figure([value * 1e3 for value in bounds]),
        "multiple_of_bound": figure([own / least for own, least in zip(seconds, bounds, strict=True)]),
        "times_as_fast_as_plain": figure([other / own for own, other in zip(seconds, plain_seconds, strict=True)]),
        "wrong_repeats": [repeat for repeat, epoch in enumerate(epochs) if epoch.checksum != expected],
    }


def table(result: dict[str, Any]) -> list[list[str]]:
    """A line for each row, the first one its head."""
    lines = [["row", "ms a step", "lowest", "highest", "bound", "x bound", "x as fast as plain"]]
    for row in result["rows"]:
        own = row["ms_per_step"]
        values = [own["median"], own["low"], own["high"]]
        values += [row[key]["median"] for key in ("bound_ms", "multiple_of_bound", "times_as_fast_as_plain")]
        lines.append([row["name"] + "!" * bool(row["wrong_repeats"]), *(f"{value:.2f}" for value in values)])
    return lines


def report(result: dict[str, Any]) -> list[str]:
    parts = {name: statistics.median(value["raw"]) for name, value in result["parts_ms"].items()}
    lines = table(result)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["---"] * len(widths))
    return [
        *headline(result["environment"]),
        *result["notes"],
        f"step: {result['step']}",
        "alone, ms a batch: " + ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in parts.items()),
        "",
        *(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines),
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="a torch device (the accelerator, else the CPU)")
    parser.add_argument("--step", choices=["convnet", "resnet18", "resnet50", "kernels"], default="convnet")
    parser.add_argument(
        "--photo-pixels",
        type=int,
        default=112,
        help="of a photo's side; 0: shrunk ones are in memory, no decoding (112)",
    )
    parser.add_argument(
        "--net-in",
        choices=[*NET_IN, "collate_fn"],
        default="__getitem__",
        help="where the dataset's net is called: for each sample, the same on streams of the threads' own, or once a "
        "batch (__getitem__)",
    )
    parser.add_argument("--channels", type=int, default=128, help="of the dataset's net (128)")
    parser.add_argument("--layers", type=int, default=8, help="of the dataset's net, beside the first and last (8)")
    parser.add_argument("--threads", type=int, default=4, help="of the row with several (4)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50, help="of an epoch (50)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--sync-every-step", action="store_true", help="the loop waits for each step, as loss.item() does"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    check_files(parser, options)
    for name, least in {
        "threads": 2,
        "channels": 1,
        "layers": 0,
        "photo_pixels": 0,
        "batch_size": 1,
        "steps": 1,
        "repeats": 1,
    }.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more; got {getattr(options, name)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.filterwarnings("ignore", "with several num_threads", RuntimeWarning)
    try:
        result = run(options, find_target(options.device))
    except Unusable as error:
        print(f"gpu_dataset.py: {error}", file=sys.stderr)
        return 1
    written = finish("\n".join(report(result)), result, options)
    wrong = [row["name"] for row in result["rows"] if row["wrong_repeats"]]
    if wrong:
        print(f"gpu_dataset.py: other batches than the plain loader's: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong or not written else 0


if __name__ == "__main__":
    start(main)
