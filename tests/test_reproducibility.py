"""``verify_reproducibility``: what it lets pass, what it finds, and what it says of it."""

import contextlib
import random
import tempfile
import threading

import numpy
import pytest
import torch
from loaders import Ramp, threads
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import gpuprefetch
from gpuprefetch import DataLoaderX, PrefetchIterator, _training_check, verify_reproducibility
from gpuprefetch._fingerprint import fingerprint, first_difference, first_unequal_element
from gpuprefetch._seeded_runs import global_generators_kept

N = 24


class Augmented(Dataset):
    """Draws from the sample's own generators."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        noise = torch.rand(2, generator=gpuprefetch.sample_generator())
        return {"image": noise, "rng": gpuprefetch.sample_rng().normal(size=3), "name": f"sample {i}", "label": i}


class DrawsGlobally(Dataset):
    """``draw()`` is from a global generator."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return N

    def __getitem__(self, i):
        return {"label": i, "image": torch.tensor([float(i), self.draw()])}


def draw_from_torch():
    return float(torch.rand(()))


class SharedHandle(Dataset):
    """Record i is i, in a file that all threads seek and read. The first time that several threads are at it, two of
    them meet between their seek and their read. All else is read in turns: threads that disturbed each other by chance
    could do so alike in two runs."""

    STRIDE = 16  # records do not follow each other, so the end of one read is not the place of another

    def __init__(self):
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        for i in range(N):
            self.file.write(i.to_bytes(4, "little").ljust(self.STRIDE))
        self.meeting = threading.Barrier(2)
        self.invitations = [self.meet, self.meet]
        self.turns = threading.Lock()

    def __len__(self):
        return N

    def __getitem__(self, i):
        read = self.read_in_turn
        if threading.current_thread().name.startswith("gpuprefetch-sample"):
            with contextlib.suppress(IndexError):
                read = self.invitations.pop()
        return torch.tensor(int.from_bytes(read(i * self.STRIDE), "little"))

    def meet(self, place):
        self.file.seek(place)
        self.meeting.wait(30)
        return self.file.read(4)

    def read_in_turn(self, place):
        with self.turns:
            self.file.seek(place)
            return self.file.read(4)


def verify(dataset, capsys, counts=(0, 1, 2), loader=None, **arguments):
    """The verdict, and the lines that it printed."""
    loader = DataLoader(dataset, batch_size=4, shuffle=True) if loader is None else loader
    verdict = verify_reproducibility(loader, counts, device="cpu", **arguments)
    out, err = capsys.readouterr()
    assert err == ""
    return verdict, out.splitlines()


def global_states():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


# --- what passes


def test_the_built_in_dataset_is_reproducible(capsys):
    assert verify_reproducibility(verbose=True) is True
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "num_threads=0: two runs, 8 batches each, are equal",
        "num_threads=1: two runs, 8 batches each, are equal to run 1 with num_threads=0",
        "num_threads=4: two runs, 8 batches each, are equal to run 1 with num_threads=0",
    ]
    assert lines[3].startswith("training step on ") and lines[3].endswith(": two runs are equal")
    assert lines[4:] == ["reproducible"]


def test_samples_with_generators_of_their_own_pass(capsys):
    before = threads()
    verdict, lines = verify(Augmented(), capsys)
    assert verdict is True and lines[-1] == "reproducible"
    assert threads(before) == []


def test_a_prefetch_iterator_is_verified_by_its_loader_on_its_device(capsys):
    assert verify_reproducibility(PrefetchIterator(DataLoader(Augmented(), 4, shuffle=True), "cpu"), (0, 1)) is True
    assert "training step on cpu: two runs are equal" in capsys.readouterr().out


def test_a_fastreid_loader_is_verified_with_several_threads_too(capsys):
    loader = gpuprefetch.DataLoaderX(0, Augmented(), batch_size=4, shuffle=True, seed=1)
    verdict, lines = verify(None, capsys, loader=loader)
    assert verdict and lines[2].startswith("num_threads=2: two runs, 6 batches each, are equal")
    assert len(next(loader)["label"]) == 4  # which is as it was
    loader.shutdown()


