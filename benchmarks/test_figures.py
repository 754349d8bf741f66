"""The pages say what the committed results say."""

import json

import figures
import pytest
from experiment import figure
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
    took = f"{figures.read('handover')['next_us']['median']:.0f} us"
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
    with pytest.raises(figures.Unwritable, match=said):
        figures.written(text)


def test_cells_of_machines_that_differ_are_told_apart(monkeypatch):
    one = figures.read("memory-kernels")
    few_cores = {**one, "environment": {**one["environment"], "cpus_usable": 4}}
    other = {**one, "environment": {**one["environment"], "device_name": "another GPU"}}
    alone = {"memory-kernels": one, "few-cores": few_cores}
    monkeypatch.setattr(figures, "cells", lambda: alone)
    described = figures.machine()
    monkeypatch.setattr(figures, "cells", lambda: {**alone, "odd": other})
    first, second = " ".join(figures.machine().split()).split(" - ")
    assert first == f"- {' '.join(described.split())[:-1]}: ready samples, GPU-bound step; few-cores."
    assert second.startswith("another GPU, ") and second.endswith(": odd.")


def test_a_python_without_the_gil_is_no_other_machine(monkeypatch):
    one = figures.read("memory-kernels")
    other = {**one, "environment": {**one["environment"], "python": "3.14.0", "gil": False}}
    monkeypatch.setattr(figures, "cells", lambda: {"one": one, "other": other})
    assert one["environment"]["python"] in figures.machine()


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
    return {f"threads-{decoder}-{step}": {"rows": rows, "over_processes": over_processes(rows)}}


def test_threads_beside_processes(monkeypatch):
    made = a_result("pil", "loading", dataloader=99.0, gpuprefetch=100.0, gpuprefetch8=16.0, workers8=20.0)
    made |= a_result("opencv", "loading", gpuprefetch8=5.0)
    made |= a_result("pil", "resnet50", gpuprefetch4=60.25, workers4=50.0)
    monkeypatch.setattr(figures, "cells", lambda: made)
    assert figures.block("threads loading").splitlines() == [
        "| samples/s |  | 1 | 8 | 8 over 8 processes |",
        "| --- | --- | --- | --- | --- |",
        "| OpenCV | threads |  | 2000 |  |",
        "| OpenCV | processes |  |  |  |",
        "| PIL | threads | 100 | 625 | 0.80 |",
        "| PIL | processes |  | 500 |  |",
    ]
    assert figures.block("threads resnet50").splitlines()[2:] == [
        "| PIL | threads | 60.2 |  |",
        "| PIL | processes | 50.0 |  |",
    ]


def test_there_may_be_no_figures_of_threads_yet(monkeypatch):
    monkeypatch.setattr(figures, "cells", dict)
    with pytest.raises(figures.Unwritable, match="no threads-DECODER-loading.json"):
        figures.block("threads loading")


def test_storages_are_a_table(monkeypatch, tmp_path):
    rates = {"1": figure([50.0]), "16": figure([400.0])}
    storage = {"description": "JPEG", "bytes_per_photo": {"disk": 21_300.0, "memory": 0.0}, "samples_per_second": rates}
    environment = figures.read("memory-kernels")["environment"]
    settings = {"threads": 16, "repeats": 5}
    result = {"environment": environment, "packages": {"pillow": "13"}, "settings": settings, "storages": [storage]}
    (tmp_path / "slow-datasets.json").write_text(json.dumps(result), encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    *_, told, _, head, line, row = figures.block("slow datasets").splitlines()
    assert told.endswith("pillow 13. Median of 5 repeats.")
    assert [head, line, row] == [
        "| photos are kept as | KB a photo | 1 thread | 16 threads | gain |",
        "| --- | --- | --- | --- | --- |",
        "| JPEG | 21 | 50 | 400 | 8.0x |",
    ]


def test_wrong_batches_are_in_the_table(monkeypatch):
    result = figures.read("memory-kernels")
    figures.find(result, "thread")["wrong_repeats"] = [0, 2]
    monkeypatch.setattr(figures, "read", lambda name: result)
    assert "| thread (wrong in 2) |" in figures.cell("memory-kernels")
