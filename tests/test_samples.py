"""Samples on several threads: all at work at once, and the batches, errors and ends of one thread."""

import collections
import gc
import itertools
import sys
import threading
import time
import warnings
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from loaders import NO_GIL, Gate, Ramp, eventually, handles, lists, script, threads, vals, within
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, default_collate

from gpuprefetch import PrefetchIterator, _arguments, _threads
from gpuprefetch._epoch import Epoch
from gpuprefetch._loader_threads import SampleThreadsEpoch

windows = pytest.mark.windows  # on some: under wine each takes its time

HAS_NOTES = sys.version_info >= (3, 11)


@pytest.fixture
def before():
    gc.collect()
    assert eventually(lambda: not threads())
    yield threads()
    assert eventually(lambda: not threads())


def on_threads(loader, num_threads=4, **options):
    return PrefetchIterator(loader, device="cpu", num_threads=num_threads, **options)


class Meeting:
    """A hook at which ``n`` samples have to be at the same time."""

    def __init__(self, n):
        self.barrier = threading.Barrier(n)

    def __call__(self, i):
        self.barrier.wait(20)


# --- at once


@windows
@pytest.mark.parametrize("num_threads", [2, 4, 9])
def test_so_many_samples_are_fetched_at_once(num_threads, before):
    n = num_threads * 4
    loader = DataLoader(Ramp(n, hook=Meeting(num_threads)), batch_size=num_threads)
    assert within(30, lambda: vals(on_threads(loader, num_threads))) == list(range(0, n, num_threads))


def test_each_thread_has_one_part_of_a_batch(before):
    """Fewer tasks hand the GIL over less often."""
    fetched_in, meeting = {}, Meeting(4)

    def hook(i):
        fetched_in[i] = threading.get_ident()
        if i % 3 == 0:
            meeting(i)

    loader = DataLoader(Ramp(10, hook=hook), batch_size=10)
    assert within(30, lambda: vals(on_threads(loader))) == [0]
    assert [fetched_in[i] for i in range(10)] == [fetched_in[i - i % 3] for i in range(10)]


def test_small_batches_share_the_threads(before):
    """Batches of one sample: as many at once as are kept ahead."""
    loader = DataLoader(Ramp(12, hook=Meeting(4)), batch_size=1)
    assert within(30, lambda: vals(on_threads(loader, 4, prefetch_batches=4))) == list(range(12))


@pytest.mark.parametrize("ahead", [1, 3])
def test_batches_of_one_call_keep_as_many_threads_busy_as_are_ahead(ahead, before):
    meeting, lock, inside, most = Meeting(ahead), threading.Lock(), 0, 0

    class Data(Ramp):
        def __getitems__(self, indices):
            nonlocal inside, most
            with lock:
                inside += 1
                most = max(most, inside)
            meeting(0)
            with lock:
                inside -= 1
            return [self[i] for i in indices]

    loader = DataLoader(Data(24), batch_size=2)
    assert within(30, lambda: vals(on_threads(loader, 8, prefetch_batches=ahead))) == list(range(0, 24, 2))
    assert most == ahead


def test_batches_are_collated_at_once(before):
    meeting = Meeting(3)

    def collate(samples):
        meeting(0)
        return default_collate(samples)

    loader = DataLoader(Ramp(12), batch_size=2, collate_fn=collate)
    assert within(30, lambda: vals(on_threads(loader, 3, prefetch_batches=3))) == list(range(0, 12, 2))


def test_one_thread_never_fetches_two_samples_at_once():
    busy, clashes = threading.Semaphore(1), []

    def hook(i):
        if not busy.acquire(blocking=False):
            clashes.append(i)
            return
        time.sleep(0.001)  # load
        busy.release()

    list(PrefetchIterator(DataLoader(Ramp(20, hook=hook), batch_size=2), device="cpu"))
    assert clashes == []


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_loading_runs_no_further_ahead_than_asked(ahead, before):
    fetched = []
    p = on_threads(DataLoader(Ramp(60, hook=fetched.append), batch_size=2), prefetch_batches=ahead)
    it = iter(p)
    for taken in range(5):
        assert eventually(lambda taken=taken: len(fetched) == 2 * (ahead + taken))
        assert sorted(fetched) == list(range(2 * (ahead + taken)))
        next(it)
    it.close()