def test_the_seed_is_the_loaders(capsys):
    seeds = []

    class Asked(Augmented):
        def __getitem__(self, i):
            seeds.append(gpuprefetch.sample_generator().initial_seed())
            return super().__getitem__(i)

    def first_seed(**arguments):
        seeds.clear()
        batches = gpuprefetch.create_dataloader(Asked(), 4, **arguments)
        assert verify(None, capsys, (0,), loader=batches)[0]
        return seeds[0]

    assert first_seed(seed=7) == first_seed(seed=7) != first_seed(seed=8)
    seeds.clear()
    assert verify(None, capsys, (0,), loader=gpuprefetch.create_dataloader(Asked(), 4, seed=8), seed=7)[0]
    assert seeds[0] == first_seed(seed=7)


def test_a_loader_without_a_seed_is_told(capsys):
    batches = gpuprefetch.create_dataloader(Augmented(), 4)
    verdict, lines = verify(None, capsys, loader=batches)
    assert verdict and lines[0].startswith("this loader has no seed")
    assert not any("has no seed" in line for line in verify(Augmented(), capsys)[1])


class Within(Dataset):
    """A dataset that no attribute leads to."""

    def __init__(self, dataset):
        self.fetch, self.count = dataset.__getitem__, len(dataset)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.fetch(i)


@pytest.mark.parametrize("wrap", [lambda cached: cached, Within])
def test_what_a_cache_holds_is_not_what_is_compared(wrap, capsys):
    cached = gpuprefetch.CachedDataset(DrawsGlobally(random.random), 1 << 20)
    before = cached[3]["image"].tolist()
    verdict, lines = verify(wrap(cached), capsys, (1,))
    assert not verdict and "draws from the global generators of random" in lines[1]
    assert cached[3]["image"].tolist() == before and len(cached._kept) == 1


class Tagged(torch.Tensor):
    pass


class Named(dict):
    pass


class Moved:
    def __init__(self, tensor, angle):
        self.tensor, self.angle = tensor, angle

    def to(self, device, non_blocking=False):
        return Moved(self.tensor.to(device), self.angle)


def with_attribute(made, value):
    made.angle = value
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda value: with_attribute(torch.ones(2).as_subclass(Tagged), value),
        lambda value: with_attribute(Named(image=torch.ones(2)), value),
        lambda value: Moved(torch.ones(2), value),
        lambda value: Moved(torch.full((2,), value), 0),
    ],
    ids=["tensor", "mapping", "object", "its tensor"],
)
def test_attributes_are_compared(make):
    one, same, other = (fingerprint(make(value)) for value in (1.0, 1.0, 2.0))
    assert one == same != other
    assert not any(value.digest is None for value in one)


def test_an_object_that_knows_what_it_is_a_part_of():
    made = Moved(torch.ones(2), 1.0)
    made.owner, made.parts = made, [made.tensor]
    made.tensor.owner = made
    assert [value.path for value in fingerprint(made)] == ["", ".tensor", ".angle", ".parts", ".parts[0]"]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_are_compared_whatever_their_order(kind):
    names = [f"image{i}" for i in range(100)]
    assert fingerprint(kind(names)) == fingerprint(kind(reversed(names))) != fingerprint(kind(names[:-1] + ["other"]))
    assert fingerprint(range(3)) == fingerprint(range(3)) != fingerprint(range(4))
    assert fingerprint(slice(3)) != fingerprint(slice(4))
    assert [value.digest for value in fingerprint(slice(torch.ones(2)))] == [None]


def test_keys_in_another_order_are_told_as_that():
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert first_difference(fingerprint(one), fingerprint(other)) == ("['a']", "in another place among the keys")
    assert first_unequal_element("['a']", one, other) is None
    assert first_difference(fingerprint(one), fingerprint({"a": 1, "c": 2})) == ("['b']", "only in one of them")


PADDED = numpy.dtype([("a", "i1"), ("b", "f8")], align=True)


def padded(fill, values):
    made = numpy.empty(len(values), PADDED)
    made.view(numpy.uint8)[:] = fill
    for i, pair in enumerate(values):
        made["a"][i], made["b"][i] = pair
    return made


