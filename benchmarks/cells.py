"""Runs throughput.py once for each workload, step and way of waiting: the figures of benchmarks/results.

Needs an accelerator, torchvision, and timm, torchdata and spdl for their rows.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path

REPEATS = {"memory": 5, "jpeg": 3, "python": 3}  # fewer where a step takes longer
STEPS = ("kernels", "resnet50")


def cells() -> dict[str, list[str]]:
    """The arguments of each cell, by its name."""
    made = {}
    for workload, step, sync in itertools.product(REPEATS, STEPS, (False, True)):
        arguments = ["--workload", workload, "--step", step, "--batch-size", "64", "--steps", "50"]
        arguments += ["--repeats", str(REPEATS[workload]), "--loaders", "all"]
        made[f"{workload}-{step}{'-sync' * sync}"] = arguments + ["--sync-every-step"] * sync
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where NAME.json and NAME.png go")
    parser.add_argument("--only", help=f"comma list of cells, of {','.join(cells())}")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"there is no folder {str(options.folder)!r}")
    chosen = options.only.split(",") if options.only else list(cells())
    if unknown := [name for name in chosen if name not in cells()]:
        parser.error(f"--only: no cell is called {', '.join(unknown)}; there are {', '.join(cells())}")

    failed = []
    for name in chosen:
        files = ["--json", str(options.folder / f"{name}.json"), "--plot", str(options.folder / f"{name}.png")]
        command = [sys.executable, str(Path(__file__).with_name("throughput.py")), *cells()[name], *files]
        started = time.monotonic()
        code = subprocess.run(command).returncode
        print(f"\n== {name}: exit status {code} after {time.monotonic() - started:.0f} s\n", flush=True)
        if code:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
