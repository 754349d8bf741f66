"""Break, error, garbage collection and close() each end the threads and free the memory, in time."""

import gc
import threading
import time
import warnings
import weakref

import pytest
import torch
from loaders import THREADS, Gate, Ramp, eventually, handles, threads, vals, within
from torch.utils.data import DataLoader, IterableDataset

from gpuprefetch import PrefetchIterator, _threads

pytestmark = pytest.mark.windows


class Source:
    """Endless batches from a generator that says when it is closed. Held here too: dropping it does not close it."""

    def __init__(self):
        self.begun = []
        self.closed = threading.Event()

    def __iter__(self):
        self.begun.append(self._batches())
        return self.begun[-1]

    def _batches(self):
        i = 0
        try:
            while True:
                yield torch.tensor([i])
                i += 1
        except GeneratorExit:
            self.closed.set()
            raise


@pytest.fixture
def before():
    """The package's threads that other tests left."""
    gc.collect()
    return threads()


@pytest.fixture
def hasty(monkeypatch):
    """A thread in the user's code is waited for 0.3 s."""
    monkeypatch.setattr(_threads, "JOIN_SECONDS", 0.3)


# --- epochs that are left


@pytest.mark.parametrize("num_threads", THREADS)
def test_abandoned_epochs_leave_nothing(num_threads, before):
    data = Ramp(1000)
    ref = weakref.ref(data)
    for _ in range(50):
        for batch in PrefetchIterator(DataLoader(data, batch_size=1), device="cpu", num_threads=num_threads):
            assert int(batch[0, 0]) == 0
            break
    del data, batch
    assert eventually(lambda: not threads(since=before))
    assert eventually(lambda: ref() is None)


def to_the_end(p):
    assert len(vals(p)) == 5


def break_off(p):
    for _ in p:
        break


def raise_in_the_loop(p):
    with pytest.raises(ZeroDivisionError):
        for _ in p:
            raise ZeroDivisionError


def close_the_epoch(p):
    it = iter(p)
    next(it)
    it.close()


def close_the_object(p):
    it = iter(p)
    next(it)
    p.close()


def leave_the_with(p):
    with p:
        next(p)


def only_begin(p):
    iter(p)


def only_next(p):
    next(p)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(
    "leave",
    [
        to_the_end,
        break_off,
        raise_in_the_loop,
        close_the_epoch,
        close_the_object,
        leave_the_with,
        only_begin,
        only_next,
    ],
)
def test_loader_dataset_and_batches_are_freed_without_a_collection(leave, num_threads, before, without_collection):
    class Tracked:
        def __init__(self):
            self.made = []

        def __iter__(self):
            for i in range(5):
                batch = torch.tensor([i])
                self.made.append(weakref.ref(batch))
                yield batch
                del batch

    loader = Tracked()
    refs, made = [weakref.ref(loader)], loader.made
    p = PrefetchIterator(loader, device="cpu", num_threads=num_threads)
    del loader
    leave(p)
    del p
    assert eventually(lambda: not threads(since=before), collect=False)
    assert eventually(lambda: [ref() for ref in refs + made] == [None] * (1 + len(made)), collect=False)


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_closed_epoch_keeps_no_batch(num_threads, before):
    made = []

    def batches():
        for i in range(9):
            batch = torch.tensor([i])
            made.append(weakref.ref(batch))
            yield batch

    it = iter(PrefetchIterator(batches(), device="cpu", num_threads=num_threads, prefetch_batches=4))
    next(it)
    assert eventually(lambda: len(made) == (5 if num_threads else 1))
    it.close()
    assert eventually(lambda: all(ref() is None for ref in made))
    assert not threads(since=before)


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_closed_epoch_keeps_no_loader(num_threads, before, without_collection):
    data = Ramp(9)
    ref = weakref.ref(data)
    it = iter(PrefetchIterator(DataLoader(data, batch_size=1), device="cpu", num_threads=num_threads))
    next(it)
    del data
    assert ref() is not None
    it.close()
    assert eventually(lambda: ref() is None, seconds=3, collect=False)
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("leave", [break_off, raise_in_the_loop, close_the_epoch, close_the_object, leave_the_with])
def test_a_generator_is_closed(leave, num_threads, without_collection):
    source = Source()
    p = PrefetchIterator(source, device="cpu", num_threads=num_threads)
    leave(p)
    assert source.closed.wait(10)
    assert len(source.begun) == 1


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_loader_begun_anew_by_iter_closes_the_generator_of_next(num_threads):
    source = Source()
    p = PrefetchIterator(source, device="cpu", num_threads=num_threads)
    next(p)
    it = iter(p)
    assert source.closed.wait(10)
    assert vals([next(it), next(it)]) == [0, 1]


