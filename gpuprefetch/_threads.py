"""Daemon threads of our own, stopped and joined before the interpreter goes.

Not ``concurrent.futures``: its threads are joined without a limit at exit, so a dataset that blocks in one keeps the
process from ending.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import itertools
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from gpuprefetch import _copier, _extension

JOIN_SECONDS = 2.0
"""How long a thread that is inside the user's code is waited for."""

SLICE_SECONDS = 0.1
"""On Windows a lock that is waited for can't be interrupted: Ctrl-C arrives between two slices of so long."""

WITHIN_NEXT = (
    "next() of an epoch can't be called by what it runs itself: the dataset that it loads, a signal handler or a "
    "finalizer"
)

T = TypeVar("T")

_LATER_SECONDS = 0.05  # until an interrupt is raised again
_LOOK_SECONDS = 0.05  # at exit: how often threads that were just started are looked for

_pid = os.getpid()
_numbers = itertools.count(1)
_running: dict[Worker, Callable[[], None]] = {}  # and how to tell each to stop


class Worker:
    """A daemon thread that can be told to stop.

    Args:
        name: what the thread does, a part of its name.
        run: the thread's work, a method of the worker's owner. Held weakly until the thread runs: one that never starts
            would keep both until a collection.
        arguments: of ``run``.
    """

    def __init__(self, name: str, run: Callable[..., None], *arguments: object) -> None:
        self.thread = threading.Thread(
            target=_work,
            args=(weakref.ref(self), weakref.WeakMethod(run), arguments),
            name=f"gpuprefetch-{name}-{next(_numbers)}",
            daemon=True,
        )
        self.left_behind = False

    def start(self, stop: Callable[[], None]) -> None:
        """Starts the thread. ``stop`` makes its work return soon, whatever it waits for, and may be called anywhere."""
        _running[self] = stop
        try:
            self.thread.start()
        except BaseException:
            if not self.thread.is_alive():  # it may be, where Ctrl-C arrived
                _running.pop(self, None)
            raise

    def join(self, deadline: float) -> None:
        """Waits for the end of the thread, which was told to stop, but not beyond ``deadline``."""
        with contextlib.suppress(RuntimeError):  # not started yet: it will see that it was stopped
            self.thread.join(max(0.0, deadline - time.monotonic()))


def _work(
    worker_ref: weakref.ref[Worker], run_ref: weakref.WeakMethod[Callable[..., None]], arguments: tuple[object, ...]
) -> None:
    worker, run = worker_ref(), run_ref()
    try:
        if run is not None:  # None: the start was interrupted, and all was dropped before the thread ran
            run(*arguments)
    finally:
        if worker is not None:
            _running.pop(worker, None)


def end(workers: Iterable[Worker], deadline: float) -> None:
    """Joins threads that were told to stop. Those still busy at ``deadline`` are left behind, with one warning."""
    current = threading.current_thread()
    joined = [worker for worker in workers if not worker.left_behind and worker.thread is not current]
    for worker in joined:
        worker.join(deadline)
    busy = [worker for worker in joined if worker.thread.is_alive()]
    for worker in busy:
        worker.left_behind = True
    if busy:
        warnings.warn(
            f"not stopped within {JOIN_SECONDS:.0f} s, so left behind: {where_they_stand(busy)}",
            RuntimeWarning,
            stacklevel=3,
        )


def deadline() -> float:
    """When, on the monotonic clock, threads that are told to stop now are given up."""
    return time.monotonic() + JOIN_SECONDS


def where_they_stand(workers: Iterable[Worker]) -> str:
    """The threads' names and stacks, each stack once."""
    names: dict[str, list[str]] = {}
    for worker in workers:
        names.setdefault(_stack(worker.thread.ident), []).append(repr(worker.thread.name))
    return "".join(
        f"thread {of[0]} stands at:\n{stack}" if len(of) == 1 else f"threads {', '.join(of)} stand at:\n{stack}"
        for stack, of in names.items()
    )


def _stack(ident: int | None) -> str:
    # All frames in a variable would be a cycle through this one, and keep what the caller's frames hold.
    frame = None if ident is None else sys._current_frames().get(ident)
    if frame is None:
        return "  (not started)\n" if ident is None else "  (ended)\n"
    return "".join(traceback.format_stack(frame))