# --- order


def uneven(i):
    time.sleep(0.002 * ((7 * i) % 5))  # load


@windows
@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_the_order_when_samples_take_different_times(ahead, before):
    loader = DataLoader(Ramp(50, hook=uneven), batch_size=3, drop_last=ahead == 2)
    assert lists(on_threads(loader, 8, prefetch_batches=ahead)) == lists(loader)


LOADERS = {
    "batch_size=None": lambda data: DataLoader(data, batch_size=None),
    "batches of 1": lambda data: DataLoader(data, batch_size=1),
    "one batch": lambda data: DataLoader(data, batch_size=100),
    "drop_last": lambda data: DataLoader(data, batch_size=4, drop_last=True),
    "shuffled": lambda data: DataLoader(data, batch_size=4, shuffle=True),
    "generator": lambda data: DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "sampler": lambda data: DataLoader(data, batch_size=4, sampler=RandomSampler(data, replacement=True)),
    "batch_sampler": lambda data: DataLoader(data, batch_sampler=BatchSampler(range(20, 3, -1), 5, False)),
    "tuples of indices": lambda data: DataLoader(data, batch_sampler=[(1, 2), (), (3,)], collate_fn=torch_stack),
    "an iterator of indices": lambda data: DataLoader(data, batch_sampler=Fresh(lambda: iter([4, 5, 6]), 3)),
    "collate_fn": lambda data: DataLoader(data, batch_size=4, collate_fn=lambda s: {"x": s, "n": len(s)}),
}


class Fresh:
    def __init__(self, make, n):
        self.make, self.n = make, n

    def __iter__(self):
        return (self.make() for _ in range(self.n))


def torch_stack(samples):
    return torch.stack(samples) if samples else torch.zeros(0, 4)


class ByBatch(Ramp):
    """A dataset that is asked for a whole batch in one call."""

    def __getitems__(self, indices):
        self.asked = [*getattr(self, "asked", []), indices]
        return [self[i] for i in indices]


@pytest.mark.parametrize("kind", [Ramp, ByBatch])
@pytest.mark.parametrize("name", LOADERS)
def test_the_plain_loaders_batches(name, kind, before, same):
    loader = LOADERS[name](kind(23))
    for seed in range(2):
        torch.manual_seed(seed)
        if loader.generator is not None:
            loader.generator.manual_seed(seed)
        plain = list(loader)
        torch.manual_seed(seed)
        if loader.generator is not None:
            loader.generator.manual_seed(seed)
        out = list(on_threads(loader))
        assert len(out) == len(plain)
        for mine, theirs in zip(out, plain, strict=True):
            if isinstance(mine, dict):
                assert mine["n"] == theirs["n"] and type(mine["x"]) is list
                mine, theirs = torch.stack(mine["x"]), torch.stack(theirs["x"])
            same(mine, theirs)


def test_getitems_gets_what_the_sampler_gave(before):
    data = ByBatch(9)
    assert vals(on_threads(DataLoader(data, batch_size=4))) == [0, 4, 8]
    assert sorted(data.asked) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_the_sampler_is_drawn_from_by_one_thread_at_a_time_and_in_order(before):
    busy, clashes, drawn_in = threading.Lock(), [], []

    def indices():
        for i in range(40):
            if not busy.acquire(blocking=False):
                clashes.append(i)
            drawn_in.append(threading.get_ident())
            time.sleep(0.001)  # load
            busy.release()
            yield i

    class Sampler:
        def __iter__(self):
            return indices()

    loader = DataLoader(Ramp(40, hook=uneven), batch_size=2, sampler=Sampler())
    assert vals(on_threads(loader, 8, prefetch_batches=5)) == list(range(0, 40, 2))
    assert clashes == []
    assert set(drawn_in[:2]) == {threading.get_ident()}  # the first batch's, in iter(): random orders come with it


