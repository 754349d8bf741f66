"""An epoch that loads inside ``next()``, where all code of the user's stays on the calling thread.

load, prepare -> [copy] -> ready -> load the next one, assemble, hand over
   consumer    copier thread                    consumer
"""

from __future__ import annotations

import itertools
import queue
from typing import Any

from gpuprefetch import _threads
from gpuprefetch._environment import Environment
from gpuprefetch._epoch import Epoch
from gpuprefetch._lanes import Lane
from gpuprefetch._record import Record
from gpuprefetch._source import Source


class CallingThreadEpoch(Epoch):
    """num_threads=0: loads inside take(). Where copies can run beside, one batch ahead, with a thread that copies."""

    def __init__(self, source: Source, lane: Lane, timeout: float, environment: Environment) -> None:
        super().__init__(source, lane, timeout)
        self._environment = environment
        self._numbers = itertools.count()
        self._unprepared: Record | None = None
        self._loaded_ahead = False
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()  # no Record: stopped, or the consumer is gone
        if lane.copies_beside:
            self._workers = [_threads.Worker("copier", self._run)]

    def stop(self) -> None:
        super().stop()
        self._jobs.put(None)

    def _drop(self) -> None:
        super()._drop()
        self._source.close()

    def _first_waits_at(self) -> queue.SimpleQueue[Any]:
        return self._jobs

    def _next_record(self) -> Record | None:
        if not self._loaded_ahead:
            self._load_ahead()
        self._prepare_late()
        record = self._wait()
        if record is None:
            return None
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
                while isinstance(record := self._jobs.get(), Record) and not self._stopped:
                    self._copy(record)
                    del record
        except BaseException as error:  # of the environment: copies fail into their records
            self._ready.put(Record(0, error=error))
