"""One pass over the loader: from the loader's iterator to the consumer's ``next()``.

Records travel one way. With a loader thread:

    permits -> [load, prepare, copy, assemble] -> ready -> hand over
                      loader thread                        consumer

Without one, loading and all other code of the user's stays on the consumer's thread:

    load, prepare -> [copy] -> ready -> load the next one, assemble, hand over
       consumer    copier thread                    consumer

With several, the loader thread does not load itself but waits for sample threads: see ``_samples``.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import queue
import sys
import threading
import time
from typing import Any

import torch

from gpuprefetch import _threads
from gpuprefetch._environment import Environment
from gpuprefetch._lanes import Lane
from gpuprefetch._record import Record, Stopped
from gpuprefetch._samples import Samples
from gpuprefetch._source import Source

# On Windows a lock that is waited for can't be interrupted: Ctrl-C arrives between two slices.
_SLICE_SECONDS = 0.1

# Before Python 3.11 a sleep on Windows lasts until the next tick of a clock of 64 Hz.
_LONGEST_YIELD_SECONDS = 0.001
_SLEEPS_BRIEFLY = sys.platform != "win32" or sys.version_info >= (3, 11)


class Epoch(abc.ABC):
    """What both ways have in common: the queue of ready records and the consumer's side.

    Queues are SimpleQueues: stop() may be called by a finalizer, at any point of any thread, and their put() is
    re-entrant.
    """

    _ADVICE = ""  # at the end of an error's note

    def __init__(self, source: Source, lane: Lane, timeout: float) -> None:
        self._source = source
        self._lane = lane
        self._timeout = timeout
        self._ready: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._stopped = False
        self._asked = False  # the lane knows of the batch that is waited for
        self._timed_out = False
        self._workers: list[_threads.Worker] = []  # the one that fills `ready` comes last
        self._taking = threading.RLock()  # consumers in several threads take turns

    def start(self) -> None:
        """Starts the epoch's threads, if it has any."""
        for worker in self._workers:
            worker.start(self.stop)

    def take(self) -> Any:
        """The next batch. After the end, an error or stop(): StopIteration."""
        current = threading.current_thread()
        if any(worker.thread is current for worker in self._workers):
            raise RuntimeError("an epoch can't be drawn from by the dataset that it loads")
        while not self._taking.acquire(timeout=_SLICE_SECONDS):
            if self._stopped:
                raise StopIteration
        try:
            return self._take()
        finally:
            self._taking.release()

    def _take(self) -> Any:
        if self._stopped:
            raise StopIteration
        if not self._asked:
            self._lane.ask()
            self._asked = True
        self._timed_out = False
        try:
            record = self._next_record()
            self._asked = False
            if not record.final:
                return self._hand_over(record)
        except BaseException as error:
            if not self._timed_out:  # after a time-out the batch may still come
                self.stop()
            if isinstance(error, StopIteration):
                raise _not_the_end(error) from error
            raise
        self.stop()
        if record.error is None or isinstance(record.error, Stopped):
            raise StopIteration
        raised, record.error = record.error, None  # frames in its traceback hold the record
        try:
            raise raised
        finally:
            del raised

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

    def close(self, deadline: float | None = None) -> None:
        """Ends the epoch and its threads, and drops the batches that were ready.

        ``deadline``, on the monotonic clock, is for a thread that is inside the user's code; by default 2 s from now.
        """
        self.stop()
        _threads.end(self._workers, _threads.deadline() if deadline is None else deadline)
        while True:
            try:
                self._ready.get_nowait().error = None  # whose traceback may hold the record
            except queue.Empty:
                return

    @abc.abstractmethod
    def _next_record(self) -> Record:
        """The next record, copied."""

    def _wait(self) -> Record:
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            pass
        started = time.monotonic()
        while True:
            try:
                return self._ready.get(timeout=_SLICE_SECONDS)
            except queue.Empty:
                pass
            if self._stopped:
                return Record(-1, ended=True)
            thread = self._workers[-1].thread
            if not thread.is_alive() and self._ready.empty():
                raise RuntimeError(f"thread {thread.name!r} is gone; was the process forked during an epoch?")
            if self._timeout and time.monotonic() - started > self._timeout:
                self._timed_out = True
                raise TimeoutError(
                    f"no batch within timeout={self._timeout} s; {_threads.where_they_stand(self._workers)}"
                )

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
        self._annotate(error, record.number, thread_name)
        record.error = error
        record.batch, record.held = None, []
        record.drop_sources()

    def _annotate(self, error: BaseException, number: int, thread_name: str | None = None) -> None:
        thread_name = thread_name or threading.current_thread().name
        with contextlib.suppress(Exception):  # a class of the user's may have other ideas of its attributes
            if hasattr(error, "add_note"):
                error.add_note(f"gpuprefetch: at batch {number}, in thread {thread_name!r}{self._ADVICE}")
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