def interrupt_later() -> None:
    """Ctrl-C anew in the main thread, once the finalizer that it arrived in has ended: raised there it goes nowhere."""
    timer = threading.Timer(_LATER_SECONDS, _interrupt)
    timer.daemon = True
    timer.start()


def _interrupt() -> None:
    main = threading.main_thread().ident
    while _is_in_finalizer(main):  # still, on a busy machine
        time.sleep(_LATER_SECONDS)
    if hasattr(signal, "pthread_kill") and main is not None and callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(main, signal.SIGINT)  # which ends a wait of the system's, too
    else:
        _thread.interrupt_main()


def _is_in_finalizer(ident: int | None) -> bool:
    frame = None if ident is None else sys._current_frames().get(ident)
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


class Mailbox(Generic[T]):
    """A SimpleQueue with a time limit that holds: before Python 3.13 a SimpleQueue's own is lost where a signal handler
    takes longer than what is left of it, and then the wait never ends. ``put()`` is re-entrant, too.

    For one reader: of two that wait, one may learn of an item when its time is over.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self.empty = self._items.empty

    def put(self, item: T) -> None:
        self._items.put(item)
        with contextlib.suppress(RuntimeError):  # the reader has been told already
            self._arrived.release()

    def get(self, timeout: float = 0) -> T:
        """Raises queue.Empty after ``timeout`` seconds, or earlier."""
        if self._items.empty():
            self._arrived.acquire(timeout=timeout)
        return self._items.get_nowait()


class _Turn:
    """A lock that knows who has it. A re-entrant one, for a signal handler that runs where nobody knows yet."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holder: int | None = None

    def release(self) -> None:
        self.holder = None
        self.lock.release()


class Turns:
    """A lock that is waited for in slices, and refused to what its own holder runs. A forked child has a new one."""

    def __init__(self) -> None:
        self._turn, self._process = _Turn(), os.getpid()

    def acquired(self, gives_up: Callable[[], bool] = lambda: False) -> Any:
        """The lock, for the caller to release, or None where it gave up.

        It is no context manager of contextlib's: those write to the errors that pass, and a user's may be frozen.
        """
        if self._process != os.getpid():  # it may be held by a thread that the fork has left behind
            self._turn, self._process = _Turn(), os.getpid()
        turn, current = self._turn, threading.get_ident()
        while turn.holder == current or not turn.lock.acquire(timeout=SLICE_SECONDS):
            if gives_up():
                return None
            if turn.holder == current:
                raise RuntimeError(WITHIN_NEXT)
        turn.holder = current
        return turn


def on_one() -> bool:
    """True on a thread of ours."""
    current = threading.current_thread()
    return any(worker.thread is current for worker in list(_running))


def _stop_all(end_by: float) -> set[Worker]:
    """Tells all threads to end, and those that they start before they see it: the next one of their epoch, or a whole
    epoch that a dataset begins. Waits for them until ``end_by``; the result is all of them."""
    stopped: set[Worker] = set()
    while True:
        # One that was left behind earlier may have come back: it must not outlive the interpreter. These first: what
        # one that has ended began is in the look at all that follows.
        alive = [worker for worker in stopped if worker.thread.is_alive()]
        begun = {worker: stop for worker, stop in dict(_running).items() if worker not in stopped}
        for stop in begun.values():
            stop()
        stopped.update(begun)
        if time.monotonic() > end_by or not (alive or begun):
            return stopped
        for worker in alive[:1]:
            worker.join(min(end_by, time.monotonic() + _LOOK_SECONDS))


@atexit.register
def _end_all() -> None:
    # Here and not in destructors: those run when the driver and the interpreter may be gone, on Windows under the
    # loader lock.
    end_by = deadline()
    workers = _stop_all(end_by)
    is_parent = os.getpid() == _pid  # a forked child has neither the pool's threads nor the device
    try:
        end(workers, end_by)  # whose warning may be an error
        if is_parent and not any(worker.thread.is_alive() for worker in workers):
            _copier.close_all()
    finally:
        if is_parent:
            _extension.shutdown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # a child has no thread of its parent's
