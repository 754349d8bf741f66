"""The blocks of figures of all benchmarks but throughput.py say what a result says."""

import json

import figures
import pytest
import result_files
from experiment import figure


@pytest.fixture
def write(monkeypatch, tmp_path):
    """`write(name, result)`: the result is the only one, or one of those that were written before."""
    environment = {
        **result_files.read("memory-kernels")["environment"],
        "command": "python x.py --repeats 5 --json a.json",
    }
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    return lambda name, result: (tmp_path / f"{name}.json").write_text(
        json.dumps({"environment": environment, **result}), encoding="utf-8"
    )


def paragraphs(name):
    """Of the block: what was typed, what is said of it, and the lines of each table."""
    typed, *texts = figures.block(name).split("\n\n")
    assert typed == "    python x.py --repeats 5"
    return [text.splitlines() if text.startswith("|") else " ".join(text.split()) for text in texts]


def test_storages_are_a_table(write):
    rates = {"1": figure([50.0]), "16": figure([400.0])}
    storage = {"description": "JPEG", "bytes_per_photo": {"disk": 21_300.0, "memory": 0.0}, "samples_per_second": rates}
    result = {"packages": {"pillow": "13"}, "settings": {"threads": 16, "repeats": 5}, "storages": [storage]}
    write("slow-datasets", result)
    *_, told, _, head, line, row = figures.block("slow datasets").splitlines()
    assert told.endswith("pillow 13. Median of 5 repeats.")
    assert [head, line, row] == [
        "| photos are kept as | KB a photo | 1 thread | 16 threads | gain |",
        "| --- | --- | --- | --- | --- |",
        "| JPEG | 21 | 50 | 400 | 8.0x |",
    ]


def test_the_first_batch(write):
    row = {"name": "gpuprefetch8", "first_ms": figure([5.0, 4.0, 7.0]), "over_load_ms": figure([-1.0])}
    row["over_shared_load_ms"] = figure([4.25])
    settings = {"workload": "memory", "batch_size": 64, "steps": 20, "repeats": 30}
    left_out = [{"name": "workers8", "reason": "no processes"}]
    write("first-batch", {"settings": settings, "load_ms": figure([6.0]), "rows": [row], "left_out": left_out})
    told, table = paragraphs("first batch")
    assert told.startswith("NVIDIA H200")
    assert told.endswith(
        "Median of 30 repeats. Workload memory, epochs of 20 batches of 64. Left out: workers8 (no processes)."
    )
    assert table == [
        "| row | first ms | [min .. max] | over load | [min .. max] | over load / threads |",
        "| --- | --- | --- | --- | --- | --- |",
        "| load | 6.00 | [6.00 .. 6.00] |  |  |  |",
        "| gpuprefetch8 | 5.00 | [4.00 .. 7.00] | -1.00 | [-1.00 .. -1.00] | 4.25 |",
    ]


def test_contention_is_a_column_a_file(write):
    def row(name, raw):
        return {"name": name, "description": f"{name}, so", "ms_per_step": {"raw": raw}}

    with pytest.raises(result_files.Unwritable, match="there is no contention-"):
        figures.block("contention")
    shared = {"settings": {"repeats": 5}, "left_out": [{"name": "workers8", "reason": "no processes"}]}
    eight = row("gpuprefetch8", [10.0, 20.0, 40.0])
    write("contention-pil", {**shared, "rows": [eight, row("gpuprefetch8-nice", [12.0, 10.0, 20.0])]})
    write("contention-opencv", {**shared, "rows": [eight], "left_out": []})
    told, typed, told_pil, table = paragraphs("contention")
    assert told.endswith("5 repeats.") and typed == "python x.py --repeats 5"
    assert told_pil.endswith("5 repeats. Left out: workers8 (no processes).")
    assert table == [
        "| row | what it is | opencv | pil |",
        "| --- | --- | --- | --- |",
        "| gpuprefetch8 | gpuprefetch8, so | 1.00 [1.00 .. 1.00] | 1.00 [1.00 .. 1.00] |",
        "| gpuprefetch8-nice | gpuprefetch8-nice, so |  | 0.50 [0.50 .. 1.20] |",
    ]


def test_datasets_on_the_gpu_are_a_table_a_file(write):
    row = {"ms_per_step": figure([3.0, 5.0]), "bound_ms": figure([4.0])}
    row |= {"multiple_of_bound": figure([1.0]), "times_as_fast_as_plain": figure([2.0])}
    rows = [{**row, "name": "plain", "wrong_repeats": []}, {**row, "name": "gpuprefetch1", "wrong_repeats": [2]}]
    result = {"step": "training", "notes": ["quiet"], "parts_ms": {"loading": figure([7.25])}, "rows": rows}
    with pytest.raises(result_files.Unwritable, match="there is no gpu-dataset.json"):
        figures.block("gpu dataset")
    write("gpu-dataset-sync", {**result, "settings": {"repeats": 5, "sync_every_step": True}})
    write("gpu-dataset", {**result, "settings": {"repeats": 5, "sync_every_step": False}})
    told, table, typed, told_sync, table_sync = paragraphs("gpu dataset")
    assert told.endswith("5 repeats. Step: training. ms a batch, each part alone: loading 7.2. Note: quiet.")
    assert typed == "python x.py --repeats 5" and "Step: training, waited for each time. ms" in told_sync
    assert table_sync == table
    assert table == [
        "| row | ms a step | lowest | highest | bound | x bound | x as fast as plain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| plain | 4.00 | 3.00 | 5.00 | 4.00 | 1.00 | 2.00 |",
        "| gpuprefetch1! | 4.00 | 3.00 | 5.00 | 4.00 | 1.00 | 2.00 |",
    ]