def test_a_sampler_that_waits_holds_up_no_complete_batch(before):
    taken = threading.Event()

    def indices():
        yield 0
        assert taken.wait(20), "the batch before was not handed over"
        yield 1

    class Sampler:
        def __iter__(self):
            return indices()

    it = iter(on_threads(DataLoader(Ramp(2), batch_size=1, sampler=Sampler())))
    assert within(20, lambda: int(next(it)[0, 0])) == 0
    taken.set()
    assert vals(it) == [1]


def refilled_list():
    indices = [0, 0]
    for i in range(0, 40, 2):
        indices[:] = i, i + 1
        yield indices


def refilled_tensor():
    indices = torch.zeros(2, dtype=torch.int64)
    for i in range(0, 40, 2):
        indices.copy_(torch.tensor([i, i + 1]))
        yield indices


def sliding_deque():
    indices = collections.deque(maxlen=2)
    for i in range(40):
        indices.append(i)
        if i % 2:
            yield indices


def refilled_user_list():
    indices = collections.UserList([0, 0])
    for i in range(0, 40, 2):
        indices[:] = i, i + 1
        yield indices


def refilled_list_that_can_not_be_made_again():
    class Named(list):
        def __reduce_ex__(self, protocol):
            raise TypeError("no pickling")

    indices = Named([0, 0])
    for i in range(0, 40, 2):
        indices[:] = i, i + 1
        yield indices


def parts_of_one_iterator():
    indices = iter(range(40))
    return (itertools.islice(indices, 2) for _ in range(20))


class Whole(Ramp):
    def __getitem__(self, i):
        return super().__getitem__(int(i))


class WholeByBatch(Whole):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Drawing:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


@pytest.mark.parametrize("kind", [Whole, WholeByBatch])
@pytest.mark.parametrize(
    "make",
    [
        refilled_list,
        refilled_tensor,
        sliding_deque,
        refilled_user_list,
        refilled_list_that_can_not_be_made_again,
        parts_of_one_iterator,
    ],
)
def test_a_sampler_may_fill_its_indices_again(make, kind, before):
    loader = DataLoader(kind(40, hook=uneven), batch_sampler=Drawing(make))
    assert vals(on_threads(loader, prefetch_batches=6)) == list(range(0, 40, 2))


class Copied:
    """As a Path of Python 3.14, whose copy() copies a file."""

    def __init__(self, number):
        self.number = number

    def copy(self, target):
        raise AssertionError("never asked for")


class Field(NamedTuple):
    number: int
    copy: int


class Numbers(list):
    pass


@pytest.mark.parametrize("make", [Copied, lambda number: Field(number, 7)])
def test_an_index_that_has_a_copy_of_its_own_is_left_as_it_is(make, before):
    class ByIndex(Ramp):
        def __getitem__(self, index):
            return super().__getitem__(index.number)

    loader = DataLoader(ByIndex(9), batch_size=None, sampler=[make(i) for i in range(9)])
    assert [int(row[0]) for row in on_threads(loader)] == list(range(9))


def test_getitems_gets_indices_of_the_samplers_type(before):
    data = ByBatch(9)
    assert vals(on_threads(DataLoader(data, batch_sampler=[Numbers([1, 2]), Numbers([3])]))) == [1, 3]
    assert {type(indices) for indices in data.asked} == {Numbers}


def test_a_sampler_may_fill_a_single_index_again(before):
    def indices():
        index = torch.zeros((), dtype=torch.int64)
        for i in range(20):
            yield index.fill_(i)

    loader = DataLoader(Whole(20, hook=uneven), batch_size=None, sampler=Drawing(indices))
    assert vals(on_threads(loader, prefetch_batches=6)) == list(range(20))


def test_a_sampler_may_fill_a_row_of_an_array_again(before):
    """A row of a structured array is a view of it."""

    class ByRow(Ramp):
        def __getitem__(self, row):
            return super().__getitem__(int(row["at"]))

    def rows():
        array = np.zeros(1, dtype=[("at", np.int64)])
        for i in range(20):
            array["at"] = i
            yield array[0]

    loader = DataLoader(ByRow(20, hook=uneven), batch_size=None, sampler=Drawing(rows))
    assert vals(on_threads(loader, prefetch_batches=6)) == list(range(20))


