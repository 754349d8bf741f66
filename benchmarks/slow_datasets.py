"""How many samples a second a dataset gives, by the way its photos are stored: loading only, no device.

    python benchmarks/slow_datasets.py [--threads N] [--json FILE]

Each sample is a random crop of a photo of 500x400 pixels, resized to 224x224 and flipped by chance, in uint8. The crop
and all after it is the same code for every storage. What was written just before is read from the system's cache: a
disk adds its own time. Temporary files are removed at the end; they take 2 MB a photo.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from decoders import IMAGE_SIZE
from output import check_files, finish, start
from storages import KINDS, Pixels, Storage
from target import describe, find_target, headline
from workloads import make_loader, random_crop, vary_photo

from gpuprefetch import PrefetchIterator
from gpuprefetch._recommended import usable_cpus

SEED = 0


class Crops:
    """From an index to a sample [3, 224, 224] uint8, of `photos` photos that a storage holds."""

    def __init__(self, storage: Storage, photos: int) -> None:
        self.storage = storage
        self.photos = photos

    def __call__(self, index: int) -> torch.Tensor:
        return cropped(self.storage(index % self.photos), random.Random(SEED * 1_000_003 + index))


def cropped(photo: Pixels, chance: random.Random) -> torch.Tensor:
    """A random crop, resized and flipped by chance. Of an array no more than the crop is read."""
    import numpy
    from PIL import Image

    if isinstance(photo, Image.Image):
        crop = random_crop(chance, *photo.size)
        image = photo.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
    else:
        crop = random_crop(chance, photo.shape[1], photo.shape[0])
        rows, columns = slice(crop.top, crop.top + crop.height), slice(crop.left, crop.left + crop.width)
        image = Image.fromarray(photo[rows, columns])
    image = image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
    if crop.flipped:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(numpy.ascontiguousarray(numpy.asarray(image).transpose(2, 0, 1)))


def samples_per_second(make: Crops, batch_size: int, batches: int, threads: int) -> float:
    """Of one epoch, from `iter()` until its last batch is there."""
    with PrefetchIterator(make_loader(make, batch_size, batches), device="cpu", num_threads=threads) as prefetched:
        start = time.perf_counter()
        arrived = sum(len(indices) for _, indices in prefetched)
        seconds = time.perf_counter() - start
    assert arrived == batch_size * batches
    return arrived / seconds


def batches_for(make: Crops, batch_size: int, threads: int, seconds: float) -> int:
    """Of an epoch that takes about `seconds`. The trial has every thread at work, and reads each photo once."""
    trial = max(4 * threads, -(-make.photos // batch_size))
    rate = samples_per_second(make, batch_size, trial, threads)
    return max(4 * threads, round(rate * seconds / batch_size))


@contextmanager
def stored(names: list[str], photos: list[bytes]) -> Iterator[dict[str, Storage]]:
    """The storages with the photos in them, in a folder that goes at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        storages: dict[str, Storage] = {}
        try:
            for name in names:
                own = Path(folder, name)
                own.mkdir()
                storages[name] = KINDS[name].make(photos, own)
            yield storages
        finally:
            for storage in storages.values():
                storage.close()
            gc.collect()  # Windows removes no file that is open, and a cycle of references may keep one open


def measure(storages: dict[str, Storage], options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Samples a second of each repeat, by storage and number of threads, which take turns in an order of chance."""
    cells = list(itertools.product(storages, (1, options.threads)))
    make = {name: Crops(storage, options.photos) for name, storage in storages.items()}
    batches = {(name, n): batches_for(make[name], options.batch_size, n, options.seconds) for name, n in cells}
    raw: dict[str, dict[int, list[float]]] = {name: {1: [], options.threads: []} for name in storages}
    for repeat in range(options.repeats):
        for name, n in random.Random(repeat).sample(cells, len(cells)):
            raw[name][n].append(samples_per_second(make[name], options.batch_size, batches[name, n], n))
    return raw


def figure(raw: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(raw), "low": min(raw), "high": max(raw), "raw": raw}


def run(options: argparse.Namespace) -> dict[str, Any]:
    chosen = options.only.split(",") if options.only else list(KINDS)
    left_out = {name: missing for name in chosen if (missing := KINDS[name].missing())}
    photos = vary_photo(options.photos, SEED)
    with stored([name for name in chosen if name not in left_out], photos) as storages:
        raw = measure(storages, options)
        size = {
            name: {"disk": storage.disk_bytes / len(photos), "memory": storage.memory_bytes / len(photos)}
            for name, storage in storages.items()
        }
    return {
        "benchmark": "slow_datasets",
        "format": 1,
        "environment": describe(find_target("cpu")),
        "packages": {KINDS[name].distribution: KINDS[name].version() for name in raw},
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "left_out": left_out,
        "storages": [
            {
                "name": name,
                "description": KINDS[name].description,
                "bytes_per_photo": size[name],
                "samples_per_second": {str(n): figure(rates) for n, rates in raw[name].items()},
            }
            for name in raw
        ],
    }


def table(result: dict[str, Any]) -> list[list[str]]:
    """A line for each storage, the first one its head."""
    threads = result["settings"]["threads"]
    lines = [["photos are kept as", "KB a photo", "1 thread", f"{threads} threads", "gain"]]
    for storage in result["storages"]:
        one, several = (storage["samples_per_second"][str(n)]["median"] for n in (1, threads))
        kilobytes = sum(storage["bytes_per_photo"].values()) / 1000
        lines.append(
            [storage["description"], f"{kilobytes:.0f}", f"{one:.0f}", f"{several:.0f}", f"{several / one:.1f}x"]
        )
    return lines


def report(result: dict[str, Any]) -> list[str]:
    """The table is Markdown, as docs/slow-datasets.md has it."""
    lines = table(result)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["---"] * len(widths))
    return [
        *headline(result["environment"]),
        ", ".join(f"{name} {version}" for name, version in result["packages"].items()),
        f"samples/s, median of {result['settings']['repeats']} repeats:",
        "",
        *(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines),
        "",
        *(f"left out: {name}, which {reason}" for name, reason in result["left_out"].items()),
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=max(2, usable_cpus()), help="beside one (the usable CPUs)")
    parser.add_argument("--photos", type=int, default=256, help="different ones (256)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one repeat of one row, about (2)")
    parser.add_argument("--only", help=f"comma list, of {','.join(KINDS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    check_files(parser, options)
    for name, least in {"threads": 2, "photos": 1, "batch_size": 1, "repeats": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more; got {getattr(options, name)}")
    if options.only and (unknown := [name for name in options.only.split(",") if name not in KINDS]):
        parser.error(f"--only: no row is called {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warnings.filterwarnings("ignore", message="with several num_threads the dataset is used by several threads")
    result = run(options)
    return 0 if finish("\n".join(report(result)), result, options) else 1


if __name__ == "__main__":
    start(main)
