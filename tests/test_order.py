"""The wrapped loader's batches, each once, in its order, whatever the loader is and however it is asked."""

import itertools
import random
import sys
import threading
import time
import types

import numpy
import pytest
import torch
from loaders import THREADS, Ramp, eventually, lists, threads, vals, within
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from gpuprefetch import PrefetchIterator, _loader_threads

pytestmark = pytest.mark.windows

LENGTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9]
AHEAD = [1, 2, 4, 50]


class Stream(IterableDataset):
    """n samples, without a length."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(torch.arange(self.n))


class Counting:
    """An iterable of n batches that starts from zero each time it is iterated."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        for i in range(self.n):
            yield torch.tensor([i])


class Sequence:
    """An iterable by the old protocol: items until IndexError."""

    def __getitem__(self, i):
        if i >= 4:
            raise IndexError(i)
        return torch.tensor([i])


# --- every length


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("drop", [False, True])
def test_map_style_of_every_length(drop, ahead, num_threads):
    for n in LENGTHS:
        loader = DataLoader(Ramp(n), batch_size=2, drop_last=drop)
        p = PrefetchIterator(loader, device="cpu", prefetch_batches=ahead, num_threads=num_threads)
        assert within(20, lambda p=p: lists(p)) == lists(loader), n


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("drop", [False, True])
def test_iterable_style_of_every_length(drop, ahead, num_threads):
    for n in LENGTHS:
        loader = DataLoader(Stream(n), batch_size=2, drop_last=drop)
        p = PrefetchIterator(loader, device="cpu", prefetch_batches=ahead, num_threads=num_threads)
        assert within(20, lambda p=p: lists(p)) == lists(loader), n


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("dataset", [Ramp, Stream], ids=["map", "iterable"])
def test_single_samples_without_a_batch_size(dataset, num_threads):
    for n in (0, 1, 2, 5):
        loader = DataLoader(dataset(n), batch_size=None)
        assert lists(PrefetchIterator(loader, device="cpu", num_threads=num_threads)) == lists(loader), n


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("ahead", AHEAD)
def test_plain_iterables_of_every_length(ahead, num_threads):
    for n in LENGTHS:
        p = PrefetchIterator(Counting(n), device="cpu", prefetch_batches=ahead, num_threads=num_threads)
        assert vals(p) == list(range(n))
        assert vals(p) == list(range(n))


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(
    "loader",
    [
        lambda: (torch.tensor([i]) for i in range(4)),
        lambda: [torch.tensor([i]) for i in range(4)],
        lambda: map(lambda i: torch.tensor([i]), range(4)),
        lambda: {torch.tensor([i]): None for i in range(4)}.keys(),
        Sequence,
        lambda: torch.arange(4).reshape(4, 1),
    ],
    ids=["generator", "list", "map", "keys", "getitem", "tensor"],
)
def test_any_iterable_is_a_loader(loader, num_threads):
    assert vals(PrefetchIterator(loader(), device="cpu", num_threads=num_threads)) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_generator_is_used_up_by_its_first_epoch_as_ever(num_threads):
    p = PrefetchIterator((torch.tensor([i]) for i in range(3)), device="cpu", num_threads=num_threads)
    assert vals(p) == [0, 1, 2]
    assert vals(p) == []


@pytest.mark.parametrize("num_threads", THREADS)
def test_batches_that_look_like_an_end_are_batches(num_threads):
    batches = [None, (), [], {}, 0, False, "", StopIteration(), StopIteration, Ellipsis]
    got = list(PrefetchIterator(batches, device="cpu", num_threads=num_threads))
    assert len(got) == len(batches)
    assert all(mine is theirs for mine, theirs in zip(got, batches, strict=True))


@pytest.mark.parametrize("num_threads", THREADS)
def test_the_cpu_gets_the_loaders_own_objects(num_threads):
    batches = [{"x": torch.ones(2), "y": [torch.zeros(1), "name"]} for _ in range(5)]
    got = list(PrefetchIterator(batches, device="cpu", num_threads=num_threads))
    assert len(got) == 5
    assert all(mine is theirs for mine, theirs in zip(got, batches, strict=True))


