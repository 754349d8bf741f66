"""Samples that are loaded once and then kept in memory, on the host or on a device."""

from __future__ import annotations

import contextlib
import numbers
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, NoReturn

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from gpuprefetch._arguments import callers_level, checked_device, checked_int
from gpuprefetch._sample_copies import bytes_in, copied, wait_for_copies
from gpuprefetch._seeds import fetch_for_all_epochs

_MOST_BYTES = 1 << 50
_ONE_PROCESS = (
    "a CachedDataset can't be copied, pickled or used in a forked process: each worker process would fill a cache of "
    "its own. Use num_threads of PrefetchIterator, and num_workers=0 in the loader"
)

_all: weakref.WeakValueDictionary[object, CachedDataset] = weakref.WeakValueDictionary()


class CachedDataset(Dataset[Any]):
    """A map-style dataset that keeps each sample of another one after its first load, as long as they fit::

        dataset = CachedDataset(Photos("train"), max_bytes=8 << 30)
        batches = PrefetchIterator(DataLoader(dataset, batch_size=64, shuffle=True), num_threads=4)

    Random augmentation inside the wrapped dataset is frozen: what the first load gave comes again in each epoch. Put it
    on top, into a dataset that wraps this one. Nor may what the wrapped dataset gives depend on the epoch: with the
    ``seed`` of a PrefetchIterator, ``sample_generator()`` and ``sample_rng()`` give it numbers of the seed and of the
    index that this object was asked for, the same in each epoch, so a sample is the same whenever it is loaded, kept
    or not. The global generators, which ``num_threads=0`` seeds, remain those of the epoch of the first load.

    May be used by several threads. One index is loaded by one thread at a time, and by none once it is kept. An error
    is not kept: it is raised where the sample was asked for, and whoever asks next, or waits for it, loads it again.
    Where not all fit, which ones are kept is for the threads' timing to decide.

    What is given is a copy of what is kept: a transform on top, or a loop without a ``collate_fn`` that copies, may
    change it in place, and no later epoch would be right. It costs one copy within the memory where samples are kept.

    Args:
        dataset: has ``dataset[index]``, and ``len(dataset)`` if the sampler needs it. It may not ask this object for
            samples. They must stand ``copy.deepcopy``; tensors in them may not be part of an autograd graph.
        max_bytes: 1 to 2**50. A sample that no longer fits is not kept but loaded each time, and the first of them
            warns. Tensors count with the bytes of their elements (what an allocator rounds up is not counted), NumPy
            arrays, strings and bytes with theirs, PIL images with 1 or 4 bytes a pixel by their mode, containers and
            other objects with what ``sys.getsizeof`` says and all that they hold, classes and functions excepted.
        device: keeps tensors of a sample, in any nesting that ``PrefetchIterator`` knows, on this device, and gives
            those of all samples there, of kept and other ones. None leaves them where the dataset put them.

    Raises:
        TypeError, ValueError: an argument is not what is said above.
        RuntimeError: the device can't be used.

    ``dataset[index]`` raises TypeError for an index that is neither an integer nor hashable, and in a process that was
    forked after the cache was made; RuntimeError for a tensor of an autograd graph.
    """

    def __init__(self, dataset: Any, max_bytes: int, device: torch.device | str | int | None = None) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
            raise TypeError(f"dataset must be map-style, with dataset[index], not {type(dataset).__name__}")
        self.dataset = dataset
        self._max_bytes = checked_int("max_bytes", max_bytes, 1, _MOST_BYTES)
        self._device = None if device is None else checked_device(device)
        self._kept = _Kept()  # grows by single operations
        self._lock = threading.RLock()  # of its counts and of what follows; not held while the dataset runs
        self._turns: dict[Hashable, _Turn] = {}
        self._process = os.getpid()
        _all[object()] = self

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if os.getpid() != self._process:  # a turn may be held by a thread that a fork has left behind
            raise TypeError(_ONE_PROCESS)
        key, kept = _key(index), self._kept
        if key not in kept:
            with self._turn(key):
                if key not in kept:
                    sample = fetch_for_all_epochs(index, operator.getitem, self.dataset, index)
                    if not self._keep(kept, key, index, sample):
                        return sample if self._device is None else copied(sample, self._device)
        return copied(kept[key])

    def __repr__(self) -> str:
        where = "" if self._device is None else f" on {self._device}"
        kept = f"{len(self._kept)} samples kept{where}, {self._kept.bytes} of {self._max_bytes} bytes"
        return f"CachedDataset({self.dataset!r}, {kept})"

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(_ONE_PROCESS)

    @contextlib.contextmanager
    def _turn(self, key: Hashable) -> Iterator[None]:
        """Until the others who asked for this sample have it or have failed."""
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
            turn.askers += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.askers -= 1
                if turn.askers == 0:
                    del self._turns[key]

    def _keep(self, kept: _Kept, key: Hashable, index: Any, sample: Any) -> bool:
        """Keeps a copy of the sample, if it fits."""
        size = bytes_in(sample)
        if not self._takes(kept, index, size, size):
            return False
        fits = False
        try:
            made = copied(sample, self._device)
            wait_for_copies(made)
            # A list is longer than its items need, and its copy by another number: how much it takes is known only now.
            taken = bytes_in(made)
            fits = self._takes(kept, index, taken, taken - size)
        finally:
            if not fits:
                with self._lock:
                    kept.bytes -= size
        if fits:
            kept[key] = made
        return fits

    def _takes(self, kept: _Kept, index: Any, size: int, more: int) -> bool:
        """Counts so many ``more`` bytes, for a sample of ``size``, if they fit."""
        with self._lock:
            fits = kept.bytes + more <= self._max_bytes
            warns = not fits and not kept.warned
            if fits:
                kept.bytes += more
            kept.warned |= warns
        if warns:
            self._warn(kept, index, size)
        return fits

    def _warn(self, kept: _Kept, index: Any, size: int) -> None:
        total = ""
        with contextlib.suppress(Exception):  # whatever a dataset without a length raises: the sample is there
            total = f" of {len(self)}"
        warnings.warn(
            f"the sample at index {index!r} takes {size} bytes and does not fit into max_bytes={self._max_bytes} of a "
            f"CachedDataset: {len(kept)}{total} samples are kept so far, {kept.bytes} bytes; what does not fit "
            "is loaded each time",
            RuntimeWarning,
            stacklevel=callers_level(),
        )


