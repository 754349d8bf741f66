"""Ctrl-C ends the epoch that it comes in, wherever it comes, and is not lost."""

import _thread
import itertools
import os
import queue
import signal
import sys
import threading

import pytest
from loaders import Gate, Ramp, eventually, stands_in, threads, vals, within
from torch.utils.data import DataLoader

from gpuprefetch import DataLoaderX, PrefetchIterator, _threads
from gpuprefetch._epoch import Epoch
from gpuprefetch._iterator import EpochIterator
from gpuprefetch._threads import SLICE_SECONDS, Mailbox, interrupt_later

pytestmark = pytest.mark.windows


def test_an_interrupted_epoch_has_ended_and_a_new_one_works():
    with Gate(at=1) as gate:
        hooks = [gate]
        p = PrefetchIterator(DataLoader(Ramp(5, hook=lambda i: hooks and hooks[0](i)), batch_size=1), device="cpu")
        it = iter(p)
        assert vals([next(it)]) == [0]
        assert gate.reached.wait(20)

        def interrupt():
            assert stands_in("_wait", threading.main_thread())
            _thread.interrupt_main()

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            next(it)
        assert next(it, "ended") == "ended"
        hooks.clear()
        gate.opened.set()
        assert vals(p) == [0, 1, 2, 3, 4]
        del it
    assert eventually(lambda: not threads())


def ctrl_c():
    """As the terminal sends it: it ends a wait of the system's, too."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:
        _thread.interrupt_main()


def test_a_mailbox_wakes_its_reader_at_once():
    mailbox, readers = Mailbox(), []

    def read():
        readers.append(threading.current_thread())
        return mailbox.get(timeout=600)

    def put():
        assert eventually(lambda: readers) and stands_in("get", readers[0])
        mailbox.put("item")

    threading.Thread(target=put, daemon=True).start()
    assert within(40, read) == "item"
    mailbox.put("item")
    assert mailbox.get() == "item"
    with pytest.raises(queue.Empty):  # at once, by the item that was there before the reader
        within(40, lambda: mailbox.get(timeout=600))
    with pytest.raises(queue.Empty):
        mailbox.get(timeout=0.01)


@pytest.fixture
def on_alarm():
    """Has a function called by a signal as soon as the main thread waits for a batch."""
    before = signal.getsignal(signal.SIGALRM)

    def send():
        assert stands_in("_wait", threading.main_thread())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    def arrange(function):
        signal.signal(signal.SIGALRM, lambda *_: function())
        threading.Thread(target=send, daemon=True).start()

    yield arrange
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="the system has no signals for threads")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_signal_handler_may_close_the_epoch_that_its_loop_waits_for(num_threads, on_alarm):
    """It takes longer than a slice: the thread is inside a sample."""
    with Gate(at=1) as gate:
        p = PrefetchIterator(DataLoader(Ramp(9, hook=gate)), "cpu", num_threads=num_threads)
        it = iter(p)
        assert vals([next(it)]) == [0]
        on_alarm(p.close)
        with pytest.warns(RuntimeWarning, match="left behind"):
            assert next(it, "ended") == "ended"


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="the system has no signals for threads")
def test_a_slow_signal_handler_does_not_lift_the_time_limit(on_alarm):
    handled = threading.Event()
    with Gate(at=1) as gate:
        it = iter(PrefetchIterator(DataLoader(Ramp(9, hook=gate)), "cpu", timeout=1))
        assert vals([next(it)]) == [0]
        on_alarm(lambda: (threading.Event().wait(3 * SLICE_SECONDS), handled.set()))
        with pytest.raises(TimeoutError):
            next(it)
        assert handled.is_set()


def test_an_interrupt_that_was_put_off_waits_for_the_end_of_its_finalizer(monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_type))

    class Finalized:
        def __del__(self):
            interrupt_later()
            threading.Event().wait(5 * _threads._LATER_SECONDS)  # as on a busy machine

    with pytest.raises(KeyboardInterrupt):
        Finalized()
        threading.Event().wait(20)
    assert ignored == []


@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize(
    "make", [lambda data: PrefetchIterator(DataLoader(data), "cpu"), lambda data: DataLoaderX(0, data)]
)
def test_ctrl_c_while_close_waits_is_raised_by_it(make, implicit):
    with Gate(at=1) as gate:
        batches = make(Ramp(5, hook=gate))
        drawn_from = batches if implicit else iter(batches)
        assert vals([next(drawn_from)]) == [0]
        assert gate.reached.wait(20)

        def interrupt():
            assert stands_in("join", threading.main_thread())
            ctrl_c()

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            getattr(batches, "shutdown" if isinstance(batches, DataLoaderX) else "close")()
    assert eventually(lambda: not threads())


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="the system has no signals for threads")
def test_ctrl_c_in_a_finalizer_comes_later_and_ends_a_wait():
    read, write = os.pipe()
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_later()
            os.read(read, 1)  # which nothing but a signal ends
    finally:
        os.close(read), os.close(write)


@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_ctrl_c_before_the_first_line_of_a_finalizer_leaves_no_thread(num_threads, interrupted_finalizer):
    prefetched = PrefetchIterator(DataLoader(Ramp(400), batch_size=4), "cpu", num_threads=num_threads)
    epoch = iter(prefetched)
    next(epoch)
    with interrupted_finalizer():
        del epoch
    assert eventually(lambda: not threads())


@pytest.mark.parametrize(
    ("function", "event_wanted", "of_the_rank"),
    [
        *itertools.product([Epoch.take, Epoch._take], ["call"], [False, True]),
        *itertools.product([Epoch._take], ["return"], [False, True]),
        (EpochIterator.__next__, "return", True),  # behind the last line that could catch it but for DataLoaderX's
    ],
)
def test_ctrl_c_in_next_ends_the_epoch_although_its_traceback_is_kept(function, event_wanted, of_the_rank):
    """As a notebook keeps it."""
    calls = itertools.count(1)

    def interrupt(frame, event, argument):
        if event == event_wanted and frame.f_code is function.__code__ and next(calls) == 3:
            sys.setprofile(None)
            raise KeyboardInterrupt

    loader = DataLoader(Ramp(400), batch_size=2)
    prefetched = DataLoaderX(0, Ramp(400), batch_size=2) if of_the_rank else PrefetchIterator(loader, "cpu")
    kept = None
    sys.setprofile(interrupt)
    try:
        for _ in prefetched:
            pass
    except KeyboardInterrupt as error:
        kept = error
    finally:
        sys.setprofile(None)
    assert kept is not None and eventually(lambda: not threads())


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_an_epoch_has_one_finalizer(num_threads, finalizers):
    prefetched = PrefetchIterator(DataLoader(Ramp(40), batch_size=4), "cpu", num_threads=num_threads)
    with finalizers() as called:
        list(prefetched)
    assert called == {"EpochIterator"}