@pytest.mark.parametrize(
    "one, same, other",
    [
        (padded(1, [(1, 2.0)]), padded(255, [(1, 2.0)]), padded(1, [(1, 3.0)])),
        (*[numpy.array([1, 2], numpy.longdouble) / 3] * 2, numpy.array([1, 2.5], numpy.longdouble) / 3),
        (padded(1, [(1, 2.0)])[0], padded(255, [(1, 2.0)])[0], padded(1, [(2, 2.0)])[0]),
    ],
    ids=["structured", "long double", "record"],
)
def test_bytes_that_mean_nothing_do_not_count(one, same, other):
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_compared_by_their_parts(layout):
    def nested(*values):
        return torch.nested.nested_tensor([torch.full((n + 1,), v) for n, v in enumerate(values)], layout=layout)

    assert fingerprint(nested(1.0, 2.0)) == fingerprint(nested(1.0, 2.0)) != fingerprint(nested(1.0, 3.0))
    assert fingerprint(nested(1.0, 2.0)) != fingerprint(nested(1.0, 2.0, 2.0))


class Used(list):
    """A sampler, or a batch sampler, that gives nothing or raises when it is iterated again."""

    def __init__(self, indices, error=None):
        super().__init__(indices)
        self.error, self.used = error, False

    def __iter__(self):
        used, self.used = self.used, True
        if used and self.error is not None:
            raise self.error
        return iter(()) if used else super().__iter__()


@pytest.mark.parametrize("error", [None, RuntimeError("used up")])
@pytest.mark.parametrize(
    "sampled", [lambda error: {"sampler": Used(range(8), error), "batch_size": 2},
                lambda error: {"batch_sampler": Used([[0, 1], [2, 3]], error)}]
)  # fmt: skip
def test_a_sampler_that_can_be_iterated_once(sampled, error, capsys):
    verdict, lines = verify(None, capsys, (0, 1), loader=DataLoader(Ramp(8), **sampled(error)))
    assert not verdict and lines[1].startswith("  order: the sampler can't be iterated again")


@pytest.mark.filterwarnings("ignore:seed=0, but with num_threads=1 this loader draws")
def test_an_iterable_that_can_be_iterated_once(capsys):
    class Stream(IterableDataset):
        used = False

        def __iter__(self):
            if self.used:
                raise RuntimeError("used up")
            self.used = True
            return iter(range(8))

    verdict, lines = verify(None, capsys, (1,), loader=DataLoader(Stream(), batch_size=4))
    assert not verdict and "RuntimeError was raised: used up" in lines[0]


def test_nothing_is_printed_when_not_wanted(capsys):
    assert verify(Augmented(), capsys, verbose=False) == (True, [])
    assert verify(DrawsGlobally(random.random), capsys, verbose=False) == (False, [])


def test_a_loader_with_a_generator_of_its_own_begins_alike_in_each_run(capsys):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    verdict, lines = verify(None, capsys, loader=DataLoader(Augmented(), 4, shuffle=True, generator=generator))
    assert verdict is True
    assert lines[0].startswith("the loader holds a generator of its own, which begins alike in each run here")
    assert torch.equal(generator.get_state(), before)


