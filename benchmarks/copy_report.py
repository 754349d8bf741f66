"""The speed of copies, as a table for people."""

from __future__ import annotations

from typing import Any

from copy_sources import LEAVES, SAMPLES, SOURCES, batch_label, size_label
from report import columns, mebibytes
from target import headline

Rows = list[dict[str, Any]]


def methods_of(rows: Rows, source: str) -> list[str]:
    """Names of the methods that copied the source, in their order."""
    return list(dict.fromkeys(row["method"] for row in rows if row["source"] == source))


def setting_line(settings: dict[str, Any]) -> str:
    pause = settings.get("pause_ms", 0)  # older results have none
    in_a_row = f"copies in a row for at least {settings['least_ms_a_repeat']:g} ms each"
    return f"repeats {settings['repeats']}, {in_a_row}, {pause:g} ms between turns"


def _spread(rows: Rows) -> float:
    """The widest interval, over its median."""
    return max(float((row["ms"]["high"] - row["ms"]["low"]) / row["ms"]["median"]) for row in rows)


def cells_of(rows: Rows, source: str) -> list[list[str]]:
    """A line a size, a column a method: GB/s, or ms for the leaves."""
    methods = methods_of(rows, source)
    unit, key, digits = ("ms", "ms", 3) if source == "leaves" else ("GB/s", "gb_per_s", 1)
    lines = [[unit, *methods, "of link", "spread"]]
    for size in dict.fromkeys(row["bytes"] for row in rows if row["source"] == source):
        at_size = {row["method"]: row for row in rows if (row["source"], row["bytes"]) == (source, size)}
        values = [f"{at_size[name][key]['median']:.{digits}f}" if name in at_size else "-" for name in methods]
        share, spread = at_size["gpuprefetch"]["share_of_link"]["median"], _spread(list(at_size.values()))
        lines.append([batch_label(source, size), *values, f"{share:.0%}", f"{spread:.0%}"])
    return lines


def peaks_of(result: dict[str, Any]) -> list[list[str]]:
    """A line a source and method: MiB."""
    lines = [["peak MiB, above what was there", "pinned", "device", "host"]]
    for peak in result["peaks"]:
        sizes = (peak["pinned_bytes"], peak["device_bytes_above_batch"], peak["host_bytes"])
        lines.append([f"{peak['source']}: {peak['method']}", *map(mebibytes, sizes)])
    return lines


_HOST_US = {  # older results have no stages, the oldest none
    "calls_us": "host us a call, timed from Python, so C++ pays less",
    "stages_us": f"host us, the stages of {LEAVES} x 4 KiB",
    "dense_stages_us": "host us, as many bytes in one tensor",
    "gathered_stages_us": f"host us, {SAMPLES} samples of 600 KB",
}


def _host_us(result: dict[str, Any]) -> list[str]:
    lines = []
    for key, what in _HOST_US.items():
        told = [f"{name} {us['median']:.1f}" for name, us in result.get(key, {}).items()]
        lines += [f"{what}: {', '.join(told)}"] if told else []
    return lines


def table(result: dict[str, Any]) -> str:
    """Header, a table for each source, peaks, and what it all means, as text of at most about 120 columns."""
    rows, settings = result["rows"], result["settings"]
    environment = result["environment"]
    lines = [
        "",
        setting_line(settings),
        *(f"  {line}" for line in headline(environment)),
        f"  {environment['command']}",
    ]
    for source, description in SOURCES.items():
        if methods_of(rows, source):
            lines += ["", f"{source}: {description}", *columns(cells_of(rows, source))]
    lines += ["", f"one batch of {size_label(result['peak_bytes'])}, each method alone", *columns(peaks_of(result)), ""]
    lines += [*_host_us(result), ""]
    lines += [f"note: {note}" for note in result["notes"]]
    width = max(map(len, settings["methods"]))
    left_out = {entry["name"]: f"left out: {entry['reason']}" for entry in result["left_out"]}
    lines += [f"{name.ljust(width)}  {left_out.get(name, text)}" for name, text in settings["methods"].items()]
    return "\n".join(
        [
            *lines,
            "",
            "GB/s: 1e9 bytes a second, from the call until the device, idle before, is done; median of the repeats,",
            "  each the median of copies in a row. of link: gpuprefetch's share of it within a repeat, median.",
            "spread: lowest to highest repeat, over the median, of the method where that is most.",
            "pinned: by torch's allocator; device: active memory, without the batch itself; host: this process.",
        ]
    )