@pytest.mark.parametrize("num_threads", THREADS)
def test_nested_prefetchers_end_together(num_threads, before):
    source = Source()
    inner = PrefetchIterator(source, device="cpu", num_threads=num_threads)
    outer = PrefetchIterator(inner, device="cpu", num_threads=num_threads)
    for batch in outer:
        assert int(batch) == 0
        break
    assert source.closed.wait(10)
    assert eventually(lambda: not threads(since=before), collect=False)


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_cycle_is_collected(num_threads, before):
    class Trainer:
        pass

    def make():
        trainer = Trainer()
        trainer.me = trainer
        trainer.batches = iter(PrefetchIterator(Source(), device="cpu", num_threads=num_threads))
        trainer.first = next(trainer.batches)
        return weakref.ref(trainer)

    ref = make()
    assert eventually(lambda: ref() is None and not threads(since=before))


def test_a_cycle_may_be_collected_by_a_loader_thread(before):
    """Its finalizer then runs in a thread of ours, which must not wait for itself."""

    class Cycle:
        pass

    def hook(i):
        if i == 3:
            gc.collect()
            collected.append((ref(), threading.current_thread().name))

    collected, own = [], Cycle()
    own.me = own
    own.batches = iter(PrefetchIterator(Source(), device="cpu"))
    next(own.batches)
    ref = weakref.ref(own)
    gc.disable()
    try:
        del own
        assert within(20, lambda: vals(PrefetchIterator(DataLoader(Ramp(6, hook=hook)), device="cpu"))) == [*range(6)]
    finally:
        gc.enable()
    ((gone, name),) = collected
    assert gone is None
    assert name.startswith("gpuprefetch-")
    assert eventually(lambda: not threads(since=before))


def test_an_epoch_that_is_collected_within_its_own_thread(before):
    """The epoch's own dataset drops the last reference to it."""
    held = []

    def hook(i):
        if i == 2:
            held.clear()
            gc.collect()

    gate = Gate(at=2)

    def gated(i):
        gate(i)
        hook(i)

    with gate:
        held.append(iter(PrefetchIterator(DataLoader(Ramp(9, hook=gated)), device="cpu", prefetch_batches=3)))
        assert gate.reached.wait(20)
    assert eventually(lambda: not held and not threads(since=before))


# --- close()


@pytest.mark.parametrize("num_threads", THREADS)
def test_close_ends_live_epochs_and_iterating_starts_afresh(num_threads, before):
    p = PrefetchIterator(DataLoader(Ramp(9), batch_size=1), device="cpu", num_threads=num_threads)
    one, two = iter(p), iter(p)
    assert vals([next(one), next(one), next(two), next(p)]) == [0, 1, 0, 0]
    p.close()
    assert not threads(since=before)
    assert next(one, "ended") == next(two, "ended") == "ended"
    assert vals([next(p), next(p)]) == [0, 1]
    assert vals(p) == list(range(9))
    p.close()
    p.close()
    assert vals(p) == list(range(9))


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_epochs_close_leaves_the_others(num_threads):
    p = PrefetchIterator(DataLoader(Ramp(5), batch_size=1), device="cpu", num_threads=num_threads)
    one, two = iter(p), iter(p)
    assert vals([next(one), next(two)]) == [0, 0]
    one.close()
    one.close()
    assert next(one, "ended") == "ended"
    assert vals(two) == [1, 2, 3, 4]


