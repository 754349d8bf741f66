"""Of an epoch's sample threads as many load as the loop needs."""

import threading
import time

import pytest
from loaders import Ramp, eventually, threads, within
from torch.utils.data import DataLoader, default_collate

from gpuprefetch import PrefetchIterator
from gpuprefetch._crew import LEAST_PATIENCE, MOST_PATIENCE, Crew, Enough
from gpuprefetch._samples import Samples

pytestmark = pytest.mark.filterwarnings("ignore:with several num_threads")


def begun(size):
    """A crew whose loop has its first batch."""
    crew = Crew(Enough(size))
    takes(crew, unfinished=2, waits=True)
    return crew


@pytest.fixture
def crew():
    crew = begun(4)
    yield crew
    crew.stop()


def takes(crew, unfinished=0, waits=False):
    with crew:
        crew.adapt(unfinished, waits)


def is_idle(crew, batches=1):
    for _ in range(batches):
        takes(crew)


def rest(crew, count):
    """``count`` threads come to rest; the result is them."""
    made = [threading.Thread(target=crew.rest, name="test-hand", daemon=True) for _ in range(count)]
    for thread in made:
        before = resting(crew)
        thread.start()
        assert eventually(lambda thread=thread, before=before: not thread.is_alive() or resting(crew) > before)
    return made


def resting(crew):
    return len(crew._resting)


def all_go_on(made):
    return eventually(lambda: not any(thread.is_alive() for thread in made), collect=False)


def test_all_begin_at_work(crew):
    assert all_go_on(rest(crew, 4))


def test_one_rests_once_all_were_idle_for_some_batches(crew):
    is_idle(crew, LEAST_PATIENCE - 1)
    assert all_go_on(rest(crew, 4))
    is_idle(crew)
    rest(crew, 4)
    assert resting(crew) == 1


def test_threads_that_are_busy_when_a_batch_is_asked_for_are_not_idle(crew):
    for _ in range(5):
        is_idle(crew, LEAST_PATIENCE - 1)
        takes(crew, unfinished=1)
    assert all_go_on(rest(crew, 4))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_last_one_never_rests(size):
    crew = begun(size)
    is_idle(crew, 2 * size * LEAST_PATIENCE)
    made = rest(crew, size)
    assert resting(crew) == size - 1
    crew.stop()
    assert all_go_on(made)


def test_nobody_rests_while_the_loop_waits(crew):
    is_idle(crew, 3 * LEAST_PATIENCE)
    made = rest(crew, 4)
    assert resting(crew) == 3
    with crew:
        crew.adapt(unfinished=1, waits=True)
        assert resting(crew) == 0 and all_go_on(made)
        assert all_go_on(rest(crew, 4))
    rest(crew, 4)
    assert resting(crew) == 2, "one more is at work from then on"


def test_nobody_rests_before_the_first_batch_is_taken():
    crew = Crew(Enough(3))
    for _ in range(4 * LEAST_PATIENCE):
        crew._enough.were_idle()  # in an epoch before
    assert all_go_on(rest(crew, 3))
    with crew:
        crew.adapt(unfinished=2, waits=True)
        assert all_go_on(rest(crew, 3))
    made = rest(crew, 3)
    assert resting(crew) == 2, "and to wait for it was no mistake"
    crew.stop()
    assert all_go_on(made)


def test_of_two_that_come_to_rest_at_once_not_both_stay(crew):
    """Each has seen one too many, since the other was not on the list yet."""
    both = threading.Barrier(2)

    class Meeting(list):
        def append(self, called_back):
            both.wait(20)
            super().append(called_back)

    is_idle(crew, LEAST_PATIENCE)  # three are enough
    crew._resting = Meeting()
    made = [threading.Thread(target=crew.rest, daemon=True) for _ in range(2)]
    for thread in made:
        thread.start()
    assert eventually(lambda: sum(thread.is_alive() for thread in made) == resting(crew) <= 1, collect=False)


