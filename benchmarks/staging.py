"""The host's part of a copy by itself: a pool of threads fills pinned memory, and a simulated bus empties it.

    python benchmarks/staging.py [--threads 1,4,8] [--json FILE]
    python benchmarks/staging.py --link-gb 0,20,40 [--json FILE]       # while a real bus reads memory as well

Compiles csrc's staging with staging.cpp, so it needs a C++ compiler (CXX, else c++) and, but for --link-gb, no device.
Each batch comes after a pause, as in a training loop: the threads sleep and the bus is idle. Beside it the same number
of threads copies the same bytes, a share each and begun together, by memcpy and as the pool does: what threads and
memory give.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from copy_speed import parse_sizes
from experiment import figure
from link_load import LinkLoad
from output import check_files, finish, start
from target import Target, describe, find_target, headline

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("host_copy", "memcpy_pool", "pinned_ring", "staged_copy", "platform")
SIZES = "256K,1M,4M,16M,38.5M,64M"


def compile_to(program: Path) -> None:
    """Raises CalledProcessError, or OSError where there is no compiler."""
    sources = [str(ROOT / "benchmarks" / "staging.cpp"), *(str(ROOT / "csrc" / f"{name}.cpp") for name in SOURCES)]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-O3", "-std=c++17", "-pthread", f"-I{ROOT / 'csrc'}"]
    subprocess.run([*compiler, *flags, *sources, "-o", str(program)], check=True)


def measure(program: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of threads and size. us: until the bus is done with it; first_us: until its first copy."""
    from gpuprefetch._copier import piece_bytes

    rows = []
    for link_gb, threads in itertools.product(options.link_gb, options.threads):
        ring = [options.ring_mib << 20, piece_bytes(options.ring_mib << 20)]
        arguments = [threads, *ring, options.bus_gb * 1e9, options.call_us * 1e-6, options.repeats]
        command = [str(program), *map(str, arguments), *map(str, options.sizes)]
        printed, carried = run_beside(command, link_gb)
        for line in printed.splitlines():
            raw = json.loads(line)
            row = {name: figure(raw.pop(name)) for name in ("us", "first_us", "memcpy_us", "alone_us")}
            rows.append({"link_gb": link_gb, "carried_gb_per_s": carried, **raw, **row})
    return rows


def run_beside(command: list[str], link_gb: float) -> tuple[str, float]:
    """What it printed, and the GB/s that the link really carried meanwhile."""

    def run() -> str:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    if link_gb == 0:
        return run(), 0.0
    with LinkLoad(find_target("cuda"), link_gb) as load:
        before, begun = load.copied_bytes, time.perf_counter()
        printed = run()
        return printed, (load.copied_bytes - before) / (time.perf_counter() - begun) * 1e-9


def gb_per_s(row: dict[str, Any], name: str) -> float:
    rate: float = row["bytes"] / row[name]["median"] / 1e3
    return rate


def table(result: dict[str, Any]) -> list[str]:
    lines = ["    MiB  threads  copies       us  [min .. max]          GB/s  first us  alone GB/s  memcpy GB/s"]
    carried = 0.0
    for row in result["rows"]:
        if row["carried_gb_per_s"] != carried:
            carried = row["carried_gb_per_s"]
            lines.append(f"beside a link that carries {carried:.1f} GB/s, {row['link_gb']:g} asked for:")
        took = row["us"]
        interval = f"[{took['low']:.0f} .. {took['high']:.0f}]"
        lines.append(
            f"{row['bytes'] / 2**20:7.2f}  {row['threads']:7}  {row['copies']:6}  {took['median']:7.0f}  {interval:18}"
            f"  {gb_per_s(row, 'us'):6.1f}  {row['first_us']['median']:8.0f}  {gb_per_s(row, 'alone_us'):10.1f}"
            f"  {gb_per_s(row, 'memcpy_us'):11.1f}"
        )
    return lines


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--threads", type=_numbers, default=[1, 2, 4, 8], metavar="N,N,..", help="of the pool (1,2,4,8)")
    add("--sizes", type=parse_sizes, default=parse_sizes(SIZES), metavar="SIZE,SIZE,..", help=f"of a batch ({SIZES})")
    add("--ring-mib", type=int, default=64, help="pinned memory, in pieces as the package has them (64)")
    add("--bus-gb", type=float, default=52.0, help="GB/s of the simulated bus (52: PCIe gen 5 x16)")
    add(
        "--link-gb",
        type=_rates,
        default=[0.0],
        metavar="GB,GB,..",
        help="GB/s of pinned memory that a CUDA device is sent meanwhile; 0: none, and no device (0)",
    )
    add("--call-us", type=float, default=8.0, help="what queueing a copy takes the host (8)")
    add("--repeats", type=int, default=15)
    add("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    check_files(parser, options)
    for name in ("ring_mib", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(options, name)}")
    if min(options.threads) < 1 or options.bus_gb <= 0 or min(options.call_us, *options.link_gb) < 0:
        parser.error("--threads and --bus-gb must be positive, and --call-us and --link-gb not negative")
    if any(options.link_gb) and not torch.cuda.is_available():
        parser.error("--link-gb needs a CUDA device; torch finds none here")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "staging"
        try:
            compile_to(program)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"staging.py: can't compile: {error}", file=sys.stderr)
            return 1
        rows = measure(program, options)
    result = {
        "benchmark": "staging",
        "format": 1,
        "environment": describe(find_target("cuda") if any(options.link_gb) else Target(torch.device("cpu"))),
        "settings": {name: value for name, value in vars(options).items() if name != "json"},
        "rows": rows,
    }
    text = "\n".join([*headline(result["environment"]), "", *table(result)])
    return 0 if finish(text, result, options) else 1


if __name__ == "__main__":
    start(main)
