"""What more threads or processes bring: the samples a second of a row, as a multiple of those with one, and what a step
with threads takes, as a multiple of one with processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from experiment import figure
from rows import split_name


def row_with_one(name: str, names: Collection[str]) -> str | None:
    """Of the rows `names`, the one that row `name` is set against: its family's with one thread or process, else the
    plain loader, which loads on one. None if row `name` has no more than one, or there is nothing to set it against."""
    family, count = split_name(name)
    if count < 2:
        return None
    return next((one for one in (family, f"{family}1", "dataloader") if one in names), None)


def multiples_of_one(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each row of a result that has several threads or processes, `of` which row it is a multiple, and the figure.
    Compared within a repeat, as the multiple of the bound is."""
    milliseconds = {row["name"]: row["ms_per_step"]["raw"] for row in rows}
    made = []
    for name, own in milliseconds.items():
        if (one := row_with_one(name, milliseconds)) is not None:
            raw = [base / value for base, value in zip(milliseconds[one], own, strict=True)]
            made.append({"name": name, "of": one, **figure(raw)})
    return made


def over_processes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of our rows `of` which row of processes its ms a step are a multiple, and the figure, within a repeat:
    below 1 it is the faster."""
    made = []
    for own in (row for row in rows if row["ours"]):
        for other in (row for row in rows if split_name(row["name"])[0] == "workers"):
            pairs = zip(own["ms_per_step"]["raw"], other["ms_per_step"]["raw"], strict=True)
            made.append({"name": own["name"], "of": other["name"], **figure([one / two for one, two in pairs])})
    return made