def test_what_runs_while_one_comes_to_rest_holds_up_no_other(crew):
    """A collection may: finalizers of the user's."""
    runs, may_end = threading.Event(), threading.Event()

    class Collecting(list):
        def append(self, called_back):
            if threading.current_thread() is held_up:
                runs.set()
                may_end.wait(20)
            super().append(called_back)

    is_idle(crew, 2 * LEAST_PATIENCE)
    crew._resting = Collecting()
    held_up = threading.Thread(target=crew.rest, daemon=True)
    held_up.start()
    assert runs.wait(20)
    (other,) = rest(crew, 1)
    assert resting(crew) == 1
    crew.stop()
    assert all_go_on([other]) and held_up.is_alive()
    may_end.set()
    assert all_go_on([held_up])


def test_an_interrupt_leaves_nobody_at_rest(crew):
    """Who is off the list was called back before."""
    calls = 0

    class Interrupting(list):
        def remove(self, called_back):
            nonlocal calls
            calls += 1
            super().remove(called_back)
            if calls == 1:
                raise KeyboardInterrupt

    is_idle(crew, 3 * LEAST_PATIENCE)
    crew._resting = Interrupting()
    made = rest(crew, 4)
    with pytest.raises(KeyboardInterrupt):
        takes(crew, unfinished=1, waits=True)
    crew.stop()
    assert all_go_on(made) and resting(crew) == 0 and calls == 3


def test_who_comes_to_rest_as_the_wait_begins_goes_on(crew, monkeypatch):
    """The loop looked at who rests before this thread did."""
    is_idle(crew, LEAST_PATIENCE)
    looks = iter([False, True])
    monkeypatch.setattr(crew, "_is_needed", lambda: next(looks))
    assert all_go_on(rest(crew, 1))
    assert list(looks) == []


def test_all_are_called_back_when_two_batches_are_in_the_making(crew):
    """Not only when the loop waits: with a long look-ahead that is late."""
    is_idle(crew, 2 * LEAST_PATIENCE)
    made = rest(crew, 4)
    takes(crew, unfinished=1)
    assert resting(crew) == 2
    takes(crew, unfinished=2)
    assert resting(crew) == 0 and all_go_on(made)
    rest(crew, 4)
    assert resting(crew) == 2, "as many as before are enough"


def test_nobody_is_called_back_for_what_is_loaded_already(crew):
    """It is on its way to the device: no sample thread can help."""
    is_idle(crew, LEAST_PATIENCE)
    rest(crew, 4)
    takes(crew, unfinished=0, waits=True)
    assert resting(crew) == 1


def test_after_each_mistake_it_takes_twice_as_long_until_one_rests(crew):
    patience = LEAST_PATIENCE
    while patience < MOST_PATIENCE:
        is_idle(crew, patience - 1)
        assert all_go_on(rest(crew, 4)), patience
        is_idle(crew)
        rest(crew, 4)
        assert resting(crew) == 1, patience
        takes(crew, unfinished=1, waits=True)
        patience *= 2
    for _ in range(3):
        is_idle(crew, MOST_PATIENCE)
        rest(crew, 4)
        assert resting(crew) == 1, "that is the most"
        takes(crew, unfinished=1, waits=True)


def test_to_wait_for_all_of_them_is_no_mistake(crew):
    for _ in range(10):
        takes(crew, unfinished=1, waits=True)
    is_idle(crew, LEAST_PATIENCE)
    rest(crew, 4)
    assert resting(crew) == 1


def test_who_would_rest_after_the_end_does_not(crew):
    is_idle(crew, LEAST_PATIENCE)
    crew.stop()
    assert all_go_on(rest(crew, 4))


# --- in an epoch


def prefetched(batches, num_threads=3, hook=lambda i: None, **options):
    def load(i):
        if i == 0:
            time.sleep(0.05)  # load, for which the loop has to wait
        hook(i)

    loader = DataLoader(Ramp(batches * num_threads, hook=load), batch_size=num_threads)
    return PrefetchIterator(loader, device="cpu", num_threads=num_threads, **options)