def test_nans_and_nested_batches_are_compared_by_their_bytes(capsys):
    class Strange(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            nan = float("nan")
            return [{"a": (torch.tensor([nan, i]), numpy.array([nan])), "b": [f"{i}", None, nan, b"x"]}]

    loader = DataLoader(Strange(), 2, collate_fn=lambda samples: samples)
    assert verify(None, capsys, loader=loader)[0] is True


def test_the_number_of_batches_is_limited(capsys):
    loaded = []

    class Endless:
        def __iter__(self):
            while True:
                yield from range(N)

    dataset = Ramp(N, hook=loaded.append)
    verdict, lines = verify(
        None, capsys, loader=DataLoader(dataset, 4, sampler=Endless()), counts=[0, 1], max_batches=3
    )
    assert verdict is True and lines[0] == "num_threads=0: two runs, 3 batches each, are equal"
    assert len(loaded) <= 4 * (3 + 3) * 4


# --- what it finds


@pytest.mark.parametrize(
    "name, draw",
    [("random", random.random), ("numpy.random", numpy.random.rand), ("torch", draw_from_torch)],
    ids=["random", "numpy", "torch"],
)
@pytest.mark.parametrize("count", [1, 3])
def test_augmentation_from_a_global_generator(name, draw, count, capsys):
    verdict, (first, second, why, training, last) = verify(DrawsGlobally(draw), capsys, counts=(0, count))
    assert verdict is False
    assert first == "num_threads=0: two runs, 6 batches each, are equal"
    place = "DIFFERS from run 1 with num_threads=0: batch 0, ['image'][0, 1]: "
    assert second.startswith(f"num_threads={count}: run 1 {place}")
    assert "1]: 0." in second and ", but 0." in second
    assert why == (
        f"  content: dataset or collate_fn draws from the global generators of {name}. "
        "Draw from gpuprefetch.sample_generator() or sample_rng() in dataset[i], or use num_threads=0 of a "
        "PrefetchIterator"
    )
    assert training == "training step on cpu: two runs are equal"
    assert last == "NOT reproducible"


def test_augmentation_from_a_global_generator_passes_on_the_calling_thread_alone(capsys):
    verdict, lines = verify(DrawsGlobally(random.random), capsys, counts=(0,))
    assert verdict is True and len(lines) == 3


@pytest.mark.parametrize("count", [2, 4])
def test_a_shared_file_handle(count, capsys):
    verdict, lines = verify(SharedHandle(), capsys, counts=(0, 1, count))
    assert verdict is False
    assert lines[1] == "num_threads=1: two runs, 6 batches each, are equal to run 1 with num_threads=0"
    assert lines[2].startswith(f"num_threads={count}: run 1 DIFFERS from run 1 with num_threads=0: batch ")
    assert lines[3].startswith("  content: several threads use what the dataset or collate_fn holds, and disturb each")
    assert lines[3].endswith(
        "in a threading.local (docs/slow-datasets.md in gpuprefetch's repository), or use num_threads of 0 or 1"
    )
    assert lines[-1] == "NOT reproducible"


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("count", [4, 8])
def test_all_threads_are_at_work_however_small_a_batch_is(batch_size, count, capsys):
    class Meets(Ramp):
        def __init__(self):
            super().__init__(N)
            self.meeting = threading.Barrier(count)
            self.invitations = [None] * count

        def __getitem__(self, i):
            if threading.current_thread().name.startswith("gpuprefetch-sample"):
                with contextlib.suppress(IndexError):
                    self.invitations.pop()
                    self.meeting.wait(30)
            return super().__getitem__(i)

    dataset = Meets()
    verdict, lines = verify(None, capsys, loader=DataLoader(dataset, batch_size), counts=(0, count))
    assert (verdict, dataset.meeting.broken) == (True, False), lines


def test_without_a_run_on_one_thread_several_causes_are_named(capsys):
    verdict, lines = verify(SharedHandle(), capsys, counts=[2])
    assert verdict is False
    assert "several threads use what the dataset or collate_fn holds" in lines[1]
    assert "Or what the dataset gives depends on what it gave before" in lines[1]


def test_a_dataset_that_goes_on_with_a_generator_of_its_own(capsys):
    rng = numpy.random.default_rng(0)
    verdict, lines = verify(DrawsGlobally(rng.random), capsys)
    assert verdict is False
    assert lines[0].startswith("num_threads=0: run 2 DIFFERS from run 1 with num_threads=0: batch 0")
    assert lines[1].startswith("  content: what the dataset gives depends on what it gave before")


def test_a_sampler_that_draws_elsewhere_is_an_order(capsys):
    class Shuffles:
        rng = random.Random(0)

        def __iter__(self):
            order = list(range(N))
            self.rng.shuffle(order)
            return iter(order)

    verdict, lines = verify(None, capsys, loader=DataLoader(Ramp(N), 4, sampler=Shuffles()))
    assert verdict is False
    assert lines[1].startswith("  order: the sampler can't be iterated again, or draws from what")


def test_a_sampler_that_draws_while_it_goes(capsys):
    class DrawsLate(RandomSampler):
        def __iter__(self):
            yield 0
            while True:
                yield int(torch.randint(N, ()))

    loader = DataLoader(Ramp(N), 4, sampler=DrawsLate(range(N)))
    assert verify(None, capsys, loader=loader, counts=(0,), max_batches=4)[0] is True
    verdict, lines = verify(None, capsys, loader=loader, counts=(0, 1), max_batches=4)
    assert verdict is False and lines[2].startswith("  order: ")


def changing(*values):
    """A loader whose one batch is the next of these, for each epoch."""
    left = list(values)

    class Changes(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, i):
            return left.pop(0)

    return DataLoader(Changes(), batch_size=None, collate_fn=lambda sample: sample)


ARRAY = numpy.arange(6.0).reshape(2, 3)
OTHER = ARRAY.copy()
OTHER[1, 2] = -1.5
HALF = torch.tensor([1.5, 2.5], dtype=torch.bfloat16)
SPARSE = torch.eye(3).to_sparse()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    "one, two, place",
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3]), ", [1]: 3, but 2"),
        (torch.tensor(1), torch.tensor(4), ": 4, but 1"),
        ({"a": [torch.tensor(1.5)]}, {"a": [torch.tensor(2.5)]}, ", ['a'][0]: 2.5, but 1.5"),
        ({"a": ("x", ARRAY)}, {"a": ("x", OTHER)}, ", ['a'][1][1, 2]: -1.5, but 5.0"),
        ({"a": "cat"}, {"a": "dog"}, ", ['a']: 'dog', but 'cat'"),
        ({3: 1}, {3: 1.0}, ", [3]: 1.0, but 1"),
        ([1, 2], [1, 2, 3], ": list of 3, but list of 2"),
        ({"a": 1}, {"b": 1}, ", ['b']: only in one of them"),
        (HALF, torch.tensor([1.5, 3.5], dtype=torch.bfloat16), ", [1]: 3.5, but 2.5"),
        (HALF, HALF.float(), ": Tensor of float32 [2], but Tensor of bfloat16 [2]"),
        (HALF, HALF[:1], ": Tensor of bfloat16 [1], but Tensor of bfloat16 [2]"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), ", [0]: -0.0, but 0.0"),
        (torch.tensor([True]), torch.tensor([False]), ", [0]: False, but True"),
        (torch.tensor([1j]), torch.tensor([2j]).conj(), ", [0]: -2j, but 1j"),
        (SPARSE, SPARSE * 2, ": a Tensor of float32 [3, 3] of other bytes"),
        (numpy.float32(1), numpy.float32(2), f": {numpy.float32(2)!r}, but {numpy.float32(1)!r}"),
        (numpy.array(["a", "b"]), numpy.array(["a", "c"]), ", [1]: 'c', but 'b'"),
        (numpy.array([1, "b"], dtype=object), numpy.array([1, "c"], dtype=object), ", [(1,)]: 'c', but 'b'"),
    ],
    ids=str,
)
def test_each_kind_of_difference_is_shown_where_it_is(one, two, place, capsys):
    """The first run is repeated to show elements: the third epoch gives what the first one gave."""
    verdict, lines = verify(None, capsys, loader=changing(one, two, one), counts=(0,))
    assert verdict is False
    expected = "num_threads=0: run 2 DIFFERS from run 1 with num_threads=0: batch 0"
    assert lines[0] == expected + place


