"""What next() runs in the middle of itself can't draw from the same epoch: a signal handler, a finalizer, the dataset.

But for one test no signal is sent: the handler is called where one would run, in the middle of the main thread's code.
"""

import itertools
import signal
import threading

import pytest
from loaders import THREADS, Gate, Ramp, stands_in, vals, within
from torch.utils.data import DataLoader

from gpuprefetch import DataLoaderX, PrefetchIterator, _threads

pytestmark = [pytest.mark.windows, pytest.mark.usefixtures("nothing_is_left")]

BESIDE = [threads for threads in THREADS if threads > 0]
AHEAD = [1, 2]
REFUSED = r"next\(\) of an epoch can't be called by what it runs itself"


def prefetched(n, num_threads, hook=None, **options):
    return PrefetchIterator(DataLoader(Ramp(n, hook=hook)), "cpu", num_threads=num_threads, **options)


def refused(draw):
    with pytest.raises(RuntimeError, match=REFUSED):
        draw()


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("num_threads", THREADS)
def test_who_catches_the_error_leaves_the_epoch_whole(num_threads, ahead, as_it_is_taken):
    it = iter(prefetched(6, num_threads, prefetch_batches=ahead))
    as_it_is_taken(lambda record: record.number == 1, lambda: refused(lambda: next(it)))
    assert within(20, lambda: vals(it)) == list(range(6))


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("num_threads", THREADS)
def test_who_does_not_ends_it_with_that_error(num_threads, ahead, as_it_is_taken):
    """It has gone through the ``next()`` that has taken a batch: would the epoch go on, that were missing."""
    it = iter(prefetched(6, num_threads, prefetch_batches=ahead))
    as_it_is_taken(lambda record: record.number == 1, lambda: next(it))
    assert within(20, lambda: vals(itertools.islice(it, 1))) == [0]
    with pytest.raises(RuntimeError, match=REFUSED):
        within(20, lambda: next(it))
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", THREADS)
def test_as_the_end_is_taken(num_threads, as_it_is_taken):
    it = iter(prefetched(3, num_threads))
    as_it_is_taken(lambda record: record.ended, lambda: refused(lambda: next(it)))
    assert within(20, lambda: vals(it)) == [0, 1, 2]


@pytest.mark.parametrize("num_threads", THREADS)
def test_as_an_error_is_taken(num_threads, as_it_is_taken):
    def fail(i):
        if i == 2:
            raise LookupError(i)

    it = iter(prefetched(9, num_threads, fail))
    as_it_is_taken(lambda record: record.error is not None, lambda: refused(lambda: next(it)))
    assert within(20, lambda: vals(itertools.islice(it, 2))) == [0, 1]
    with pytest.raises(LookupError):
        within(20, lambda: next(it))
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", BESIDE)
def test_during_a_time_out(num_threads, monkeypatch):
    stand = _threads.where_they_stand

    def interrupted(workers):
        gate.opened.set()
        refused(lambda: next(it))
        return stand(workers)

    with Gate(at=2) as gate:
        it = iter(prefetched(6, num_threads, gate, timeout=0.3))
        assert vals(itertools.islice(it, 2)) == [0, 1]
        monkeypatch.setattr(_threads, "where_they_stand", interrupted)
        with pytest.raises(TimeoutError):
            within(20, lambda: next(it))
        assert within(20, lambda: vals(it)) == [2, 3, 4, 5]


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows sends no signal to a thread")
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("num_threads", THREADS)
def test_a_signal_while_the_loop_waits(num_threads, ahead):
    loop, told = threading.current_thread(), []

    def send(i):
        if i == 3:
            assert threading.current_thread() is loop or stands_in("_wait", loop)
            signal.pthread_kill(loop.ident, signal.SIGUSR1)

    def draw(*_):
        refused(lambda: next(it))
        told.append(True)

    it = iter(prefetched(6, num_threads, send, prefetch_batches=ahead))
    before = signal.signal(signal.SIGUSR1, draw)
    try:
        assert vals(it) == list(range(6))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [True]


@pytest.mark.parametrize("num_threads", THREADS)
def test_another_epoch_is_free(num_threads, as_it_is_taken):
    p, drawn = prefetched(6, num_threads), []
    it = iter(p)
    as_it_is_taken(lambda record: record.number == 1, lambda: drawn.extend(vals(p)))
    assert within(20, lambda: vals(it)) == drawn == list(range(6))


@pytest.mark.parametrize("num_threads", THREADS)
def test_close_ends_it_quietly(num_threads, as_it_is_taken):
    p = prefetched(6, num_threads)
    it = iter(p)
    as_it_is_taken(lambda record: record.number == 1, lambda: (p.close(), next(it, "ended")))
    assert within(20, lambda: vals(it)) in ([0], [0, 1])  # the one that was taken may still be given


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("at", [0, 2, 4])
def test_the_dataset(at, num_threads):
    begun = threading.Event()

    def hook(i):
        if i == at:
            assert begun.wait(20)
            next(it)

    it = iter(prefetched(5, num_threads, hook))
    begun.set()
    assert within(20, lambda: vals(itertools.islice(it, at))) == list(range(at))
    with pytest.raises(RuntimeError, match=REFUSED):
        within(20, lambda: next(it))
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("catches", [True, False])
@pytest.mark.parametrize("wrap", [PrefetchIterator, DataLoaderX])
def test_as_next_of_the_loader_begins_an_epoch(wrap, catches, num_threads):
    drawn = []

    class Sampler:
        def __len__(self):
            return 5

        def __iter__(self):
            if not drawn:
                drawn.append(True)
                refused(draw) if catches else draw()
            return iter(range(5))

    def draw():
        return next(loader)

    if wrap is PrefetchIterator:
        loader = PrefetchIterator(DataLoader(Ramp(5), sampler=Sampler()), "cpu", num_threads=num_threads)
    else:
        loader = DataLoaderX(0, dataset=Ramp(5), sampler=Sampler(), num_workers=num_threads)
    try:
        if catches:
            assert within(20, lambda: vals(draw() for _ in range(5))) == [0, 1, 2, 3, 4]
        else:  # an error of the first batch, as any that the sampler raises
            refused(lambda: within(20, draw))
        with pytest.raises(StopIteration):
            draw()
    finally:
        loader.close() if wrap is PrefetchIterator else loader.shutdown()
