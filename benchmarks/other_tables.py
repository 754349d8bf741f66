"""What pages show of the results of all benchmarks but throughput.py: the tables that those print."""

from __future__ import annotations

import statistics
from typing import Any

import copy_report
import copy_sources
import first_batch as first_batch_script
import gil_takes as gil_takes_script
import gpu_dataset as gpu_dataset_script
import ready_batches as ready_batches_script
import slow_datasets as slow_datasets_script
from page_text import left_out, markdown, origin, paragraph, parts_alone, told
from result_files import Unwritable, find, names, ratios, read


def calls() -> str:
    handover, memory = read("handover"), read("memory")
    took, size = handover["next_us"], memory["peak"]["batches_above_own"]
    return paragraph(
        f"On one {origin(handover['environment'])}: with a batch ready, `next()` takes {took['median']:.0f} us (median "
        f"of {handover['settings']['calls']}; p99 {took['p99']:.0f} us).",
        f"Device memory above the loop's own: {max(size.values()):.1f} batches.",
        f"Pinned memory: {memory['growth']['last']['pinned_bytes'] >> 20} MiB.",
    )


def first_batch() -> str:
    """How long until an epoch's first batch is on the device, and above loading it; a table for each file."""
    return "\n\n".join(map(first_batch_table, names("first-batch*") or ["first-batch"]))


def first_batch_table(name: str) -> str:
    result = read(name)
    settings = result["settings"]
    epochs = f"Workload {settings['workload']}, epochs of {settings['steps']} batches of {settings['batch_size']}."
    return f"{told(result, epochs, *left_out(result))}\n\n{markdown(first_batch_script.table(result))}"


def contention(name: str) -> str:
    """What a step takes with each row over one of gpuprefetch8, a column for each file, as contention-pil.json."""
    results = {found.removeprefix(f"{name}-"): read(found) for found in names(f"{name}-*")}
    if not results:
        raise Unwritable(f"there is no {name}-*.json in benchmarks/results")
    rows = {row["name"]: row["description"] for result in results.values() for row in result["rows"]}
    lines = [["row", "what it is", *results]]
    for row, description in rows.items():
        lines.append([row, description, *(_over_eight_threads(result, row) for result in results.values())])
    heads = [f"{told(result)} {' '.join(left_out(result))}".rstrip() for result in results.values()]
    return "\n\n".join([*heads, markdown(lines)])


def _over_eight_threads(result: dict[str, Any], name: str) -> str:
    """In the same repeat: the median, and the lowest and highest."""
    row, eight = find(result, name), find(result, "gpuprefetch8")
    if row is None or eight is None:
        return ""
    found = ratios(row, eight)
    return f"{statistics.median(found):.2f} [{min(found):.2f} .. {max(found):.2f}]"


def gil_takes() -> str:
    """How often the interpreter's lock is taken for a batch, by its size."""
    result = read("gil-takes")
    copies = f"Copies are made {result['settings']['copies']}."
    return f"{told(result, copies)}\n\n{markdown(gil_takes_script.table(result))}"


def pure_python() -> str:
    """What two threads gain where samples are pure Python: two columns for each Python, pure-python-VERSION.json."""
    results = [read(found) for found in names("pure-python-*")]
    if not results:
        raise Unwritable("there is no pure-python-*.json in benchmarks/results")
    lines = [["samples/s"]]
    for result in results:
        environment, threads = result["environment"], result["settings"]["threads"]
        python = f"{environment['python']}, lock {'on' if environment['gil'] else 'off'}"
        lines[0] += [f"{python}: 1 thread", f"{threads} threads"]
    for row in results[0]["rows"]:
        lines.append([f"{row['row']}: {row['description']}"])
        for result in results:
            own = find(result, row["row"], "row")
            gain = f"{own['gain']['median']:.2f}x" if own else ""
            lines[-1] += [f"{own['samples_per_second']['1']['median']:.0f}" if own else "", gain]
    return "\n\n".join([*map(told, results), markdown(lines)])


def ready_batches() -> str:
    """What is left to pay for a batch that is ready, case by case."""
    result = read("ready-batches")
    caller = "x caller: over pin_memory() and a copy in the loop, in the same repeat."
    text = [told(result, caller, "Our threads, caller: their processor time; 100% is a core.")]
    for name, case in result["cases"].items():
        best = case["best_over_caller"]
        faster = f"The faster of ours: {best['row']}, {best['median']:.3f} x caller."
        text += [paragraph(f"{name}: {case['description']}.", faster), markdown(ready_batches_script.cells(case))]
    return "\n\n".join(text)


def copies() -> str:
    """What each method is, and a table for each source: GB/s by size and method, or ms of many small tensors."""
    result = read("copy-speed")
    rows, settings = result["rows"], result["settings"]
    sources = dict.fromkeys(row["source"] for row in rows)
    used = {row["method"] for row in rows}
    methods = [[name, text] for name, text in settings["methods"].items() if name in used]
    of_link = "Of link: gpuprefetch's share of it in the same repeat. Spread: of the method where it is most."
    text = [told(result, of_link, *left_out(result)), markdown([["method", "what it is"], *methods])]
    for source in sources:
        text += [paragraph(f"{source}: {settings['sources'][source]}."), markdown(copy_report.cells_of(rows, source))]
    size = copy_sources.size_label(result["peak_bytes"])
    what = "Device: without the batch itself; host: this process, pinned memory included."
    text += [paragraph(f"Memory for one batch of {size}, each method alone.", what)]
    text += [markdown(copy_report.peaks_of(result))]
    return "\n\n".join(text)


def gpu_dataset() -> str:
    """A table for each file of gpu_dataset.py, as gpu-dataset-resnet18-sync.json."""
    return "\n\n".join(map(gpu_dataset_table, names("gpu-dataset*") or ["gpu-dataset"]))


def gpu_dataset_table(name: str) -> str:
    result = read(name)
    step = f"Step: {result['step']}{', waited for each time' * result['settings']['sync_every_step']}."
    notes = [f"Note: {note}." for note in result["notes"]]
    described = told(result, step, parts_alone(result), *notes)
    return f"{described}\n\n{markdown(gpu_dataset_script.table(result))}"


def streams() -> str:
    """A line for each file of gpu_dataset.py, as streams-8-apart-sync.json: its row of several threads."""
    results = [read(name) for name in names("streams-*")]
    if not results:
        raise Unwritable("there is no streams-*.json in benchmarks/results")
    if len({(each["step"], each["environment"].get("boot"), each["settings"]["repeats"]) for each in results}) > 1:
        raise Unwritable("streams-*.json are not of one step, machine and number of repeats, of which the block tells")
    lines = [["--threads", "--net-in", "--sync-every-step", *gpu_dataset_script.table(results[0])[0][1:]]]
    for result in results:
        settings = result["settings"]
        (row,) = [line for line in gpu_dataset_script.table(result) if line[0] == f"gpuprefetch{settings['threads']}"]
        loop = "yes" if settings["sync_every_step"] else "no"
        lines.append([str(settings["threads"]), f"`{settings['net_in']}`", loop, *row[1:]])
    described = told(results[0], f"Step: {results[0]['step']}.", "The others: with what their columns say.")
    return f"{described}\n\n{markdown(lines)}"


def slow_datasets() -> str:
    """docs/slow-datasets.md: what each way of storing photos gives."""
    result = read("slow-datasets")
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    return f"{told(result, packages=packages)}\n\n{markdown(slow_datasets_script.table(result))}"