@contextlib.contextmanager
def emptied_caches() -> Iterator[None]:
    """All caches of the process keep nothing at first, and afterwards what they kept before, and nothing else. Both are
    in memory meanwhile."""
    references = _all.valuerefs()  # a list of its own: other threads may make caches
    alive = [cache for reference in references if (cache := reference()) is not None]
    before = [(cache, cache._kept) for cache in alive]
    try:
        for cache, _ in before:
            cache._kept = _Kept()
        yield
    finally:
        for cache, kept in before:
            cache._kept = kept


class _Kept(dict[Hashable, Any]):
    """Samples, and what they come to."""

    __slots__ = ("bytes", "warned")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.warned = False  # that one does not fit


class _Turn:
    """Of those who ask for one sample."""

    __slots__ = ("askers", "lock")

    def __init__(self) -> None:
        self.askers = 0
        self.lock = threading.RLock()  # a dataset that asks the cache for its own sample recurses, and does not hang


def _key(index: Any) -> Hashable:
    """Equal for equal indices of one kind: 1, 1.0 and True are three, and so they are within a tuple."""
    try:
        return _hashable(index)
    except TypeError:
        allowed = "an integer or a hashable key"
        raise TypeError(f"the index of a CachedDataset must be {allowed}, not {index!r}") from None


def _hashable(index: Any) -> Hashable:
    if isinstance(index, (bool, numpy.bool_)) or getattr(index, "dtype", None) == torch.bool:
        return bool, bool(index)
    if getattr(index, "ndim", 0) == 0:  # one index in an array is an integer too, but another sample
        with contextlib.suppress(TypeError):
            return operator.index(index)
    if isinstance(index, torch.Tensor):  # whose hash is its address
        raise TypeError
    if isinstance(index, numbers.Number):
        return type(index), repr(index)  # 0.0 is not -0.0
    if isinstance(index, tuple):
        return type(index), tuple(map(_hashable, index))
    if isinstance(index, frozenset):
        return type(index), frozenset(map(_hashable, index))
    if isinstance(index, slice):
        return slice, *map(_hashable, (index.start, index.stop, index.step))
    hash(index)
    return type(index), index