@pytest.mark.parametrize("num_threads", THREADS)
def test_with_closes_and_gives_the_object(num_threads, before):
    p = PrefetchIterator(DataLoader(Ramp(5), batch_size=1), device="cpu", num_threads=num_threads)
    with p as same:
        assert same is p
        it = iter(p)
        assert vals([next(it)]) == [0]
    assert not threads(since=before)
    assert next(it, "ended") == "ended"
    with pytest.raises(ZeroDivisionError), p:
        it = iter(p)
        raise ZeroDivisionError
    assert next(it, "ended") == "ended"


def test_close_from_another_thread_ends_a_waiting_next(before):
    with Gate(at=1) as gate:
        p = PrefetchIterator(DataLoader(Ramp(5, hook=gate), batch_size=1), device="cpu")
        it, ended = iter(p), []
        assert vals([next(it)]) == [0]
        waiting = threading.Thread(target=lambda: ended.append(next(it, "ended")), daemon=True)
        waiting.start()
        assert gate.reached.wait(20)
        closing = threading.Thread(target=p.close, daemon=True)
        closing.start()
        waiting.join(10)
        assert ended == ["ended"]
        gate.opened.set()
        closing.join(10)
        assert not closing.is_alive()
        assert not threads(since=before)


@pytest.mark.parametrize("what", ["object", "epoch"])
def test_close_during_next_again_and_again(what, monkeypatch, before):
    """next() gives the next batch or the end, and nothing else, wherever close() meets it."""
    monkeypatch.setattr("gpuprefetch._threads.SLICE_SECONDS", 1e-4)
    wrong = []
    for _ in range(300):
        load = Ramp(3, hook=lambda i: time.sleep(2e-4))  # load, so that close() comes before, in and behind next()
        p = PrefetchIterator(DataLoader(load, batch_size=1), device="cpu")
        it, go = iter(p), threading.Barrier(2)

        def consume(it=it, go=go):
            go.wait(10)
            for expected in range(4):
                try:
                    got = int(next(it)[0, 0])
                except StopIteration:
                    return
                except BaseException as error:
                    wrong.append(error)
                    return
                if got != expected:
                    wrong.append(got)

        consumer = threading.Thread(target=consume, daemon=True)
        consumer.start()
        go.wait(10)
        (p if what == "object" else it).close()
        consumer.join(10)
        assert not consumer.is_alive()
    assert wrong == []
    assert eventually(lambda: not threads(since=before))


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("kind", ["dataset", "generator"])
def test_close_from_another_thread_while_a_batch_loads(kind, num_threads, before, hasty):
    gate = Gate(at=1)

    def batches():
        for i in range(5):
            gate(i)
            yield torch.full((4,), i)

    loader = batches() if kind == "generator" else DataLoader(Ramp(5, hook=gate), batch_size=1)
    with gate, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the thread is stuck
        p = PrefetchIterator(loader, device="cpu", num_threads=num_threads)
        it, got = iter(p), []
        consumer = threading.Thread(target=lambda: got.extend(vals(it)), daemon=True)
        consumer.start()
        assert gate.reached.wait(20)
        within(10, p.close)
        gate.opened.set()
        consumer.join(10)
        assert not consumer.is_alive()
        assert got in ([0], [0, 1]) or (num_threads > 1 and got == [])  # the second sample is begun with the first
        assert next(it, "ended") == "ended"
    assert eventually(lambda: not threads(since=before))


def test_a_dataset_may_close_the_object_it_is_loaded_by(before):
    def hook(i):
        if i == 2:
            p.close()

    p = PrefetchIterator(DataLoader(Ramp(9, hook=hook), batch_size=1), device="cpu", prefetch_batches=1)
    got = within(20, lambda: vals(p))
    assert got in ([0], [0, 1])
    assert eventually(lambda: not threads(since=before))


# --- a thread that does not come back from the user's code


def stuck(gate):
    def stand_here(i):
        gate(i)

    return stand_here