def test_where_the_first_run_does_not_come_again_no_element_is_shown(capsys):
    verdict, lines = verify(None, capsys, loader=changing(*map(torch.tensor, (1, 2, 3))), counts=(0,))
    assert verdict is False
    assert lines[0].endswith(": batch 0: a Tensor of int64 [] of other bytes")


class Grows(Dataset):
    """The next of ``lengths`` samples in each epoch."""

    def __init__(self, *lengths):
        self.lengths = list(lengths)

    def __iter__(self):
        return iter(range(self.lengths.pop(0)))

    def __getitem__(self, i):
        return torch.tensor(i)


@pytest.mark.parametrize(
    "lengths, text",
    [
        ((3, 2), "batch 2: it is missing, and there were 3 in all"),
        ((2, 3), "batch 2: it is there, and there were 2 in all"),
    ],
)
def test_epochs_of_different_lengths(lengths, text, capsys):
    grows = Grows(*lengths, 2, 2, 2)
    verdict, lines = verify(None, capsys, loader=DataLoader(grows, sampler=grows), counts=(0,))
    assert verdict is False and lines[0].endswith(text)


def test_an_error_in_a_later_run_is_a_difference(capsys):
    class OnOneThread(Ramp):
        def __getitem__(self, i):
            if threading.current_thread().name.startswith("gpuprefetch-sample") and i == 9:
                raise OSError("not a database")
            return super().__getitem__(i)

    verdict, lines = verify(None, capsys, loader=DataLoader(OnOneThread(N), 4), counts=(0, 2))
    assert verdict is False
    assert lines[1].endswith("batch 2: OSError was raised: not a database")
    assert "several threads use what the dataset or collate_fn holds" in lines[2]


