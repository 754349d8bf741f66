"""An epoch that loads on a thread of its own.

    permits -> [load, prepare, copy, assemble] -> ready -> hand over
                      loader thread                        consumer

With several ``num_threads`` the loader thread does not load itself but waits for sample threads: see ``_samples``.
"""

from __future__ import annotations

import itertools
import queue
import sys
import time
from typing import Any

from gpuprefetch import _threads
from gpuprefetch._environment import Environment
from gpuprefetch._epoch import Epoch
from gpuprefetch._lanes import Lane
from gpuprefetch._record import Record
from gpuprefetch._samples import Samples
from gpuprefetch._source import Source

# Before Python 3.11 a sleep on Windows lasts until the next tick of a clock of 64 Hz.
_LONGEST_YIELD_SECONDS = 0.001
_SHORTEST_YIELD_SECONDS = 5e-5
_SLEEPS_BRIEFLY = sys.platform != "win32" or sys.version_info >= (3, 11)


class LoaderThreadEpoch(Epoch):
    """num_threads=1: loads on a thread of its own, at most ``prefetch_batches`` ahead of the consumer."""

    _ADVICE = "; num_threads=0 of PrefetchIterator runs the dataset on the calling thread"

    def __init__(
        self, source: Source, lane: Lane, timeout: float, environment: Environment, prefetch_batches: int
    ) -> None:
        super().__init__(source, lane, timeout)
        self._environment = environment
        self._prefetch_batches = prefetch_batches
        self._permits: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None for each batch that the consumer took
        self._workers = [_threads.Worker("loader", self._run)]

    def stop(self) -> None:
        super().stop()
        self._permits.put(None)

    def _first_waits_at(self) -> queue.SimpleQueue[Any]:
        return self._permits

    def _next_record(self) -> Record | None:
        record = self._wait()
        if record is not None:
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
                        if number == 0:
                            self._let_consumer_go_on()
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
        if self._permits.get() is not None:  # the consumer is gone
            self.stop()
        if _SLEEPS_BRIEFLY:
            time.sleep(min((time.perf_counter() - started) / 8, _LONGEST_YIELD_SECONDS))

    def _let_consumer_go_on(self) -> None:
        """Keeps out of the consumer's way until it has the first batch, which it waits for as a rule. A thread that
        went straight on to load would have the GIL, if samples hold it, for up to a switch interval first.

        Who waits for a later batch waits for loading anyway, and each pause would make that longer.
        """
        end = time.perf_counter() + _LONGEST_YIELD_SECONDS
        while _SLEEPS_BRIEFLY and not self._ready.empty() and time.perf_counter() < end:
            time.sleep(_SHORTEST_YIELD_SECONDS)

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
    """num_threads=N: as with one, but the loader's next batch comes from N threads that fetch its samples.

    Each thread starts the next one. ``Thread.start()`` waits until the new thread has had the GIL, which those at work
    may keep for a switch interval each: the consumer would wait for that N times before its first batch.
    """

    _ADVICE = "; several threads share the dataset, and num_threads=1 of PrefetchIterator is one"

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
        places = range(1, samples.crew.size + 1)
        self._workers += [_threads.Worker("sample", self._fetch, place) for place in places]

    def start(self) -> None:
        for _ in range(self._prefetch_batches):
            self._samples.request()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._samples.stop()

    def _drop(self) -> None:
        super()._drop()
        self._samples.close()
        self._crashed = None  # of a thread that began when all was loaded

    def _first_waits_at(self) -> queue.SimpleQueue[Any]:
        return self._samples.complete

    def _wait(self) -> Record | None:
        with self._samples.crew as crew:
            crew.adapt(self._samples.unfinished(), waits=self._ready.empty())
            return super()._wait()

    def _permit(self) -> None:
        self._samples.request()

    def _wait_for_permit(self) -> None:
        pass  # the samples wait for it

    def _let_consumer_go_on(self) -> None:
        pass  # this thread loads nothing

    def _run(self) -> None:
        self._start_after(0)
        super()._run()

    def _fetch(self, place: int) -> None:
        """A sample thread's work."""
        self._start_after(place)
        try:
            with self._environment.entered(sharing=self._samples.crew.size):
                self._samples.work()
        except BaseException as error:  # of the environment: what samples raise belongs to their batch
            self._crash(error)

    def _start_after(self, place: int) -> None:
        """Starts the thread after the one at ``place``, which this one is."""
        if place == self._samples.crew.size or self._stopped:
            return
        try:
            self._workers[place + 1].start(self.stop)
        except BaseException as error:  # the system has no thread left to give
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        """Ends loading; ``error`` is raised in place of the next batch."""
        self._crashed = error
        self._samples.stop()

    def _load(self, number: int) -> Record:
        record = super()._load(number)
        crashed = self._crashed
        if crashed is not None:
            self._crashed = None  # its traceback holds this object. Not before: another thread may set it meanwhile
            record.error = crashed
        return record

    def _loaded_in(self) -> str | None:
        return self._samples.thread_name
