"""Rows that need torch alone: the loader as it is, and the ways to overlap that people write by hand."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from epoch import Batch
from fastreid_described import Described
from rows import Loader, Opened, row
from target import Target
from workloads import changed

T = TypeVar("T")


class Epochs:
    """An iterable whose every `iter()` calls `start`."""

    def __init__(self, start: Callable[[], Iterator[Batch]]) -> None:
        self.start = start

    def __iter__(self) -> Iterator[Batch]:
        return self.start()


def on_device(batches: Iterable[Batch], target: Target, non_blocking: bool) -> Iterator[Batch]:
    """Each batch, copied on the current stream."""
    for images, labels in batches:
        yield images.to(target.device, non_blocking=non_blocking), labels.to(target.device, non_blocking=non_blocking)


def nothing_to_pin(target: Target) -> str | None:
    return None if target.streams is not None else f"pinned memory has no use for {target.device.type}"


@row(
    "dataloader",
    "DataLoader, 0 workers, .to(device)",
    loads_beside=False,
)
def dataloader(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    yield Epochs(lambda: on_device(loader, target, non_blocking=False))


@row(
    "pinned",
    "DataLoader, 0 workers, pin_memory=True, .to(device, non_blocking=True)",
    loads_beside=False,
    missing=nothing_to_pin,
)
def pinned(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    pinning = changed(loader, pin_memory=True)
    yield Epochs(lambda: on_device(pinning, target, non_blocking=True))


@row(
    "windows-fix",
    "FastReID's fix for Windows: pin_memory=True, no thread, no stream, .to(device) in the step",
    loads_beside=False,
    default=False,
    missing=nothing_to_pin,
)
def windows_fix(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    pinning = changed(loader, pin_memory=True)
    yield Epochs(lambda: on_device(pinning, target, non_blocking=False))


@row(
    "apex",
    "as apex's data_prefetcher: the next batch is loaded in next(), and copied from pinned memory on a side stream",
    loads_beside=False,
    default=False,
    missing=nothing_to_pin,
)
def apex(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    pinning = changed(loader, pin_memory=True)
    assert target.streams is not None
    stream = target.streams.Stream(target.device)
    yield Epochs(lambda: _one_ahead(pinning, target, stream))


def _one_ahead(loader: Iterable[Batch], target: Target, stream: Any) -> Iterator[Batch]:
    streams = target.streams
    assert streams is not None
    batches = iter(loader)

    def copy_next() -> Batch | None:
        batch = next(batches, None)
        if batch is None:
            return None
        with streams.stream(stream):
            return next(on_device([batch], target, non_blocking=True))

    upcoming = copy_next()
    while (batch := upcoming) is not None:
        consumer = streams.current_stream(target.device)
        consumer.wait_stream(stream)
        for leaf in batch:
            leaf.record_stream(consumer)
        upcoming = copy_next()
        yield batch


def in_background(items: Iterable[T], ahead: int) -> Iterator[T]:
    """The items, taken by a thread of its own that is up to `ahead` of them in front."""
    ready: queue.Queue[Any] = queue.Queue(ahead)
    stopped = threading.Event()

    def take() -> None:
        try:
            for item in items:
                if stopped.is_set():
                    return
                ready.put((item, None))
            ready.put((None, StopIteration()))
        except BaseException as error:  # a thread has nobody to raise to but the consumer
            ready.put((None, error))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
            del item
    finally:
        stopped.set()
        while thread.is_alive():  # it may be waiting for room in the queue
            try:
                ready.get(timeout=0.01)
            except queue.Empty:
                pass
        thread.join()


@row(
    "background",
    "as prefetch_generator: one thread loads and pins; .to(device, non_blocking=True) in the loop",
    loads_beside=True,
    default=False,
)
def background(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    pinning = changed(loader, pin_memory=target.streams is not None)
    yield Epochs(lambda: on_device(in_background(pinning, prefetch_batches), target, non_blocking=True))


@row(
    "fastreid",
    "as FastReID's DataLoaderX: a thread loads and pins, 10 batches ahead; next() copies the next on a side stream",
    loads_beside=True,
    default=False,
    missing=nothing_to_pin,
)
def fastreid(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    collate = loader.collate_fn
    described = Described(
        target.device,
        dataset=loader.dataset,
        batch_sampler=loader.batch_sampler,
        collate_fn=lambda samples: dict(zip(("images", "labels"), collate(samples), strict=True)),
        pin_memory=True,
    )
    try:
        yield Epochs(lambda: ((batch["images"], batch["labels"]) for batch in described))
    finally:
        described.shutdown()


@row("thread", "one background thread: load, pin_memory(), copy on a side stream", loads_beside=True)
def thread(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    """What one writes by hand, made safe: the consumer's stream waits for the copy, and memory is recorded on it."""
    stream = target.streams.Stream(target.device) if target.streams is not None else None
    yield Epochs(lambda: _handed_over(in_background(_copied(loader, target, stream), prefetch_batches), target))


def _copied(loader: Loader, target: Target, stream: Any) -> Iterator[tuple[Batch, Any]]:
    """Each batch, and the event of its copy. Runs in the background thread."""
    for batch in loader:
        if target.streams is None:
            yield next(on_device([batch], target, non_blocking=False)), None
            continue
        # The current device and stream belong to a thread, so they are set in this one.
        with target.streams.device(target.device), target.streams.stream(stream):
            images, labels = batch
            moved = next(on_device([(images.pin_memory(), labels.pin_memory())], target, non_blocking=True))
            copied = target.streams.Event()
            copied.record(stream)
        yield moved, copied


def _handed_over(copied_batches: Iterable[tuple[Batch, Any]], target: Target) -> Iterator[Batch]:
    for batch, copied in copied_batches:
        if target.streams is not None:
            consumer = target.streams.current_stream(target.device)
            consumer.wait_event(copied)
            for leaf in batch:
                leaf.record_stream(consumer)
        yield batch
