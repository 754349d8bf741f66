"""The samples of a map-style dataset, fetched and collated by several threads, in the loader's order.

    request() -> [draw indices] -> slices -> [samples, collate] -> [in order] -> next()
    consumer     one sample thread            sample threads       loader thread
                 at a time

A slice is a part of a batch, and whoever ends the last one collates: so all threads work on the batch that is waited
for, and on the next ones as soon as its slices are taken. The loader thread draws nothing: a sampler that takes its
time holds up no batch that is complete. An error comes once the samples of its batch that were begun have ended.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import enum
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from gpuprefetch._crew import Crew
from gpuprefetch._dataset import fetches_one_by_one


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
        error, self.error = self.error, None  # frames in its traceback hold this object, and this frame the error
        try:
            raise error
        finally:
            del error


_NONE_LEFT = object()
_FILLED_AGAIN = (  # besides tensors; not any index that has a copy(), which may be about something else
    *(list, dict, set, bytearray, array.array),
    *(collections.deque, collections.UserDict, collections.UserList),
    *(numpy.ndarray, numpy.void),  # a row of a structured array is a view
)


class _Task(enum.Enum):
    DRAW = enum.auto()
    END = enum.auto()


class Samples:
    """Stands in for the sampler of a DataLoader's iterator: in place of a batch's indices it gives its ``Batch``, which
    is complete.

    Queues are SimpleQueues, since stop() may be called by a finalizer at any point of any thread.

    Args:
        indices: the sampler's iterator.
        dataset: fetched from by ``__getitems__`` where it has that, a batch in one call, as a DataLoader does.
        collate: from the samples of a batch to the batch.
        auto_collation: False where a batch is what ``dataset[index]`` gives for one index.
        crew: of the threads that call ``work()``.
    """

    def __init__(
        self,
        indices: Iterator[Any],
        dataset: Any,
        collate: Callable[[Any], Any],
        auto_collation: bool,
        crew: Crew,
    ) -> None:
        self._indices = indices
        self._dataset = dataset
        self._collate: Any = collate
        self._auto_collation = auto_collation
        self._splits = auto_collation and fetches_one_by_one(dataset)
        self.crew = crew
        self._tasks: queue.SimpleQueue[tuple[Batch, range] | _Task] = queue.SimpleQueue()
        self.complete: queue.SimpleQueue[Any] = queue.SimpleQueue()  # no Batch: stopped, or the consumer is gone
        self._early: dict[int, Batch] = {}  # complete before one that comes before them
        self._given = 0
        self._requested = 0  # batches
        self._lock = threading.Lock()  # of what follows and of a batch's slices and errors; no code of the user's in it
        self._completed = 0  # batches, with or without an error
        self._wanted = 0  # batches to be drawn
        self._is_drawing = False
        self._drawn = 0
        self._last: int | None = None  # the number of the first batch that is the end, or fails
        self._stopped = False
        self.thread_name: str | None = None  # where the error was raised that the batch given last holds

    def request(self) -> None:
        """Lets one more batch be loaded. For the consumer."""
        self._requested += 1
        self._tasks.put(_Task.DRAW)

    def unfinished(self) -> int:
        """How many batches were requested and are not complete. For the consumer."""
        return self._requested - self._completed

    def stop(self) -> None:
        """Ends all waits, and each thread after the sample that it is at. May be called from anywhere."""
        self._stopped = True
        self.complete.put(None)
        self.crew.stop()
        for _ in range(self.crew.size):
            self._tasks.put(_Task.END)

    def close(self) -> None:
        """stop(), and lets go of what is the user's. A thread that is behind may meet its absence: nobody listens."""
        self.stop()
        self._indices, self._dataset, self._collate = iter(()), None, None
        self._early.clear()
        for waiting in (self._tasks, self.complete):
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
        self.stop()  # again, for whoever waits at a queue

    def __iter__(self) -> Samples:
        return self

    def __next__(self) -> Batch:
        """The next batch, or StopIteration after the last one or stop(). For the loader thread."""
        while (batch := self._early.pop(self._given, None)) is None:
            arrived = self.complete.get()
            if not isinstance(arrived, Batch) or self._stopped:
                raise StopIteration
            self._early[arrived.number] = arrived
        self._given += 1
        if batch.ended:
            raise StopIteration
        self.thread_name = batch.thread_name
        return batch

    def work(self) -> None:
        """Draws indices and fetches samples until stop(). For a sample thread."""
        while (task := self._tasks.get()) is not _Task.END and not self._stopped:
            if task is _Task.DRAW:
                self._draw_all()
            else:
                self._load(*task)
            del task  # it would keep the batch until the next one comes
            self.crew.rest()

    def _draw_all(self) -> None:
        """Draws a batch, or leaves that to the thread that is drawing."""
        with self._lock:
            self._wanted += 1
            if self._is_drawing:
                return
            self._is_drawing = True
        while True:
            with self._lock:
                if self._last is not None:
                    self._completed += self._wanted  # nothing comes of these
                    self._wanted = 0
                if self._wanted == 0 or self._stopped:
                    self._is_drawing = False
                    return
                self._wanted -= 1
            self._draw()

    def _draw(self) -> None:
        batch = Batch(self._drawn)
        self._drawn += 1
        try:
            indices = next(self._indices, _NONE_LEFT)
            batch.ended = indices is _NONE_LEFT
            if not batch.ended:
                batch.indices = self._own(indices)
        except BaseException as error:  # StopIteration too: it comes from iterating what the sampler gave
            self._fail(batch, error, 0)
            self._put(batch)
            return
        if batch.ended:
            self._end_at(batch)
            self._put(batch)
            return
        positions = range(len(batch.indices)) if self._splits else range(1)
        size = self._slice_size(len(positions))
        slices = [positions[begin : begin + size] for begin in range(0, max(1, len(positions)), size)]
        batch.samples = [None] * len(positions)
        batch.slices_left = len(slices)
        for positions in slices:
            self._tasks.put((batch, positions))

    def _slice_size(self, samples: int) -> int:
        """So many that each thread has one slice at most."""
        return max(1, -(-samples // self.crew.size))

    def _own(self, indices: Any) -> Any:
        """The indices, apart from an object that the sampler may fill again for its next batch."""
        if isinstance(indices, torch.Tensor):
            indices = indices.clone()
        elif self._splits or (self._auto_collation and isinstance(indices, Iterator)):
            return list(indices)
        elif isinstance(indices, _FILLED_AGAIN):
            try:
                indices = copy.copy(indices)
            except Exception:  # a class of the user's that can't be made again
                indices = indices.copy()
        return list(indices) if self._splits else indices

    def _load(self, batch: Batch, positions: range) -> None:
        try:
            self._fetch(batch, positions)
        except BaseException as error:
            self._fail(batch, error, positions.start)
        with self._lock:
            batch.slices_left -= 1
            if batch.slices_left > 0:
                return
        if batch.error is None and not self._is_beyond_the_end(batch):
            try:
                batch.data = self._collate(batch.samples)
            except BaseException as error:
                self._fail(batch, error, 0)
        batch.samples = None
        self._put(batch)

    def _fetch(self, batch: Batch, positions: range) -> None:
        if self._is_beyond_the_end(batch):
            return
        if not self._auto_collation:
            batch.samples = self._dataset[batch.indices]
        elif not self._splits:
            batch.samples = self._dataset.__getitems__(batch.indices)
        else:
            for position in positions:
                if self._is_beyond_the_end(batch) or (batch.error is not None and batch.failed_at < position):
                    return  # by itself the loader would not have come this far
                batch.samples[position] = self._dataset[batch.indices[position]]

    def _is_beyond_the_end(self, batch: Batch) -> bool:
        return self._stopped or (self._last is not None and self._last < batch.number)

    def _put(self, batch: Batch) -> None:
        with self._lock:
            self._completed += 1
        if not self._stopped:
            self.complete.put(batch)

    def _fail(self, batch: Batch, error: BaseException, position: int) -> None:
        """Keeps the error that is first in the batch: the loader by itself would have met that one."""
        if self._stopped:  # it may be of that, and holds this object
            return
        if isinstance(error, StopIteration):  # which would be taken for the end
            told = RuntimeError("the dataset or collate_fn raised StopIteration")
            told.__cause__ = error
            error = told
        replaced, thread_name = None, threading.current_thread().name
        with self._lock:
            if batch.error is None or position < batch.failed_at:
                replaced = batch.error  # dropped after the lock: that may run code of the user's
                batch.failed_at, batch.error, batch.thread_name = position, error, thread_name
        del replaced
        self._end_at(batch)

    def _end_at(self, batch: Batch) -> None:
        with self._lock:
            self._last = batch.number if self._last is None else min(self._last, batch.number)
