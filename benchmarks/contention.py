"""What the threads that load take from the training loop, and what helps: gpuprefetch with 8 threads as it is, and with
one thing changed in each further row, beside worker processes.

    python benchmarks/contention.py --step resnet50 --decoder pil --batch-size 64 --json out.json

Takes the arguments of throughput.py, and prints and writes what that does. Rows of 8 threads spread by a fifth: ask for
7 repeats. With --sync-every-step the row `pausing` means nothing: its pause lasts until the step is done.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import throughput
from output import start
from rows import ROWS, Loader, Opened, Row, gathered, row
from target import Target
from workloads import MakeImage, make_loader

THREADS = 8
BESIDE = ("workers8", "gpuprefetch4", "gpuprefetch8", "gpuprefetch15")
TRIALS: dict[str, Row] = {}  # rows of throughput.py while main() runs only

LONGEST_PAUSE_SECONDS = 0.05  # of a sample: a loop that saves a checkpoint between two batches stops nothing
NICENESS = 10

prefetched = contextlib.contextmanager(throughput.ours.prefetched)


def trial(
    name: str,
    description: str,
    missing: Callable[[Target], str | None] = lambda target: None,
    at_work: int = THREADS,
) -> Callable[[Callable[[Loader, Target, int], Opened]], None]:
    """Make the decorated function a row of TRIALS: gpuprefetch with 8 threads, of which `at_work` load at a time, and
    one thing changed."""
    name = f"gpuprefetch{THREADS}-{name}"  # no digit at its end, which would be a number of threads
    described = f"gpuprefetch{THREADS}, {description}"

    def register(make: Callable[[Loader, Target, int], Opened]) -> None:
        row(name, described, bound=gathered(at_work), loads_beside=True, default=False, missing=missing)(make)
        trial_row = ROWS.pop(name)
        assert isinstance(trial_row, Row)
        TRIALS[name] = trial_row

    return register


def samples_a_task(size: int, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    """In the epochs of this row alone: others are open at the same time."""
    from gpuprefetch._samples import Samples

    class Sliced(Samples):
        def _slice_size(self, samples: int) -> int:
            return size

    with prefetched(THREADS, loader, target, prefetch_batches) as batches:
        yield EachEpoch(batches, iter, mock.patch("gpuprefetch._source.Samples", Sliced))


for size in (1, 4, 8, 16):
    trial(f"{size}-a-task", f"{size} samples a task")(functools.partial(samples_a_task, size))


@trial("half-if-ready", "a batch is split among half of the threads, unless the loop waits for one")
def half_if_ready(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from gpuprefetch._crew import Crew
    from gpuprefetch._samples import Samples

    class Seen(Crew):
        waits = True  # for the first one

        def adapt(self, unfinished: int, waits: bool) -> None:
            self.waits = waits
            super().adapt(unfinished, waits)

    class Sliced(Samples):
        def _slice_size(self, samples: int) -> int:
            assert isinstance(self.crew, Seen)
            return super()._slice_size(samples) * (1 if self.crew.waits else 2)

    with prefetched(THREADS, loader, target, prefetch_batches) as batches:
        yield EachEpoch(batches, iter, mock.patch.multiple("gpuprefetch._source", Crew=Seen, Samples=Sliced))


def threads_inside(most: int, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    turns = threading.Semaphore(most)
    with prefetched(THREADS, around_each_sample(loader, lambda: turns), target, prefetch_batches) as batches:
        yield batches


for most in (2, 4):
    inside = trial(f"{most}-inside", f"at most {most} threads inside dataset[i], with or without the GIL", at_work=most)
    inside(functools.partial(threads_inside, most))


def switch_interval(seconds: float, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    def switching(epoch: Iterator[Any]) -> Iterator[Any]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(seconds)
        try:
            yield from epoch
        finally:
            sys.setswitchinterval(before)

    with prefetched(THREADS, loader, target, prefetch_batches) as batches:
        yield EachEpoch(batches, switching)


for milliseconds in (0.02, 0.5, 20):
    trial(f"{milliseconds}ms-switch", f"a switch interval of {milliseconds} ms in place of 5")(
        functools.partial(switch_interval, milliseconds * 1e-3)
    )


@trial("none-resting", "no thread rests while the loop waits for none")
def none_resting(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from gpuprefetch._crew import Crew

    class NoneRests(Crew):
        def rest(self) -> None:
            pass

    with prefetched(THREADS, loader, target, prefetch_batches) as batches:
        yield EachEpoch(batches, iter, mock.patch("gpuprefetch._source.Crew", NoneRests))


@trial("pausing", "no sample begins while the loop launches its step and has the next batch ready")
def pausing(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    may_begin = threading.Event()
    may_begin.set()

    @contextlib.contextmanager
    def begun() -> Iterator[None]:
        may_begin.wait(LONGEST_PAUSE_SECONDS)
        yield

    def holding(epoch: Any) -> Iterator[Any]:
        try:
            for batch in epoch:
                if not epoch._epoch._ready.empty():
                    may_begin.clear()
                yield batch
                may_begin.set()
        finally:
            may_begin.set()

    with prefetched(THREADS, around_each_sample(loader, begun), target, prefetch_batches) as batches:
        yield EachEpoch(batches, holding)


@trial("1-intra-op", "1 of torch's intra-op threads for each sample thread, as in a worker process")
def one_intra_op_thread(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from gpuprefetch._environment import Environment

    class Alone(Environment):
        def entered(self, sharing: int = 1) -> contextlib.AbstractContextManager[None]:
            return super().entered(1 if sharing == 1 else sys.maxsize)

    with prefetched(THREADS, loader, target, prefetch_batches) as batches:
        yield EachEpoch(batches, iter, mock.patch("gpuprefetch._iterator.Environment", Alone))


def priority_is_the_process(target: Target) -> str | None:
    return None if sys.platform == "linux" else "only Linux has a niceness for each thread"


@trial("nice", f"sample threads of niceness {NICENESS}", missing=priority_is_the_process)
def nice(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    local = threading.local()

    @contextlib.contextmanager
    def begun() -> Iterator[None]:
        if not hasattr(local, "is_nice") and threading.current_thread() is not threading.main_thread():
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            local.is_nice = True
        yield

    with prefetched(THREADS, around_each_sample(loader, begun), target, prefetch_batches) as batches:
        yield batches


class EachEpoch:
    """`batches`, each epoch of which goes through `wrap`, and is begun in `context`."""

    def __init__(self, batches: Iterable[Any], wrap: Callable[[Any], Iterator[Any]], context: Any = None) -> None:
        self._batches, self._wrap = batches, wrap
        self._context = contextlib.nullcontext() if context is None else context

    def __iter__(self) -> Iterator[Any]:
        with self._context:
            epoch: Any = iter(self._batches)
        with contextlib.closing(epoch):
            yield from self._wrap(epoch)


def around_each_sample(loader: Loader, context: Callable[[], Any]) -> Loader:
    """The same batches, each sample made inside a `context()`."""
    make: MakeImage = loader.dataset.make

    def made(index: int) -> Any:
        with context():
            return make(index)

    return make_loader(made, loader.batch_size, len(loader))


def main(arguments: list[str]) -> int:
    with mock.patch.dict(ROWS, TRIALS):
        options = throughput.parse_arguments(["--loaders", ",".join([*BESIDE, *TRIALS]), *arguments])
        return throughput.main(options, "contention")


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]))
