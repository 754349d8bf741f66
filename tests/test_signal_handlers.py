"""A signal handler may draw from the epoch, at any point of the ``next()`` that it interrupts.

No signal is sent: the handler is called where one would run, in the middle of the main thread's code.
"""

import itertools

import pytest
from loaders import THREADS, Gate, Ramp, vals, within
from torch.utils.data import DataLoader

from gpuprefetch import PrefetchIterator, _threads

pytestmark = [pytest.mark.windows, pytest.mark.usefixtures("nothing_is_left")]

BESIDE = [threads for threads in THREADS if threads > 0]


def epoch_of(n, num_threads, hook=None, **options):
    return iter(PrefetchIterator(DataLoader(Ramp(n, hook=hook)), "cpu", num_threads=num_threads, **options))


@pytest.mark.parametrize("num_threads", THREADS)
def test_as_a_batch_is_taken(num_threads, as_it_is_taken):
    it, drawn = epoch_of(6, num_threads), []
    as_it_is_taken(lambda record: record.number == 1, lambda: drawn.extend(vals([next(it)])))
    assert within(20, lambda: vals(it)) == [0, 1, 3, 4, 5]
    assert drawn == [2]


@pytest.mark.parametrize("num_threads", THREADS)
def test_as_the_end_is_taken(num_threads, as_it_is_taken):
    it, drawn = epoch_of(3, num_threads), []
    as_it_is_taken(lambda record: record.ended, lambda: drawn.append(next(it, "ended")))
    assert within(20, lambda: vals(it)) == [0, 1, 2]
    assert drawn == ["ended"]


@pytest.mark.parametrize("num_threads", THREADS)
def test_as_an_error_is_taken(num_threads, as_it_is_taken):
    def fail(i):
        if i == 2:
            raise LookupError(i)

    it, drawn = epoch_of(9, num_threads, fail), []
    as_it_is_taken(lambda record: record.error is not None, lambda: drawn.extend(vals(itertools.islice(it, 1))))
    assert within(20, lambda: vals(itertools.islice(it, 2))) == [0, 1]
    with pytest.raises(LookupError):
        within(20, lambda: next(it))
    assert drawn == ([3] if num_threads == 0 else [])  # without a thread loading goes on inside the handler
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("num_threads", BESIDE)
def test_a_time_out_of_the_handlers_own_ends_the_epoch(num_threads, ahead, as_it_is_taken):
    """It goes up through the ``next()`` that has taken a batch. Would that go on, the batch were missing."""
    with Gate(at=3) as gate:
        it = epoch_of(6, num_threads, gate, prefetch_batches=ahead, timeout=0.3)
        as_it_is_taken(lambda record: record.number == 2, lambda: next(it))
        assert vals(itertools.islice(it, 2)) == [0, 1]
        with pytest.raises(TimeoutError):
            within(20, lambda: next(it))
        assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", BESIDE)
def test_during_a_time_out_of_the_loops(num_threads, monkeypatch):
    """The handler gets the batch, and the loop goes on behind it."""
    stand, drawn = _threads.where_they_stand, []

    def interrupted(workers):
        gate.opened.set()
        drawn.extend(vals([next(it)]))
        return stand(workers)

    with Gate(at=2) as gate:
        it = epoch_of(6, num_threads, gate, timeout=0.3)
        assert vals(itertools.islice(it, 2)) == [0, 1]
        monkeypatch.setattr(_threads, "where_they_stand", interrupted)
        with pytest.raises(TimeoutError):
            within(20, lambda: next(it))
        assert drawn == [2]
        assert within(20, lambda: vals(it)) == [3, 4, 5]


@pytest.mark.parametrize("num_threads", THREADS)
def test_as_the_loop_begins_its_epoch(num_threads):
    """Both draw from the one that the handler has begun."""
    drawn = []

    class Sampler:
        def __len__(self):
            return 5

        def __iter__(self):
            if not drawn:
                drawn.append("begun")
                drawn.extend(vals([next(p)]))
            return iter(range(5))

    p = PrefetchIterator(DataLoader(Ramp(5), sampler=Sampler()), "cpu", num_threads=num_threads)
    assert within(20, lambda: vals(itertools.islice(iter(lambda: next(p, None), None), 5))) == [1, 2, 3, 4]
    assert drawn == ["begun", 0]
    p.close()
