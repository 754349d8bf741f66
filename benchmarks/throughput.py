"""How long a training step takes with each way of loading, beside the least that is possible.

    python benchmarks/throughput.py

No worker process is started unless a row of theirs or --threads is given, so it runs the same on Windows and in a
notebook. benchmarks/README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import in_process  # noqa: F401  (registers the rows: so do the next two)
import ours  # noqa: F401
import peers  # noqa: F401
from calibration import MIN_STEPS, make_plan
from decoders import DECODERS, SPLIT
from experiment import run
from output import check_files, finish, say, start
from plot import draw
from report import comparison, table
from rows import MOST_THREADS, ROWS, Family, Row, choose_rows, rows_called
from scaling import multiples_of_one, over_processes
from steps import Wait
from target import Unusable, describe, find_target
from timeline import timelines
from workloads import DESCRIPTIONS, DISTINCT_SAMPLES, find_images, make_loader, make_workload

FORMAT = 2  # of --json
STEPS = ("kernels", "python", "resnet50", "resnet50-graph", "convnet", "convnet-graph", "none")
COUNTS = (4, 8)  # threads or processes, without --threads
DISTURBED = 1.5  # the most that a part takes over the least, on a machine that does nothing else
THREADS_ROWS = ("dataloader", "gpuprefetch", "gpuprefetchN", "workersN")  # with --threads and no --loaders


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.removeprefix("-").isdecimal() and len(text) < 20 and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"must be a number from {low} to {high}, got {text[:20]!r}")
        return int(text)

    return number


def _counts(text: str) -> list[int]:
    """The numbers of a comma list, each once, in ascending order."""
    parts = text.split(",")
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_THREADS for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 to {MOST_THREADS}, as in 1,2,4; got {text!r}")
    return sorted({int(part) for part in parts})


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workload", choices=DESCRIPTIONS, default="jpeg", help="what a sample costs on the host (jpeg)")
    add("--data", type=Path, metavar="DIR", help="a folder of images for the workload jpeg")
    add("--decoder", choices=DECODERS, default="pil", help="what decodes and augments in the workload jpeg (pil)")
    add("--step", choices=STEPS, default="kernels", help="what the device does with a batch; none: only load (kernels)")
    add("--device", help="the current accelerator, or cpu where there is none")
    add(
        "--batch-size", type=_number(1, 10**5), help="samples; by default the largest up to 64 that keeps the run short"
    )
    add(
        "--steps",
        type=_number(MIN_STEPS, 10**6),
        help=f"an epoch; at least {MIN_STEPS}, or the first batch weighs too much; by default as many as keep the run "
        "short",
    )
    add("--repeats", type=_number(1, 10**4), help="epochs of every row; by default 3 to 7")
    add("--sync-every-step", action="store_true", help="read the loss after every step, as loops that print it do")
    add(
        "--loaders",
        help=f"comma list of rows, or all; of {','.join(ROWS)}, where N is a number of threads or processes, as in "
        f"workers8, or stays N for those of --threads ({','.join(_default_rows())})",
    )
    add(
        "--threads",
        type=_counts,
        metavar="N,N,..",
        help=f"numbers for the rows called ..N of --loaders, {','.join(map(str, COUNTS))} by default; "
        f"without --loaders, run {','.join(THREADS_ROWS)}",
    )
    counts = ", ".join(f"{count} for {workload}" for workload, count in DISTINCT_SAMPLES.items())
    add("--samples", type=_number(1, 10**7), help=f"different samples behind an epoch ({counts}; all files of --data)")
    add(
        "--prefetch-batches",
        type=_number(1, 1000),
        default=2,
        help="of gpuprefetch, and of thread, background and spdl (2)",
    )
    add(
        "--seed", type=_number(0, 2**32 - 1), default=0, help="of the data, and of the order of rows in each repeat (0)"
    )
    add("--json", type=Path, metavar="FILE", help="write every figure, with raw repeats")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG), with a timeline of a few steps")
    add(
        "--compare",
        type=Path,
        nargs=2,
        metavar="FILE",
        help="measure nothing, and set two files of --json side by side",
    )
    options = parser.parse_args(arguments)

    if options.data is not None and options.workload != "jpeg":
        parser.error(f"--data is for --workload jpeg, not {options.workload}")
    if options.data is not None and not options.data.is_dir():
        parser.error(f"--data {str(options.data)!r} is no folder")
    if options.decoder != "pil" and options.workload != "jpeg":
        parser.error(f"--decoder is for --workload jpeg, not {options.workload}")
    check_files(parser, options)
    if options.compare and (options.json or options.plot):
        parser.error("--compare measures nothing, so there is nothing for --json or --plot")
    names = _wanted(options.loaders, options.threads)
    unknown = [name for name in names if not rows_called(name, COUNTS)]
    if unknown or not names:
        said = f"no row is called {', '.join(unknown)}" if unknown else "no row is named"
        parser.error(f"--loaders: {said}; there are {', '.join(ROWS)}")
    if options.threads and not any(isinstance(ROWS.get(name), Family) for name in names):
        parser.error(f"--threads is for the rows called ..N, and --loaders names none: {', '.join(names)}")
    found = [row for name in names for row in rows_called(name, options.threads or COUNTS)]
    if options.loaders is None:
        found = [row for row in found if row.name != "workers1"]  # dataloader and gpuprefetch are those with one
    options.rows = list({row.name: row for row in found}.values())
    return options


def _default_rows() -> list[str]:
    return [row.name for row in ROWS.values() if isinstance(row, Row) and row.default]


def _wanted(loaders: str | None, threads: list[int] | None) -> list[str]:
    """The names of rows and families that `--loaders` stands for."""
    if loaders == "all":
        return list(ROWS)
    if loaders is None:
        return list(THREADS_ROWS) if threads else _default_rows()
    return [name.strip() for name in loaders.split(",") if name.strip()]


def disturbed(measured: dict[str, Any]) -> list[str]:
    """A note for each part that moved so far between repeats that rows may have done so too."""
    fastest = min(row["ms_per_step"]["median"] for row in measured["rows"])
    return [
        f"{name} took {part['low']:.1f} to {part['high']:.1f} ms alone: something else was at work on this machine, so "
        "these figures say little"
        for name, part in measured["parts_ms"].items()
        if part["high"] > DISTURBED * part["low"] and part["high"] - part["low"] > fastest / 10
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, as `--json` writes it."""
    target = find_target(options.device)
    rows, left_out = choose_rows(options.rows, target)
    samples = options.samples or DISTINCT_SAMPLES[options.workload]
    if options.data is not None:
        samples = min(options.samples or sys.maxsize, len(find_images(options.data, DECODERS[options.decoder])))
    make = make_workload(options.workload, samples, options.seed, options.data, options.decoder)
    plan = make_plan(options.step, target, make, rows, options.batch_size, options.steps, options.repeats)
    loader = make_loader(make, plan.batch_size, plan.steps)
    measured = run(plan, rows, loader, target, options.prefetch_batches, options.sync_every_step, options.seed)
    left_out += measured.pop("left_out")
    measured["timelines"] = []
    if options.plot and options.step != "none":  # a lane of steps that do nothing shows nothing
        try:
            measured["timelines"] = timelines(
                rows, loader, target, options.prefetch_batches, plan.step, options.sync_every_step
            )
        except Exception as error:  # of the profiler, say: no reason to lose the figures
            plan.notes.append(f"no timeline: {type(error).__name__}: {error}")

    environment = describe(target)
    notes = [*plan.notes, *disturbed(measured)]
    if environment["cuda_launch_blocking"]:
        notes.append("CUDA_LAUNCH_BLOCKING=1 is set: every copy and kernel waits, so nothing can overlap")
    if options.workload == "jpeg":
        source = str(options.data) if options.data else "the photo that matplotlib ships, cropped and varied"
        description = f"{DESCRIPTIONS['jpeg']}, by {DECODERS[options.decoder].description}, from {source}"
    else:
        description = DESCRIPTIONS[options.workload]
    return {
        "format": FORMAT,
        "environment": environment,
        "settings": {
            "workload": options.workload,
            "workload_description": description,
            "decoder": options.decoder if options.workload == "jpeg" else None,
            "step": "wait" if isinstance(plan.step, Wait) else options.step,
            "step_description": plan.step.description,
            "on_accelerator": target.accelerated,
            "sync_every_step": options.sync_every_step,
            "batch_size": plan.batch_size,
            "steps": plan.steps,
            "repeats": len(measured["parts_ms"]["load"]["raw"]),
            "samples": samples,
            "seed": options.seed,
            "prefetch_batches": options.prefetch_batches,
            "interval": "lowest to highest of the repeats",
        },
        **measured,
        "multiples_of_one": multiples_of_one(measured["rows"]),
        "over_processes": over_processes(measured["rows"]),
        "left_out": left_out,
        "notes": notes,
    }