@pytest.mark.parametrize("num_threads", THREADS)
def test_the_order_on_a_device_that_to_serves(num_threads):
    batches = [torch.empty(n) for n in (3, 1, 4, 1, 5, 9, 2, 6)]
    got = list(PrefetchIterator(batches, device="meta", num_threads=num_threads))
    assert [(b.device.type, b.numel()) for b in got] == [("meta", n) for n in (3, 1, 4, 1, 5, 9, 2, 6)]


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(
    "arguments",
    [
        lambda data: {"batch_size": 3, "shuffle": True},
        lambda data: {"batch_size": 3, "sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 10)},
        lambda data: {"batch_size": 3, "sampler": RandomSampler(data, replacement=True, num_samples=70)},
        lambda data: {"batch_sampler": BatchSampler(SequentialSampler(data), 4, False)},
        lambda data: {"batch_sampler": [[3, 1], [], [0], [2, 2, 2]], "collate_fn": list},
        lambda data: {"batch_size": None, "sampler": [5, 3, 3, 0]},
        lambda data: {"batch_size": 3, "generator": torch.Generator().manual_seed(5), "shuffle": True},
    ],
    ids=["shuffle", "weighted", "replacement", "batch sampler", "list of batches", "no batches", "generator"],
)
def test_samplers(arguments, num_threads):
    def run(wrap):
        torch.manual_seed(3)
        loader = wrap(DataLoader(data, **arguments(data)))
        return [repr(b) for b in loader], [repr(b) for b in loader], torch.rand(1).item()

    data = Ramp(10)
    plain = run(lambda loader: loader)
    assert run(lambda loader: PrefetchIterator(loader, device="cpu", num_threads=num_threads)) == plain


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_loader_class_with_its_own_iter(num_threads):
    class Twice(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                yield -batch

    loader = Twice(Ramp(4), batch_size=2)
    assert lists(PrefetchIterator(loader, device="cpu", num_threads=num_threads)) == lists(loader)


@pytest.mark.skipif(sys.platform != "linux", reason="starts worker processes by fork")
@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_loader_with_workers(num_threads):
    loader = DataLoader(Ramp(9), batch_size=2, num_workers=1, multiprocessing_context="fork")
    plain = lists(DataLoader(Ramp(9), batch_size=2))
    p = PrefetchIterator(loader, device="cpu", num_threads=num_threads)
    assert within(60, lambda: lists(p)) == plain


# --- asking for batches in all ways


@pytest.mark.parametrize("num_threads", THREADS)
def test_epoch_after_epoch(num_threads):
    loader = DataLoader(Ramp(7), batch_size=2)
    p = PrefetchIterator(loader, device="cpu", num_threads=num_threads)
    for _ in range(5):
        assert lists(p) == lists(loader)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_end_stays_the_end(ahead, num_threads):
    it = iter(PrefetchIterator(Counting(2), device="cpu", prefetch_batches=ahead, num_threads=num_threads))
    assert vals(it) == [0, 1]
    for _ in range(4):
        with pytest.raises(StopIteration):
            within(10, lambda: next(it))
    assert next(it, "nothing") == "nothing"


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_epoch_is_its_own_iterator(num_threads):
    it = iter(PrefetchIterator(Counting(4), device="cpu", num_threads=num_threads))
    assert iter(it) is it
    assert vals([next(it)]) + vals(it) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_threads", THREADS)
def test_two_epochs_of_one_object_are_independent(num_threads):
    p = PrefetchIterator(DataLoader(Ramp(9), batch_size=1), device="cpu", num_threads=num_threads)
    assert [vals(pair) for pair in zip(iter(p), iter(p), strict=True)] == [[i, i] for i in range(9)]
    one, two = iter(p), iter(p)
    assert vals(itertools.islice(one, 5)) == [0, 1, 2, 3, 4]
    assert vals(two) == list(range(9))
    assert vals(one) == [5, 6, 7, 8]


@pytest.mark.parametrize("num_threads", THREADS)
def test_many_epochs_at_once(num_threads):
    p = PrefetchIterator(DataLoader(Ramp(5), batch_size=1), device="cpu", num_threads=num_threads)
    assert [vals(row) for row in zip(*[iter(p) for _ in range(12)], strict=True)] == [[i] * 12 for i in range(5)]


@pytest.mark.parametrize("num_threads", THREADS)
def test_next_draws_from_an_epoch_of_the_objects_own(num_threads):
    p = PrefetchIterator(DataLoader(Ramp(4), batch_size=1), device="cpu", num_threads=num_threads)
    assert vals([next(p), next(p)]) == [0, 1]
    assert vals([next(p), next(p)]) == [2, 3]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(p)


@pytest.mark.parametrize("num_threads", THREADS)
def test_iter_renews_the_epoch_of_next(num_threads):
    p = PrefetchIterator(DataLoader(Ramp(4), batch_size=1), device="cpu", num_threads=num_threads)
    assert vals([next(p), next(p)]) == [0, 1]
    it = iter(p)
    assert vals([next(p)]) == [0]
    assert vals([next(it), next(p), next(it), next(p)]) == [0, 1, 1, 2]
    assert vals(p) == [0, 1, 2, 3]
    assert vals([next(p)]) == [0]


@pytest.mark.parametrize("num_threads", THREADS)
def test_next_after_the_end_needs_iter_first(num_threads):
    p = PrefetchIterator(Counting(1), device="cpu", num_threads=num_threads)
    assert vals([next(p)]) == [0]
    assert next(p, None) is None
    assert next(p, None) is None
    iter(p)
    assert vals([next(p)]) == [0]


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_validation_loop_inside_a_paused_training_epoch(ahead, num_threads):
    def run(wrap):
        train = wrap(DataLoader(Ramp(12), batch_size=2))
        val = wrap(DataLoader(Ramp(5), batch_size=2))
        seen = []
        for step, batch in enumerate(train):
            seen.append(batch[:, 0].tolist())
            if step % 2:
                seen += [b[:, 0].tolist() for b in val]
        return seen

    def wrapped(loader):
        return PrefetchIterator(loader, device="cpu", prefetch_batches=ahead, num_threads=num_threads)

    assert within(30, lambda: run(wrapped)) == run(lambda loader: loader)


@pytest.mark.parametrize("num_threads", THREADS)
def test_sixteen_micro_batches_kept_in_a_list(num_threads):
    p = PrefetchIterator(DataLoader(Ramp(40, (64,)), batch_size=1), device="cpu", num_threads=num_threads)
    it, seen = iter(p), []
    while kept := list(itertools.islice(it, 16)):
        seen += [(int(b.min()), int(b.max())) for b in kept]
    assert seen == [(i, i) for i in range(40)]


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_epoch_may_be_consumed_by_several_threads_in_turn(num_threads):
    it = iter(PrefetchIterator(Counting(6), device="cpu", num_threads=num_threads))
    assert vals([within(10, lambda: next(it)) for _ in range(6)]) == [0, 1, 2, 3, 4, 5]
    assert within(10, lambda: next(it, None)) is None


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_prefetcher_inside_a_prefetcher(num_threads):
    inner = PrefetchIterator(DataLoader(Ramp(9), batch_size=2), device="cpu", num_threads=num_threads)
    outer = PrefetchIterator(inner, device="cpu", num_threads=num_threads)
    for _ in range(2):
        assert within(20, lambda: lists(outer)) == lists(DataLoader(Ramp(9), batch_size=2))


# --- how far ahead, and on which thread


def test_nothing_is_loaded_before_iter_and_no_thread_is_started():
    class Untouched:
        def __iter__(self):
            raise AssertionError("iterated")

        def __len__(self):
            raise AssertionError("measured")

    before = threading.active_count()
    p = PrefetchIterator(Untouched(), device="cpu")
    assert "Untouched" in repr(p)
    assert threading.active_count() == before


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_loading_runs_prefetch_batches_ahead_and_no_further(ahead):
    started, n = [], 24
    loader = DataLoader(Ramp(n, hook=started.append), batch_size=1)
    it = iter(PrefetchIterator(loader, device="cpu", prefetch_batches=ahead))
    for taken in range(n):
        assert eventually(lambda taken=taken: len(started) >= min(n, taken + ahead), collect=False)
        assert len(started) == min(n, taken + ahead)
        assert int(next(it)[0, 0]) == taken
    assert next(it, None) is None


@pytest.mark.parametrize("waited, yielded", [(0.0, 0.0), (2**-8, 2**-11), (5.0, 0.001)])
def test_a_loader_thread_that_had_to_wait_lets_the_consumer_begin_its_step(waited, yielded, monkeypatch):
    """Loading at once, it would compete for the GIL with the launch of that step. It gives away what it has."""
    done = []
    clock = itertools.count(0.0, waited)  # each look is that much later
    fake = types.SimpleNamespace(perf_counter=lambda: next(clock), sleep=done.append, monotonic=time.monotonic)
    monkeypatch.setattr(_loader_threads, "time", fake)
    monkeypatch.setattr(_loader_threads, "_SLEEPS_BRIEFLY", True)
    monkeypatch.setattr(_loader_threads.LoaderThreadEpoch, "_let_consumer_go_on", lambda self: None)  # another pause
    loader = DataLoader(Ramp(5, hook=lambda i: done.append(f"load {i}")), batch_size=1)
    assert vals(PrefetchIterator(loader, device="cpu", prefetch_batches=2)) == list(range(5))
    assert done == ["load 0", "load 1", yielded, "load 2", yielded, "load 3", yielded, "load 4", yielded]


def test_the_first_batch_is_taken_before_the_next_one_is_loaded(monkeypatch):
    """Where samples hold the GIL, too, whatever the switch interval is."""
    monkeypatch.setattr(_loader_threads, "_LONGEST_YIELD_SECONDS", 10.0)
    monkeypatch.setattr(_loader_threads, "_SLEEPS_BRIEFLY", True)
    taken, taken_at_load = [], []

    class HoldsTheGil(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            taken_at_load.append(list(taken))
            return i

    before = sys.getswitchinterval()
    sys.setswitchinterval(100.0)
    try:
        for batch in PrefetchIterator(DataLoader(HoldsTheGil(), batch_size=None), "cpu"):
            taken.append(batch)
    finally:
        sys.setswitchinterval(before)
    assert taken == [0, 1, 2, 3] and taken_at_load[:2] == [[], [0]]


def test_the_next_epoch_loads_while_something_else_runs():
    started = []
    p = PrefetchIterator(DataLoader(Ramp(9, hook=started.append), batch_size=1), device="cpu", prefetch_batches=3)
    it = iter(p)
    assert eventually(lambda: started == [0, 1, 2])
    assert vals(it) == list(range(9))


def test_without_a_thread_the_cpu_loads_a_batch_only_when_asked():
    loaded = []
    loader = DataLoader(Ramp(6, hook=lambda i: loaded.append((i, threading.get_ident()))), batch_size=2)
    before = threading.active_count()
    it = iter(PrefetchIterator(loader, device="cpu", num_threads=0, prefetch_batches=4))
    assert loaded == []
    for taken in (2, 4, 6):
        next(it)
        assert loaded == [(i, threading.get_ident()) for i in range(taken)]
        assert threading.active_count() == before


def test_one_thread_loads_all_and_it_is_a_daemon_with_a_name():
    seen = set()
    loader = DataLoader(Ramp(6, hook=lambda i: seen.add(threading.current_thread())), batch_size=1)
    assert vals(PrefetchIterator(loader, device="cpu")) == [0, 1, 2, 3, 4, 5]
    (thread,) = seen
    assert thread.daemon
    assert thread.name.startswith("gpuprefetch-loader-")


def test_loading_and_the_loop_run_at_the_same_time():
    """Each waits for the other to be inside its code: without overlap neither gets on."""
    barrier = threading.Barrier(2, timeout=20)
    loader = DataLoader(Ramp(5, hook=lambda i: i and barrier.wait()), batch_size=1)
    seen = []
    for batch in PrefetchIterator(loader, device="cpu", prefetch_batches=1):
        seen.append(int(batch[0, 0]))
        if seen[-1] < 4:
            barrier.wait()
    assert seen == [0, 1, 2, 3, 4]


def test_the_loader_is_asked_for_one_batch_at_a_time():
    inside, most = [], []

    def hook(i):
        inside.append(i)
        most.append(len(inside))
        time.sleep(0.001)  # load
        inside.remove(i)

    assert vals(PrefetchIterator(DataLoader(Ramp(20, hook=hook), batch_size=1), device="cpu", prefetch_batches=4))
    assert most == [1] * 20


# --- buffers that a loader uses again


def test_one_buffer_reused_by_collate():
    buffer = torch.empty(1 << 12)

    def collate(samples):
        return buffer.fill_(samples[0])

    loader = DataLoader(range(30), batch_size=1, collate_fn=collate)
    p = PrefetchIterator(loader, device="cpu", num_threads=0, prefetch_batches=4)
    assert [(int(b.min()), int(b.max())) for b in p] == [(i, i) for i in range(30)]


def test_one_numpy_buffer_reused_by_a_generator():
    buffer = numpy.zeros(1 << 12, dtype=numpy.float32)

    def batches():
        for i in range(30):
            buffer[:] = i
            yield torch.from_numpy(buffer)

    p = PrefetchIterator(batches(), device="cpu", num_threads=0)
    assert [(int(b.min()), int(b.max())) for b in p] == [(i, i) for i in range(30)]


def test_a_loop_may_write_into_its_own_batch():
    seen = []
    for batch in PrefetchIterator(DataLoader(Ramp(12), batch_size=2), device="cpu", prefetch_batches=4):
        seen.append(batch[:, 0].tolist())
        batch.mul_(2).add_(1)
    assert seen == lists(b[:, 0] for b in DataLoader(Ramp(12), batch_size=2))


# --- random numbers


@pytest.mark.parametrize("num_threads", THREADS)
def test_order_and_the_state_of_the_generator_equal_the_plain_loaders(num_threads):
    def run(wrap):
        torch.manual_seed(7)
        it, got = wrap(DataLoader(Ramp(40), batch_size=4, shuffle=True)), []
        for _ in range(2):
            got += [(x[:, 0].tolist(), torch.rand(1).item()) for x in it]  # the loop draws too
        return got, torch.rand(1).item()

    plain = run(lambda loader: loader)
    assert plain[0][:10] != plain[0][10:]
    for _ in range(10):
        assert run(lambda loader: PrefetchIterator(loader, device="cpu", num_threads=num_threads)) == plain


@pytest.mark.parametrize("num_threads", THREADS)
def test_the_samplers_first_draw_happens_in_iter_and_not_in_the_thread(num_threads):
    callers = []

    class Watched(RandomSampler):
        def __iter__(self):
            callers.append(threading.get_ident())
            yield from super().__iter__()

    data = Ramp(12)
    p = PrefetchIterator(DataLoader(data, batch_size=4, sampler=Watched(data)), device="cpu", num_threads=num_threads)
    torch.manual_seed(7)
    it = iter(p)
    assert callers == [threading.get_ident()]
    state = torch.get_rng_state()
    order = [x[:, 0].tolist() for x in it]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(7)
    assert order == [x[:, 0].tolist() for x in DataLoader(data, batch_size=4, sampler=RandomSampler(data))]


def test_iter_waits_for_a_slow_samplers_draw():
    class Slow(RandomSampler):
        def __iter__(self):
            time.sleep(0.05)  # load
            yield from super().__iter__()

    def run(wait):
        torch.manual_seed(7)
        data, loaded = Ramp(12), threading.Event()
        data.hook = lambda i: loaded.set()
        it = iter(PrefetchIterator(DataLoader(data, batch_size=4, sampler=Slow(data)), device="cpu"))
        if wait:
            assert loaded.wait(20)
        return torch.rand(1).item(), [x[:, 0].tolist() for x in it]

    assert run(False) == run(True)


def test_constructor_draws_nothing():
    random.seed(1)
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate()
    PrefetchIterator(DataLoader(Ramp(4), shuffle=True), device="cpu")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


# --- set_epoch


@pytest.mark.parametrize("num_threads", THREADS)
def test_set_epoch_reaches_the_sampler_in_time(num_threads):
    def run(wrap):
        data = Ramp(16)
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=1)
        it, out = wrap(DataLoader(data, batch_size=4, sampler=sampler)), []
        for epoch in range(3):
            getattr(it, "set_epoch", sampler.set_epoch)(epoch)
            out.append([b[:, 0].tolist() for b in it])
        return out

    plain = run(lambda loader: loader)
    assert plain[0] != plain[1] != plain[2]
    assert run(lambda loader: PrefetchIterator(loader, device="cpu", num_threads=num_threads)) == plain


def test_set_epoch_leaves_a_running_epoch_alone():
    data = Ramp(16)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=1)
    p = PrefetchIterator(DataLoader(data, batch_size=4, sampler=sampler), device="cpu", prefetch_batches=1)
    p.set_epoch(0)
    first = lists(p)
    it = iter(p)
    got = [next(it).tolist()]
    p.set_epoch(1)
    assert got + lists(it) == first
    assert lists(p) != first


def test_a_dataset_changed_between_epochs_is_seen_whole():
    data = TensorDataset(torch.zeros(8))
    p = PrefetchIterator(DataLoader(data, batch_size=2), device="cpu", prefetch_batches=4)
    for value in (1.0, 2.0, 3.0):
        data.tensors[0].fill_(value)
        assert [x.tolist() for (x,) in p] == [[value, value]] * 4


def test_no_thread_is_left_when_an_epoch_has_ended():
    before = threads()
    it = iter(PrefetchIterator(DataLoader(Ramp(3), batch_size=1), device="cpu"))
    assert vals(it) == [0, 1, 2]
    assert eventually(lambda: not threads(since=before), collect=False)
