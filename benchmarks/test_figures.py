"""The pages say what the committed results say."""

import figures
import pytest
import result_files
import throughput_tables
from experiment import figure
from rows import split_name
from scaling import over_processes


def test_which_pages_have_figures():
    assert {"README.md", "docs/performance.md"} <= set(figures.pages())


@pytest.mark.parametrize("page", figures.pages())
def test_a_page_says_what_the_results_say(page):
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    assert figures.written(text) == text, "run python benchmarks/figures.py"


def test_another_figure_is_found(monkeypatch, tmp_path, capsys):
    page = "docs/performance.md"
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    took = f"{result_files.read('handover')['next_us']['median']:.0f} us"
    assert took in text
    (tmp_path / "docs").mkdir()
    (tmp_path / page).write_text(text.replace(took, "1 us"), encoding="utf-8")
    (tmp_path / "README.md").write_text("no figures here", encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.main(["--check"]) == 1
    assert f"{page} does not say what benchmarks/results says" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, said",
    [
        ("<!-- figures: nonsense -->\n<!-- end of figures -->", "no figures called 'nonsense'"),
        ("<!-- figures: steps -->\nno end", "of 1 blocks of figures 0 have an end"),
        ("<!-- figures: cell no-such -->\n<!-- end of figures -->", "there is no no-such.json in benchmarks/results"),
    ],
)
def test_what_can_t_be_filled_is_said(text, said):
    with pytest.raises(result_files.Unwritable, match=said):
        figures.written(text)


def test_cells_of_machines_that_differ_are_told_apart(monkeypatch):
    one = result_files.read("memory-kernels")
    few_cores = {**one, "environment": {**one["environment"], "cpus_usable": 4}}
    other = {**one, "environment": {**one["environment"], "device_name": "another GPU"}}
    alone = {"memory-kernels": one, "few-cores": few_cores}
    monkeypatch.setattr(throughput_tables, "cells", lambda: alone)
    described = throughput_tables.machine()
    monkeypatch.setattr(throughput_tables, "cells", lambda: {**alone, "odd": other})
    first, second = " ".join(throughput_tables.machine().split()).split(" - ")
    assert first == f"- {' '.join(described.split())[:-1]}: memory-kernels; few-cores."
    assert second.startswith("another GPU, ") and second.endswith(": odd.")


def test_a_python_without_the_gil_is_no_other_machine(monkeypatch):
    one = result_files.read("memory-kernels")
    other = {**one, "environment": {**one["environment"], "python": "3.14.0", "gil": False}}
    monkeypatch.setattr(throughput_tables, "cells", lambda: {"one": one, "other": other})
    assert one["environment"]["python"] in throughput_tables.machine()


def a_result(decoder, step, **ms):
    """What throughput.py --threads gives, of one repeat with batches of 10."""
    rows = [
        {
            "name": name,
            "ours": name.startswith("gpuprefetch"),
            "ms_per_step": figure([value]),
            "samples_per_s": figure([10_000 / value]),
        }
        for name, value in ms.items()
    ]
    notes = [f"{name} was slow" for name in ms if name == "gpuprefetch4"]
    return {f"threads-{decoder}-{step}": {"rows": rows, "over_processes": over_processes(rows), "notes": notes}}


def test_threads_beside_processes(monkeypatch):
    made = a_result(
        "pil", "loading", dataloader=99.0, gpuprefetch=100.0, workers1=160.0, gpuprefetch8=16.0, workers8=20.0
    )
    made |= a_result("opencv", "loading", gpuprefetch8=5.0)
    made |= a_result("pil", "resnet50-graph", gpuprefetch4=60.25, workers4=50.0)
    monkeypatch.setattr(throughput_tables, "cells", lambda: made)
    assert figures.block("threads loading").splitlines() == [
        "| samples/s |  | 1 | 8 | time of 8 over 8 processes |",
        "| --- | --- | --- | --- | --- |",
        "| OpenCV | threads |  | 2000 |  |",
        "| OpenCV | processes |  |  |  |",
        "| PIL | threads | 100 | 625 | 0.80 |",
        "| PIL | processes | 62 | 500 |  |",
    ]
    assert figures.block("threads resnet50-graph").splitlines()[2:] == [
        "| PIL | threads | 60.2 |  |",
        "| PIL | processes | 50.0 |  |",
        "",
        "Note, PIL: gpuprefetch4 was slow.",
    ]


