"""How often the interpreter's lock is taken for a batch, by all threads together: what could be a hand-over.

    python benchmarks/gil_takes.py [--json FILE]

Needs Linux, gdb and a CPython whose library has symbols: gdb counts the calls of `take_gil` in a process that loads
few batches, and in one that loads more. Samples are ready tensors, which the loader stacks. Without a CUDA device the
copies are those of the tests' planted device (which needs pytest and a C++ compiler), done at once; all that Python
does is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from experiment import figure
from output import check_files, finish, start
from report import columns
from target import Unusable, describe, find_target, headline
from torch.utils.data import DataLoader, TensorDataset

THREADS = {"dataloader": None, "gpuprefetch0": 0, "gpuprefetch": 1, "gpuprefetch4": 4}
BATCH_SIZES = (8, 64)
FEW, MANY = 50, 150  # batches
LIMIT_SECONDS = 300
STEP_SECONDS = 0.002  # in which the loop waits without the lock, as for a device
COUNT = r"already hit (\d+) times"


@contextlib.contextmanager
def batches(threads: int | None, loader: DataLoader[Any]) -> Iterator[Iterable[Any]]:
    from gpuprefetch import PrefetchIterator

    if threads is None:
        yield loader
    elif torch.cuda.is_available():
        yield PrefetchIterator(loader, device="cuda", num_threads=threads)
    else:
        sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
        from planted import Planted, planted_cuda, planted_device

        with tempfile.TemporaryDirectory() as folder, planted_device(folder), planted_cuda():
            with Planted(loader, "cpu", num_threads=threads) as prefetched:
                yield prefetched


def load(name: str, batch_size: int, count: int) -> None:
    """What the counted process does."""
    samples = TensorDataset(torch.zeros(count * batch_size, 3, 32, 32), torch.arange(count * batch_size))
    with batches(THREADS[name], DataLoader(samples, batch_size)) as prefetched:
        for _ in prefetched:
            time.sleep(STEP_SECONDS)


def takes(name: str, batch_size: int, count: int) -> int:
    """Of one process, from its start to its end. Raises Unusable."""
    script = ["set breakpoint pending on", "break take_gil", "ignore 1 1000000000", "run", "info breakpoints"]
    command = ["gdb", "--quiet", "--batch", *(part for line in script for part in ("-ex", line)), "--args"]
    command += [sys.executable, __file__, "--load", name, str(batch_size), str(count)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except FileNotFoundError:
        raise Unusable("gdb is not installed") from None
    except subprocess.TimeoutExpired:
        raise Unusable(f"gdb has not ended within {LIMIT_SECONDS} s") from None
    found = re.search(COUNT, done.stdout)
    if found is None or "exited normally" not in done.stdout:
        raise Unusable(f"gdb counted nothing:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return int(found[1])


def measure(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name in THREADS:
        raw: dict[int, list[float]] = {size: [] for size in BATCH_SIZES}
        for size in BATCH_SIZES:
            for _ in range(repeats):
                more = takes(name, size, MANY) - takes(name, size, FEW)
                raw[size].append(more / (MANY - FEW))
        rows.append({"row": name, "takes_a_batch": {str(size): figure(values) for size, values in raw.items()}})
    return rows


def table(result: dict[str, Any]) -> list[list[str]]:
    """A line for each row, the first one its head."""
    lines = [["takes of the GIL, a batch", *(f"of {size} samples" for size in result["rows"][0]["takes_a_batch"])]]
    for row in result["rows"]:
        lines.append([row["row"], *(f"{counts['median']:.1f}" for counts in row["takes_a_batch"].values())])
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--load", nargs=3, metavar=("ROW", "BATCH_SIZE", "BATCHES"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.load:
        load(options.load[0], int(options.load[1]), int(options.load[2]))
        return 0
    check_files(parser, options)
    try:
        rows = measure(options.repeats)
    except Unusable as error:
        print(f"gil_takes.py: {error}", file=sys.stderr)
        return 1
    environment = describe(find_target("cuda" if torch.cuda.is_available() else "cpu"))
    settings = {"repeats": options.repeats, "few": FEW, "many": MANY, "step_ms": STEP_SECONDS * 1e3}
    settings["copies"] = "to the device" if torch.cuda.is_available() else "on the host, by the tests' planted device"
    result = {"benchmark": "gil_takes", "format": 1, "environment": environment, "settings": settings, "rows": rows}
    text = "\n".join(["", *headline(environment), "", *columns(table(result))])
    return 0 if finish(text, result, options) else 1


if __name__ == "__main__":
    start(main)
