"""``CachedDataset``: each sample is loaded once, by whoever asks first, as long as there is room."""

import contextlib
import copy
import gc
import os
import pickle
import sys
import threading
import warnings
import weakref
from collections import namedtuple
from fractions import Fraction

import numpy
import pytest
import torch
from caches import PLENTY, Counted, Holder, N, WithItsOwnCopy, cached, ramp
from loaders import THREADS, Gate, Ramp, eventually, vals, within
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import gpuprefetch
from gpuprefetch import CachedDataset, PrefetchIterator, _cached_dataset
from gpuprefetch._cached_dataset import emptied_caches
from gpuprefetch._sample_copies import bytes_in, copied
from gpuprefetch._seeds import SeededDataset, Seeds

pytestmark = pytest.mark.windows

Pair = namedtuple("Pair", "a b")


# --- once


def test_a_sample_is_loaded_once():
    cache, dataset = cached(ramp)
    assert len(cache) == N and cache.dataset is dataset
    for _ in range(3):
        assert [cache[i].tolist() for i in range(N)] == [[float(i)] * 4 for i in range(N)]
    assert dataset.asked == list(range(N))


@pytest.mark.parametrize("threads", THREADS)
def test_in_a_loader(threads):
    cache, dataset = cached(lambda i: {"image": ramp(i), "label": i, "name": f"{i}"})
    batches = PrefetchIterator(DataLoader(cache, 5, shuffle=True), "cpu", num_threads=threads)
    for _ in range(3):
        samples = {}
        for batch in batches:
            for name, image, label in zip(batch["name"], batch["image"], batch["label"], strict=True):
                samples[name] = image.tolist(), int(label)
        assert samples == {f"{i}": ([float(i)] * 4, i) for i in range(N)}
    assert sorted(dataset.asked) == list(range(N))