def test_an_error_in_the_first_run_is_the_users():
    def fail(i):
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        verify_reproducibility(DataLoader(Ramp(N, hook=fail)), (0, 1), device="cpu")


def test_objects_whose_values_can_not_be_seen_are_named(capsys):
    class Opaque:
        pass

    class Holds(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return {"x": Opaque(), "set": {Opaque()}}

    verdict, lines = verify(None, capsys, loader=DataLoader(Holds(), 1, collate_fn=list), counts=(0,))
    assert verdict is True
    assert lines[1] == "not compared, since their values can't be seen: objects of type Opaque, set"


def test_tensors_without_values_are_named(capsys):
    dataset = DrawsGlobally(random.SystemRandom().random)
    assert verify_reproducibility(DataLoader(dataset, 4), (0,), device="meta") is True
    unseen = "not compared, since their values can't be seen: objects of type meta Tensor"
    assert capsys.readouterr().out.splitlines() == [
        "num_threads=0: two runs, 6 batches each, are equal",
        unseen,
        "training step on meta: two runs are equal",
        unseen,
        "reproducible",
    ]
    one, other = (fingerprint(torch.empty(n, device="meta")) for n in (2, 3))
    assert first_difference(one, other) == ("", "meta Tensor of float32 [2], but meta Tensor of float32 [3]")


# --- loaders that threads can't share


def test_an_iterable_dataset_is_tried_on_one_thread(capsys):
    class Stream(IterableDataset):
        def __init__(self, draw):
            self.draw = draw

        def __iter__(self):
            return (torch.tensor([float(i), self.draw()]) for i in range(8))

    with pytest.warns(RuntimeWarning, match="this loader draws from the global generators at the same time"):
        verdict, lines = verify(None, capsys, loader=DataLoader(Stream(lambda: 0.5), 4), counts=(0, 4))
    assert verdict is True
    assert lines[0] == (
        "num_threads above 1 are tried as 1, since one thread iterates this loader: its dataset is an IterableDataset"
    )
    assert lines[2] == "num_threads=1: two runs, 2 batches each, are equal to run 1 with num_threads=0"
    with pytest.warns(RuntimeWarning, match="this loader draws from the global generators at the same time"):
        verdict, lines = verify(None, capsys, loader=DataLoader(Stream(random.random), 4), counts=(0, 4))
    advice = "Use num_threads=0 of a PrefetchIterator, and no generators but the global ones"
    assert verdict is False
    assert lines[3] == f"  content: dataset or collate_fn draws from the global generators of random. {advice}"
    assert verify(None, capsys, loader=DataLoader(Stream(random.random), 4), counts=(0,))[0] is True
    verdict, lines = verify(None, capsys, loader=DataLoader(Stream(random.Random(0).random), 4), counts=(0,))
    assert verdict is False and lines[1].endswith(advice)


@pytest.mark.parametrize("persistent", [True, False])
def test_persistent_workers_go_on_where_the_epoch_before_ended(persistent, capsys):
    loader = DataLoader(DrawsGlobally(draw_from_torch), 4, num_workers=2, persistent_workers=persistent)
    verdict, lines = verify(None, capsys, loader=loader, counts=(0,))
    assert verdict is not persistent
    told = lines[1].startswith("  content: torch seeds persistent workers once")
    assert told is lines[1].endswith("Set persistent_workers=False") is persistent


def test_a_loader_with_worker_processes_is_tried_with_one_thread(capsys):
    verdict, lines = verify(None, capsys, loader=DataLoader(Ramp(N), num_workers=1), counts=(0, 1, 4))
    assert verdict is True
    assert lines[0] == (
        "num_threads above 1 are tried as 1, since one thread iterates this loader: it starts processes, num_workers=1"
    )
    assert lines[2].startswith("num_threads=1: ") and not any("num_threads=4" in line for line in lines)


# --- the training step


def test_a_training_step_that_differs_is_part_of_the_verdict(capsys, monkeypatch):
    results = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])]
    monkeypatch.setattr(gpuprefetch._reproducibility, "train", lambda device: {"losses": results.pop(0)})
    verdict, lines = verify(Augmented(), capsys, counts=(0,))
    assert verdict is False
    assert lines[1] == "training step on cpu: two runs DIFFER: ['losses']: a Tensor of float32 [2] of other bytes"
    assert "gpuprefetch.set_seed(seed, deterministic=True)" in lines[2]
    assert lines[3] == "NOT reproducible"


