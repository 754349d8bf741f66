"""``seed=``: order and random augmentation are functions of the seed, the epoch and the sample."""

import contextvars
import operator
import random
import sys
import threading
import warnings

import numpy
import pytest
import torch
from loaders import THREADS, Ramp, within
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, StackDataset, Subset, random_split
from torch.utils.data.distributed import DistributedSampler

import gpuprefetch
from gpuprefetch import PrefetchIterator, _source
from gpuprefetch._crew import Enough
from gpuprefetch._dataset import fetches_one_by_one
from gpuprefetch._seeds import Seeds

pytestmark = pytest.mark.windows

N = 24


class Augmented(Dataset):
    """Sample i is i, two draws of torch's sample generator and two of NumPy's."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        first = torch.rand((), generator=gpuprefetch.sample_generator())
        rng = gpuprefetch.sample_rng()
        second = torch.rand((), generator=gpuprefetch.sample_generator())
        return torch.tensor([i, first, second, rng.random(), rng.random()], dtype=torch.float64)


class DrawsGlobally(Dataset):
    """Sample i is i, and a draw from each global generator."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(()), random.random(), numpy.random.rand()], dtype=torch.float64)


class DrawsInAStream(IterableDataset):
    def __iter__(self):
        return (torch.tensor([random.random(), float(torch.rand(())), numpy.random.rand()]) for _ in range(N))


def epochs(dataset, count=2, step=lambda: None, **arguments):
    """The samples of some epochs, [epochs, N, ...], as a loop gets them that calls ``step()`` for each batch."""
    arguments = {"device": "cpu", "seed": 5, **arguments}
    shuffle = not isinstance(dataset, IterableDataset)
    with PrefetchIterator(DataLoader(dataset, batch_size=5, shuffle=shuffle), **arguments) as batches:
        result = []
        for _ in range(count):
            samples = []
            for batch in batches:
                step()
                samples.append(batch)
            result.append(torch.cat(samples))
    return torch.stack(result)


def global_states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def draw_globally():
    return random.random(), numpy.random.rand(), float(torch.rand(()))


