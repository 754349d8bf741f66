"""Random numbers that depend on the seed, the epoch and the place alone: not on threads, nor on earlier draws."""

from __future__ import annotations

import functools
import hashlib
import operator
import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import torch

from gpuprefetch._dataset import fetches_one_by_one

T = TypeVar("T")


class Seeds:
    """What is seeded in one epoch of a ``PrefetchIterator``."""

    def __init__(self, seed: int, epoch: int | None) -> None:
        self._seed = seed
        self._epoch = epoch

    def of_all_epochs(self) -> Seeds:
        return Seeds(self._seed, None)

    def number(self, purpose: str, place: object) -> int:
        """128 bits."""
        name = f"{self._seed} {self._epoch} {purpose} {place}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")

    def call(self, place: object, function: Callable[..., T], *arguments: Any) -> T:
        """Calls it with Python's, NumPy's and torch's CPU generators seeded for ``place``; then they are as before.

        Right as long as no other thread draws from them meanwhile.
        """
        python, legacy = random.getstate(), numpy.random.get_state(legacy=False)
        cpu = torch.default_generator.get_state()
        number = self.number("global", place)
        try:
            random.seed(number)
            numpy.random.seed([(number >> shift) & 0xFFFF_FFFF for shift in range(0, 128, 32)])
            torch.default_generator.manual_seed(number & 0xFFFF_FFFF_FFFF_FFFF)
            return function(*arguments)
        finally:  # Ctrl-C may come in any of them
            try:
                torch.default_generator.set_state(cpu)
            finally:
                try:
                    random.setstate(python)
                finally:
                    numpy.random.set_state(legacy)


class SeededDataset:
    """The dataset of one epoch, which knows of which sample it is asked for."""

    def __init__(self, dataset: Any, seeds: Seeds) -> None:
        self._dataset = dataset
        self._seeds = seeds
        if not fetches_one_by_one(dataset):
            self.__getitems__ = functools.partial(_fetch, seeds, _SEVERAL, dataset.__getitems__)

    def __getitem__(self, index: Any) -> Any:
        return _fetch(self._seeds, index, operator.getitem, self._dataset, index)


_SEVERAL = object()  # in place of an index


class _Sampling:
    """A call of the dataset's, and the generators that it has asked for."""

    def __init__(self, seeds: Seeds, index: Any) -> None:
        self.seeds = seeds
        self.index = index
        self.generators: dict[tuple[str, str], Any] = {}


class _Current(threading.local):
    """Not a context variable, which a new thread may take over from the one that starts it: Python 3.14 has a flag."""

    sampling: _Sampling | None = None


_current = _Current()


def _fetch(seeds: Seeds, index: Any, function: Callable[..., T], *arguments: Any) -> T:
    before, _current.sampling = _current.sampling, _Sampling(seeds, index)
    try:
        return function(*arguments)
    finally:
        _current.sampling = before


def fetch_for_all_epochs(index: Any, function: Callable[..., T], *arguments: Any) -> T:
    """Calls it for what is kept over epochs: the sample's generators give the same numbers in each of them."""
    sampling = _current.sampling
    if sampling is None:
        return function(*arguments)
    return _fetch(sampling.seeds.of_all_epochs(), index, function, *arguments)


def sample_generator(index: Any = None) -> torch.Generator:
    """The torch generator of a sample, on the CPU, for use inside ``dataset[i]``::

        def __getitem__(self, i):
            angle = torch.rand((), generator=gpuprefetch.sample_generator())

    What it gives depends on the ``seed`` of the PrefetchIterator, the number of the epoch and the sample's index: not
    on the number of threads, nor on the order. An index that comes twice in an epoch gives the same numbers twice.
    Calls for one sample return one generator, which goes on where it was. torch takes 32 bits of a seed, so two of a
    million samples may well get the same numbers; ``sample_rng()`` has 128.

    Args:
        index: of the sample: an integer (of any type), a string, bytes, a float, None, a slice, or a list or tuple of
            these. Needed in ``__getitems__``, which is asked for several at once.

    Raises:
        RuntimeError: no sample is being fetched in this thread by a PrefetchIterator that has a seed.
        TypeError: the index is something else.
    """
    return _drawn_from("torch", index, _torch_generator)  # type: ignore[no-any-return]


def sample_rng(index: Any = None) -> numpy.random.Generator:
    """The NumPy generator of a sample (PCG64); otherwise as ``sample_generator``, of which it is independent."""
    return _drawn_from("numpy", index, _numpy_generator)  # type: ignore[no-any-return]


def _torch_generator(number: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(number & 0xFFFF_FFFF_FFFF_FFFF)


def _numpy_generator(number: int) -> numpy.random.Generator:
    return numpy.random.Generator(numpy.random.PCG64(number))


def _drawn_from(library: str, index: Any, make: Callable[[int], Any]) -> Any:
    sampling = _current.sampling
    if sampling is None:
        raise RuntimeError(
            "no seeded sample is being fetched in this thread: sample_generator() and sample_rng() are for use inside "
            "dataset[i], on the thread that calls it, where a PrefetchIterator(loader, seed=...) has torch's own "
            "DataLoader with a map-style dataset and num_workers=0. Pass it a seed, if it has none"
        )
    if index is None:
        index = sampling.index
    if index is _SEVERAL:
        raise RuntimeError("__getitems__ fetches several samples: pass the index of the one that is meant")
    key = library, _name(index)
    if key not in sampling.generators:
        sampling.generators[key] = make(sampling.seeds.number(*key))
    return sampling.generators[key]


def _name(index: Any) -> str:
    """Equal in every process for equal indices."""
    try:
        return str(operator.index(index))
    except TypeError:
        pass
    for kind in (str, bytes, float):
        if isinstance(index, kind):
            return kind.__repr__(index)  # of NumPy's own subclasses, too
    if index is None:
        return "None"
    if isinstance(index, slice):
        return f"slice{_name((index.start, index.stop, index.step))}"
    if callable(getattr(index, "tolist", None)):
        index = index.tolist()
    if isinstance(index, (list, tuple)):
        return f"({', '.join(map(_name, index))})"
    raise TypeError(
        "an index that seeds a generator must be an integer, a string, bytes, a float, None, a slice, or a list or "
        f"tuple of these, not {index!r}"
    )
