"""Tests that the documentation names exist."""

import re
from pathlib import Path

import pytest

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