def test_there_may_be_no_figures_of_threads_yet(monkeypatch):
    monkeypatch.setattr(throughput_tables, "cells", dict)
    with pytest.raises(result_files.Unwritable, match="no threads-DECODER-loading.json"):
        figures.block("threads loading")


def test_wrong_batches_are_in_the_table(monkeypatch):
    result = result_files.read("memory-kernels")
    result_files.find(result, "thread")["wrong_repeats"] = [0, 2]
    monkeypatch.setattr(throughput_tables, "read", lambda name: result)
    assert "| thread (wrong in 2 of 3) |" in throughput_tables.cell("memory-kernels")


def made(**ms):
    """A cell of rows with these ms a step, "_" in a name for "-"."""
    rows = [(name.replace("_", "-"), figure(raw)) for name, raw in ms.items()]
    fastreid = {"below_bound": True, "wrong_repeats": [0, 2]}
    others = {"below_bound": False, "wrong_repeats": []}
    told = [(name, took, fastreid if name == "fastreid" else others) for name, took in rows]
    return {"rows": [{"name": name, "ms_per_step": took, **rest} for name, took, rest in told], "notes": []}


def test_the_fix_for_windows_beside_ours(monkeypatch):
    both = made(windows_fix=[30.0, 32.0], gpuprefetch=[20.0], gpuprefetch0=[16.0], fastreid=[25.0] * 4)
    fastreid, gpuprefetch_x = [10.0, 20.0, 40.0, 20.0], [26.0, 10.0, 40.0, 30.0]  # 2.6, 0.5, 1 and 1.5 times as long
    lost = made(windows_fix=[1.3, 1.0, 6.0, 9.0], gpuprefetch=[25.0], gpuprefetch_x=gpuprefetch_x, fastreid=fastreid)
    lost["notes"] = ["loud"]
    cells = {"odd": lost, "one row": made(windows_fix=[1.0]), "no fix": made(gpuprefetch=[1.0]), "memory-kernels": both}
    monkeypatch.setattr(throughput_tables, "cells", lambda: cells)
    assert figures.block("windows fix").splitlines()[2:] == [
        "| ready samples, GPU-bound step | 31.0 | 25.0\\* (wrong in 2 of 4) |  | 20.0 | 16.0 |  |  |",
        "| odd | 3.6 | 20.0\\* (wrong in 2 of 4) | 28.0 | 25.0 |  | 1.25 (within the spread) | 0.12 |",
        "",
        "Note, odd: loud.",
    ]


def test_rows_beside_what_was_measured_earlier(monkeypatch):
    """Over the longer part, of a cell that is there, with its twin that waits if that is; what nobody measured is left
    out."""

    def now(**ms):
        parts = {"load": figure([20.0, 30.0, 25.0]), "compute": figure([10.0, 10.0, 40.0])}
        return {"settings": {"workload": "jpeg", "batch_size": 64}, "parts_ms": parts, **made(**ms)}

    before = {
        "one": {"load": 250, "compute": 20.0, "dataloader": 300, "thread": 225},
        "one-sync": {"load": 10, "compute": 20.0, "thread": 30},
        "other": {"load": 10, "compute": 20.0, "dataloader": 30},
        "gone": {"load": 10, "compute": 20.0, "dataloader": 30},
    }
    measured = {"one": now(dataloader=[40.0, 30.0, 80.0]), "one-sync": now(thread=[10.0, 30.0, 20.0])}
    monkeypatch.setattr(throughput_tables, "read", lambda name: {"earlier": {"ms_per_step": before}}[name])
    monkeypatch.setattr(throughput_tables, "cells", lambda: {**measured, "other": now(dataloader=[20.0, 30.0, 40.0])})
    assert figures.block("earlier").splitlines() == [
        "Workload jpeg, batch 64:",
        "",
        "| ms a step over the longer part | earlier | now | waited for: earlier | now |",
        "| --- | --- | --- | --- | --- |",
        "| load alone, ms | 250 | 25.0 | 10 | 25.0 |",
        "| compute alone, ms | 20 | 10.0 | 20 | 10.0 |",
        "| dataloader | 1.20 | 2.00 |  |  |",
        "| thread | 0.90 |  | 1.50 | 0.50 |",
        "",
        "Workload jpeg, batch 64:",
        "",
        "| ms a step over the longer part | earlier | now |",
        "| --- | --- | --- |",
        "| load alone, ms | 10 | 25.0 |",
        "| compute alone, ms | 20 | 10.0 |",
        "| dataloader | 1.50 | 1.00 |",
    ]


