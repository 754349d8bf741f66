"""The samples of a map-style dataset, fetched and collated by several threads, in the loader's order.

    request() -> [draw indices] -> slices -> [samples, collate] -> [in order] -> next()
    consumer      loader thread               sample threads       loader thread

Only the loader thread draws from the sampler. A slice is a part of a batch, and whoever ends the last one collates: so
all threads work on the batch that is waited for, and on the next ones as soon as its slices are taken.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gpuprefetch._record import Stopped


class Batch:
    """One batch on its way through the threads."""

    __slots__ = ("data", "ended", "error", "failed_at", "indices", "number", "samples", "slices_left", "thread_name")

    def __init__(self, number: int) -> None:
        self.number = number
        self.indices: Any = None  # a list where the batch is split, else what the sampler gave
        self.samples: Any = None
        self.slices_left = 0
        self.data: Any = None  # the samples, collated
        self.ended = False  # there is no batch of this number
        self.error: BaseException | None = None
        self.failed_at = 0  # the position in the batch of the sample that raised it
        self.thread_name: str | None = None  # in which it was raised

    def result(self) -> Any:
        if self.error is None:
            return self.data
        error, self.error = self.error, None  # frames in its traceback hold this object
        raise error


class Samples:
    """Stands in for the sampler of a DataLoader's iterator: in place of a batch's indices it gives its ``Batch``, which
    is complete.

    Queues are SimpleQueues, since stop() may be called by a finalizer at any point of any thread.

    Args:
        indices: the sampler's iterator.
        dataset: fetched from by ``__getitems__`` where it has that, a batch in one call, as a DataLoader does.
        collate: from the samples of a batch to the batch.
        auto_collation: False where a batch is what ``dataset[index]`` gives for one index.
        num_threads: of the threads that call ``work()``.
    """

    def __init__(
        self,
        indices: Iterator[Any],
        dataset: Any,
        collate: Callable[[Any], Any],
        auto_collation: bool,
        num_threads: int,
    ) -> None:
        self._indices = indices
        self._dataset = dataset
        self._collate: Any = collate
        self._auto_collation = auto_collation
        self._splits = auto_collation and not getattr(dataset, "__getitems__", None)
        self.num_threads = num_threads
        self._slices: queue.SimpleQueue[tuple[Batch, range] | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()  # None: one more batch is wanted
        self._counting = threading.Lock()  # of a batch's slices and errors; never held while code of the user's runs
        self._drawn = 0
        self._given = 0
        self._early: dict[int, Batch] = {}  # complete before one that comes before them
        self._stopped = False
        self.thread_name: str | None = None  # where the error was raised that the batch given last holds

    def request(self) -> None:
        """Lets one more batch be loaded. For the consumer."""
        self._inbox.put(None)

    def stop(self) -> None:
        """Ends all waits, and each thread after the sample that it is at. May be called from anywhere."""
        self._stopped = True
        self._inbox.put(None)
        for _ in range(self.num_threads):
            self._slices.put(None)

    def close(self) -> None:
        """stop(), and lets go of what is the user's. A thread that is behind may meet its absence: nobody listens."""
        self.stop()
        self._indices, self._dataset, self._collate = iter(()), None, None
        self._early.clear()

    def __iter__(self) -> Samples:
        return self

    def __next__(self) -> Batch:
        """The next batch, or StopIteration after the last one or stop(). For the loader thread."""
        while self._given not in self._early:
            self._attend(self._inbox.get())
        while not self._inbox.empty():  # so that the threads have work while this batch is copied
            self._attend(self._inbox.get())
        batch = self._early.pop(self._given)
        self._given += 1
        if batch.ended:
            raise StopIteration
        self.thread_name = batch.thread_name
        return batch

    def _attend(self, batch: Batch | None) -> None:
        if self._stopped:
            raise StopIteration
        if batch is None:
            self._draw()
        else:
            self._early[batch.number] = batch

    def _draw(self) -> None:
        batch = Batch(self._drawn)
        self._drawn += 1
        try:
            batch.indices = next(self._indices)
            if self._splits:
                batch.indices = list(batch.indices)
        except StopIteration:
            batch.ended = True
        except BaseException as error:
            batch.error = error
        if batch.ended or batch.error is not None:
            self._early[batch.number] = batch
            return
        positions = range(len(batch.indices)) if self._splits else range(1)
        size = max(1, -(-len(positions) // self.num_threads))
        slices = [positions[begin : begin + size] for begin in range(0, max(1, len(positions)), size)]
        batch.samples = [None] * len(positions)
        batch.slices_left = len(slices)
        for positions in slices:
            self._slices.put((batch, positions))

    def work(self) -> None:
        """Fetches samples until stop(). For a sample thread."""
        while (taken := self._slices.get()) is not None and not self._stopped:
            self._load(*taken)
            del taken  # it would keep the batch until the next slice comes

    def _load(self, batch: Batch, positions: range) -> None:
        try:
            self._fetch(batch, positions)
        except Stopped:
            return
        except BaseException as error:
            self._fail(batch, error, positions.start)
        with self._counting:
            batch.slices_left -= 1
            is_last = batch.slices_left == 0
        if not is_last:
            return
        if batch.error is None:
            try:
                batch.data = self._collate(batch.samples)
            except BaseException as error:
                self._fail(batch, error, 0)
        batch.samples = None
        self._inbox.put(batch)

    def _fetch(self, batch: Batch, positions: range) -> None:
        if not self._auto_collation:
            batch.samples = self._dataset[batch.indices]
        elif not self._splits:
            batch.samples = self._dataset.__getitems__(batch.indices)
        else:
            for position in positions:
                if self._stopped:
                    raise Stopped
                if batch.error is not None and batch.failed_at < position:
                    return  # by itself the loader would not have come this far
                batch.samples[position] = self._dataset[batch.indices[position]]

    def _fail(self, batch: Batch, error: BaseException, position: int) -> None:
        """Keeps the error that is first in the batch: the loader by itself would have met that one."""
        if isinstance(error, StopIteration):  # which would be taken for the end
            told = RuntimeError("the dataset or collate_fn raised StopIteration")
            told.__cause__ = error
            error = told
        with self._counting:
            if batch.error is None or position < batch.failed_at:
                batch.error, batch.failed_at = error, position
                batch.thread_name = threading.current_thread().name
