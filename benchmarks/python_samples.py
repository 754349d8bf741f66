"""Samples in pure Python, of a fraction of a millisecond each: for pure_python.py.

In a module, as datasets are: in the program's own file these loops went otherwise, without the interpreter's lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable

ROUNDS = 5_000  # of a sample's loop

DOCUMENT = json.dumps({"boxes": [[i, i + 1, i + 2, i + 3] for i in range(100)], "file": "a.jpg"})


def small_integers(index: int) -> int:
    value = index
    for _ in range(ROUNDS):
        value = (value * 109 + 57) & 255
    return value


def large_integers(index: int) -> int:
    value = index
    for _ in range(ROUNDS):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
    return value


def large_integers_of_its_own(index: int) -> int:
    factor, summand, mask = (int(text) for text in ("1103515245", "12345", "2147483647"))
    value = index
    for _ in range(ROUNDS):
        value = (value * factor + summand) & mask
    return value


def floats(index: int) -> float:
    value = float(index)
    for _ in range(ROUNDS):
        value = value * 0.5 + 1.25
    return value


def a_dict(index: int) -> int:
    counts: dict[int, int] = {}
    for i in range(ROUNDS):
        counts[i % 97] = counts.get(i % 97, 0) + index
    return counts[0]


def a_document(index: int) -> int:
    return sum(len(json.loads(DOCUMENT)["boxes"]) for _ in range(5)) + index


SAMPLES: dict[str, tuple[str, Callable[[int], float]]] = {
    "small integers": ("a loop over integers up to 256, which the interpreter has but once", small_integers),
    "large integers": ("a loop with large integers that stand in the code of the module", large_integers),
    "large integers of its own": ("the same, with integers that each sample makes", large_integers_of_its_own),
    "floats": ("a loop with floats that stand in the code of the module", floats),
    "a dict": ("a loop that counts in a dict of the sample's own", a_dict),
    "a document": ("json.loads() of one text, five times", a_document),
}