def test_a_stuck_thread_is_waited_for_two_seconds_and_left_with_one_warning(before):
    with Gate(at=1) as gate:
        p = PrefetchIterator(DataLoader(Ramp(5, hook=stuck(gate)), batch_size=1), device="cpu")
        it = iter(p)
        assert vals([next(it)]) == [0]
        assert gate.reached.wait(20)
        (thread,) = threads(since=before)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            started = time.monotonic()
            p.close()
            waited = time.monotonic() - started
            assert 1.5 < waited < 4
            # It has been given up once: nothing waits for it, or warns, a second time.
            started = time.monotonic()
            p.close()
            it.close()
            assert next(it, "ended") == "ended"
            del it, p
            gc.collect()
            assert time.monotonic() - started < 1.5
        assert [w.category for w in caught] == [RuntimeWarning]
        text = str(caught[0].message)
        assert thread.name in text
        assert "2 s" in text
        assert "stand_here" in text and "opened.wait" in text
        assert thread.is_alive() and thread.daemon
    assert eventually(lambda: not threads(since=before))


def test_what_was_ready_is_dropped_though_the_warning_is_an_error(before, hasty):
    made = []

    def collate(samples):
        batch = torch.stack(samples)
        made.append(weakref.ref(batch))
        return batch

    with Gate(at=2) as gate:
        it = iter(PrefetchIterator(DataLoader(Ramp(5, hook=gate), collate_fn=collate), device="cpu"))
        assert vals([next(it)]) == [0]
        assert gate.reached.wait(20)
        assert made[1]() is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="left behind"):
                it.close()
        assert eventually(lambda: made[1]() is None)
    assert eventually(lambda: not threads(since=before))


def test_several_stuck_threads_are_waited_for_together(before, monkeypatch):
    monkeypatch.setattr(_threads, "JOIN_SECONDS", 0.5)
    gates = []

    class Stuck:
        def __iter__(self):
            gate = Gate(at=0)
            gates.append(gate)
            gate(0)
            yield torch.ones(1)

    p = PrefetchIterator(Stuck(), device="cpu")
    epochs = [iter(p) for _ in range(6)]
    assert eventually(lambda: len(gates) == 6 and all(gate.reached.is_set() for gate in gates))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = time.monotonic()
        p.close()
        waited = time.monotonic() - started
        for gate in gates:
            gate.opened.set()
        del epochs
    assert waited < 1.5
    assert eventually(lambda: not threads(since=before))


def test_a_thread_left_behind_ends_when_it_comes_back_and_its_batch_is_dropped(before, hasty):
    made = []

    class Late:
        def __iter__(self):
            gate(0)
            batch = torch.ones(1)
            made.append(weakref.ref(batch))
            yield batch

    with Gate(at=0) as gate, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it = iter(PrefetchIterator(Late(), device="cpu"))
        assert gate.reached.wait(20)
        it.close()
        assert threads(since=before)
    assert eventually(lambda: not threads(since=before))
    assert eventually(lambda: len(made) == 1 and made[0]() is None)
    assert next(it, "ended") == "ended"


# --- growth


@pytest.mark.parametrize("num_threads", THREADS)
def test_threads_and_file_handles_are_flat_over_200_epochs(num_threads, before):
    p = PrefetchIterator(DataLoader(Ramp(10), batch_size=1), device="cpu", num_threads=num_threads)
    counted = set()
    for epoch in range(200):
        for step, _ in enumerate(p):
            if epoch % 2 and step == 4:
                break
        counted.add(len(threads(since=before)))
        if epoch == 20:
            early = handles()
    assert max(counted) <= 1
    assert eventually(lambda: handles() <= early, collect=False), (early, handles())
    assert eventually(lambda: not threads(since=before), collect=False)


def test_objects_are_flat_over_epochs(before):
    loader = DataLoader(Ramp(3), batch_size=1)
    counts = []
    for _ in range(4):
        for _ in range(10):
            assert vals(PrefetchIterator(loader, device="cpu")) == [0, 1, 2]
        assert eventually(lambda: not threads(since=before))
        gc.collect()
        counts.append(sum(str(type(thing).__module__).startswith("gpuprefetch") for thing in gc.get_objects()))
    assert counts[1:] == counts[:1] * 3


# --- no end


def test_an_endless_dataset_needs_no_end(before):
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(1)

    with PrefetchIterator(DataLoader(Endless(), batch_size=2), device="cpu") as p:
        for _, batch in zip(range(20), p, strict=False):
            assert batch.tolist() == [[1.0], [1.0]]
    assert not threads(since=before)