def test_pin_memory_of_the_loader_is_its_own_affair(before):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be nothing to pin for
        loader = DataLoader(Ramp(8), batch_size=2, pin_memory=True)
        assert vals(on_threads(loader)) == [0, 2, 4, 6]


def held():
    """What a leak would make more: objects of the package, files, and blocks of memory."""
    assert eventually(lambda: not threads())
    ours = sum(type(thing).__module__.startswith("gpuprefetch") for thing in gc.get_objects())
    return ours, handles(), sys.getallocatedblocks()


@windows
def test_a_thousand_short_epochs(before):
    p = on_threads(DataLoader(Ramp(5), batch_size=2), 8)
    expected = [0, 2, 4]
    epochs = 1000 if sys.platform != "win32" else 100  # threads start slowly there
    for epoch in range(epochs):
        if epoch % 3:
            assert vals(p) == expected
        else:
            assert vals(itertools.islice(p, epoch % 4)) == expected[: epoch % 4]
        if epoch == epochs // 10:
            early = held()
    late = held()
    assert late[:2] == early[:2]
    if epochs == 1000 and not NO_GIL:  # the first few hundred epochs fill caches; without a GIL threads have their own
        assert late[2] - early[2] < epochs / 2, "more than a block of memory in two epochs"


# --- errors


@windows
@pytest.mark.parametrize("at", [0, 1, 5, 32, 33, 47])
def test_an_error_comes_at_its_batch(at, before):
    def hook(i):
        uneven(i)
        if i == at:
            raise LookupError(f"sample {i}")

    it, got = iter(on_threads(DataLoader(Ramp(48, hook=hook), batch_size=4), 8)), []
    with pytest.raises(LookupError) as caught:
        for batch in it:
            got.append(batch[:, 0].tolist())
    assert caught.value.args == (f"sample {at}",)
    assert got == [[i, i + 1, i + 2, i + 3] for i in range(0, at - at % 4, 4)]
    assert next(it, "ended") == "ended"
    if HAS_NOTES:
        (note,) = caught.value.__notes__
        assert f"at batch {at // 4}, in thread 'gpuprefetch-sample-" in note
        assert "several threads share the dataset, and num_threads=1 of PrefetchIterator is one" in note


def test_of_two_errors_the_first_in_the_batch_is_raised(before):
    later = threading.Event()

    def hook(i):
        if i == 7:
            later.set()
            raise KeyError(i)
        if i == 2:
            assert later.wait(20)
            raise ValueError(i)

    with pytest.raises(ValueError, match="2"):
        list(on_threads(DataLoader(Ramp(8, hook=hook), batch_size=8), 8))


@pytest.mark.parametrize("kind", [Ramp, ByBatch])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_stop_iteration_is_no_end(batch_size, kind, before):
    def hook(i):
        if i == 4:
            raise StopIteration(i)

    it = iter(on_threads(DataLoader(kind(9, hook=hook), batch_size=batch_size)))
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        list(it)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_errors_of_collate_and_sampler(before):
    def collate(samples):
        if int(samples[0][0]) == 4:
            raise ArithmeticError("collate")
        return default_collate(samples)

    it = iter(on_threads(DataLoader(Ramp(10), batch_size=2, collate_fn=collate)))
    assert vals(itertools.islice(it, 2)) == [0, 2]
    with pytest.raises(ArithmeticError):
        next(it)

    def indices():
        yield from (0, 1, 2)
        raise BufferError("sampler")

    class Sampler:
        def __iter__(self):
            return indices()

    it = iter(on_threads(DataLoader(Ramp(10), batch_size=1, sampler=Sampler())))
    assert vals(itertools.islice(it, 3)) == [0, 1, 2]
    with pytest.raises(BufferError):
        next(it)


def test_indices_that_can_t_be_iterated_are_an_error_and_no_end(before):
    class Odd:
        def __iter__(self):
            raise StopIteration

    it = iter(on_threads(DataLoader(Ramp(9), batch_sampler=[[0], [1], Odd()])))
    assert vals(itertools.islice(it, 2)) == [0, 1]
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(it)