def test_streams_are_a_line_a_file(write):
    row = {"bound_ms": figure([4.0]), "multiple_of_bound": figure([1.0]), "times_as_fast_as_plain": figure([2.0])}
    named = {"gpuprefetch1": 9.0, "gpuprefetch8": 5.0, "gpuprefetch4": 6.0}
    rows = [{**row, "name": name, "ms_per_step": figure([ms]), "wrong_repeats": []} for name, ms in named.items()]
    result = {"step": "training", "rows": rows}
    eight = {"repeats": 5, "threads": 8, "net_in": "apart", "sync_every_step": True}
    with pytest.raises(result_files.Unwritable, match=r"there is no streams-\*.json"):
        figures.block("streams")
    write("streams-8-sync", {**result, "settings": eight})
    write("streams-4", {**result, "settings": {**eight, "threads": 4, "net_in": "shared", "sync_every_step": False}})
    told, table = paragraphs("streams")
    assert "5 repeats. Step: training. The others: " in told
    assert table[2:] == [
        "| 4 | `shared` | no | 6.00 | 6.00 | 6.00 | 4.00 | 1.00 | 2.00 |",
        "| 8 | `apart` | yes | 5.00 | 5.00 | 5.00 | 4.00 | 1.00 | 2.00 |",
    ]
    write("streams-2", {**result, "step": "another", "settings": eight})
    with pytest.raises(result_files.Unwritable, match="not of one step, machine and number of repeats"):
        figures.block("streams")


def test_copies_by_source_size_and_method(write):
    def row(source, size, method, ms, share):
        rate = figure([size / ms * 1e-6])
        figured = {"ms": figure([ms]), "gb_per_s": rate, "share_of_link": figure([share])}
        return {"source": source, "bytes": size, "method": method, **figured}

    rows = [
        row("pageable", 1 << 20, "gpuprefetch", 0.1, 0.5),
        row("pageable", 1 << 20, "link", 0.05, 1.0),
        row("odd", 3 << 19, "gpuprefetch", 0.2, 0.25),
        row("odd", 3 << 19, "another", 0.1, 0.5),
        row("leaves", 200 << 12, "gpuprefetch", 0.8, 0.04),
        row("leaves", 200 << 16, "gpuprefetch", 1.6, 0.16),
    ]
    sources = {"pageable": "one tensor", "odd": "new", "pinned": "not here", "leaves": "200 tensors"}
    methods = {"gpuprefetch": "ours", "another": "theirs", "unused": "not here", "link": "the limit"}
    settings = {"repeats": 5, "sources": sources, "methods": methods}
    peak = {"source": "odd", "method": "another", "pinned_bytes": 1 << 20, "device_bytes_above_batch": 0}
    peaks = {"peak_bytes": 1 << 30, "peaks": [{**peak, "host_bytes": 3 << 20}]}
    write("copy-speed", {"settings": settings, "rows": rows, "left_out": [], **peaks})
    told, legend, *sources, memory, peak_table = paragraphs("copies")
    assert memory.startswith("Memory for one batch of 1 GiB, ")
    assert peak_table[2:] == ["| odd: another | 1 | 0 | 3 |"]
    assert "5 repeats. Of link" in told
    assert legend[2:] == ["| gpuprefetch | ours |", "| another | theirs |", "| link | the limit |"]
    assert sources == [
        "pageable: one tensor.",
        [
            "| GB/s | gpuprefetch | link | of link | spread |",
            "| --- | --- | --- | --- | --- |",
            "| 1 MiB | 10.5 | 21.0 | 50% | 0% |",
        ],
        "odd: new.",
        [
            "| GB/s | gpuprefetch | another | of link | spread |",
            "| --- | --- | --- | --- | --- |",
            "| 1.5 MiB | 7.9 | 15.7 | 25% | 0% |",
        ],
        "leaves: 200 tensors.",
        [
            "| ms | gpuprefetch | of link | spread |",
            "| --- | --- | --- | --- |",
            "| 200 x 4 KiB | 0.800 | 4% | 0% |",
            "| 200 x 64 KiB | 1.600 | 16% | 0% |",
        ],
    ]


def test_ready_batches_case_by_case(write):
    row = {"ms_per_step": figure([0.25]), "ms_per_step_over_caller": figure([0.875]), "next_us": figure([20.0, 30.0])}
    rows = [
        {**row, "row": "resident", "own_threads_share": None, "caller_share": figure([0.5])},
        {**row, "row": "gpuprefetch0", "own_threads_share": figure([0.125]), "caller_share": figure([0.5])},
    ]
    case = {"description": "4 KiB", "rows": rows, "best_over_caller": {"row": "gpuprefetch0", **figure([0.875])}}
    write("ready-batches", {"settings": {"repeats": 7}, "cases": {"small": case, "idle": case}})
    told, small, table, idle, again = paragraphs("ready batches")
    assert "Median of 7 repeats." in told
    assert small == "small: 4 KiB. The faster of ours: gpuprefetch0, 0.875 x caller."
    assert idle.startswith("idle: ") and again == table
    assert table[2:] == [
        "| resident | 0.250 | [0.250 .. 0.250] | 0.875 | 25.0 | [20.0 .. 30.0] | - | 50% |",
        "| gpuprefetch0 | 0.250 | [0.250 .. 0.250] | 0.875 | 25.0 | [20.0 .. 30.0] | 12.5% | 50% |",
    ]
