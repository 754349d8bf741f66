"""Runs throughput.py once for each workload, step and way of waiting, on few cores, and with several numbers of threads
for each decoder: the figures of benchmarks/results.

Needs an accelerator, torchvision, OpenCV, Linux for the runs on few cores, and timm, torchdata and spdl for their rows.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path

from decoders import DECODERS
from output import start

# With 64 files a batch, loading would take 20 steps of computing: nothing to overlap, and a cell of ten minutes.
BATCH_SIZES = {"memory": 64, "jpeg": 8, "python": 16}
STEPS = ("kernels", "resnet50")
ROWS = "dataloader,pinned,windows-fix,apex,background,fastreid,thread,gpuprefetch,gpuprefetch0,timm,workers4,workers8"
ROWS += ",gpuprefetch8,gpuprefetch-x,gpuprefetch-workers8,nodes8,spdl8"
FEW_CORES_ROWS = "dataloader,pinned,gpuprefetch,gpuprefetch0"
# 15 and 4 divide them. Processes make whole batches, so that of 50 steps the last 5 would leave 10 of 15 idle.
THREADS_STEPS = 60
# What was measured before there was throughput.py (results/earlier.json): workload, batch size, steps, rows.
EARLIER = (
    ("python", "32", "50", "dataloader,apex,thread,workers4,gpuprefetch"),
    ("jpeg", "64", "56", "dataloader,thread,workers8,nodes8,spdl8,gpuprefetch8"),
)
FEW_CORES = "4-cores"


def cells() -> dict[str, list[str]]:
    """The arguments of each cell, by its name."""
    made = {}
    for workload, batch_size in BATCH_SIZES.items():
        shared = ["--workload", workload, "--batch-size", str(batch_size), "--steps", "50", "--repeats", "3"]
        for step, sync in itertools.product(STEPS, (False, True)):
            arguments = [*shared, "--step", step, "--loaders", ROWS]
            made[f"{workload}-{step}{'-sync' * sync}"] = arguments + ["--sync-every-step"] * sync
        if workload == "memory":  # beside a step that holds the interpreter's lock
            made["memory-python"] = [*shared, "--step", "python", "--loaders", ROWS]
        if workload != "python":
            made[f"{FEW_CORES}-{workload}"] = [*shared, "--step", "kernels", "--loaders", FEW_CORES_ROWS]
    for (workload, batch, steps, rows), sync in itertools.product(EARLIER, (False, True)):
        arguments = ["--workload", workload, "--batch-size", batch, "--steps", steps, "--repeats", "3"]
        arguments += ["--step", "resnet50", "--loaders", rows] + ["--sync-every-step"] * sync
        made[f"earlier-{workload}{'-sync' * sync}"] = arguments
    for decoder in DECODERS:
        arguments = ["--workload", "jpeg", "--decoder", decoder, "--batch-size", "64", "--steps", str(THREADS_STEPS)]
        arguments += ["--repeats", "3", "--threads", "4,8,15"]
        made[f"threads-{decoder}-loading"] = [*arguments, "--step", "none"]  # with those that load with one
        rows = ["--loaders", "gpuprefetchN,workersN"]
        made[f"threads-{decoder}-resnet50-graph"] = [*arguments, "--step", "resnet50-graph", *rows]
    return made


def command_of(name: str) -> list[str]:
    program = [sys.executable, str(Path(__file__).with_name("throughput.py")), *cells()[name]]
    return ["taskset", "-c", "0-3", *program] if name.startswith(FEW_CORES) else program


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
    wanted = options.only.split(",") if options.only is not None else list(cells())
    if unknown := [name for name in wanted if not cells_called(name)]:
        parser.error(f"--only: no cell is called {', '.join(unknown)}; there are {', '.join(cells())}")

    failed = []
    for name in dict.fromkeys(cell for begin in wanted for cell in cells_called(begin)):
        files = ["--json", str(options.folder / f"{name}.json"), "--plot", str(options.folder / f"{name}.png")]
        started = time.monotonic()
        code = subprocess.run([*command_of(name), *files]).returncode
        print(f"\n== {name}: exit status {code} after {time.monotonic() - started:.0f} s\n", flush=True)
        if code:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    start(main)
