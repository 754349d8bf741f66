"""The public class: forwarding, and the beginning and end of epochs."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any, NoReturn

import torch

from gpuprefetch import _batch, _threads
from gpuprefetch._arguments import (
    LARGEST_SEED,
    checked_device,
    checked_int,
    checked_loader,
    checked_seed,
    checked_skip_keys,
    checked_threads,
    checked_timeout,
)
from gpuprefetch._calling_thread import CallingThreadEpoch
from gpuprefetch._copier import DEFAULT_PINNED_BYTES, Copier, Share
from gpuprefetch._copy_lane import CopyLane
from gpuprefetch._crew import Enough
from gpuprefetch._environment import Environment
from gpuprefetch._epoch import Epoch
from gpuprefetch._lanes import HostLane, Lane, ToLane
from gpuprefetch._loader_threads import LoaderThreadEpoch, SampleThreadsEpoch
from gpuprefetch._seeds import Seeds
from gpuprefetch._source import Source

_MOST_BATCHES = 10_000
_MOST_PINNED_BYTES = 1 << 40


class PrefetchIterator:
    """Wraps a loader so that loading, copying to the device and computing overlap, in one process.

    Gives the loader's batches, each once, in order, bit for bit, on ``device``::

        for images, labels in PrefetchIterator(loader, device="cuda"):
            ...

    Make it once and iterate it for each epoch, as a DataLoader. ``next(p)`` without a loop draws from an epoch of the
    object's own, which a later ``iter(p)`` ends. Attributes that are not its own are the loader's.

    With a CUDA device, no ``skip_keys`` and torch's own ``default_collate``, samples are not stacked on the host: the
    copy gathers them. The batch is the same; any other ``collate_fn`` is called as it is.

    Args:
        loader: any iterable of batches, usually a ``torch.utils.data.DataLoader`` with ``num_workers=0``. Batches
            are any nesting of dicts and other mutable mappings, lists, tuples, namedtuples and dataclasses; tensors in
            them move, objects with a ``to(device)`` of their own move themselves, everything else passes through as it
            is (numpy arrays too: use ``torch.from_numpy``).
        device: where batches go. None takes the current accelerator, or the CPU where there is none. ``"cpu"`` loads
            ahead and copies nothing. CUDA devices get copies on a stream of their own; others a plain ``.to``.
        prefetch_batches: batches kept ready ahead of the consumer, 1 to 10,000. Device memory in use is at most
            ``prefetch_batches + 2`` batches, or 64 MiB of small ones, beyond what the loop itself holds.
        num_threads: 1 loads on a thread of its own; what the dataset draws from global random generators then
            interleaves with what the loop draws on the CPU. More, up to 256, fetch and collate the samples of a
            DataLoader's map-style dataset, which they share: dataset and ``collate_fn`` must stand being used by
            several threads at once and must not fill one buffer again and again, and what they draw from global
            generators is no longer repeatable. Order and errors are those of one thread. As long as batches are ready
            in time only as many threads load as the loop needs; when it has to wait all do. A dataset with
            ``__getitems__`` is asked for whole batches, so that no more than ``prefetch_batches`` threads are busy; nor
            are more with a ``batch_size`` of 1 or None. The threads are new in each epoch. The loader's ``num_workers``
            must be 0; one that is no such DataLoader is iterated by one thread, with a warning. 0 loads on the calling
            thread, inside ``next()``, for datasets that are bound to it or that hold the GIL; staging and copying still
            overlap, one batch ahead (so a sample that is a view of the dataset's memory is read until the ``next()``
            after the one that loaded it).
        skip_keys: keys of mappings, at any depth, whose values stay as they are.
        seed: 0 to 2**64 - 1, or None. With it an epoch depends on the seed and on its own number alone, for any
            ``num_threads``: the order, where a DataLoader's sampler draws it before the first index, as torch's do, and
            what ``sample_generator()`` and ``sample_rng()`` give in ``dataset[i]``. Each ``iter()`` counts one up from
            0; ``set_epoch(n)`` makes the next one number n. With ``num_threads=0`` the same holds for all that is drawn
            from the global generators of Python, NumPy and torch's CPU while a batch is loaded, as long as no other
            thread draws from them; afterwards their states are the loop's own again. That costs a fraction of a
            millisecond for each batch, and processes with one seed draw alike. Samplers and loaders with a generator
            of their own draw from that. Without a seed the order is the plain loader's, as its sampler draws it in
            ``iter()`` (that of a plain DataLoader draws in the first ``next()``).
        pinned_bytes: size limit, in bytes, of the pinned host buffer that tensors go through on their way to this
            device, however large a batch is; rounded down to a power of two. One buffer serves all objects of the
            process: the largest value among the open ones counts. Default 64 MiB; below 1 MiB copies leave from
            pageable memory. An object that moves itself and has a ``pin_memory()`` is pinned by that, in memory of its
            own.
        timeout: seconds that ``next()`` waits for our threads before it raises TimeoutError. 0 waits for ever. The
            batch may still come: call ``next()`` again. What ``num_threads=0`` loads inside ``next()`` takes its time.

    Raises:
        TypeError, ValueError: an argument is not what is said above.
        RuntimeError: the device can't be used.
        ImportError: the device needs the compiled module, and it is missing or was built for another torch.

    An exception of the dataset, the sampler or the ``collate_fn`` is raised by the ``next()`` that would have given
    that batch, with its own traceback; afterwards the epoch is over. With several threads it comes once the samples of
    that batch that were begun by then have ended. What ``next()`` runs can't call it for the same epoch: to the
    dataset, a signal handler or a finalizer it is a RuntimeError, as it is of a generator.
    """

    __slots__ = (
        "__weakref__",
        "_beginning",
        "_device",
        "_enough",
        "_epochs",
        "_implicit",
        "_loader",
        "_lock",
        "_next_epoch",
        "_num_threads",
        "_pinned_bytes",
        "_prefetch_batches",
        "_seed",
        "_share",
        "_skip_keys",
        "_timeout",
    )

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int | None = None,
        *,
        prefetch_batches: int = 2,
        num_threads: int = 1,
        skip_keys: Collection[Any] = (),
        seed: int | None = None,
        pinned_bytes: int | None = None,
        timeout: float = 0,
    ) -> None:
        self._loader = checked_loader(loader)
        self._prefetch_batches = checked_int("prefetch_batches", prefetch_batches, 1, _MOST_BATCHES)
        self._num_threads = checked_threads(num_threads, self._loader)
        self._enough = Enough(self._num_threads)
        self._skip_keys = checked_skip_keys(skip_keys)
        self._seed = checked_seed(seed, self._num_threads, self._loader)
        self._next_epoch = 0
        self._pinned_bytes = (
            DEFAULT_PINNED_BYTES
            if pinned_bytes is None
            else checked_int("pinned_bytes", pinned_bytes, 0, _MOST_PINNED_BYTES)
        )
        self._timeout = checked_timeout(timeout)
        self._device = checked_device(device)
        self._epochs: set[weakref.ref[EpochIterator]] = set()  # a WeakSet can't be read while another thread drops one
        self._implicit: EpochIterator | None = None
        self._beginning = _threads.Turns()  # threads that share this object share what next() begins
        self._lock = threading.RLock()  # of _share, never held while code of the user's runs
        self._share: Share | None = None
        self._open()

    @property
    def device(self) -> torch.device:
        """Where batches go, with its index."""
        return self._device

    def __iter__(self) -> EpochIterator:
        self._implicit = None
        return self._begin()

    def __next__(self) -> Any:
        implicit = self._implicit
        if implicit is None:
            turn = self._beginning.acquired()
            try:
                implicit = self._implicit
                if implicit is None:
                    implicit = self._implicit = self._begin()
            finally:
                turn.release()
        return next(implicit)

    def __len__(self) -> int:
        """Batches of an epoch. TypeError where the loader has no length."""
        return len(self._loader)  # type: ignore[arg-type]

    def __enter__(self) -> PrefetchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all epochs and their threads and gives the pinned memory back. Iterating again starts afresh, with the
        next epoch.

        A loop that is in an epoch sees its end, as if the loader had no more batches.

        A thread that is inside the dataset's code is waited for 2 seconds, then left behind with a warning.
        """
        iterators = self._live()  # until the end: dropped, they are waited for in a finalizer, where Ctrl-C is lost
        self._implicit = None
        with self._lock:
            share, self._share = self._share, None
        for iterator in iterators:
            iterator._stop()
        deadline = _threads.deadline()
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            if share is not None:
                stack.callback(share.close)
            for iterator in iterators:
                stack.callback(iterator._epoch.close, deadline)

    def set_epoch(self, epoch: int) -> None:
        """Calls ``set_epoch(epoch)`` of the loader, its sampler, batch sampler, that one's sampler, and its dataset:
        of whichever have one. Takes effect with the next epoch: nothing of it is loaded before ``iter()``. With a
        ``seed`` that one has this number."""
        if self._seed is not None:
            self._next_epoch = checked_int("epoch", epoch, 0, LARGEST_SEED)
        if isinstance(self._loader, PrefetchIterator):  # forwards what it wraps, and would reach everything twice
            self._loader.set_epoch(epoch)
            return
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        for owner in {
            id(owner): owner
            for owner in (
                self._loader,
                getattr(self._loader, "sampler", None),
                batch_sampler,
                getattr(batch_sampler, "sampler", None),
                getattr(self._loader, "dataset", None),
            )
        }.values():
            method = getattr(owner, "set_epoch", None)
            if callable(method):
                method(epoch)

    def __getattr__(self, name: str) -> Any:
        # Positions are not resumable yet: the loader's own state is ahead by what was prefetched.
        if name in ("state_dict", "load_state_dict") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in PrefetchIterator.__slots__:  # not set yet: the constructor failed
            raise AttributeError(name)
        try:
            return getattr(self._loader, name)
        except AttributeError as error:
            if error.name != name or error.obj is not self._loader:  # out of a property of the loader's
                raise
            kinds = f"{type(self).__name__!r} object and the {type(self._loader).__name__!r} that it wraps"
            raise AttributeError(f"{kinds} have no attribute {name!r}") from error

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError as error:
            if hasattr(type(self), name):
                raise
            told = f"{name!r} of a {type(self).__name__} can't be set; what is its loader's, is set on the loader"
            raise AttributeError(told) from error

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("a PrefetchIterator can't be copied or pickled: copy or pickle the loader, and wrap it again")

    def __repr__(self) -> str:
        return (
            f"PrefetchIterator({self._loader!r}, device={str(self._device)!r}, "
            f"prefetch_batches={self._prefetch_batches}, num_threads={self._num_threads})"
        )

    def _open(self) -> Share | None:
        with self._lock:
            if self._device.type == "cuda" and self._share is None:
                self._share = Share(Copier.of(self._device), self._pinned_bytes)
            return self._share

    def _begin(self) -> EpochIterator:
        if isinstance(self._loader, (Generator, EpochIterator)) or getattr(self._loader, "persistent_workers", False):
            # Its epochs are one iterator, which two threads can't share: a new one ends the others.
            for iterator in self._live():
                iterator._epoch.replace()
        share = self._open()
        lane = self._lane(share)
        seeds = None if self._seed is None else Seeds(self._seed, self._next_epoch)
        source = Source(self._loader, lane.collate, self._enough, seeds)
        self._next_epoch += 1
        environment = Environment(self._device)
        epoch: Epoch
        if source.samples is not None:
            epoch = SampleThreadsEpoch(source, source.samples, lane, self._timeout, environment, self._prefetch_batches)
        elif self._num_threads:
            epoch = LoaderThreadEpoch(source, lane, self._timeout, environment, self._prefetch_batches)
        else:
            epoch = CallingThreadEpoch(source, lane, self._timeout, environment)
        iterator = EpochIterator(epoch, share)
        self._epochs.add(weakref.ref(iterator, self._epochs.discard))
        epoch.start()  # last: whatever interrupts it, dropping the iterator ends the thread
        return iterator

    def _live(self) -> list[EpochIterator]:
        return [iterator for reference in list(self._epochs) if (iterator := reference()) is not None]

    def _lane(self, share: Share | None) -> Lane:
        if share is not None:
            on_loader_thread = self._num_threads > 0
            return CopyLane(share.copier, self._prefetch_batches, self._skip_keys, on_loader_thread=on_loader_thread)
        if self._device.type == "cpu":
            return HostLane(self._skip_keys)
        return ToLane(self._device, self._skip_keys)