def read_result(file: Path) -> dict[str, Any]:
    """What `--json` wrote. Raises Unusable if it is something else."""
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Unusable(f"{file} is no JSON: {error}") from None
    if (
        not isinstance(result, dict)
        or (result.get("benchmark"), result.get("format")) != ("throughput", FORMAT)
        or not result.keys() >= {"settings", "environment", "rows"}
    ):
        raise Unusable(f"{file} is no result of this version of throughput.py --json")
    return result


def complaint(result: dict[str, Any]) -> str | None:
    """Why the result must not be used, or None. Only a GPU-bound step is quiet enough to say so of times, and only of
    a decoder whose samples cost the same in each row."""
    settings = result["settings"]
    wrong = [
        row["name"] for row in result["rows"] if row["wrong_repeats"] and (row["ours"] or row["name"] == "dataloader")
    ]
    if wrong:
        return f"wrong batches in {', '.join(wrong)}: not those of the plain loader, each once and in order"
    below = [row for row in result["rows"] if row["below_bound"]]
    if not below or not settings["on_accelerator"] or settings["step"] != "kernels":
        return None
    if settings["decoder"] in SPLIT:
        return None
    named = ", ".join(
        f"{row['name']} took {row['ms_per_step']['median']:.2f} ms a step, its bound {row['bound_ms']['median']:.2f} ms"
        for row in below
    )
    return f"not to be trusted: {named}, so a row beat its bound by more than 2 %; run it again on a quieter machine"


def main(options: argparse.Namespace, benchmark: str = "throughput") -> int:
    """`benchmark`: what the result says that it is."""
    if options.compare:
        try:
            results = [read_result(file) for file in options.compare]
            say("\n".join(f"{name}: {file}" for name, file in zip(("first", "second"), options.compare, strict=True)))
            say(comparison(*results))
        except (OSError, Unusable) as error:
            print(f"throughput.py: {error}", file=sys.stderr)
            return 1
        return 0
    try:
        result = {"benchmark": benchmark, **measure(options)}
    except Unusable as error:
        print(f"throughput.py: {error}", file=sys.stderr)
        return 1
    written = finish(table(result), result, options, draw)
    wrong = complaint(result)
    if wrong:
        print(f"throughput.py: {wrong}", file=sys.stderr)
    return 1 if wrong or not written else 0


if __name__ == "__main__":
    start(lambda: main(parse_arguments()))
