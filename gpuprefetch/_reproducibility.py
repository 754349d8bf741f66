"""Whether two runs from one seed give the same batches, for any number of threads, and the same training step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpuprefetch._arguments import LARGEST_SEED, MOST_THREADS, checked_bool, checked_device, checked_int
from gpuprefetch._dataloader_x import DataLoaderX
from gpuprefetch._fingerprint import Value, fingerprint, first_difference, first_unequal_element
from gpuprefetch._iterator import PrefetchIterator
from gpuprefetch._seeded_runs import SeededRuns, global_generators_kept
from gpuprefetch._seeds import sample_generator, sample_rng
from gpuprefetch._source import why_one_thread
from gpuprefetch._training_check import train

_MOST_BATCHES = 1_000_000
_ORDER = (
    "the sampler can't be iterated again, or draws from what seed does not reach. Let it draw in __iter__, before the "
    "first index, from a global generator, as torch's own do, or from a seed of its own and the epoch"
)
_DRAW_FROM = "Draw from gpuprefetch.sample_generator() or sample_rng() in dataset[i]"
_WITHOUT_THREADS = "num_threads=0 of a PrefetchIterator"
_PERSISTENT = (
    "torch seeds persistent workers once, when they start, and an epoch goes on from where the one before ended. Set "
    "persistent_workers=False"
)
_STATE = (
    "what the dataset gives depends on what it gave before (a generator of its own, a buffer that it fills again), on "
    "a device's generator or kernels, or on the time"
)
_SHARED = (
    "several threads use what the dataset or collate_fn holds, and disturb each other: a file, a database, a buffer. "
    "Keep one for each thread, in a threading.local (docs/slow-datasets.md in gpuprefetch's repository), or use "
    "num_threads of 0 or 1"
)


def verify_reproducibility(
    loader: Any = None,
    num_threads: Collection[int] = (0, 1, 4),
    verbose: bool = True,
    *,
    seed: int | None = None,
    max_batches: int = 50,
    device: torch.device | str | int | None = None,
) -> bool:
    """True if runs from one seed agree bit for bit: the batches of a loader, and a small training step on the device.

    For each number of threads the first epoch of ``PrefetchIterator(loader, seed=seed)`` is loaded twice, each time
    with other states of the global generators, and at least as many batches ahead as there are threads. All batches are
    compared with those of the very first run: structure, types, shapes and bytes; of each run only digests are kept. It
    stops at the first difference. The training step is a small convolutional network, trained twice for five steps
    under the flags as they are (see ``set_seed``); it is not yours.

    Some values can't be seen: a plain object with all it holds (a ``SimpleNamespace``, say; no dataclass, nor one with
    attributes and a ``to(device)`` of its own), a memoryview, a set of other things than numbers, strings and the like,
    a tensor on the device "meta". Only their places and types count, and the result may be True whatever they are.

    The global generators of Python, NumPy, the CPU and CUDA, and the torch generators that the loader and its sampler
    hold, are afterwards as they were. A dataset that keeps state of its own has moved on.

    Args:
        loader: a DataLoader, a DataLoaderX, or a PrefetchIterator of a DataLoader. None takes a small dataset that is
            reproducible.
        num_threads: numbers of threads to try, 0 to 256; the first one gives what the others are compared with.
        verbose: prints a line for each, and for a difference where it is, of what kind, and what to do. Types whose
            values can't be seen are named as not compared.
        seed: 0 to 2**64 - 1. None takes that of the PrefetchIterator or DataLoaderX, else 0.
        max_batches: of each run, 1 to 1,000,000.
        device: where batches go and the step runs. None takes that of the PrefetchIterator, else the current
            accelerator, or the CPU where there is none.

    Raises:
        TypeError, ValueError: an argument is not what is said above; the loader gives no batch.
        Exception: whatever the loader raises in the very first run. What it raises in a later one is a difference.
    """
    say = print if checked_bool("verbose", verbose) else _say_nothing
    loader, wrapper = _opened(_built_in() if loader is None else loader)
    chosen = checked_device(device) if device is not None or wrapper is None else wrapper.device
    skip_keys = () if wrapper is None else wrapper._skip_keys
    counts = _checked_counts(num_threads)
    if seed is None and wrapper is not None:
        seed = wrapper._seed
        if seed is None:
            say("this loader has no seed, so its order and its generators differ between processes: tested with seed=0")
    seed = checked_int("seed", 0 if seed is None else seed, 0, LARGEST_SEED)
    max_batches = checked_int("max_batches", max_batches, 1, _MOST_BATCHES)
    reason = why_one_thread(loader)
    if reason is None and loader.num_workers:
        reason = f"it starts processes, num_workers={loader.num_workers}"
    if max(counts) > 1 and reason is not None:
        say(f"num_threads above 1 are tried as 1, since one thread iterates this loader: {reason}")
        counts = list(dict.fromkeys(min(count, 1) for count in counts))
    prefetch_batches = 2 if wrapper is None else wrapper._prefetch_batches  # the default
    runs = SeededRuns(loader, chosen, skip_keys, prefetch_batches, seed, max_batches)
    if runs.own_generators():
        say(
            "the loader holds a generator of its own, which begins alike in each run here: seed does not reach what is "
            "drawn from it, and set_epoch does not put it where it was in that epoch"
        )
    with global_generators_kept(chosen):
        batches_agree = _batches_agree(runs, counts, say)
        steps_agree = _steps_agree(chosen, say)
    say("reproducible" if batches_agree and steps_agree else "NOT reproducible")
    return batches_agree and steps_agree


def _say_nothing(_: str) -> None:
    pass


def _opened(loader: Any) -> tuple[DataLoader[Any], PrefetchIterator | None]:
    """The DataLoader, and its PrefetchIterator if it has one."""
    wrapper = loader._prefetch if isinstance(loader, DataLoaderX) else loader
    wrapper = wrapper if isinstance(wrapper, PrefetchIterator) else None
    loader = loader if wrapper is None else wrapper._loader
    if not isinstance(loader, DataLoader) or isinstance(loader, DataLoaderX):  # which counts epochs of its own
        kind = type(loader).__name__ if wrapper is None else f"a PrefetchIterator of {type(loader).__name__}"
        raise TypeError(f"loader must be a DataLoader, a PrefetchIterator of one or None, not {kind}")
    return loader, wrapper


def _checked_counts(num_threads: Collection[int]) -> list[int]:
    if isinstance(num_threads, (str, bytes)) or not isinstance(num_threads, Collection):
        raise TypeError(f"num_threads must be a collection of integers, such as (0, 1, 4), not {num_threads!r}")
    counts = list(dict.fromkeys(checked_int("each of num_threads", count, 0, MOST_THREADS) for count in num_threads))
    if not counts:
        raise ValueError(f"num_threads must hold at least one number, not {num_threads!r}")
    return counts


def _batches_agree(runs: SeededRuns, counts: list[int], say: Callable[[str], object]) -> bool:
    with runs.epoch(counts[0]) as batches:
        expected = [fingerprint(batch) for batch in batches]
    if not expected:
        raise ValueError("the loader gives no batch, so there is nothing to compare")
    first = f"run 1 with num_threads={counts[0]}"
    for count in counts:
        for number in (2,) if count == counts[0] else (1, 2):
            with runs.epoch(count) as batches:
                difference = _difference(batches, expected)
            if difference is not None:
                explanation = _explanation(runs, runs.drawn, len(expected), count, counts[0])
                say(f"num_threads={count}: run {number} DIFFERS from {first}: {_place(runs, difference, counts[0])}")
                say(f"  {explanation}")
                return False
        agree = "are equal" if count == counts[0] else f"are equal to {first}"
        say(f"num_threads={count}: two runs, {len(expected)} batches each, {agree}")
    _tell_unseen(itertools.chain(*expected), say)
    return True


def _tell_unseen(values: Iterable[Value], say: Callable[[str], object]) -> None:
    unseen = {value.kind.partition(" of ")[0] for value in values if value.digest is None}
    if unseen:
        say(f"not compared, since their values can't be seen: objects of type {', '.join(sorted(unseen))}")


class _Difference(NamedTuple):
    number: int  # of the batch
    path: str  # in it
    text: str
    batch: Any = None
    expected: list[Value] | None = None  # None: there is nothing that elements could be compared in


def _difference(batches: Iterator[Any], expected: list[list[Value]]) -> _Difference | None:
    number = 0
    try:
        for number, batch in enumerate(batches):
            if number == len(expected):
                return _Difference(number, "", f"it is there, and there were {number} in all")
            differs = first_difference(fingerprint(batch), expected[number])
            if differs is not None:
                return _Difference(number, *differs, batch, expected[number])
            number += 1
    except Exception as error:
        return _Difference(number, "", f"{type(error).__name__} was raised: {error}")
    if number < len(expected):
        return _Difference(number, "", f"it is missing, and there were {len(expected)} in all")
    return None


def _place(runs: SeededRuns, difference: _Difference, first_count: int) -> str:
    """Where it is, and what. To show elements, the very first run is repeated: only its digests have been kept."""
    where, what = difference.path, difference.text
    if difference.expected is not None:
        with contextlib.suppress(Exception), runs.epoch(first_count) as batches:
            batch = next(itertools.islice(batches, difference.number, None), None)
            if fingerprint(batch) == difference.expected:
                where, what = first_unequal_element(where, difference.batch, batch) or (where, what)
    return f"batch {difference.number}{f', {where}' if where else ''}: {what}"


def _explanation(runs: SeededRuns, drawn: list[str], batches: int, count: int, first_count: int) -> str:
    """Of what kind a difference from a run of so many batches is, and what to do."""
    order = runs.order()
    if order != runs.order() or len(order) < batches:
        return f"order: {_ORDER}"
    if drawn:
        advice = _advice(runs.loader, or_no_threads=count > 0)
        return f"content: dataset or collate_fn draws from the global generators of {', '.join(drawn)}. {advice}"
    if runs.loader.persistent_workers:
        return f"content: {_PERSISTENT}"
    if count < 2:
        return f"content: {_STATE}. {_advice(runs.loader)}"
    return f"content: {_SHARED}" + ("" if first_count < 2 else f". Or {_STATE}")


def _advice(loader: DataLoader[Any], or_no_threads: bool = False) -> str:
    if loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset):  # there a sample has no generator
        return f"Use {_WITHOUT_THREADS}, and no generators but the global ones"
    return f"{_DRAW_FROM}, or use {_WITHOUT_THREADS}" if or_no_threads else _DRAW_FROM


def _steps_agree(device: torch.device, say: Callable[[str], object]) -> bool:
    expected = fingerprint(train(device))
    difference = first_difference(fingerprint(train(device)), expected)
    if difference is None:
        say(f"training step on {device}: two runs are equal")
        _tell_unseen(expected, say)
        return True
    where, what = difference
    say(f"training step on {device}: two runs DIFFER: {where}: {what}")
    say("  kernels: gpuprefetch.set_seed(seed, deterministic=True) makes torch choose those that can be repeated")
    return False


class _Augmented(Dataset[Any]):
    """Draws as a reproducible dataset does."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.rand(3, 16, 16, generator=sample_generator())
        return {"image": image, "noise": sample_rng().normal(size=4), "label": index, "name": f"sample {index}"}


def _built_in() -> DataLoader[Any]:
    return DataLoader(_Augmented(), batch_size=8, shuffle=True)