def is_loaded(epoch):
    samples = epoch._epoch._samples
    return samples.unfinished() == 0 and not epoch._epoch._ready.empty()


def until_resting(epoch, count):
    """The batches of a loop that waits for the first one, and then is so slow that all is loaded whenever it comes:
    until ``count`` threads rest."""
    drawn = [int(next(epoch)[0, 0])]
    while True:
        assert eventually(lambda: is_loaded(epoch), collect=False)
        crew = epoch._epoch._samples.crew
        if resting(crew) == count:
            return drawn
        drawn.append(int(next(epoch)[0, 0]))


@pytest.mark.parametrize("prefetch_batches", [1, 3])
def test_threads_that_the_loop_does_not_need_rest_until_it_waits(prefetch_batches):
    meeting, meets = threading.Barrier(3), threading.Event()
    hook = lambda i: meets.is_set() and meeting.wait(20)  # noqa: E731
    epoch = iter(prefetched(100, hook=hook, prefetch_batches=prefetch_batches))
    drawn = within(60, lambda: until_resting(epoch, 2))
    assert 2 * LEAST_PATIENCE <= len(drawn) < 90
    meets.set()  # from now on a sample is loaded by three threads or by none
    drawn += within(60, lambda: [int(batch[0, 0]) for batch in epoch])
    assert drawn == list(range(0, 300, 3))


def test_nobody_is_called_back_while_a_batch_is_ready_and_one_in_the_making():
    held, opened = threading.Event(), threading.Event()
    opened.set()

    def hook(i):
        if not opened.is_set():
            held.set()
            opened.wait(20)

    epoch = iter(prefetched(100, hook=hook))
    drawn = within(60, lambda: until_resting(epoch, 2))
    opened.clear()
    try:
        drawn.append(int(next(epoch)[0, 0]))
        assert held.wait(20)
        drawn.append(int(next(epoch)[0, 0]))
        assert resting(epoch._epoch._samples.crew) == 2
    finally:
        opened.set()
    drawn += within(60, lambda: [int(batch[0, 0]) for batch in epoch])
    assert drawn == list(range(0, 300, 3))


def test_the_next_epoch_knows_how_many_are_enough():
    batches = prefetched(100)
    epoch = iter(batches)
    within(60, lambda: until_resting(epoch, 2))
    epoch.close()
    assert enough(iter(batches)) == 1
    assert enough(iter(prefetched(100))) == 3, "that of another object does not"


def enough(epoch):
    return epoch._epoch._samples.crew._enough.threads


def indices(ends):
    yield [0]
    if ends == "by an error":
        raise ZeroDivisionError


@pytest.mark.parametrize("ends", ["by itself", "by an error"])
def test_what_is_asked_for_beyond_the_end_is_not_unfinished(ends, crew):
    samples = Samples(indices(ends), Ramp(1), default_collate, True, crew)
    for _ in range(5):
        samples.request()
    assert samples.unfinished() == 5
    thread = threading.Thread(target=samples.work, name="test-work", daemon=True)
    thread.start()
    assert eventually(lambda: samples.unfinished() == 0, collect=False)
    samples.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_the_beginning_and_the_end_of_an_epoch_tell_nothing():
    """Nothing is loaded yet, or any more, though it was asked for."""
    enough_for = Enough(4)
    for _ in range(LEAST_PATIENCE - 1):
        enough_for.were_idle()
    crew = Crew(enough_for)
    takes(crew, unfinished=2, waits=True)
    crew.stop()
    takes(crew, unfinished=1)
    enough_for.were_idle()
    assert enough_for.threads == 3


@pytest.mark.parametrize("how", ["close", "drop"])
def test_threads_that_rest_end_with_their_epoch(how):
    before = threads()
    epoch = iter(prefetched(100))
    within(60, lambda: until_resting(epoch, 2))
    if how == "close":
        within(20, epoch.close)
    epoch = None
    assert eventually(lambda: threads() <= before)