class LoaderThreadEpoch(Epoch):
    """num_threads=1: loads on a thread of its own, at most ``prefetch_batches`` ahead of the consumer."""

    _ADVICE = "; num_threads=0 runs the dataset on the calling thread"

    def __init__(
        self, source: Source, lane: Lane, timeout: float, environment: Environment, prefetch_batches: int
    ) -> None:
        super().__init__(source, lane, timeout)
        self._environment = environment
        self._prefetch_batches = prefetch_batches
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()  # one a batch that the consumer took
        self._workers = [_threads.Worker("loader", self._run)]

    def stop(self) -> None:
        super().stop()
        self._permits.put(None)

    def _next_record(self) -> Record:
        record = self._wait()
        self._permit()  # only now: a woken loader thread competes for the GIL
        return record

    def _permit(self) -> None:
        """Lets one more batch be loaded."""
        self._permits.put(None)

    def _run(self) -> None:
        number = 0
        try:
            with self._environment.entered():
                try:
                    for number in itertools.count():
                        if number >= self._prefetch_batches:
                            self._wait_for_permit()
                        if self._stopped:
                            return
                        record = self._make(number)
                        if self._stopped:
                            return
                        self._ready.put(record)
                        if record.final:
                            return
                        del record
                finally:
                    self._source.close()
        except BaseException as error:
            if self._stopped:
                raise
            record = Record(number)
            self._fail(record, error)
            self._ready.put(record)

    def _wait_for_permit(self) -> None:
        """Waits until the consumer has taken a batch, and lets it begin its step before it meets us at the GIL.

        A thread that had to wait is in no hurry, and gives away an eighth of that time. One that is behind has not
        waited.
        """
        started = time.perf_counter()
        self._permits.get()
        if _SLEEPS_BRIEFLY:
            time.sleep(min((time.perf_counter() - started) / 8, _LONGEST_YIELD_SECONDS))

    def _make(self, number: int) -> Record:
        record = self._load(number)
        if record.final:
            return record
        try:
            if not self._prepared(record):
                self._lane.wait_until_due(number)
                record = Record(number, record.batch)
                self._lane.prepare(record)
            self._lane.copy(record)
            self._lane.assemble(record)
        except BaseException as error:
            self._fail(record, error)
        return record


class SampleThreadsEpoch(LoaderThreadEpoch):
    """num_threads=N: as with one, but the loader's next batch comes from N threads that fetch its samples."""

    _ADVICE = "; several threads share the dataset, and num_threads=1 is one"

    def __init__(
        self,
        source: Source,
        samples: Samples,
        lane: Lane,
        timeout: float,
        environment: Environment,
        prefetch_batches: int,
    ) -> None:
        super().__init__(source, lane, timeout, environment, prefetch_batches)
        self._samples = samples
        self._crashed: BaseException | None = None
        workers = [_threads.Worker("sample", self._fetch) for _ in range(samples.num_threads)]
        self._workers = [*workers, *self._workers]

    def start(self) -> None:
        for _ in range(self._prefetch_batches):
            self._samples.request()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._samples.stop()

    def close(self, deadline: float | None = None) -> None:
        super().close(deadline)
        self._samples.close()

    def _permit(self) -> None:
        self._samples.request()

    def _wait_for_permit(self) -> None:
        pass  # the samples wait for it

    def _fetch(self) -> None:
        """A sample thread's work."""
        try:
            with self._environment.entered(sharing=self._samples.num_threads):
                self._samples.work()
        except BaseException as error:  # of the environment: what samples raise belongs to their batch
            self._crashed = error
            self._samples.stop()

    def _load(self, number: int) -> Record:
        record = super()._load(number)
        crashed, self._crashed = self._crashed, None  # its traceback holds this object
        if crashed is not None:
            record.error = crashed
        return record

    def _loaded_in(self) -> str | None:
        return self._samples.thread_name


class CallingThreadEpoch(Epoch):
    """num_threads=0: loads inside take(). Where copies can run beside, one batch ahead, with a thread that copies."""

    def __init__(self, source: Source, lane: Lane, timeout: float, environment: Environment) -> None:
        super().__init__(source, lane, timeout)
        self._environment = environment
        self._numbers = itertools.count()
        self._unprepared: Record | None = None
        self._loaded_ahead = False
        self._jobs: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        if lane.copies_beside:
            self._workers = [_threads.Worker("copier", self._run)]

    def stop(self) -> None:
        super().stop()
        self._jobs.put(None)

    def close(self, deadline: float | None = None) -> None:
        super().close(deadline)
        self._source.close()

    def _next_record(self) -> Record:
        if not self._loaded_ahead:
            self._load_ahead()
        self._prepare_late()
        record = self._wait()
        self._loaded_ahead = False
        if not record.final:
            try:
                self._lane.assemble(record)  # first, since it lets go of what was loaded
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fail(record, error)
        if self._lane.copies_beside and not record.final:
            self._load_ahead()
        return record

    def _load_ahead(self) -> None:
        record = self._load(next(self._numbers))
        if isinstance(record.error, KeyboardInterrupt):
            raise record.error  # it is the caller that is interrupted, and not at that batch
        self._loaded_ahead = True
        if record.final:
            self._submit(record)
            return
        try:
            prepared = self._prepared(record)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._fail(record, error)
            prepared = True
        if prepared:
            self._submit(record)
        else:
            self._unprepared = Record(record.number, record.batch)

    def _prepare_late(self) -> None:
        """Prepares a batch that found no memory while it was ahead: now it is due."""
        if self._unprepared is None:
            return
        record, self._unprepared = self._unprepared, None
        try:
            self._lane.wait_until_due(record.number)
            self._lane.prepare(record)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._fail(record, error)
        self._submit(record)

    def _submit(self, record: Record) -> None:
        if self._workers:
            self._jobs.put(record)
        else:
            self._copy(record)

    def _copy(self, record: Record) -> None:
        if not record.final:
            try:
                self._lane.copy(record)
            except BaseException as error:
                self._fail(record, error)
        self._ready.put(record)

    def _run(self) -> None:
        try:
            with self._environment.entered():
                while (record := self._jobs.get()) is not None and not self._stopped:
                    self._copy(record)
                    del record
        except BaseException as error:  # of the environment: copies fail into their records
            self._ready.put(Record(0, error=error))
