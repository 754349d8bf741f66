"""What pages show of the results of all benchmarks but throughput.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from copy_sources import batch_label
from page_text import labelled, left_out, markdown, paragraph, parts_alone, ranged, told
from result_files import names, read


def calls() -> str:
    handover, memory = read("handover"), read("memory")
    took, size = handover["next_us"], memory["peak"]["batches_above_own"]
    return paragraph(
        f"With a batch ready, `next()` takes {took['median']:.0f} us (median of {handover['settings']['calls']}; p99 "
        f"{took['p99']:.0f} us).",
        f"Device memory above the loop's own: {max(size.values()):.1f} batches.",
        f"Pinned memory: {memory['growth']['last']['pinned_bytes'] >> 20} MiB.",
    )


def first_batch() -> str:
    """ms until an epoch's first batch is on the device, and above loading it."""
    result = read("first-batch")
    settings = result["settings"]
    head = "row|first ms|lowest to highest|above load|lowest to highest|above load / threads"
    lines = [head.split("|"), ["load, on the host", *ranged(result["load_ms"]), "", "", ""]]
    for row in result["rows"]:
        shared = f"{row['over_shared_load_ms']['median']:.2f}"
        lines.append([labelled(row["name"]), *ranged(row["first_ms"]), *ranged(row["over_load_ms"]), shared])
    epochs = f"Workload {settings['workload']}, epochs of {settings['steps']} batches of {settings['batch_size']}."
    return f"{told(result, epochs, *left_out(result))}\n\n{markdown(lines)}"


def gil_takes() -> str:
    """How often the interpreter's lock is taken for a batch, by its size."""
    result = read("gil-takes")
    sizes = list(result["rows"][0]["takes_a_batch"])
    lines = [["the lock is taken", *(f"for a batch of {size}" for size in sizes)]]
    for row in result["rows"]:
        lines.append([labelled(row["row"]), *(f"{row['takes_a_batch'][size]['median']:.1f}" for size in sizes)])
    copies = f"Copies are made {result['settings']['copies']}."
    return f"{told(result, copies)}\n\n{markdown(lines)}"


def ready_batches() -> str:
    """What is left to pay for a batch that is ready, case by case."""
    result = read("ready-batches")
    caller = "x caller: over pin_memory() and a copy in the loop, in the same repeat."
    text = [told(result, caller, "Our threads, caller: their processor time; 100% is a core.")]
    head = "row|ms a step|lowest to highest|x caller|next() us|lowest to highest|our threads|caller"
    for name, case in result["cases"].items():
        lines = [head.split("|")]
        for row in case["rows"]:
            own = row["own_threads_share"]
            times = [*ranged(row["ms_per_step"], 3), f"{row['ms_per_step_over_caller']['median']:.3f}"]
            shares = ["" if own is None else f"{own['median']:.1%}", f"{row['caller_share']['median']:.0%}"]
            lines.append([labelled(row["row"]), *times, *ranged(row["next_us"], 1), *shares])
        best = case["best_over_caller"]
        faster = f"The faster of ours: {best['row']}, {best['median']:.3f} x caller."
        text += [paragraph(f"{name}: {case['description']}.", faster), markdown(lines)]
    return "\n\n".join(text)


def copies() -> str:
    """GB/s by source, size and method, and ms for many small tensors."""
    result = read("copy-speed")
    rows, settings = result["rows"], result["settings"]
    sources = [f"{name}: {settings['sources'][name]}." for name in dict.fromkeys(row["source"] for row in rows)]
    used = {row["method"] for row in rows}
    methods = {name: text for name, text in settings["methods"].items() if name in used}
    small = [row for row in rows if row["source"] == "leaves"]
    dense = [row for row in rows if row["source"] != "leaves"]
    return "\n\n".join(
        [
            told(result, *sources, "Of link: gpuprefetch's share of it in the same repeat.", *left_out(result)),
            markdown([["method", "what it is"], *map(list, methods.items())]),
            copy_table(dense, methods, "GB/s", "gb_per_s", 1),
            copy_table(small, methods, "ms", "ms", 3),
        ]
    )


def copy_table(rows: list[dict[str, Any]], methods: Iterable[str], unit: str, key: str, digits: int) -> str:
    """A line for each source and size, a column for each method that one of them has."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["source"], row["bytes"]), {})[row["method"]] = row
    columns = [name for name in methods if any(name in by_method for by_method in found.values())]
    lines = [[unit, "", *map(labelled, columns), "of link"]]
    for (source, size), by_method in found.items():
        values = [f"{by_method[name][key]['median']:.{digits}f}" if name in by_method else "" for name in columns]
        share = f"{by_method['gpuprefetch']['share_of_link']['median']:.0%}"
        lines.append([source, batch_label(source, size), *values, share])
    return markdown(lines)


def gpu_dataset() -> str:
    """A table for each file of gpu_dataset.py, as gpu-dataset-kernels-sync.json."""
    return "\n\n".join(map(gpu_dataset_table, names("gpu-dataset*") or ["gpu-dataset"]))


def gpu_dataset_table(name: str) -> str:
    result = read(name)
    lines = ["row|what it is|ms a step|lowest to highest|x bound|x as fast as plain".split("|")]
    for row in result["rows"]:
        compared = [f"{row[key]['median']:.2f}" for key in ("multiple_of_bound", "times_as_fast_as_plain")]
        label = labelled(row["name"], len(row["wrong_repeats"]))
        lines.append([label, row["description"], *ranged(row["ms_per_step"]), *compared])
    step = f"Step: {result['step']}{', waited for each time' * result['settings']['sync_every_step']}."
    notes = [f"Note: {note}." for note in result["notes"]]
    return f"{told(result, step, parts_alone(result), *notes)}\n\n{markdown(lines)}"


def slow_datasets() -> str:
    """docs/slow-datasets.md: what each way of storing photos gives."""
    from slow_datasets import table

    result = read("slow-datasets")
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    return f"{told(result, packages=packages)}\n\n{markdown(table(result))}"