def test_the_legend_is_of_all_cells(monkeypatch):
    def cell(**rows):
        return {"rows": [{"name": name, "description": text} for name, text in rows.items()]}

    cells = {"a": cell(workers8="a", gpuprefetch8="b", dataloader="c"), "b": cell(fastreid="d", gpuprefetch0="e")}
    cells["c"] = cell(gpuprefetch2="f", workers8="not a")
    monkeypatch.setattr(throughput_tables, "cells", lambda: cells)
    *alike, differing = figures.block("rows").splitlines()[2:]
    names = ["dataloader", "fastreid", "gpuprefetch0", "gpuprefetch2", "gpuprefetch8"]
    assert alike == [f"| {name} | {text} |" for name, text in zip(names, "cdefb", strict=True)]
    assert differing.startswith("| workers8 | DataLoader, num_workers=8 (processes)")
    cells["d"] = cell(bygone="g")
    with pytest.raises(result_files.Unwritable, match="rows that are not registered: bygone"):
        figures.block("rows")


KNOWN_LOSSES = {"memory-resnet50": ["gpuprefetch8 behind nodes8"]}  # by cell; README names each
ONE_THREAD = ("dataloader", "pinned", "windows-fix", "apex", "background", "fastreid", "thread", "timm")


def losses(result):
    """Which of our rows are behind others by more than the spread: the faster one with one thread, behind those that
    load on one; those with several, behind other packages' with as many."""
    names = [row["name"] for row in result["rows"]]
    on_one_thread = [row for row in result["rows"] if row["name"] in ("gpuprefetch", "gpuprefetch0")]
    ours = min(on_one_thread, key=lambda row: row["ms_per_step"]["median"], default=None)
    pairs = [(ours["name"], name) for name in ONE_THREAD if ours and name in names]
    for family, count in map(split_name, names):
        if family in ("nodes", "spdl") and f"gpuprefetch{count}" in names:
            pairs.append((f"gpuprefetch{count}", f"{family}{count}"))
    ms = {row["name"]: row["ms_per_step"] for row in result["rows"]}
    return [f"{own} behind {other}" for own, other in pairs if ms[other]["high"] < ms[own]["low"]]


def test_a_loss_is_found():
    result = made(dataloader=[9.0], thread=[9.0, 10.5], gpuprefetch=[12.0], gpuprefetch0=[10.0, 11.0], workers4=[1.0])
    assert losses(result) == ["gpuprefetch0 behind dataloader"]
    assert losses(made(gpuprefetch4=[5.0], gpuprefetch8=[6.0], nodes4=[4.0], spdl8=[6.0], nodes8=[5.0])) == [
        "gpuprefetch4 behind nodes4",
        "gpuprefetch8 behind nodes8",
    ]


@pytest.mark.parametrize("name", [*result_files.cells(), *(f"h100/{name}" for name in result_files.cells("h100"))])
def test_no_committed_cell_shows_another_loss(name):
    assert losses(result_files.read(name)) == KNOWN_LOSSES.get(name, [])


def test_the_same_table_of_another_folder(monkeypatch):
    asked = []
    monkeypatch.setattr(throughput_tables, "cells", lambda folder=".": asked.append(folder) or {})
    figures.block("steps")
    figures.block("steps h100")
    assert asked == [".", "h100"]
