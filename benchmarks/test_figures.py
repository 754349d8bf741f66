"""The pages say what the committed results say."""

import figures
import pytest


@pytest.mark.parametrize("page", figures.PAGES)
def test_a_page_says_what_the_results_say(page):
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    assert "<!-- figures: " in text
    assert figures.written(text) == text, "run python benchmarks/figures.py"


def test_another_figure_is_found(monkeypatch, tmp_path, capsys):
    page = "docs/performance.md"
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    took = f"{figures.read('handover')['next_us']['median']:.0f} us"
    assert took in text
    (tmp_path / "docs").mkdir()
    (tmp_path / page).write_text(text.replace(took, "1 us"), encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "PAGES", (page,))
    assert figures.main(["--check"]) == 1
    assert f"{page} does not say what benchmarks/results says" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, said",
    [
        ("<!-- figures: nonsense -->\n<!-- end of figures -->", "no figures called 'nonsense'"),
        ("<!-- figures: steps -->\nno end", "of 1 blocks of figures 0 have an end"),
    ],
)
def test_what_can_t_be_filled_is_said(text, said):
    with pytest.raises(figures.Unwritable, match=said):
        figures.written(text)


def test_cells_of_machines_that_differ_are_refused(monkeypatch):
    one = figures.read("memory-kernels")
    other = {**one, "environment": {**one["environment"], "device_name": "another GPU"}}
    monkeypatch.setattr(figures, "cells", lambda: {"one": one, "other": other})
    with pytest.raises(figures.Unwritable, match="another GPU"):
        figures.machine()


def test_wrong_batches_are_in_the_table(monkeypatch):
    result = figures.read("memory-kernels")
    figures.find(result, "thread")["wrong_repeats"] = [0, 2]
    monkeypatch.setattr(figures, "read", lambda name: result)
    assert "| thread (wrong in 2) |" in figures.cell("memory-kernels")