class Drawing(Dataset):
    """Of both generators of a sample."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        drawn = torch.rand(1, generator=gpuprefetch.sample_generator())
        return torch.cat([drawn, torch.tensor([gpuprefetch.sample_rng().random()])])


def drawn(dataset, epochs=(0,), threads=0, seed=3):
    """What each of these epochs gives, in the order of the indices."""
    batches = PrefetchIterator(DataLoader(dataset, 5), "cpu", num_threads=threads, seed=seed)
    given = []
    for epoch in epochs:
        batches.set_epoch(epoch)
        given.append(torch.cat(list(batches)))
    return given


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("room", [PLENTY, 5 * 8], ids=["all fit", "some fit"])
@pytest.mark.filterwarnings("ignore:the sample at index:RuntimeWarning")
def test_a_sample_is_the_same_whichever_epoch_loads_it(threads, room):
    (expected,) = drawn(CachedDataset(Drawing(), PLENTY))
    assert len(expected.unique()) == 2 * N
    for epochs in ((0, 1, 2), (7,), (2, 0)):
        for given in drawn(CachedDataset(Drawing(), room), epochs, threads):
            assert torch.equal(given, expected)
    assert not torch.equal(drawn(CachedDataset(Drawing(), PLENTY), seed=4)[0], expected)
    assert not torch.equal(drawn(Drawing())[0], expected)


def test_a_sample_is_the_same_whichever_way_it_is_asked_for():
    (expected,) = drawn(CachedDataset(Drawing(), PLENTY))
    backwards = Subset(CachedDataset(Drawing(), PLENTY), range(N - 1, -1, -1))
    assert torch.equal(drawn(backwards)[0], expected.flip(0))
    assert torch.equal(drawn(CachedDataset(CachedDataset(Drawing(), PLENTY), PLENTY))[0], expected)


def test_what_lies_on_top_draws_as_without_a_cache():
    class OnTop(Drawing):
        def __getitem__(self, i):
            before = torch.rand(1, generator=gpuprefetch.sample_generator())
            cache[i]
            return torch.cat([before, torch.rand(1, generator=gpuprefetch.sample_generator())])

    cache = CachedDataset(Drawing(), PLENTY)
    first, second = drawn(OnTop(), (0, 1))
    cache = range(N)
    again, _ = drawn(OnTop(), (0, 1))
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize(
    "one, same, other",
    [
        (3, [numpy.int64(3), numpy.array(3), torch.tensor(3)], [4, -3, 3.0, "3", (3,)]),
        ("a", ["a"], ["b", b"a"]),
        (("a", 1), [("a", 1)], [("a", 2)]),
        (None, [None], [0]),
        ((1,), [(1,), (numpy.int64(1),)], [1, (1.0,), (True,), ((1,),), ("1",), (1, 1)]),
        (("a", (1, 2)), [("a", (1, torch.tensor(2)))], [("a", (1, 2.0)), ("a", (1.0, 2))]),
        (0.0, [0.0], [-0.0, 0, False, numpy.float32(0), numpy.float32(-0.0), 0j]),
        (1, [numpy.uint8(1)], [True, 1.0, Fraction(1)]),
        (True, [True, numpy.bool_(True), torch.tensor(True)], [1, False]),
        (frozenset({1}), [frozenset({1})], [frozenset({1.0}), frozenset({True})]),
        (slice(1), [slice(numpy.int64(1))], [slice(1.0), slice(True), slice(1, None), slice(None, None, 1)]),
        (Pair(1, 2), [Pair(1, 2)], [Pair(1, 2.0), (1, 2)]),
    ],
)
def test_which_indices_are_one(one, same, other):
    cache, dataset = cached(lambda key: [key])
    for key in [one, *same]:
        assert cache[key] == [one]
    assert len(dataset.asked) == 1
    for number, key in enumerate(other, 2):
        assert repr(cache[key]) == repr([key])
        assert len(dataset.asked) == number == len(cache._kept)


@pytest.mark.parametrize(
    "index",
    [
        [1],
        (1, [2]),
        ("a", torch.tensor(1.5)),
        slice([1]),
        torch.tensor([3]),
        torch.tensor(1.5),
        numpy.array([3]),
        {1: 2},
    ],
    ids=repr,
)
def test_what_is_no_index(index):
    cache, dataset = cached(ramp)
    with pytest.raises(TypeError) as caught:
        cache[index]
    text = f"the index of a CachedDataset must be an integer or a hashable key, not {index!r}"
    assert str(caught.value) == text and dataset.asked == []


def test_dropping_the_cache_frees_what_it_kept():
    cache, _ = cached(lambda i: Holder(i))
    list(PrefetchIterator(DataLoader(cache, 4, collate_fn=list), "cpu", num_threads=2))
    kept = [weakref.ref(sample) for sample in cache._kept.values()]
    assert len(kept) == N
    del cache
    assert eventually(lambda: all(reference() is None for reference in kept))


# --- several threads


def asked_at_once(cache, indices):
    """What each of these threads gets or is raised."""
    results = [None] * len(indices)

    def ask(place, index):
        try:
            results[place] = cache[index]
        except Exception as error:
            results[place] = error

    asking = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(indices)]
    for thread in asking:
        thread.start()
    return asking, results


def test_two_threads_that_ask_for_one_sample_load_it_once():
    with Gate(at=3) as gate:
        cache, dataset = cached(lambda i: gate(i) or ramp(i))
        asking, results = asked_at_once(cache, [3, 3, 3])
        assert gate.reached.wait(10)
        assert eventually(lambda: cache._turns[3].askers == 3, collect=False)
        assert within(10, lambda: cache[4].tolist()) == [4.0] * 4  # others are not held up
        gate.opened.set()
        for thread in asking:
            thread.join(10)
    assert [result.tolist() for result in results] == [[3.0] * 4] * 3
    assert len({result.data_ptr() for result in results}) == 3
    assert dataset.asked == [3, 4] and cache._turns == {}


def test_an_error_arrives_in_each_asker_and_is_not_kept():
    failures = [OSError("first"), OSError("second")]

    def fail(i):
        gate(i)
        if failures:
            raise failures.pop(0)
        return ramp(i)

    with Gate(at=3) as gate:
        cache, dataset = cached(fail)
        asking, results = asked_at_once(cache, [3, 3])
        assert gate.reached.wait(10)
        assert eventually(lambda: cache._turns[3].askers == 2, collect=False)
        gate.opened.set()
        for thread in asking:
            thread.join(10)
    assert sorted(map(str, results)) == ["first", "second"]
    assert cache[3].tolist() == [3.0] * 4
    assert dataset.asked == [3, 3, 3] and cache._turns == {}


def test_many_threads_and_little_room():
    """Counts stay right: what is kept fits, and what does not is loaded by whoever asks."""
    cache, dataset = cached(ramp, max_bytes=5 * torch.zeros(4).nbytes)
    with pytest.warns(RuntimeWarning, match="does not fit"):
        for _ in range(5):
            asking, results = asked_at_once(cache, list(range(N)) * 2)
            for thread in asking:
                thread.join(10)
            assert [result.tolist() for result in results] == [[float(i)] * 4 for i in range(N)] * 2
    assert len(cache._kept) == 5 and cache._kept.bytes == 80
    assert len(dataset.asked) == 5 + 5 * 2 * (N - 5)


def test_a_dataset_that_asks_the_cache_for_its_own_sample_does_not_hang():
    dataset = Counted(lambda i: cache[i])
    cache = CachedDataset(dataset, PLENTY)
    with pytest.raises(RecursionError):
        within(30, lambda: cache[0])
    assert cache._turns == {}


# --- how much


def test_when_no_more_fits_one_warning_says_how_much_does():
    cache, dataset = cached(ramp, max_bytes=5 * 16)
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(2):
            assert vals(cache[i] for i in range(N)) == list(range(N))
    assert [str(warning.message) for warning in caught] == [
        "the sample at index 5 takes 16 bytes and does not fit into max_bytes=80 of a CachedDataset: 5 of 12 samples "
        "are kept so far, 80 bytes; what does not fit is loaded each time"
    ]
    assert dataset.asked == [*range(N), *range(5, N)]
    assert repr(cache).endswith(", 5 samples kept, 80 of 80 bytes)")


def test_a_smaller_sample_may_still_fit():
    cache, dataset = cached(lambda i: torch.zeros(100 if i == 0 else 1), max_bytes=40)
    with pytest.warns(RuntimeWarning, match="takes 400 bytes .* 0 of 12 samples are kept so far, 0 bytes"):
        cache[0]
    for _ in range(2):
        cache[1], cache[0]
    assert dataset.asked == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "wrap",
    [lambda c: c, lambda c: CachedDataset(c, PLENTY), lambda c: SeededDataset(c, Seeds(1, 0))],
    ids=["plain", "cache in a cache", "seeded"],
)
def test_the_warning_points_at_whoever_asks(wrap):
    cache, _ = cached(ramp, max_bytes=1)
    whole = wrap(cache)
    with pytest.warns(RuntimeWarning, match="does not fit") as caught:
        line, _ = sys._getframe().f_lineno, whole[0]
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


class Keyed(Dataset):
    def __getitem__(self, key):
        return torch.zeros(10)


class KeyedWithoutEnd(Keyed):
    def __len__(self):
        raise NotImplementedError


@pytest.mark.parametrize("kind, error", [(Keyed, TypeError), (KeyedWithoutEnd, NotImplementedError)])
def test_a_dataset_without_a_length(kind, error):
    cache = CachedDataset(kind(), 1)
    with pytest.warns(RuntimeWarning, match="the sample at index 'x' .* 0 samples are kept so far"):
        assert len(cache["x"]) == 10
    with pytest.raises(error):
        len(cache)


@pytest.mark.parametrize("warned", [True, False])
def test_all_that_fits_is_no_warning(warned):
    cache, _ = cached(ramp, max_bytes=N * 16 - warned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        vals(cache[i] for i in range(N))
    assert len(caught) == warned


def test_copies_that_are_longer_than_their_samples_count():
    """[i] has room for one item, and what deepcopy() makes by append() for four."""
    cache = CachedDataset([[[i], [i], [i], [i]] for i in range(200)], max_bytes=50_000)
    with pytest.warns(RuntimeWarning, match="does not fit"):
        assert [cache[i] for i in range(200)] == [[[i]] * 4 for i in range(200)]
    assert 40_000 < sum(map(bytes_in, cache._kept.values())) <= cache._kept.bytes <= 50_000


def test_a_small_copy_that_is_longer_than_its_sample_leaves_room_for_large_ones():
    """That of an object with little in it is more than twice as long."""
    cache, dataset = cached(lambda i: Holder(None if i == 0 else torch.zeros(1 << 18)), max_bytes=5 << 19)
    for _ in range(2):
        for i in range(3):
            cache[i]
    assert dataset.asked == [0, 1, 2]


def test_what_is_too_large_itself_is_not_copied(monkeypatch):
    made = []
    monkeypatch.setattr(_cached_dataset, "copied", lambda sample, *device: made.append(sample) or copied(sample))
    cache, _ = cached(ramp, max_bytes=5 * 16)
    with pytest.warns(RuntimeWarning, match="does not fit"):
        for _ in range(2):
            for i in range(N):
                cache[i]
    assert len(made) == 3 * 5  # to keep, and to give twice


# --- emptied for a while


@pytest.mark.parametrize("error", [None, KeyError])
def test_caches_are_empty_for_a_while_and_then_as_before(error):
    cache, dataset = cached(ramp, max_bytes=5 * 16)
    [cache[i] for i in range(3)]
    before = cache._kept
    with contextlib.suppress(KeyError), emptied_caches():
        assert len(cache._kept) == cache._kept.bytes == 0
        with pytest.warns(RuntimeWarning, match="does not fit"):
            [cache[i] for i in range(N)]
        assert len(cache._kept) == 5
        if error is not None:
            raise error
    assert dataset.asked == [0, 1, 2, *range(N)]
    assert cache._kept is before and list(before) == [0, 1, 2] and before.bytes == 48 and not before.warned


def test_caches_are_known_while_they_live_and_need_no_hash():
    class Unhashable(CachedDataset):
        def __eq__(self, other):
            return NotImplemented

        __hash__ = None

    cache = Unhashable(Ramp(N), PLENTY)
    cache[0]
    with emptied_caches():
        assert not cache._kept
    assert cache._kept
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    with emptied_caches():
        pass


def test_a_load_that_is_under_way_while_caches_are_emptied_is_counted_where_it_began():
    with Gate(at=3) as gate:
        cache, dataset = cached(lambda i: gate(i) or ramp(i))
        asking, results = asked_at_once(cache, [3])
        assert gate.reached.wait(10)
        with emptied_caches():
            gate.opened.set()
            asking[0].join(10)
            assert len(cache._kept) == cache._kept.bytes == 0
    assert results[0].tolist() == [3.0] * 4 and list(cache._kept) == [3] and cache._kept.bytes == 16


# --- devices


def test_on_a_device_all_samples_are_there():
    """The device "meta" stands in for one: tensors have no values there, but a place."""
    cache, dataset = cached(lambda i: {"image": ramp(i), "name": f"{i}"}, max_bytes=500, device="meta")
    with pytest.warns(RuntimeWarning, match="does not fit"):
        for _ in range(2):
            samples = [cache[i] for i in range(N)]
            assert {sample["image"].device.type for sample in samples} == {"meta"}
            assert [sample["name"] for sample in samples] == [f"{i}" for i in range(N)]
    assert 0 < len(cache._kept) < N and len(dataset.asked) == 2 * N - len(cache._kept)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("room", [PLENTY * 64, 6 * 256 * 1024], ids=["all fit", "some fit"])
@pytest.mark.filterwarnings("ignore:the sample at index:RuntimeWarning")
def test_on_cuda(threads, room):
    cache, dataset = cached(lambda i: (torch.full((256, 256), float(i)), i), max_bytes=room, device="cuda")
    batches = PrefetchIterator(DataLoader(cache, 5, shuffle=True), "cuda", num_threads=threads)
    for _ in range(4):
        seen = []
        for images, labels in batches:
            assert images.is_cuda and labels.is_cuda
            assert torch.equal(images, labels.float()[:, None, None].expand(-1, 256, 256))
            images.zero_()  # of the batch, and no sample
            seen += labels.tolist()
        assert sorted(seen) == list(range(N))
    assert all(image.is_cuda for image, _ in cache._kept.values())
    assert len(cache._kept) == (N if room > PLENTY * 8 else len(cache._kept)) > 0
    assert len(dataset.asked) == len(cache._kept) + 4 * (N - len(cache._kept))


@pytest.mark.gpu
@pytest.mark.parametrize("threads", THREADS)
def test_on_cuda_a_later_epoch_waits_for_nothing(threads, spin):
    cache, _ = cached(lambda i: torch.full((256, 256), float(i)), device="cuda", max_bytes=PLENTY * 64)
    batches = PrefetchIterator(DataLoader(cache, 2), "cuda", num_threads=threads)
    assert vals(batches) == list(range(0, N, 2))
    torch.cuda.synchronize()
    epoch = iter(batches)
    spin(1500)
    end = torch.cuda.Event()
    end.record()
    first = next(epoch)
    second = next(epoch)
    assert not end.query(), "the host waited for the device"
    assert vals([first, second]) == [0, 2]


@pytest.mark.gpu
def test_on_cuda_samples_are_read_on_another_stream_than_they_were_made(spin):
    """The stream that made a sample is busy before: who reads it early would see what was there."""
    cache, _ = cached(lambda i: torch.full((1 << 20,), float(i)), device="cuda", max_bytes=PLENTY * 64)
    made, read = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(made):
        spin(200)
        cache[3]
    with torch.cuda.stream(read):
        sample = cache[3]
    read.synchronize()
    assert torch.equal(sample, torch.full_like(sample, 3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.Tensor, WithItsOwnCopy], ids=["tensor", "copies itself"])
def test_on_cuda_a_cache_that_is_dropped_while_it_is_read(kind, spin):
    """Its memory must not be used again before the copy out of it is done."""
    cache, _ = cached(
        lambda i: torch.full((1 << 20,), float(i)).as_subclass(kind), device="cuda", max_bytes=PLENTY * 64
    )
    made, read = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(made):
        cache[3]
    torch.cuda.synchronize()
    with torch.cuda.stream(read):
        spin(200)
        sample = cache[3]
    del cache
    with torch.cuda.stream(made):
        others = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert torch.equal(sample, torch.full_like(sample, 3.0))
    assert len(others) == 4


@pytest.mark.gpu
def test_samples_that_the_dataset_makes_on_the_device_are_kept_there():
    cache, dataset = cached(lambda i: torch.full((64,), float(i), device="cuda"))
    batches = PrefetchIterator(DataLoader(cache, 4), "cuda", num_threads=3)
    assert vals(batches) == vals(batches) == [0, 4, 8]
    assert sorted(dataset.asked) == list(range(N)) and cache[0].is_cuda


# --- wrong use


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Stream(), 5, None, iter([1])])
def test_a_dataset_that_is_not_map_style(dataset):
    with pytest.raises(TypeError) as caught:
        CachedDataset(dataset, 5)
    assert str(caught.value) == f"dataset must be map-style, with dataset[index], not {type(dataset).__name__}"


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"max_bytes": 0}, ValueError, "max_bytes must be an integer from 1 to 1125899906842624, not 0"),
        ({"max_bytes": -5}, ValueError, "max_bytes must be an integer from 1 to 1125899906842624, not -5"),
        ({"max_bytes": 1e9}, TypeError, "max_bytes must be an integer from 1 to 1125899906842624, not 1000000000.0"),
        ({"max_bytes": "8G"}, TypeError, "max_bytes must be an integer from 1 to 1125899906842624, not '8G'"),
        ({"max_bytes": None}, TypeError, "max_bytes must be an integer from 1 to 1125899906842624, not None"),
        (
            {"device": 2**70},
            ValueError,
            "device must name a torch device, such as 'cuda:0' or 'cpu', not 11805916",
        ),
        ({"device": "gpu"}, ValueError, "device must name a torch device, such as 'cuda:0' or 'cpu', not 'gpu'"),
        ({"device": 1.5}, TypeError, "device must be a torch.device, a string, an index or None, not 1.5"),
    ],
    ids=str,
)
def test_wrong_argument(arguments, error, text):
    with pytest.raises(error) as caught:
        CachedDataset(Ramp(3), **{"max_bytes": 5, **arguments})
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_can_not_be_copied_or_pickled(how):
    with pytest.raises(TypeError, match="each worker process would fill a cache of its own. Use num_threads"):
        how(CachedDataset(Ramp(3), 5))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("index", [0, 3], ids=["kept", "being loaded"])
def test_a_forked_worker_says_so_and_does_not_hang(index):
    with Gate(at=3) as gate:
        cache, _ = cached(lambda i: gate(i) or ramp(i))
        cache[0]
        asking, results = asked_at_once(cache, [3])
        assert gate.reached.wait(10)
        loader = DataLoader(
            cache, sampler=[index], batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=30
        )
        with pytest.raises(TypeError, match="in a forked process: each worker process would fill a cache of its own"):
            list(loader)
        gate.opened.set()
        asking[0].join(10)
    assert results[0].tolist() == [3.0] * 4
