"""How many of an epoch's sample threads load, and where the others rest meanwhile.

Threads that load faster than the loop needs gain nothing, and take the GIL from its step, and from each other, whenever
a sample has let go of it. So one of them rests once all were idle for some batches in a row. Where that was one too
many, loading falls behind, and all are called back; while the loop waits nobody rests.
"""

from __future__ import annotations

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
    """The threads of an epoch, all of which begin at work. In a block of ``with`` the consumer takes a batch: nobody
    comes to rest then, nor before the first one.

    The consumer takes no lock here: a signal handler may stop the epoch, in the middle of any line.
    """

    def __init__(self, enough: Enough) -> None:
        self.size = enough.most
        self._enough = enough
        self._resting: list[threading.Lock] = []  # what each one waits for
        self._takes = False
        self._has_taken = False
        self._stopped = False

    def __enter__(self) -> Crew:
        self._takes = True
        return self

    def __exit__(self, *_: object) -> None:
        self._has_taken = True
        self._takes = False

    def adapt(self, unfinished: int, waits: bool) -> None:
        """Learns what was enough, and calls back who is needed. At the beginning of the block.

        Args:
            unfinished: batches that threads were asked for and have not loaded yet.
            waits: the batch is not there.
        """
        if not self._has_taken or self._stopped:
            pass  # the beginning and the end tell nothing
        elif unfinished == 0:  # so if it waits, then for the copy
            self._enough.were_idle()
        else:
            if waits and self._resting:
                self._enough.were_too_few()
            else:
                self._enough.were_busy()
            if waits or unfinished > 1:  # with two in the making it will wait soon
                self._call_back()

    def rest(self) -> None:
        """Waits while enough others are at work and the consumer takes no batch. For a thread with nothing in hand."""
        if self._is_needed() or self.size - len(self._resting) <= self._enough.threads:
            return
        called_back = threading.Lock()
        called_back.acquire()
        self._resting.append(called_back)
        # Others may have come to rest meanwhile, or the consumer for a batch: who has not seen this one is seen by it.
        # No lock instead: a collection may run code of the user's in it, and nobody could end that wait.
        if self._is_needed() or self.size - len(self._resting) < self._enough.threads:
            with contextlib.suppress(ValueError):  # called back already
                self._resting.remove(called_back)
            return
        called_back.acquire()

    def stop(self) -> None:
        """Ends all rests. May be called from anywhere."""
        self._stopped = True
        self._call_back()

    def _is_needed(self) -> bool:
        return self._takes or not self._has_taken or self._stopped

    def _call_back(self) -> None:
        """Ctrl-C may arrive after any call: one that was called back and is still listed is no harm, the reverse is."""
        for called_back in self._resting[:]:
            with contextlib.suppress(RuntimeError):  # called back already
                called_back.release()
            with contextlib.suppress(ValueError):  # off the list already
                self._resting.remove(called_back)