def test_after_an_error_no_more_is_loaded(before):
    fetched, gate = [], Gate(at=0)

    def hook(i):
        fetched.append(i)
        gate(i)
        if i == 0:
            raise LookupError

    drawn = []

    def indices():
        for i in range(1000):
            drawn.append(i)
            yield i

    loader = DataLoader(Ramp(1000, hook=hook), batch_size=None, sampler=Drawing(indices))
    with gate:
        it = iter(on_threads(loader, 2, prefetch_batches=20))
        assert eventually(lambda: len(fetched) == 20)  # the other thread's
        gate.opened.set()
        with pytest.raises(LookupError):
            next(it)
    assert len(fetched) == len(drawn) == 20


def test_samples_that_wait_behind_an_error_are_not_loaded(before):
    fetched, opened = [], threading.Event()

    def hook(i):
        fetched.append(i)
        if i == 0:
            raise LookupError
        assert opened.wait(20)

    it = iter(on_threads(DataLoader(Ramp(100, hook=hook), batch_size=None), 2, prefetch_batches=20))
    samples = it._epoch._samples
    try:
        assert eventually(lambda: 0 in fetched and (samples._tasks.empty() or samples._stopped))
    finally:
        opened.set()
    with pytest.raises(LookupError):
        next(it)
    assert set(fetched) <= {0, 1}  # the one that failed, and what the other thread was at


def test_samples_behind_an_error_in_their_batch_are_not_loaded(before):
    fetched, both, failed = [], threading.Barrier(2), threading.Event()

    def hook(i):
        fetched.append(i)
        if i in (0, 4):  # the first ones of the two threads
            both.wait(20)
        if i == 1:
            raise LookupError
        assert i == 0 or failed.wait(20)

    it = iter(on_threads(DataLoader(Ramp(8, hook=hook), batch_size=8), 2))
    assert eventually(lambda: it._epoch._samples._last == 0)
    failed.set()
    with pytest.raises(LookupError):
        next(it)
    assert sorted(fetched) == [0, 1, 4]


