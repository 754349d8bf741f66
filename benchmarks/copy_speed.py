"""How fast a batch gets to a CUDA device, by its size: gpuprefetch, the usual ways, and the link.

    python benchmarks/copy_speed.py [--json FILE] [--plot FILE]

Time runs from the call until a device that had nothing to do is done with the copy, so nothing overlaps. A
PrefetchIterator copies ahead, and its `next()` shows what is left to wait for (handover.py measures that). So its
copying part is driven by hand here, through the stages of an epoch and in their order: ask, collate, prepare, copy,
assemble, hand over. What an epoch adds is the way of a batch from one thread to another.

Small batches are copied many times in a row, so they come out of the processor's caches, as those do that a loader has
just made.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import footprint
import torch
from copy_methods import METHODS, Copy, Method
from copy_peaks import measure_peak
from copy_plot import draw
from copy_report import table
from copy_sources import LEAVES, SAMPLES, SOURCES, WORD_BYTES, Source, WrongCopy, check, make_source
from copy_timing import (
    LEAST_SECONDS,
    PAUSE_SECONDS,
    bring_to_speed,
    copies_a_repeat,
    time_calls,
    time_in_turn,
    time_stages,
)
from experiment import figure
from output import check_files, finish, start
from target import Target, Unusable, describe, find_target
from tqdm import tqdm

FORMAT = 3  # of --json
# What the stages of a copy take for: many small tensors, their bytes in one, and images of 3 x 224 x 224 float32.
STAGED = {
    "stages_us": ("leaves", LEAVES * 4096),
    "dense_stages_us": ("pageable", LEAVES * 4096),
    "gathered_stages_us": ("gathered", SAMPLES * 602_112),
}
# Some two minutes on an H100, by an estimate from the speeds that are known: half of it for 1 GiB, a quarter of it for
# data, checks and pinning.
SIZES = "64K,256K,1M,4M,16M,38.5M,64M,256M,1G"
LEAF_SIZES = [kib << 10 for kib in (1, 4, 16, 64, 128)]  # around csrc/packing.h's kSmallLeafBytes
STEP_BYTES = SAMPLES * WORD_BYTES  # sizes are multiples of it
PEAK_BYTES = 1 << 30


def open_checked(
    methods: list[Method], source: Source, target: Target, opened: ExitStack, left_out: dict[str, str]
) -> dict[str, Copy]:
    """Opens the methods, and checks the first copy of each. A peer that can't copy goes into `left_out`."""
    copies: dict[str, Copy] = {}
    for method in methods:
        reason = method.missing()
        if reason is None:
            source.invert()  # memory that still holds what another method copied must not pass for this one's
            try:
                copy = opened.enter_context(method.make(source, target))
                check(source, method.name, copy(), target.device)
                copies[method.name] = copy
            except Exception as error:
                if not method.is_peer or isinstance(error, WrongCopy):
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            left_out[method.name] = reason
    return copies


