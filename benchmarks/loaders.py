"""The rows themselves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from epoch import Batch
from rows import GATHERED, GATHERED_BESIDE_COMPUTE, IN_TURN, Loader, overlapped, row
from target import Target
from torch.utils.data import DataLoader


class Epochs:
    """An iterable whose every `iter()` calls `start`."""

    def __init__(self, start: Callable[[], Iterator[Batch]]) -> None:
        self.start = start

    def __iter__(self) -> Iterator[Batch]:
        return self.start()


def _to(loader: Loader, target: Target, non_blocking: bool) -> Iterator[Batch]:
    for images, labels in loader:
        yield images.to(target.device, non_blocking=non_blocking), labels.to(target.device, non_blocking=non_blocking)


@row(
    "dataloader",
    "DataLoader, 0 workers, .to(device)",
    bound=overlapped(1),
    bound_in_sync=IN_TURN,
    overlaps=False,
)
@contextmanager
def dataloader(loader: Loader, target: Target, prefetch_batches: int) -> Iterator[Iterable[Batch]]:
    yield Epochs(lambda: _to(loader, target, non_blocking=False))


def _nothing_to_pin(target: Target) -> str | None:
    return None if target.streams is not None else f"pinned memory has no use for {target.device.type}"


@row(
    "pinned",
    "DataLoader, 0 workers, pin_memory=True, .to(device, non_blocking=True)",
    bound=overlapped(1),
    bound_in_sync=IN_TURN,
    overlaps=False,
    missing=_nothing_to_pin,
)
@contextmanager
def pinned(loader: Loader, target: Target, prefetch_batches: int) -> Iterator[Iterable[Batch]]:
    pinning: Loader = DataLoader(loader.dataset, batch_size=loader.batch_size, num_workers=0, pin_memory=True)
    yield Epochs(lambda: _to(pinning, target, non_blocking=True))


class ThreadedCopy:
    """One background thread loads, pins and copies on a side stream; a queue of 2. What one writes by hand, made safe:
    the consumer's stream waits for the copy, and the memory is recorded on it."""

    QUEUE = 2  # batches

    def __init__(self, loader: Loader, target: Target) -> None:
        self.loader = loader
        self.target = target
        self.stream = target.streams.Stream(target.device) if target.streams is not None else None

    def __iter__(self) -> Iterator[Batch]:
        ready: queue.Queue[Any] = queue.Queue(self.QUEUE)
        stopped = threading.Event()
        worker = threading.Thread(target=self._work, args=(ready, stopped), daemon=True)
        worker.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                batch, copied = item
                del item
                self._hand_over(batch, copied)
                yield batch
        finally:
            stopped.set()
            while worker.is_alive():  # it may be waiting for room in the queue
                try:
                    ready.get(timeout=0.01)
                except queue.Empty:
                    pass
            worker.join()

    def _hand_over(self, batch: Batch, copied: Any) -> None:
        if self.target.streams is None:
            return
        consumer = self.target.streams.current_stream(self.target.device)
        consumer.wait_event(copied)
        for leaf in batch:
            leaf.record_stream(consumer)

    def _work(self, ready: queue.Queue[Any], stopped: threading.Event) -> None:
        try:
            for batch in self.loader:
                if stopped.is_set():
                    return
                ready.put(self._copy(batch))
            ready.put(None)
        except BaseException as error:  # a thread has nobody to raise to but the consumer
            ready.put(error)

    def _copy(self, batch: Batch) -> tuple[Batch, Any]:
        images, labels = batch
        device = self.target.device
        if self.target.streams is None:
            return (images.to(device), labels.to(device)), None
        # The current device and stream belong to a thread, so they are set in this one.
        with self.target.streams.device(device), self.target.streams.stream(self.stream):
            moved = (
                images.pin_memory().to(device, non_blocking=True),
                labels.pin_memory().to(device, non_blocking=True),
            )
            copied = self.target.streams.Event()
            copied.record(self.stream)
        return moved, copied


@row("thread", "one background thread: load, pin_memory(), copy on a side stream", bound=overlapped(1), overlaps=True)
@contextmanager
def thread(loader: Loader, target: Target, prefetch_batches: int) -> Iterator[Iterable[Batch]]:
    yield ThreadedCopy(loader, target)


def _not_installed(target: Target) -> str | None:
    try:
        from gpuprefetch import PrefetchIterator

        PrefetchIterator([], target.device).close()  # raises where the compiled part is needed and missing
    except ImportError as error:
        return f"gpuprefetch can't be used: {str(error).splitlines()[0]}"
    return None


@row(
    "gpuprefetch",
    "PrefetchIterator(loader), one loader thread",
    bound=GATHERED,
    overlaps=True,
    missing=_not_installed,
)
@contextmanager
def gpuprefetch(loader: Loader, target: Target, prefetch_batches: int) -> Iterator[Iterable[Batch]]:
    from gpuprefetch import PrefetchIterator

    with PrefetchIterator(loader, target.device, prefetch_batches=prefetch_batches, num_threads=1) as batches:
        yield batches


def _nothing_to_copy(target: Target) -> str | None:
    if not target.accelerated:
        return f"it loads inside next(), and copies nothing on {target.device.type}"
    return _not_installed(target)


@row(
    "gpuprefetch0",
    "PrefetchIterator(loader, num_threads=0), loads inside next(), copies ahead",
    bound=GATHERED,
    bound_in_sync=GATHERED_BESIDE_COMPUTE,
    overlaps=False,
    missing=_nothing_to_copy,
)
@contextmanager
def gpuprefetch0(loader: Loader, target: Target, prefetch_batches: int) -> Iterator[Iterable[Batch]]:
    from gpuprefetch import PrefetchIterator

    with PrefetchIterator(loader, target.device, prefetch_batches=prefetch_batches, num_threads=0) as batches:
        yield batches
