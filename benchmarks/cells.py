"""Runs throughput.py once for each workload, step and way of waiting, and with several numbers of threads for each
decoder: the figures of benchmarks/results.

Needs an accelerator, torchvision, OpenCV, and timm, torchdata and spdl for their rows.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path

from decoders import DECODERS

REPEATS = {"memory": 5, "jpeg": 3, "python": 3}  # fewer where a step takes longer
STEPS = ("kernels", "resnet50")
# 15, 4 and 2 divide them. Processes make whole batches, so that of 50 steps the last 5 would leave 10 of 15 idle.
THREADS_STEPS = 60


def cells() -> dict[str, list[str]]:
    """The arguments of each cell, by its name."""
    made = {}
    for workload, step, sync in itertools.product(REPEATS, STEPS, (False, True)):
        arguments = ["--workload", workload, "--step", step, "--batch-size", "64", "--steps", "50"]
        arguments += ["--repeats", str(REPEATS[workload]), "--loaders", "all"]
        made[f"{workload}-{step}{'-sync' * sync}"] = arguments + ["--sync-every-step"] * sync
    for decoder in DECODERS:
        arguments = ["--workload", "jpeg", "--decoder", decoder, "--batch-size", "64", "--steps", str(THREADS_STEPS)]
        arguments += ["--repeats", "3"]
        made[f"threads-{decoder}-loading"] = [*arguments, "--step", "none", "--threads", "1,2,4,8,15"]
        made[f"threads-{decoder}-resnet50"] = [*arguments, "--step", "resnet50", "--threads", "4,8,15"]
    return made


def cells_called(name: str) -> list[str]:
    """The cell `name`, or those whose names begin with it: threads, threads-pil."""
    return [name] if name in cells() else [cell for cell in cells() if cell.startswith(f"{name}-")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where NAME.json and NAME.png go")
    parser.add_argument("--only", help=f"comma list of cells, or of how they begin, of {','.join(cells())}")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"there is no folder {str(options.folder)!r}")
    wanted = options.only.split(",") if options.only else list(cells())
    if unknown := [name for name in wanted if not cells_called(name)]:
        parser.error(f"--only: no cell is called {', '.join(unknown)}; there are {', '.join(cells())}")

    failed = []
    for name in dict.fromkeys(cell for begin in wanted for cell in cells_called(begin)):
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