def measure_source(
    source: Source, target: Target, repeats: int, pause: float, chance: random.Random, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """The rows of one source of one size, with `pause` seconds between turns, in which the link is kept at work."""
    methods = [method for method in METHODS.values() if source.name in method.sources]
    with ExitStack() as opened:
        copies = open_checked(methods, source, target, opened, left_out)
        bring_to_speed(copies["link"], target)
        counts = {name: copies_a_repeat(copy, target) for name, copy in copies.items()}
        between = functools.partial(bring_to_speed, copies["link"], target, pause)
        seconds = time_in_turn(copies, counts, target, repeats, between, chance)
    links = seconds["link"]
    return [
        {
            "source": source.name,
            "bytes": source.nbytes,
            "method": name,
            "copies_a_repeat": counts[name],
            "ms": figure([value * 1e3 for value in own]),
            "gb_per_s": figure([source.nbytes / value * 1e-9 for value in own]),
            # Compared within a repeat, so that a link that changes between them is no gain and no loss.
            "share_of_link": figure([link / value for link, value in zip(links, own, strict=True)]),
        }
        for name, own in seconds.items()
    ]


def release(target: Target) -> None:
    """Gives cached memory back, so that one size's does not add to the next one's."""
    footprint.read_released(target)
    torch.cuda.empty_cache()


def measure(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The whole result, as `--json` writes it. Raises WrongCopy."""
    chance = random.Random(options.seed)
    cells = [(name, size) for name in SOURCES if name != "leaves" for size in options.sizes]
    cells += [("leaves", LEAVES * size) for size in LEAF_SIZES]
    peak_bytes = min(PEAK_BYTES, max(options.sizes))
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    tqdm.monitor_interval = 0  # its thread would take the GIL now and then
    for name, size in tqdm(cells, leave=False, unit="size", disable=None):
        release(target)
        source = make_source(name, size, options.seed)
        rows += measure_source(source, target, options.repeats, options.pause / 1e3, chance, left_out)
    calls = time_calls(target, options.repeats)
    stages: dict[str, dict[str, list[float]]] = {}
    for key, (name, size) in STAGED.items():
        release(target)
        stages[key] = time_stages(make_source(name, size, options.seed), target, options.repeats)

    peaks = []
    for name in ("pageable", "pinned", "gathered"):
        release(target)
        source = make_source(name, peak_bytes, options.seed)
        methods = [method for method in METHODS.values() if name in method.sources and method.name != "link"]
        peaks += [measure_peak(method, source, target) for method in methods]
    environment = describe(target)
    notes = []
    if environment["cuda_launch_blocking"]:
        notes.append("CUDA_LAUNCH_BLOCKING=1 is set: every call waits for the device, the copies by piece too")
    return {
        "benchmark": "copy_speed",
        "format": FORMAT,
        "environment": environment,
        "settings": {
            "sizes": options.sizes,
            "leaf_sizes": LEAF_SIZES,
            "repeats": options.repeats,
            "seed": options.seed,
            "least_ms_a_repeat": LEAST_SECONDS * 1e3,
            "pause_ms": options.pause,
            "sources": SOURCES,
            "methods": {name: method.description for name, method in METHODS.items()},
        },
        "rows": rows,
        "calls_us": _microseconds(calls),
        **{key: _microseconds(seconds) for key, seconds in stages.items()},
        "peak_bytes": peak_bytes,
        "peaks": peaks,
        "left_out": [{"name": name, "reason": reason} for name, reason in left_out.items()],
        "notes": notes,
    }


def _microseconds(times: dict[str, list[float]]) -> dict[str, Any]:
    return {name: figure([value * 1e6 for value in seconds]) for name, seconds in times.items()}


def parse_size(text: str) -> int:
    """Bytes. Raises ArgumentTypeError with the reason."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 64K, 38.5M or 1G (powers of 1024)")
    size = float(match[1]) * 1024 ** " KMG".index(match[2] or " ")
    if size < STEP_BYTES or size % STEP_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no multiple of {STEP_BYTES} bytes, which {SAMPLES} samples of {WORD_BYTES}-byte words need"
        )
    return int(size)


def parse_sizes(text: str) -> list[int]:
    """Bytes, ascending, each once."""
    return sorted({parse_size(part) for part in text.split(",")})


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--sizes",
        type=parse_sizes,
        default=SIZES,
        metavar="LIST",
        help=f"comma list ({SIZES}); the host needs 7 times the largest",
    )
    add("--repeats", type=int, default=7, help="turns of each method (7)")
    add("--pause", type=float, default=PAUSE_SECONDS * 1e3, metavar="MS", help="between turns, about (30)")
    add("--seed", type=int, default=0, help="of the data, and of the order of turns (0)")
    add("--json", type=Path, metavar="FILE", help="write every figure, with raw repeats")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1; got {options.repeats}")
    if not 0 <= options.pause < math.inf:
        parser.error(f"--pause must be a number from 0 up; got {options.pause}")
    check_files(parser, options)
    return options


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("copy_speed.py: needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1
    try:
        result = measure(options, find_target("cuda"))
    except (Unusable, ImportError) as error:
        print(f"copy_speed.py: {error}", file=sys.stderr)
        return 1
    except WrongCopy as error:
        print(f"copy_speed.py: wrong bytes: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(f"copy_speed.py: --sizes has one that does not fit the device: {error}", file=sys.stderr)
        return 1
    return 0 if finish(table(result), result, options, draw) else 1


if __name__ == "__main__":
    start(lambda: main(parse_arguments()))
