"""One pass over the loader: from the loader's iterator to the consumer's ``next()``.

Records travel one way, by threads of the epoch's own (``_loader_threads``) or without (``_calling_thread``).
"""

from __future__ import annotations

import abc
import contextlib
import queue
import threading
import time
import weakref
from typing import Any

import torch

from gpuprefetch import _threads
from gpuprefetch._lanes import Lane
from gpuprefetch._record import Record, Stopped
from gpuprefetch._source import Source


class Epoch(abc.ABC):
    """What both ways have in common: the queue of ready records and the consumer's side.

    Queues are SimpleQueues, and what is made of one: stop() may be called by a finalizer, at any point of any thread,
    and their put() is re-entrant.
    """

    _ADVICE = ""  # at the end of an error's note

    def __init__(self, source: Source, lane: Lane, timeout: float) -> None:
        self._source = source
        self._lane = lane
        self._timeout = timeout
        self._ready: _threads.Mailbox[Record] = _threads.Mailbox()
        self._stopped = False
        self._replaced = False  # by an epoch that goes on with the same iterator
        self._asked = False  # the lane knows of the batch that is waited for
        self._workers: list[_threads.Worker] = []  # in the order in which they start; the first one fills `ready`
        self._taking = _threads.Turns()  # of consumers in several threads

    def end_with(self, consumer: object) -> None:
        """Ends the threads once ``consumer`` is gone, whatever becomes of its finalizer: Ctrl-C may arrive before the
        first line of that, but not in a callback that is compiled. What it puts into the queue is the reference."""
        self._lane.end_with(consumer)
        self._gone = weakref.ref(consumer, self._first_waits_at().put)

    def start(self) -> None:
        """Starts the epoch's first thread, if it has any."""
        try:
            for worker in self._workers[:1]:
                worker.start(self.stop)
        except BaseException:
            self.stop()
            raise

    def take(self) -> Any:
        """The next batch. After the end, an error or stop(): StopIteration."""
        current = threading.current_thread()
        if any(worker.thread is current for worker in self._workers):
            raise RuntimeError(_threads.WITHIN_NEXT)
        turn = self._taking.acquired(lambda: self._stopped)
        if turn is None:
            raise self._end()
        try:
            return self._take()
        finally:
            turn.release()

    def _take(self) -> Any:
        if self._stopped:
            raise self._end()
        if not self._asked:
            self._lane.ask()
            self._asked = True
        try:
            record = self._next_record()
            if record is not None:
                self._asked = False
                if not record.final:
                    return self._hand_over(record)
        except BaseException as error:
            self.stop()
            if isinstance(error, StopIteration):
                raise _not_the_end(error) from error
            raise
        if record is None:  # and the epoch goes on: the batch may still come
            stand = _threads.where_they_stand(self._workers)
            raise TimeoutError(f"no batch within timeout={self._timeout} s; {stand}")
        self.stop()
        if record.error is None or isinstance(record.error, Stopped):
            raise self._end()
        raised, record.error = record.error, None  # frames in its traceback hold the record
        try:
            raise raised
        finally:
            del raised

    def _end(self) -> Exception:
        if self._replaced:
            return RuntimeError(
                "this epoch was ended by a later iter(): a generator, or a loader with persistent workers, has one "
                "iterator for all, so that two can't be drawn from at once"
            )
        return StopIteration()

    def _hand_over(self, record: Record) -> Any:
        try:
            return self._lane.hand_over(record)
        except Exception as error:
            self._annotate(error, record.number)
            raise

    def stop(self) -> None:
        """Tells everything to end. Waits for nothing; may be called from any thread and by a finalizer."""
        self._stopped = True
        self._lane.stop()
        self._ready.put(Record(-1, ended=True))  # wakes a consumer that waits in another thread

    def replace(self) -> None:
        """close(), and ``take()`` says why there is nothing more."""
        self._replaced = self._replaced or not self._stopped
        self.close()

    def close(self, deadline: float | None = None) -> None:
        """Ends the epoch and its threads, and drops the batches that were ready.

        ``deadline``, on the monotonic clock, is for a thread that is inside the user's code; by default 2 s from now.
        """
        self.stop()
        try:
            _threads.end(self._workers, _threads.deadline() if deadline is None else deadline)
        finally:  # its warning may be an error
            self._drop()

    def _drop(self) -> None:
        """Lets go of what was ready, and of what loads: the threads have ended, or were left behind."""
        while True:
            try:
                self._ready.get().error = None  # whose traceback may hold the record
            except queue.Empty:
                return

    @abc.abstractmethod
    def _first_waits_at(self) -> queue.SimpleQueue[Any]:
        """The queue at which the first thread waits for the consumer."""

    @abc.abstractmethod
    def _next_record(self) -> Record | None:
        """The next record, copied; None after ``timeout``."""

    def _wait(self) -> Record | None:
        started = time.monotonic()
        while True:
            try:
                return self._ready.get(_threads.SLICE_SECONDS)
            except queue.Empty:
                pass
            if self._stopped:
                return Record(-1, ended=True)
            thread = self._workers[0].thread
            if not thread.is_alive() and self._ready.empty():
                raise RuntimeError(f"thread {thread.name!r} is gone; was the process forked during an epoch?")
            if self._timeout and time.monotonic() - started > self._timeout:
                return None

    def _load(self, number: int) -> Record:
        """Loads the next batch, on whatever thread this is, and finds out what of it has to move."""
        record = Record(number)
        try:
            record.batch = next(self._source)
        except StopIteration:
            record.ended = True
        except BaseException as error:
            self._fail(record, error, self._loaded_in())
        return record

    def _loaded_in(self) -> str | None:
        """The name of the thread in which loading failed, where it is not this one."""
        return None

    def _prepared(self, record: Record) -> bool:
        """prepare(), or False where the device had no memory for it."""
        try:
            self._lane.prepare(record)
        except torch.OutOfMemoryError:
            return False
        return True

    def _fail(self, record: Record, error: BaseException, thread_name: str | None = None) -> None:
        if isinstance(error, StopIteration):
            error = _not_the_end(error)
        if isinstance(error, Stopped):
            error.__traceback__ = None  # nobody sees it, and its frames hold the record and what is in it
        else:
            self._annotate(error, record.number, thread_name)
        record.error = error
        record.batch, record.held = None, []
        record.drop_sources()

    def _annotate(self, error: BaseException, number: int, thread_name: str | None = None) -> None:
        thread_name = thread_name or threading.current_thread().name
        advice = "" if self._source.loads_in_processes else self._ADVICE  # which is about where the dataset runs
        with contextlib.suppress(Exception):  # a class of the user's may have other ideas of its attributes
            if hasattr(error, "add_note"):
                error.add_note(f"gpuprefetch: at batch {number}, in thread {thread_name!r}{advice}")
                if "Cannot re-initialize CUDA in forked subprocess" in str(error):
                    error.add_note(
                        "gpuprefetch: a worker process can't use CUDA once its parent does. With num_workers=0 in the "
                        "loader and num_threads=N here, N threads of this process load, and they can"
                    )


def _not_the_end(error: StopIteration) -> RuntimeError:
    """What is raised instead of a StopIteration that does not come from the loader's own end."""
    told = RuntimeError("an object in the batch raised StopIteration")
    told.__cause__ = error
    return told