@pytest.mark.parametrize("threads", THREADS)
def test_order_and_augmentation_are_equal_for_any_threads_and_whatever_was_drawn_before(threads):
    expected = epochs(Augmented(), num_threads=0)
    draw_globally()
    assert torch.equal(epochs(Augmented(), num_threads=threads, step=draw_globally), expected)
    assert torch.equal(epochs(Augmented(), num_threads=threads, prefetch_batches=9), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dataset", [Augmented, DrawsGlobally])
def test_the_device_changes_nothing(dataset):
    expected = epochs(dataset(), num_threads=0)
    for threads in THREADS if dataset is Augmented else [0]:
        assert torch.equal(epochs(dataset(), num_threads=threads, device="cuda").cpu(), expected)


def test_epochs_and_seeds_differ():
    first, second = epochs(Augmented())
    other = epochs(Augmented(), seed=6)[0]
    orders = [samples[:, 0].tolist() for samples in (first, second, other)]
    assert all(sorted(order) == list(range(N)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    draws = torch.cat([first, second, other])[:, 1:]
    assert len(draws.unique()) == draws.numel() == 3 * N * 4  # none equals another: one generator a sample and library
    assert 0.4 < draws.mean() < 0.6


def test_what_a_sample_draws_belongs_to_its_index():
    in_order = DataLoader(Augmented(), batch_size=5)
    by_index = torch.cat(list(PrefetchIterator(in_order, "cpu", seed=5)))
    (shuffled,) = epochs(Augmented(), count=1)
    assert not torch.equal(shuffled, by_index)
    assert torch.equal(shuffled[shuffled[:, 0].argsort()], by_index)


@pytest.mark.parametrize("threads", THREADS)
def test_an_epoch_can_be_chosen(threads):
    expected = epochs(Augmented(), count=5)
    batches = PrefetchIterator(DataLoader(Augmented(), 5, shuffle=True), "cpu", seed=5, num_threads=threads)
    for number in (3, 1):
        batches.set_epoch(number)
        assert torch.equal(torch.cat(list(batches)), expected[number])
        assert torch.equal(torch.cat(list(batches)), expected[number + 1])  # it counts on from there


def test_an_epoch_that_is_left_counts():
    batches = PrefetchIterator(DataLoader(Augmented(), 5, shuffle=True), "cpu", seed=5)
    next(iter(batches))
    next(batches)
    assert torch.equal(torch.cat(list(batches)), epochs(Augmented(), count=3)[2])


def test_an_iter_that_fails_does_not_count():
    class Once(list):
        failed = False

        def __iter__(self):
            if not self.failed:
                self.failed = True
                raise OSError("not yet")
            return iter([torch.rand(3)])

    batches = PrefetchIterator(Once(), "cpu", seed=5, num_threads=0)
    with pytest.raises(OSError, match="not yet"):
        iter(batches)
    fresh = Once()
    fresh.failed = True
    assert torch.equal(next(batches), next(PrefetchIterator(fresh, "cpu", seed=5, num_threads=0)))


@pytest.mark.parametrize("dataset", [DrawsGlobally(), DrawsInAStream()], ids=["map-style", "iterable"])
def test_global_draws_on_the_calling_thread_are_apart_from_the_loops(dataset):
    """Neither disturbs the other: not in what it draws, nor in the state that it finds."""
    expected = epochs(dataset, num_threads=0)

    def fresh():
        random.seed(1), numpy.random.seed(2), torch.manual_seed(3)

    fresh()
    plain = [draw_globally() for _ in range(10)]
    state = global_states()
    fresh()
    drawn = []
    assert torch.equal(epochs(dataset, num_threads=0, step=lambda: drawn.append(draw_globally())), expected)
    assert drawn == plain
    assert global_states() == state
    assert len(expected.reshape(-1, expected.shape[-1])[:, -1].unique()) == 2 * N


def test_a_seed_of_0_is_a_seed():
    first = epochs(Augmented(), seed=0)
    draw_globally()
    assert torch.equal(epochs(Augmented(), seed=0), first)


@pytest.mark.parametrize("threads", [threads for threads in THREADS if threads])
def test_in_other_threads_the_global_generators_are_the_loops(threads):
    """Seeded there, they would be seeded under the feet of the training step."""
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    before, seen = global_states(), []
    epochs(Ramp(N, hook=lambda i: seen.append(global_states())), num_threads=threads)
    assert seen and all(state == before for state in seen)


def test_one_thread_draws_from_the_global_generators_as_they_are():
    """Equal between runs that begin alike, as long as the loop draws nothing; not what seed= gives without a thread."""

    def run(step=lambda: None):
        random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
        return epochs(DrawsGlobally(), num_threads=1, step=step)

    assert torch.equal(run(), run())
    assert not torch.equal(run(step=draw_globally), run())
    assert not torch.equal(epochs(DrawsGlobally(), num_threads=0), run())


@pytest.mark.skipif(len(THREADS) < 3, reason="sample threads are not tested here")
def test_samples_fetched_at_the_same_time_have_generators_of_their_own():
    together = threading.Barrier(3, timeout=20)

    class Meeting(Augmented):
        def __getitem__(self, i):
            together.wait()
            first = gpuprefetch.sample_rng().random()
            together.wait()
            return torch.tensor([i, first, gpuprefetch.sample_rng().random()], dtype=torch.float64)

    batches = PrefetchIterator(DataLoader(Meeting(), 3), "cpu", seed=5, num_threads=3)
    expected = torch.cat(list(PrefetchIterator(DataLoader(Augmented(), 3), "cpu", seed=5)))
    assert torch.equal(torch.cat(list(batches)), expected[:, [0, 3, 4]])


def test_set_epoch_still_reaches_the_loader():
    sampler = DistributedSampler(Ramp(N), num_replicas=1, rank=0, shuffle=True)
    batches = PrefetchIterator(DataLoader(Ramp(N), 5, sampler=sampler), "cpu", seed=5)
    batches.set_epoch(7)
    assert sampler.epoch == 7


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_no_order(persistent):
    def loader(workers):
        persistent_workers = persistent and workers > 0
        context = "fork" if workers else None
        return DataLoader(
            Ramp(N),
            N,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent_workers,
            multiprocessing_context=context,
        )

    plain = PrefetchIterator(loader(0), "cpu", seed=5)
    expected = [next(iter(plain)).flatten().tolist() for _ in range(3)]
    with PrefetchIterator(loader(1), "cpu", seed=5) as batches:
        assert [list(batches)[0].flatten().tolist() for _ in range(3)] == expected
        batches.set_epoch(0)
        assert list(batches)[0].flatten().tolist() == expected[0]


def test_an_iterator_of_the_users_is_left_as_it_is():
    iterator = iter(DataLoader(Ramp(N), 1))
    dataset, collate = iterator._dataset_fetcher.dataset, iterator._dataset_fetcher.collate_fn
    source = _source.Source(iterator, lambda collate: lambda samples: "adapted", Enough(1), Seeds(5, 0))
    assert torch.equal(next(source), torch.zeros(1, 4))
    source.close()
    assert iterator._dataset_fetcher.dataset is dataset and iterator._dataset_fetcher.collate_fn is collate
    assert torch.equal(next(iterator), torch.ones(1, 4))


@pytest.mark.parametrize(
    "loader, reason",
    [
        (DataLoader(DrawsInAStream(), 5), "its dataset is an IterableDataset"),
        ([torch.zeros(1)], "it is no DataLoader"),
    ],
)
def test_a_loader_whose_draws_no_seed_reaches_is_named(loader, reason):
    with pytest.warns(
        RuntimeWarning, match=f"seed=5, but with num_threads=1 .*: {reason}. With num_threads=0 they are"
    ):
        PrefetchIterator(loader, "cpu", seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrefetchIterator(loader, "cpu", seed=5, num_threads=0)
        PrefetchIterator(DataLoader(Ramp(N)), "cpu", seed=5)


@pytest.mark.parametrize("threads", THREADS)
def test_the_order_leaves_the_global_generators_alone(threads):
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    before = global_states()
    epochs(Ramp(N), num_threads=threads)
    assert global_states() == before


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, StopIteration])
def test_global_generators_are_put_back_after_an_error(failure):
    def fail(i):
        draw_globally()
        if i == 7:
            raise failure("planted")

    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    before = global_states()
    batches = iter(PrefetchIterator(DataLoader(Ramp(N, hook=fail), 5), "cpu", seed=5, num_threads=0))
    next(batches)
    with pytest.raises(RuntimeError if failure is StopIteration else failure):
        next(batches)
    assert global_states() == before


def test_without_a_seed_the_order_is_the_plain_loaders():
    torch.manual_seed(3)
    plain = torch.cat(list(DataLoader(Ramp(N), 5, shuffle=True)))
    torch.manual_seed(3)
    assert torch.equal(torch.cat(list(PrefetchIterator(DataLoader(Ramp(N), 5, shuffle=True), "cpu"))), plain)


def test_a_loader_with_a_generator_of_its_own_takes_its_order_from_that():
    def loader():
        return DataLoader(Ramp(N), 5, shuffle=True, generator=torch.Generator().manual_seed(9))

    assert torch.equal(torch.cat(list(PrefetchIterator(loader(), "cpu", seed=5))), torch.cat(list(loader())))


@pytest.mark.parametrize("threads", THREADS)
def test_samplers_that_draw_with_replacement(threads):
    def order():
        sampler = RandomSampler(range(N), replacement=True, num_samples=100)
        return torch.cat(list(PrefetchIterator(DataLoader(Ramp(N), 5, sampler=sampler), "cpu", seed=5)))

    expected = order()
    draw_globally()
    assert torch.equal(order(), expected)


# --- where the index comes from ---------------------------------------------------------------------------------------


class AsksForMany(Augmented):
    def __getitems__(self, indices):
        return [
            torch.tensor(
                [
                    i,
                    torch.rand((), generator=gpuprefetch.sample_generator(i)),
                    torch.rand((), generator=gpuprefetch.sample_generator(i)),
                    *gpuprefetch.sample_rng(i).random(2),
                ],
                dtype=torch.float64,
            )
            for i in indices
        ]


@pytest.mark.parametrize("threads", THREADS)
def test_getitems_passes_the_index(threads):
    assert torch.equal(epochs(AsksForMany(), num_threads=threads), epochs(Augmented()))


def test_getitems_without_the_index():
    class Forgets(AsksForMany):
        def __getitems__(self, indices):
            return [gpuprefetch.sample_rng().random() for _ in indices]

    with pytest.raises(RuntimeError, match="pass the index of the one that is meant"):
        epochs(Forgets())


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("wrap", [lambda d: random_split(d, [1.0])[0], lambda d: Subset(Subset(d, range(N)), range(N))])
def test_a_subset_fetches_one_by_one_what_its_dataset_does(wrap, threads):
    """torch's Subset has a __getitems__ that the user never wrote."""
    torch.manual_seed(0)
    dataset = wrap(Augmented())
    torch.manual_seed(0)
    expected = torch.cat(list(PrefetchIterator(DataLoader(dataset, 5), "cpu", seed=5, num_threads=0)))
    assert torch.equal(expected[:, 0].sort().values, torch.arange(N, dtype=torch.float64))
    batches = PrefetchIterator(DataLoader(dataset, 5), "cpu", seed=5, num_threads=threads)
    assert torch.equal(torch.cat(list(batches)), expected)


def test_which_datasets_fetch_one_by_one():
    one, many = Augmented(), AsksForMany()
    alone = [one, [1, 2], Subset(one, [1]), Subset(Subset(one, [1]), [0]), StackDataset(one, one), StackDataset(a=one)]
    together = [many, Subset(many, [1]), Subset(Subset(many, [1]), [0]), StackDataset(one, many), StackDataset(a=many)]
    assert [fetches_one_by_one(dataset) for dataset in alone + together] == [True] * 6 + [False] * 5


class Keyed(Dataset):
    def __getitem__(self, key):
        return torch.rand(2, generator=gpuprefetch.sample_generator())


def drawn_for(keys):
    return list(PrefetchIterator(DataLoader(Keyed(), sampler=keys, batch_size=None), "cpu", seed=5))


def test_integers_of_all_types_are_one_index():
    first, *others = drawn_for([3, numpy.int64(3), numpy.uint8(3), torch.tensor(3)])
    assert all(torch.equal(other, first) for other in others)


def test_which_keys_are_one_index():
    long = numpy.arange(3000)
    middle = long.copy()
    middle[1500] = 0
    keys = ["3", 3, b"3", "a", ("a", 3), [3], None, 3.5, slice(3), slice(3, 4), (3, (4,)), (3, 4), long, middle]
    draws = torch.stack(drawn_for(keys))
    assert len(draws.unique()) == draws.numel()
    alike = [numpy.str_("3"), torch.tensor(3), b"3", "a", ["a", numpy.int8(3)], (torch.tensor(3),), None]
    alike += [numpy.float64(3.5), slice(numpy.int64(3)), slice(3, 4), [3, [4]], torch.tensor([3, 4])]
    alike += [torch.tensor(long), torch.tensor(middle)]
    assert torch.equal(torch.stack(drawn_for(alike)), draws)


@pytest.mark.parametrize("key", [object(), {3}, [1, object()], (1, {"a": 2}), lambda: 3])
def test_a_key_that_is_no_index(key):
    with pytest.raises(TypeError, match="must be an integer, a string, bytes, a float, None, a slice, or a list"):
        drawn_for([key])


@pytest.mark.parametrize("draw", [gpuprefetch.sample_generator, gpuprefetch.sample_rng])
def test_outside_of_a_seeded_sample(draw):
    message = r"no seeded sample is being fetched in this thread.*PrefetchIterator\(loader, seed=\.\.\.\)"
    with pytest.raises(RuntimeError, match=message):
        draw()
    for loader, arguments in (
        (DataLoader(Ramp(4, hook=lambda i: draw())), {}),
        ([draw] * 2, {"seed": 1, "num_threads": 0}),
    ):
        with pytest.raises(RuntimeError, match=message):
            for batch in PrefetchIterator(loader, "cpu", **arguments):
                batch()
    list(PrefetchIterator(DataLoader(Ramp(4)), "cpu", seed=1, num_threads=0))
    with pytest.raises(RuntimeError, match=message):  # after one, too
        draw()


def test_a_thread_that_a_sample_starts_is_fetching_none():
    """Not even with the starter's context, which a new thread has on a free-threaded Python 3.14."""

    class Starts(Ramp):
        def __getitem__(self, i):
            context = contextvars.copy_context()
            with pytest.raises(RuntimeError, match="no seeded sample is being fetched in this thread"):
                within(20, lambda: context.run(gpuprefetch.sample_generator))
            return super().__getitem__(i)

    assert len(list(PrefetchIterator(DataLoader(Starts(4)), "cpu", seed=5))) == 4


def test_a_loader_inside_a_sample_has_samples_of_its_own():
    class Outer(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            before = torch.rand((), generator=gpuprefetch.sample_generator())
            inner = list(PrefetchIterator(DataLoader(Augmented(), 5), "cpu", seed=5, num_threads=0))
            after = torch.rand((), generator=gpuprefetch.sample_generator())
            return torch.cat([torch.cat(inner).flatten(), torch.stack([before, after]).double()])

    samples = torch.stack(list(PrefetchIterator(DataLoader(Outer(), batch_size=None), "cpu", seed=5)))
    assert torch.equal(
        samples[0, :-2].view(N, -1), torch.cat(list(PrefetchIterator(DataLoader(Augmented(), 5), "cpu", seed=5)))
    )
    assert len(samples[:, -2:].unique()) == 8


def test_the_numbers_themselves():
    """They are part of the interface: a training run can be repeated with a later version."""
    (sample,) = PrefetchIterator(DataLoader(Augmented(), batch_size=None, sampler=[7]), "cpu", seed=5)
    (order,) = PrefetchIterator(DataLoader(Ramp(8, (1,)), 8, shuffle=True), "cpu", seed=5)
    drawn = [0.7713541388511658, 0.6237474083900452, 0.6471097441015303, 0.020452940490087168]  # by another process
    assert sample.tolist() == [7, *drawn]
    assert order.flatten().tolist() == [3, 6, 1, 4, 5, 7, 0, 2]


def test_the_dataset_of_the_loader_stays_the_users():
    dataset = Augmented()
    loader = DataLoader(dataset, 5)
    batches = PrefetchIterator(loader, "cpu", seed=5)
    list(batches)
    assert loader.dataset is dataset and batches.dataset is dataset
    assert operator.index(len(batches)) == 5
