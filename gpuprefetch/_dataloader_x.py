"""The loader of FastReID's name, constructor and use, on threads."""

from __future__ import annotations

import contextlib
import numbers
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from gpuprefetch._arguments import MOST_THREADS, checked_int, warn_of_worker_init_fn
from gpuprefetch._iterator import EpochIterator, PrefetchIterator

_LARGEST_RANK = (1 << 31) - 1
_SET_ONCE = ("local_rank", "num_workers", "prefetch_factor", "timeout", "worker_init_fn")


class DataLoaderX(DataLoader[Any]):
    """A DataLoader that loads ahead on threads and gives its batches on the device of ``local_rank``.

    Stands in for FastReID's class of that name: takes the same arguments, and is used in the same ways::

        loader = DataLoaderX(local_rank, dataset=dataset, num_workers=4, batch_sampler=batches, collate_fn=collate)
        batches = iter(loader)
        batch = next(batches)  # or next(loader)
        loader.shutdown()

    Batches are those of the plain DataLoader, each once, in order, moved as ``PrefetchIterator`` moves them: tensors at
    any depth of dicts, lists and so on; strings and the like stay as they are. There is no worker process.

    Every ``iter()`` begins an epoch. ``break`` in a for loop ends it and its threads, as dropping what ``iter()`` gave
    does once something was drawn from it. ``next(loader)`` draws from the epoch begun last; where there is none, from
    one that it begins.

    Args:
        local_rank: index of the accelerator that batches go to: 1 means ``cuda:1``. Where torch finds no accelerator
            batches stay on the CPU, whatever the rank is.
        dataset, batch_size, shuffle, sampler, batch_sampler, collate_fn, drop_last, generator: as of a DataLoader.
        num_workers: threads that fetch and collate, 0 to 256; 0 means one, too. See ``num_threads`` of
            ``PrefetchIterator`` for what a dataset must stand with several of them. One thread iterates an
            IterableDataset, and a warning says so where more were asked for.
        timeout: seconds that ``next()`` waits before it raises TimeoutError. 0 waits for ever.
        worker_init_fn: not called, since there are no workers, and a warning says so.
        pin_memory, pin_memory_device, prefetch_factor, persistent_workers, multiprocessing_context: no effect. Copies
            leave from a pinned buffer anyway, and the rest is about processes.
        prefetch_batches, skip_keys, seed, pinned_bytes: as of a PrefetchIterator.
        others: passed on to DataLoader, of whose newer arguments ``in_order=False`` has no effect.

    The attributes are those of a DataLoader without workers, which this is: ``num_workers`` is 0, or code that reads it
    would take into account processes that don't exist, ``timeout`` 0, ``pin_memory`` and ``persistent_workers`` False,
    ``prefetch_factor`` None. What may be changed of a DataLoader, such as ``collate_fn``, counts from the next epoch
    on; the rank and what is about workers can't be changed.

    Raises:
        TypeError, ValueError: an argument is not what is said above, or wrong for DataLoader.
        RuntimeError, ImportError: as PrefetchIterator.
    """

    # Apart from __dict__, which the loader inside shares: it must not hold what holds that one.
    __slots__ = ("_kept", "_latest", "_prefetch")

    def __init__(
        self,
        local_rank: int,
        dataset: Dataset[Any] | None = None,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        prefetch_batches: int = 2,
        skip_keys: Collection[Any] = (),
        seed: int | None = None,
        pinned_bytes: int | None = None,
        **others: Any,
    ) -> None:
        if dataset is None or _is_dataset(local_rank):
            raise TypeError(
                "local_rank comes first, and the dataset second: DataLoaderX(0, dataset, ...), not "
                f"{type(local_rank).__name__} and {type(dataset).__name__}"
            )
        device = _device(local_rank)
        num_workers = checked_int("num_workers", num_workers, 0, MOST_THREADS)
        super().__init__(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            worker_init_fn=worker_init_fn,
            generator=generator,
            **others,
        )
        self.local_rank = local_rank
        # The same loader, but iterated in torch's own way, and as it is at the time.
        plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
        plain.__dict__ = self.__dict__
        self._kept: EpochIterator | None = None  # what next(self) draws from, or could
        self._latest: Callable[[], EpochIterator | None] = _none
        self._prefetch = PrefetchIterator(
            plain,
            device,
            prefetch_batches=prefetch_batches,
            num_threads=max(1, num_workers),
            skip_keys=skip_keys,
            seed=seed,
            pinned_bytes=pinned_bytes,
            timeout=timeout,
        )
        warn_of_worker_init_fn(worker_init_fn)

    @property
    def device(self) -> torch.device:
        """Where batches go, with its index."""
        return self._prefetch.device

    def __iter__(self) -> Batches:  # type: ignore[override]
        return Batches(self, self._begin())

    def __next__(self) -> Any:
        turn = self._prefetch._beginning.acquired()
        try:
            epoch = self._latest()
            self._kept = epoch = self._begin() if epoch is None else epoch
        finally:
            turn.release()
        return next(epoch)

    def shutdown(self) -> None:
        """Ends all epochs and their threads, and gives the pinned memory back; more than once does no harm. A loop that
        is in one sees its end. Iterating again starts afresh.

        A thread that is inside the dataset's code is waited for 2 seconds, then left behind with a warning.
        """
        kept, self._kept, self._latest = self._kept, None, _none
        self._prefetch.close()
        del kept  # not before: it would be waited for in a finalizer, where Ctrl-C is lost

    def set_epoch(self, epoch: int) -> None:
        """As ``PrefetchIterator.set_epoch``: for samplers that have one, and the ``seed``."""
        self._prefetch.set_epoch(epoch)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET_ONCE and hasattr(self, "_prefetch"):
            raise ValueError(
                f"{name} of a DataLoaderX can't be set, here to {value!r}, once it is made: make a new one"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("a DataLoaderX can't be copied or pickled: make a new one of the same arguments")

    def _begin(self) -> EpochIterator:
        self._kept = None  # which ends an epoch that nobody draws from, before there are two
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with on_device:  # current in the threads of the epoch: `.cuda()` of a dataset goes to the rank's
            epoch = iter(self._prefetch)
        self._kept, self._latest = epoch, weakref.ref(epoch)
        return epoch


class Batches:
    """One epoch of a DataLoaderX: what ``iter()`` gives. Dropping it ends the epoch, unless nothing was drawn from it
    yet, or ``next()`` of the loader drew last.

    FastReID's ``iter(loader)`` is the loader itself, so other attributes, and the length, are the loader's.
    """

    __slots__ = ("__weakref__", "_epoch", "_loader")

    def __init__(self, loader: DataLoaderX, epoch: EpochIterator) -> None:
        self._loader = loader
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            if self._loader._kept is self._epoch:
                self._loader._kept = None
            return next(self._epoch)
        except KeyboardInterrupt:  # as in the epoch's own
            self._epoch._stop()
            raise

    def close(self) -> None:
        """Ends the epoch and its threads. ``next()`` then raises StopIteration."""
        self._epoch.close()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._loader, name)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("an epoch of a DataLoaderX can't be copied or pickled")


def _none() -> None:
    return None


def _is_dataset(local_rank: Any) -> bool:
    """An IterableDataset is one, too; a rank of NumPy has some of what a sequence has."""
    other = (str, numbers.Integral, torch.Tensor)
    return hasattr(local_rank, "__getitem__") and not isinstance(local_rank, other)


def _device(local_rank: int) -> int | None:
    local_rank = checked_int("local_rank", local_rank, 0, _LARGEST_RANK)
    if not torch.accelerator.is_available():
        return None
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ValueError(f"local_rank={local_rank} was asked for, but there are {count} devices, counted from 0")
    return local_rank
