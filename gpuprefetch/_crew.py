"""How many of an epoch's sample threads load, and where the others rest meanwhile.

Threads that load faster than the loop needs gain nothing, and take the GIL from its step, and from each other, whenever
a sample has let go of it. So one of them rests once all were idle for some batches in a row. Where that was one too
many, loading falls behind, and all are called back; while the loop waits nobody rests.
"""

from __future__ import annotations

import collections
import contextlib
import threading

LEAST_PATIENCE = 4  # batches in a row at which all threads were idle, until one rests
MOST_PATIENCE = 64


class Enough:
    """How many of ``most`` threads a loop needs, as all epochs of one object have shown. For the consumer."""

    def __init__(self, most: int) -> None:
        self.threads = self.most = most
        self._idle = 0  # batches in a row
        self._patience = LEAST_PATIENCE

    def were_idle(self) -> None:
        """There was nothing left to load as a batch was asked for."""
        self._idle += 1
        if self._idle >= self._patience:
            self._idle = 0
            self.threads = max(1, self.threads - 1)

    def were_busy(self) -> None:
        self._idle = 0

    def were_too_few(self) -> None:
        self._idle = 0
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.threads = min(self.threads + 1, self.most)


class Crew:
    """The threads of an epoch, all of which begin at work.

    The consumer takes no lock here: a signal handler may stop the epoch or draw from it, in the middle of any line.
    """

    def __init__(self, enough: Enough) -> None:
        self.size = enough.most
        self._enough = enough
        self._resting: collections.deque[threading.Lock] = collections.deque()  # what each one waits for
        self._coming_to_rest = threading.Lock()  # for one at a time: of two that see one too many, one goes on
        self._waits = 0  # of the consumer: a signal handler may wait inside another wait
        self._stopped = False

    def come(self, unfinished: int, waits: bool) -> None:
        """The consumer has come for a batch. ``leave()`` follows.

        Args:
            unfinished: batches that threads were asked for and have not loaded yet.
            waits: the batch is not there.
        """
        self._waits += waits
        if unfinished == 0:  # so if it waits, then for the copy
            self._enough.were_idle()
            return
        if waits and self._resting:
            self._enough.were_too_few()
        else:
            self._enough.were_busy()
        if waits or unfinished > 1:  # with two in the making it will wait soon
            self._call_back()

    def leave(self, waits: bool) -> None:
        """The consumer has the batch, or gave up."""
        self._waits -= waits

    def rest(self) -> None:
        """Waits while enough others are at work and the consumer does not wait. For a thread with nothing in hand."""
        with self._coming_to_rest:
            if self._is_needed() or self.size - len(self._resting) <= self._enough.threads:
                return
            called_back = threading.Lock()
            called_back.acquire()
            self._resting.append(called_back)
        if self._is_needed():  # since the first look: whoever says so has not seen this thread
            self._call_back()
        called_back.acquire()

    def stop(self) -> None:
        """Ends all rests. May be called from anywhere."""
        self._stopped = True
        self._call_back()

    def _is_needed(self) -> bool:
        return self._waits > 0 or self._stopped

    def _call_back(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._resting.pop().release()