def test_a_note_names_the_thread_of_its_own_error(before):
    shared = torch.zeros(4)

    class Data(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 1:
                raise LookupError
            return shared

    it = iter(on_threads(DataLoader(Data(), batch_size=None), prefetch_batches=3))
    assert eventually(lambda: it._epoch._samples.thread_name is not None)
    shared.add_(1)  # an error of the hand-over, in this thread
    with pytest.raises(RuntimeError, match="was written to") as caught:
        next(it)
    if HAS_NOTES:
        assert f"in thread {threading.current_thread().name!r}" in caught.value.__notes__[0]


def test_an_error_of_a_thread_s_beginning_arrives(before, monkeypatch):
    from gpuprefetch import _environment

    entered = _environment.Environment.entered

    def failing(self, sharing=1):
        if sharing > 1:
            raise OSError("no such device")
        return entered(self)

    monkeypatch.setattr(_environment.Environment, "entered", failing)
    it = iter(on_threads(DataLoader(Ramp(10), batch_size=1)))
    with pytest.raises(OSError, match="no such device"):
        within(20, lambda: next(it))


def test_an_error_of_a_thread_s_beginning_is_not_lost_while_the_loader_looks_for_one(before, monkeypatch):
    """Lost, it would be an epoch that ends early without a word."""
    values = [None]
    reads = itertools.count()

    def read(epoch):
        value = values[0]
        if next(reads) == 2:
            epoch._crash(OSError("no such device"))  # another thread's, just now
        return value

    def write(epoch, value):
        values[0] = value

    monkeypatch.setattr(SampleThreadsEpoch, "_crashed", property(read, write), raising=False)
    with pytest.raises(OSError, match="no such device"):
        within(30, lambda: list(on_threads(DataLoader(Ramp(4000), batch_size=1))))


@windows
def test_the_consumer_starts_one_thread_and_each_the_next(before, monkeypatch):
    """It would have to wait until each new one has had the GIL."""
    starters = []
    start = threading.Thread.start

    def noted(thread):
        starters.append((threading.current_thread().name, thread.name))
        start(thread)

    loader = DataLoader(Ramp(32, hook=Meeting(8)), batch_size=8)
    p = on_threads(loader, 8)
    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", noted)
        assert vals(p) == [0, 8, 16, 24]
    assert len(starters) == 9 and starters[0][0] == threading.current_thread().name
    assert all(started == starter for (_, started), (starter, _) in itertools.pairwise(starters))


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("at", [0, 1, 2, 8])
def test_a_thread_that_does_not_start_is_an_error_and_leaves_none(at, num_threads, before, monkeypatch):
    """The first one is iter()'s; of the others the batch says so that is waited for, as some may be there already."""
    started, told = [], threading.Event()
    start = threading.Thread.start
    if at > (num_threads if num_threads > 1 else 0):
        told.set()

    def refused(thread):
        if thread.name.startswith("gpuprefetch-"):
            started.append(thread.name)
            if len(started) == at + 1:
                told.set()
                raise RuntimeError("can't start new thread")
        start(thread)

    def hook(i):  # no epoch is over before its last thread was to start
        assert i < 100 or told.wait(20)

    p = on_threads(DataLoader(Ramp(4000, hook=hook), batch_size=2), num_threads)
    with monkeypatch.context() as changed:
        changed.setattr(threading.Thread, "start", refused)
        if told.is_set():
            assert within(30, lambda: len(list(p))) == 2000
        else:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                within(30, lambda: list(p))
    assert eventually(lambda: not threads())
    assert within(30, lambda: len(list(p))) == 2000


def test_a_time_out_shows_where_the_samples_are(before):
    gate = Gate(at=3)
    with gate:
        it = iter(on_threads(DataLoader(Ramp(8, hook=gate), batch_size=8), 2, timeout=0.2))
        with pytest.raises(TimeoutError) as caught:
            next(it)
        assert str(caught.value).count("thread 'gpuprefetch-sample-") == 2
        assert "in __call__" in str(caught.value) and "self.opened.wait" in str(caught.value)
        gate.opened.set()
        assert vals(it) == [0]


# --- ends


def test_a_thread_that_has_not_started_is_said_to_stand_nowhere():
    worker = _threads.Worker("test", Gate(at=0).__call__)
    assert _threads.where_they_stand([worker]) == f"thread {worker.thread.name!r} stands at:\n  (not started)\n"


@windows
@pytest.mark.parametrize("how", ["close", "drop", "object"])
def test_threads_end_with_their_epoch(how, before):
    p = on_threads(DataLoader(Ramp(1000), batch_size=2))
    it = iter(p)
    next(it)
    assert eventually(lambda: len(threads()) == 5)
    if how == "close":
        it.close()
        assert not threads()
    elif how == "object":
        p.close()
        assert not threads()
    del it
    assert eventually(lambda: not threads(), collect=False)


@windows
def test_close_waits_for_the_sample_that_is_being_fetched(before):
    gate = Gate(at=0)
    fetched = []

    def hook(i):
        gate(i)
        fetched.append(i)

    with gate:
        it = iter(on_threads(DataLoader(Ramp(64, hook=hook), batch_size=64), 2))
        assert gate.reached.wait(20)
        closing = threading.Thread(target=it.close, daemon=True)
        closing.start()
        assert eventually(lambda: it._epoch._stopped)
        gate.opened.set()
        closing.join(20)
        assert not closing.is_alive()
    assert not threads()
    assert len(fetched) < 64  # each thread ended after the sample it was at


class Watched(Dataset):
    """Counts those of its samples that are alive."""

    class Sample:
        pass

    def __init__(self, n, hook=lambda i: None):
        self.n, self.hook, self.made = n, hook, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        sample = self.Sample()
        self.made.append(weakref.ref(sample))
        self.hook(i)
        return sample

    def alive(self):
        return sum(ref() is not None for ref in self.made)


@pytest.mark.skipif(
    NO_GIL,
    reason="without a GIL, what a thread made and another one dropped is freed when the first one wakes",
)
def test_no_batch_is_kept_by_a_thread_that_waits(before):
    data = Watched(40)
    it = iter(on_threads(DataLoader(data, batch_size=4, collate_fn=list), prefetch_batches=1))
    for _ in range(3):
        next(it)
    assert eventually(lambda: data.alive() == 4, collect=False)  # the one that is ahead
    it.close()
    del it
    assert eventually(lambda: data.alive() == 0, collect=False)


@windows
@pytest.mark.parametrize("error", [False, True])
def test_nothing_of_the_users_waits_for_a_collection(error, before, without_collection):
    """After an early end, or an error that is handled, in whatever the threads were doing."""

    def hook(i):
        time.sleep(0.0005 * (i % 3))  # load
        if error and i == 9:
            raise LookupError

    data = Watched(64, hook)
    for _ in range(30):
        it = iter(on_threads(DataLoader(data, batch_size=2, collate_fn=list)))
        try:
            collections.deque(itertools.islice(it, 6), maxlen=0)
        except LookupError:
            pass
        del it
    assert eventually(lambda: not threads(), collect=False)
    assert eventually(lambda: data.alive() == 0, collect=False)


def test_an_epoch_is_freed_whose_threads_did_not_all_start(before, without_collection, monkeypatch):
    """On a CUDA device it holds a stream, which the next epoch is to use again."""
    second, ended = threading.Event(), threading.Event()
    start = threading.Thread.start

    def held_up(thread):
        if threading.current_thread().name.startswith("gpuprefetch-"):
            second.set()
            assert ended.wait(20)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", held_up)
    it = iter(on_threads(DataLoader(Ramp(64), batch_size=2), 8))
    epoch = weakref.ref(it._epoch)
    assert second.wait(20)
    epoch().stop()
    ended.set()
    it.close()
    del it
    assert eventually(lambda: epoch() is None, collect=False)


@pytest.mark.parametrize("num_threads", [1, 8])
def test_an_epoch_is_freed_whose_first_thread_did_not_start(num_threads, before, without_collection, monkeypatch):
    made = []

    def refused(thread):
        raise RuntimeError("can't start new thread")

    init = Epoch.__init__

    def noted(epoch, *args):
        made.append(weakref.ref(epoch))
        init(epoch, *args)

    monkeypatch.setattr(Epoch, "__init__", noted)
    monkeypatch.setattr(threading.Thread, "start", refused)
    try:
        iter(on_threads(DataLoader(Ramp(64), batch_size=2), num_threads))
    except RuntimeError:
        pass
    assert [epoch() for epoch in made] == [None]


def test_a_closed_epoch_that_is_kept_keeps_no_batch(before, without_collection):
    data = Watched(64)
    it = iter(on_threads(DataLoader(data, batch_size=None, collate_fn=lambda x: x), 8, prefetch_batches=16))
    next(it)
    it.close()
    assert eventually(lambda: data.alive() == 0, collect=False)


def test_stuck_threads_are_one_warning(before):
    gate = Gate(at=-1)
    everyone = threading.Barrier(5)

    def hook(i):
        everyone.wait(20)
        assert gate.opened.wait(30)

    with gate:
        it = iter(on_threads(DataLoader(Ramp(8, hook=hook), batch_size=8)))
        everyone.wait(20)  # until each has been started by the one before
        with pytest.warns(RuntimeWarning, match="not stopped within 2 s, so left behind: threads ") as caught:
            it.close()
        (warning,) = caught
        text = str(warning.message)
        assert text.count("'gpuprefetch-sample-") == 4 and text.count("in hook") == 1


@windows
@pytest.mark.process
def test_exit_during_an_epoch_and_with_threads_that_have_come_back(before):
    """Those of the closed epoch were left behind. None may outlive the interpreter, which would abort."""
    code, out, err = script(
        """
        release = threading.Event()
        stuck = iter(PrefetchIterator(DataLoader(Ramp(64, hook=lambda i: release.wait(30)), batch_size=8), device="cpu",
                                      num_threads=4))
        warnings.simplefilter("ignore")
        stuck.close()
        data = Ramp(1000, hook=lambda i: time.sleep(0.01))  # load
        slow = iter(PrefetchIterator(DataLoader(data, batch_size=4), device="cpu", num_threads=4))
        next(slow)
        release.set()
        print("end")
        """
    )
    assert (code, out) == (0, "end\n"), err


# --- who shares


def test_that_the_dataset_is_shared_is_said_once(before):
    _arguments._warn_of_sharing.cache_clear()
    loader = DataLoader(Ramp(4))
    with pytest.warns(RuntimeWarning, match="used by several threads at once") as caught:
        for n in (0, 1, 2, 3, 2):
            PrefetchIterator(loader, device="cpu", num_threads=n)
    (warning,) = caught
    assert warning.filename == __file__


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


class OwnIter(DataLoader):
    def __iter__(self):
        return super().__iter__()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: [torch.tensor([i]) for i in range(5)], "it is no DataLoader"),
        (lambda: DataLoader(Stream(), batch_size=1), "its dataset is an IterableDataset"),
        (lambda: OwnIter(torch.arange(5), batch_size=1), "OwnIter iterates in a way of its own"),
    ],
)
def test_another_loader_is_iterated_by_one_thread_and_that_is_said(make, reason, before):
    with pytest.warns(RuntimeWarning) as caught:
        p = on_threads(make())
    (warning,) = caught
    assert str(warning.message) == f"num_threads=4, but one thread iterates this loader: {reason}"
    assert warning.filename == __file__
    it = iter(p)
    assert vals(it) == list(range(5))