@torch.no_grad()
def test_the_training_step_trains():
    with global_generators_kept(torch.device("cpu")):
        with torch.inference_mode():
            result = _training_check.train(torch.device("cpu"))
    losses = result["losses"]
    assert losses.shape == (5,) and losses[-1] < losses[0]
    assert len(losses.unique()) == 5
    assert not any(value.requires_grad for value in result.values())


@pytest.mark.gpu
def test_the_training_step_runs_on_the_device():
    with global_generators_kept(torch.device("cuda")):
        assert {value.device.type for value in _training_check.train(torch.device("cuda")).values()} == {"cuda"}


@pytest.mark.gpu
def test_on_the_device(capsys):
    flags = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        state = torch.cuda.get_rng_state()
        assert verify_reproducibility(DataLoader(Augmented(), 4, shuffle=True), device="cuda") is True
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert f"training step on cuda:{torch.cuda.current_device()}: two runs are equal" in capsys.readouterr().out
    finally:
        torch.backends.cudnn.deterministic = flags


@pytest.mark.gpu
def test_the_built_in_dataset_is_reproducible_on_the_device(capsys):
    assert verify_reproducibility() is True
    assert f"training step on cuda:{torch.cuda.current_device()}: two runs are equal" in capsys.readouterr().out


@pytest.mark.gpu
def test_draws_on_the_device_are_found(capsys):
    loader = DataLoader(DrawsGlobally(lambda: float(torch.rand((), device="cuda"))), 4)
    assert verify_reproducibility(loader, (0,), device="cuda") is False
    assert "on a device's generator or kernels" in capsys.readouterr().out


# --- what it leaves alone


@pytest.mark.parametrize("dataset", [Augmented(), DrawsGlobally(random.random)], ids=["passes", "fails"])
def test_the_global_generators_are_as_they_were(dataset, capsys):
    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    before = global_states()
    verify(dataset, capsys)
    assert global_states() == before


def test_after_an_error_too():
    def fail(i):
        random.random()
        raise OSError("planted")

    random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
    before = global_states()
    with pytest.raises(OSError, match="planted"):
        verify_reproducibility(DataLoader(Ramp(N, hook=fail)), (1,), device="cpu")
    assert global_states() == before


# --- wrong arguments


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"loader": [1, 2]}, TypeError, "loader must be a DataLoader, a PrefetchIterator of one or None, not list"),
        ({"num_threads": 4}, TypeError, "num_threads must be a collection of integers, such as (0, 1, 4), not 4"),
        ({"num_threads": "04"}, TypeError, "num_threads must be a collection of integers, such as (0, 1, 4), not '04'"),
        ({"num_threads": ()}, ValueError, "num_threads must hold at least one number, not ()"),
        ({"num_threads": [0, -1]}, ValueError, "each of num_threads must be an integer from 0 to 256, not -1"),
        ({"num_threads": [1.0]}, TypeError, "each of num_threads must be an integer from 0 to 256, not 1.0"),
        ({"verbose": 1}, TypeError, "verbose must be True or False, not 1"),
        ({"seed": -1}, ValueError, "seed must be an integer from 0 to 18446744073709551615, not -1"),
        ({"max_batches": 0}, ValueError, "max_batches must be an integer from 1 to 1000000, not 0"),
        ({"max_batches": 2.5}, TypeError, "max_batches must be an integer from 1 to 1000000, not 2.5"),
        ({"device": "gpu"}, ValueError, "device must name a torch device, such as 'cuda:0' or 'cpu', not 'gpu'"),
        ({"loader": DataLoader([])}, ValueError, "the loader gives no batch, so there is nothing to compare"),
    ],
)
def test_wrong_argument(arguments, error, text):
    with pytest.raises(error) as caught:
        verify_reproducibility(**{"device": "cpu", **arguments})
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("inner", [lambda: [1], lambda: DataLoaderX(0, [1])], ids=["list", "DataLoaderX"])
def test_a_prefetcher_of_something_else_is_refused(inner):
    """One in another counts epochs of its own, which the runs would move on."""
    loader = inner()
    told = f"a DataLoader, a PrefetchIterator of one or None, not a PrefetchIterator of {type(loader).__name__}$"
    with pytest.raises(TypeError, match=told):
        verify_reproducibility(PrefetchIterator(loader, "cpu"), device="cpu")
