"""Tests that the documentation names exist."""

import re
from pathlib import Path

import pytest
import torch
from loaders import Ramp
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
NAMED = re.compile(r"\b((?:tests|benchmarks)/\w+\.py)(?:::(\w+))?")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    for file, name in NAMED.findall((ROOT / page).read_text(encoding="utf-8")):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text, f"{page}: there is no {name} in {file}"


def test_there_is_something_to_look_at():
    assert NAMED.findall("see tests/test_x.py::test_y, benchmarks/z.py") == [
        ("tests/test_x.py", "test_y"),
        ("benchmarks/z.py", ""),
    ]
    assert "docs/windows.md" in PAGES and "::" in (ROOT / "docs/windows.md").read_text(encoding="utf-8")


def code_with(text):
    """The one block of choosing-threads.md that has this text."""
    page = (ROOT / "docs/choosing-threads.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if text in code)
    return code


def test_the_loop_that_counts_batches_runs(capsys):
    exec(code_with("batches a second"), {"loader": DataLoader(Ramp(20), batch_size=4)})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[str(number), "threads:"] for number in (1, 2, 4, 8)]
    assert all(float(line.split()[2]) > 0 for line in lines)


def test_the_loop_that_times_epochs_runs(capsys, monkeypatch):
    trained = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: trained.append("waited"))
    exec(code_with("train(batch)"), {"loader": DataLoader(Ramp(8), batch_size=4), "train": trained.append})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[str(i), str(n)] for i in range(4) for n in (0, 1, 4, 8)]
    assert [type(each) for each in trained] == [torch.Tensor, torch.Tensor, str] * 16


LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([\w-]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for file, part in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.S)):
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), f"{page} links to {file}"
        if part:
            named = HEADING.findall(target.read_text(encoding="utf-8"))
            parts = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in named]
            assert part in parts, f"{page}: there is no {part} in {file}"
