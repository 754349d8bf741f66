"""What is in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


class Unwritable(Exception):
    """A page and the results do not fit together; the text says where."""


def read(name: str) -> dict[str, Any]:
    file = RESULTS / f"{name}.json"
    if not file.is_file():
        raise Unwritable(f"there is no {name}.json in benchmarks/results")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def cells(folder: str = ".") -> dict[str, dict[str, Any]]:
    """Every result of throughput.py in a folder of the results, by the name of its file."""
    named = {path.stem: read(f"{folder}/{path.stem}") for path in sorted((RESULTS / folder).glob("*.json"))}
    return {name: result for name, result in named.items() if result["benchmark"] == "throughput"}


def names(pattern: str) -> list[str]:
    """Of the results whose names match the pattern, as `gpu-dataset*`."""
    return sorted(file.stem for file in RESULTS.glob(f"{pattern}.json"))


def ratios(row: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """What a step takes with one row over what it takes with the other, in each repeat: both ran one after the other
    there, and from one repeat to the next the machine changes by more."""
    return [one / two for one, two in zip(row["ms_per_step"]["raw"], other["ms_per_step"]["raw"], strict=True)]


def find(result: dict[str, Any], name: str, key: str = "name") -> dict[str, Any] | None:
    return next((row for row in result["rows"] if row[key] == name), None)