def test_num_workers_of_something_else_is_no_concern(before):
    class Batches:
        num_workers = 2

        def __iter__(self):
            return iter([torch.tensor([0])])

    with pytest.warns(RuntimeWarning, match="it is no DataLoader"):
        assert vals(on_threads(Batches())) == [0]


def test_workers_and_threads_exclude_each_other():
    loader = DataLoader(Ramp(4), num_workers=2)
    with pytest.raises(
        ValueError, match="num_threads=2 and the loader's num_workers=2 exclude each other: set num_workers to 0"
    ):
        PrefetchIterator(loader, device="cpu", num_threads=2)


@pytest.mark.process
@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes since Python 3.11")
@pytest.mark.skipif(sys.platform != "linux", reason="starts worker processes by fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cuda_in_a_forked_worker_gets_a_note(before, device, num_threads):
    """torch's own error, out of a worker, which brings it as text."""

    def hook(i):
        if device == "cpu":
            torch.cuda._is_in_bad_fork = lambda: True  # in the worker, as after its parent has used CUDA
        torch.zeros(1, device="cuda")

    torch.zeros(1, device=device)
    loader = DataLoader(Ramp(4, hook=hook), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess") as caught:
        within(60, lambda: next(iter(PrefetchIterator(loader, device=device, num_threads=num_threads))))
    place, advice = caught.value.__notes__
    assert place.startswith("gpuprefetch: at batch 0, in thread ") and "num_threads" not in place  # it runs elsewhere
    assert "num_workers=0" in advice and "num_threads=N" in advice


# --- the environment


@windows
def test_sample_threads_share_the_intra_op_threads(before):
    mine = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        inside = []
        list(on_threads(DataLoader(Ramp(8, hook=lambda i: inside.append(torch.get_num_threads())), batch_size=4)))
        assert inside == [1] * 8
        assert torch.get_num_threads() == 4
        assert within(10, torch.get_num_threads) == 4
    finally:
        torch.set_num_threads(mine)


def test_a_prefetcher_inside_the_dataset_leaves_new_threads_alone(before):
    class Nested(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            inner = PrefetchIterator(DataLoader(Ramp(2)), device="cpu")
            return torch.tensor(vals(inner)), torch.get_num_threads()

    mine = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        seen = [int(n[0]) for _, n in on_threads(DataLoader(Nested()))]
        assert seen == [2] * 8
        assert torch.get_num_threads() == within(10, torch.get_num_threads) == 8
    finally:
        torch.set_num_threads(mine)


def test_no_thread_of_the_users_sees_another_number_of_intra_op_threads(before):
    mine, seen, stop = torch.get_num_threads(), [], threading.Event()

    def watch():
        while not stop.is_set():
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()

    try:
        torch.set_num_threads(6)
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        for _ in range(20):
            list(on_threads(DataLoader(Ramp(8), batch_size=4)))
        stop.set()
        watcher.join(20)
        assert set(seen) == {6}
    finally:
        torch.set_num_threads(mine)