class EpochIterator:
    """One epoch. Dropping it ends it.

    The epoch's thread holds the epoch and not this object, so that it can be collected while the thread waits.
    """

    __slots__ = ("__weakref__", "_epoch", "_share")

    def __init__(self, epoch: Epoch, share: Share | None) -> None:
        self._epoch = epoch
        self._share = share  # keeps the pinned memory while the epoch lives
        epoch.end_with(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._epoch.take()
        except KeyboardInterrupt:  # in whatever line of it: the traceback may be kept, and this object by that
            self._stop()
            raise

    def close(self) -> None:
        """Ends the epoch and its thread. ``next()`` then raises StopIteration, unless a later ``iter()`` has ended it
        before."""
        self._epoch.close()

    def _stop(self) -> None:
        """Ends the epoch, and waits for nothing."""
        self._epoch.stop()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("an epoch of a PrefetchIterator can't be copied or pickled")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        try:
            if is_finalizing():  # the exit hook has ended all threads, and modules may be gone
                return
            # A collection may run on any thread, at any point: those of ours don't wait for each other in one, and
            # nobody waits in a `to` for a thread that can't go on before it ends.
            if _threads.on_one() or _batch.is_moving():
                self._stop()
            else:
                self._epoch.close()
        except KeyboardInterrupt:
            _threads.interrupt_later()
