"""The registry of rows: a way to get batches to the device, and the least time a step can take with it.

A row is a generator function that takes the plain loader, the target and `prefetch_batches`, yields once, and cleans
up: what it yields is an iterable of batches on the device, of which every `iter()` starts an epoch. `@row` registers
it, `--loaders` takes the names. `@family` registers rows that differ in their number of threads or processes alone, of
which there is one for every number: workers4. Importing `in_process`, `peers` and `ours` fills the registry, in the
table's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from epoch import Batch
from parts import Parts
from target import Target, Unusable
from torch.utils.data import DataLoader

Loader = DataLoader[Batch]
Opened = Iterator[Iterable[Batch]]
Make = Callable[[Loader, Target, int], AbstractContextManager[Iterable[Batch]]]


@dataclass(frozen=True)
class Bound:
    """`formula` says what `seconds` computes from the parts: the least time of a step."""

    formula: str
    seconds: Callable[[Parts], float]


# Loading and staging on one thread. All runs beside all else, so the longest part decides.
ONE_THREAD = Bound(
    "max(load + stage, copy, compute)", lambda parts: max(parts.load + parts.stage, parts.copy, parts.compute)
)


def staged_beside(threads: int) -> Bound:
    """Loading on `threads` threads or processes, and staging on one more."""
    return Bound(
        f"max(load / {threads}, stage, copy, compute)",
        lambda parts: max(parts.load / threads, parts.stage, parts.copy, parts.compute),
    )


def _rested_step(parts: Parts) -> float:
    """Of loops that wait for every step, and load in between. There is no bound in a step that is slower after loading,
    with the caches that it leaves."""
    return min(parts.compute, parts.rested)


# For loading inside next(), in a loop that waits for every step: the parts add up.
IN_TURN = Bound("load + stage + min(compute, rested)", lambda parts: parts.load + parts.stage + _rested_step(parts))

# Loading and staging on a thread of its own that stacks nothing: the samples are gathered where they are staged.
GATHERED = Bound(
    "max(fetch + stage, copy, compute)",
    lambda parts: max(parts.fetch + parts.stage, parts.copy, parts.compute),
)


# Loading inside next(), where another thread stages: that can go on while the loop waits for its step.
GATHERED_BESIDE_COMPUTE = Bound(
    "max(fetch + max(stage, min(compute, rested)), copy)",
    lambda parts: max(parts.fetch + max(parts.stage, _rested_step(parts)), parts.copy),
)


def gathered(threads: int) -> Bound:
    """Fetching on `threads` threads, and staging on one more."""
    return Bound(
        f"max(fetch / {threads}, stage, copy, compute)",
        lambda parts: max(parts.fetch / threads, parts.stage, parts.copy, parts.compute),
    )


@dataclass(frozen=True)
class Row:
    """`bound` holds for a loop that lets the device work on, `bound_in_sync` for one that waits for every step. A row
    that overlaps less than it could has the bound of those that do, so that its multiple shows what it loses.

    `missing(target)` says why the row can't run here, or None. `loads_beside`: a thread or process of its own loads, so
    that goes on while the loop waits for a step. `default`: the row runs where none is named.
    """

    name: str
    description: str
    make: Make
    bound: Bound
    bound_in_sync: Bound
    loads_beside: bool
    default: bool
    missing: Callable[[Target], str | None]

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("gpuprefetch")

    def bound_for(self, sync_every_step: bool) -> Bound:
        return self.bound_in_sync if sync_every_step else self.bound


@dataclass(frozen=True)
class Family:
    """`row(count)` is the row with `count` threads or processes."""

    row: Callable[[int], Row]


ROWS: dict[str, Row | Family] = {}  # a family by its rows' name with N in place of the number: workersN
MOST_THREADS = 256  # that PrefetchIterator takes


def row(
    name: str,
    description: str,
    *,
    loads_beside: bool,
    bound: Bound = ONE_THREAD,
    bound_in_sync: Bound | None = None,
    default: bool = True,
    missing: Callable[[Target], str | None] = lambda target: None,
) -> Callable[[Callable[[Loader, Target, int], Opened]], None]:
    """Register the decorated function as row `name`. Without `bound_in_sync`, `bound` holds for both loops where a
    thread or process of its own loads, and else the parts add up where each step is waited for."""
    in_sync = bound_in_sync or (bound if loads_beside else IN_TURN)

    def register(make: Callable[[Loader, Target, int], Opened]) -> None:
        ROWS[name] = Row(name, description, contextmanager(make), bound, in_sync, loads_beside, default, missing)

    return register


def family(
    name: str,
    description: str,
    *,
    bound: Callable[[int], Bound],
    missing: Callable[[Target], str | None] = lambda target: None,
) -> Callable[[Callable[[int, Loader, Target, int], Opened]], None]:
    """Register the decorated function, which takes the number of threads or processes first, as the rows called `name`
    and that number. `{}` in `description` stands for it. The row registered as `name` alone is the one with 1."""

    def register(make: Callable[[int, Loader, Target, int], Opened]) -> None:
        def numbered(count: int) -> Row:
            alone = ROWS.get(name)
            if count == 1 and isinstance(alone, Row):
                return alone
            opened = contextmanager(functools.partial(make, count))
            own = bound(count)
            return Row(f"{name}{count}", description.format(count), opened, own, own, True, False, missing)

        ROWS[f"{name}N"] = Family(numbered)

    return register


def split_name(name: str) -> tuple[str, int]:
    """A row's family and its number of threads or processes: of "workers4" ("workers", 4). No number stands for 1."""
    letters = name.rstrip("0123456789")
    digits = name[len(letters) :] or "1"
    return letters, int(digits) if len(digits) < 10 else MOST_THREADS + 1


def rows_called(name: str, counts: Sequence[int]) -> list[Row]:
    """The row called `name`; for a family, as workersN, its rows for `counts`; [] if there is none."""
    registered = ROWS.get(name)
    if isinstance(registered, Row):
        return [registered]
    if isinstance(registered, Family):
        return [registered.row(count) for count in counts]
    letters, count = split_name(name)
    registered = ROWS.get(f"{letters}N")
    if isinstance(registered, Family) and name != letters and 1 <= count <= MOST_THREADS:
        return [registered.row(count)]
    return []


def choose_rows(wanted: list[Row], target: Target) -> tuple[list[Row], list[dict[str, str]]]:
    """The rows to run, and those that can't run here with the reason. Raises Unusable if none is left, or
    if some are the package's and that can't be used: the others alone would be a table without its subject."""
    if any(row.is_ours for row in wanted):
        _require_package(target)
    chosen, left_out = [], []
    for row in wanted:
        reason = row.missing(target)
        if reason:
            left_out.append({"name": row.name, "reason": reason})
        else:
            chosen.append(row)
    if not chosen:
        raise Unusable("no row can run: " + "; ".join(f"{row['name']}: {row['reason']}" for row in left_out))
    return chosen, left_out


def _require_package(target: Target) -> None:
    try:
        from gpuprefetch import PrefetchIterator

        PrefetchIterator([], target.device).close()  # raises where the compiled part is needed and missing
    except ImportError as error:
        said = str(error).splitlines()[0]
        raise Unusable(f"gpuprefetch can't be used: {said}. Install it: python -m pip install .") from error
