"""DataLoaderX in FastReID's place: built as its train and test loaders are, and used as its trainers use them."""

import copy
import gc
import itertools
import pickle
import threading
import weakref

import numpy
import pytest
import torch
from loaders import Gate, Ramp, eventually, script, threads, vals, within
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    SequentialSampler,
)

from gpuprefetch import DataLoaderX, PrefetchIterator

windows = pytest.mark.windows
sharing = pytest.mark.filterwarnings("ignore:with several num_threads")


pytestmark = pytest.mark.usefixtures("nothing_is_left")


# --- as FastReID builds them


class Images(Dataset):
    def __init__(self, n=23, hook=None):
        self.n, self.hook = n, hook

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.hook is not None:
            self.hook(i)
        return {
            "images": torch.full((3, 8, 4), float(i)),
            "targets": i % 5,
            "camids": i % 3,
            "img_paths": f"market/{i:04}.jpg",
            "meta": {"score": i / 2, "box": torch.tensor([i, i + 1])},
        }


def collate(samples):
    """Tensors and numbers become tensors, strings a list, in dicts of any depth."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, torch.Tensor):
        return torch.stack(samples)
    return samples if isinstance(first, str) else torch.tensor(samples)


class Endless(Sampler):
    """Permutations without end, from one seed, of which each rank takes its share."""

    def __init__(self, size, rank=0, world=1, seed=3):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed

    def __iter__(self):
        yield from itertools.islice(self.permutations(), self.rank, None, self.world)

    def permutations(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=generator).tolist()


def for_training(dataset, sampler=None, size=4, **options):
    sampler = Endless(len(dataset)) if sampler is None else sampler
    batches = BatchSampler(sampler, size, drop_last=True)
    return {"dataset": dataset, "batch_sampler": batches, "collate_fn": collate, "pin_memory": True, **options}


def for_tests(dataset, size=4, **options):
    batches = BatchSampler(SequentialSampler(dataset), size, drop_last=False)
    return {"dataset": dataset, "batch_sampler": batches, "collate_fn": collate, "pin_memory": True, **options}


def plain(arguments):
    return DataLoader(**{**arguments, "num_workers": 0, "pin_memory": False})


def assert_equal(got, expected):
    """Wherever the tensors of the first one are: these tests run on the device, too."""
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.equal(got.cpu(), expected)
    else:
        assert got == expected


@windows
@sharing
@pytest.mark.parametrize("num_workers", [0, 1, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_training_batches_are_those_of_the_plain_loader(num_workers, rank):
    data = Images()
    arguments = for_training(data, Endless(len(data), rank, 2), num_workers=num_workers)
    loader = DataLoaderX(0, **arguments)
    batches = iter(loader)
    for expected in itertools.islice(plain(arguments), 20):
        assert_equal(next(batches), expected)
    loader.shutdown()
    assert threads() == []


@windows
@sharing
@pytest.mark.parametrize("num_workers", [0, 4])
def test_test_batches_are_those_of_the_plain_loader_in_each_pass(num_workers):
    arguments = for_tests(Images(), num_workers=num_workers)
    loader, expected = DataLoaderX(0, **arguments), list(plain(arguments))
    assert len(loader) == len(expected) == 6
    for _ in range(3):
        got = list(loader)
        assert len(got) == 6
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other)
        assert eventually(lambda: not threads())  # the last batch ends them


@windows
def test_the_rank_first_by_place_or_name_and_then_what_a_dataloader_takes():
    data = Ramp(10)
    rank = torch.accelerator.device_count() - 1 if torch.accelerator.is_available() else 3
    for loader in (
        DataLoaderX(rank, dataset=data, batch_size=4),
        DataLoaderX(local_rank=rank, dataset=data, batch_size=4),
        DataLoaderX(batch_size=4, dataset=data, local_rank=rank),
        DataLoaderX(numpy.int64(rank), data, batch_size=4),
        DataLoaderX(rank, data, 4),
        DataLoaderX(rank, data, 4, False, None, None, 1, None, True, False, 5.0, None, None, None),
    ):
        assert loader.local_rank == rank
        assert vals(loader) == [0, 4, 8]


def test_the_arguments_come_in_the_order_of_a_dataloader():
    ours = DataLoaderX.__init__.__code__.co_varnames
    theirs = DataLoader.__init__.__code__
    assert list(ours[2 : theirs.co_argcount + 1]) == list(theirs.co_varnames[1 : theirs.co_argcount])


# --- attributes


@windows
@sharing
def test_it_is_a_dataloader_without_workers():
    arguments = for_training(Images(), num_workers=4, timeout=9, prefetch_factor=3, persistent_workers=True)
    loader = DataLoaderX(0, **arguments)
    assert isinstance(loader, DataLoader)
    for name in ("dataset", "batch_sampler", "collate_fn"):
        assert getattr(loader, name) is arguments[name]
    assert (loader.num_workers, loader.timeout, loader.prefetch_factor) == (0, 0, None)
    assert (loader.pin_memory, loader.persistent_workers, loader.multiprocessing_context) == (False, False, None)
    assert (loader.local_rank, loader.batch_size, loader.drop_last) == (0, None, False)
    with pytest.raises(TypeError):
        len(loader)  # the sampler has none


@windows
def test_what_iter_gives_has_the_loaders_attributes():
    loader = DataLoaderX(0, Ramp(10), batch_size=4)
    batches = iter(loader)
    assert iter(batches) is batches
    assert batches.dataset is loader.dataset and batches.batch_sampler is loader.batch_sampler
    assert len(batches) == 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = batches.no_such_thing
    with pytest.raises(AttributeError, match="_get_iterator"):
        _ = batches._get_iterator
    batches.shutdown()  # which is the loader's, too
    assert threads() == []


@windows
def test_set_epoch_of_the_sampler():
    data = Ramp(20)
    ours, theirs = (DistributedSampler(data, num_replicas=2, rank=1, seed=5) for _ in range(2))
    loader, expected = DataLoaderX(0, data, 2, sampler=ours), DataLoader(data, 2, sampler=theirs)
    assert loader.sampler is ours
    orders = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        theirs.set_epoch(epoch)
        orders.append([batch[:, 0].tolist() for batch in loader])
        assert orders[-1] == [batch[:, 0].tolist() for batch in expected]
    assert orders[0] != orders[1] != orders[2]
    loader.set_epoch(0)
    assert ours.epoch == 0
    assert [batch[:, 0].tolist() for batch in loader] == orders[0]


def test_shuffled_by_a_generator_as_the_plain_loader():
    def order(make):
        return [vals(make(torch.Generator().manual_seed(8))) for _ in range(2)]

    assert order(lambda generator: DataLoaderX(0, Ramp(12), shuffle=True, generator=generator)) == order(
        lambda generator: DataLoader(Ramp(12), shuffle=True, generator=generator)
    )


@windows
def test_what_is_changed_between_epochs_counts():
    loader = DataLoaderX(0, Ramp(6), batch_size=2)
    assert vals(loader) == [0, 2, 4]
    loader.collate_fn = lambda samples: torch.stack(samples) * 10
    assert vals(loader) == [0, 20, 40]
    loader.dataset.n = 4  # the sampler asks it for its length
    assert vals(loader) == [0, 20]


@windows
def test_a_subclass_that_replaces_its_batch_sampler():
    """As YOLOX's loader does."""

    class Own(DataLoaderX):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._DataLoader__initialized = False
            self.batch_sampler = [[5], [3, 4]]
            self._DataLoader__initialized = True

    loader = Own(0, Ramp(6), batch_size=2)
    assert vals(loader) == [5, 3]
    assert len(loader) == 2


@windows
@pytest.mark.parametrize(
    ("name", "value"),
    [("local_rank", 1), ("num_workers", 4), ("timeout", 3), ("prefetch_factor", 2), ("worker_init_fn", print)],
)
def test_the_rank_and_what_is_about_workers_can_not_be_changed(name, value):
    loader = DataLoaderX(0, Ramp(4))
    before = getattr(loader, name)
    with pytest.raises(ValueError, match=f"{name} of a DataLoaderX can't be set, here to .*: make a new one"):
        setattr(loader, name, value)
    assert getattr(loader, name) is before
    with pytest.raises(ValueError, match="batch_size"):  # torch's own
        loader.batch_size = 3
    loader.note = "mine"
    assert (loader.note, vals(loader)) == ("mine", [0, 1, 2, 3])


@windows
@pytest.mark.parametrize("do", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(do):
    loader = DataLoaderX(0, Ramp(4))
    with pytest.raises(TypeError, match="a DataLoaderX can't be copied or pickled: make a new one"):
        do(loader)
    with pytest.raises(TypeError, match="an epoch of a DataLoaderX can't be copied or pickled"):
        do(iter(loader))


@windows
def test_what_iter_gives_can_be_referred_to_weakly():
    batches = iter(DataLoaderX(0, Ramp(4)))
    reference = weakref.ref(batches)
    assert reference() is batches
    del batches
    assert reference() is None


# --- next()


class Counted(Sampler):
    """Counts how often an order was begun."""

    def __init__(self, n):
        self.n, self.begun = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        self.begun += 1
        return iter(range(self.n))


@windows
def test_next_of_the_loader_after_iter():
    sampler = Counted(4)
    loader = DataLoaderX(0, Ramp(4), sampler=sampler)
    iter(loader)  # what it gives is not kept
    gc.collect()
    assert vals(next(loader) for _ in range(4)) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    assert sampler.begun == 1
    assert eventually(lambda: not threads(), collect=False)  # that of the epoch has given all, and is ending
    iter(loader)
    assert vals([next(loader)]) == [0]
    assert sampler.begun == 2


@windows
def test_next_of_the_loader_and_of_the_epoch_share_it():
    sampler = Counted(6)
    loader = DataLoaderX(0, Ramp(6), sampler=sampler)
    batches = iter(loader)
    assert vals([next(batches), next(loader), next(batches), next(loader)]) == [0, 1, 2, 3]
    assert vals([next(iter(loader)), next(loader)]) == [0, 0]  # that one was dropped by its end
    assert vals(batches) == [4, 5]
    assert sampler.begun == 3


@windows
def test_next_without_iter_begins_an_epoch():
    loader = DataLoaderX(0, Ramp(3))
    assert vals([next(loader), next(loader)]) == [0, 1]
    assert vals(loader) == [0, 1, 2]


@windows
def test_two_epochs_of_one_loader():
    loader = DataLoaderX(0, Ramp(4))
    assert [vals(pair) for pair in zip(loader, loader, strict=True)] == [[0, 0], [1, 1], [2, 2], [3, 3]]


@windows
def test_a_dataset_that_calls_next_of_its_loader_gets_an_error():
    loader = DataLoaderX(0, Ramp(4, hook=lambda i: next(loader)))
    with pytest.raises(RuntimeError, match="the dataset that it loads"):
        within(20, lambda: next(loader))


# --- ends


@windows
@sharing
@pytest.mark.parametrize("num_workers", [0, 3])
def test_shutdown_at_any_time(num_workers):
    arguments = for_training(Images(), num_workers=num_workers)
    loader = DataLoaderX(0, **arguments)
    first = next(iter(plain(arguments)))
    loader.shutdown()
    for take in (0, 1, 5):
        batches = iter(loader)
        for _ in range(take):
            next(batches)
        assert threads() != []
        loader.shutdown()
        loader.shutdown()
        assert threads() == []
        with pytest.raises(StopIteration):
            next(batches)
        assert_equal(next(loader), first)  # afresh
        loader.shutdown()
        assert_equal(next(iter(loader)), first)
    count = 0
    for _ in loader:
        count += 1
        if count == 3:
            loader.shutdown()
    assert count == 3


@windows
def test_shutdown_from_another_thread_ends_a_wait():
    gate = Gate(2)
    loader = DataLoaderX(0, Ramp(9, hook=gate))
    with gate:
        batches = iter(loader)
        assert vals([next(batches), next(batches)]) == [0, 1]
        assert gate.reached.wait(20)
        ends = threading.Thread(target=loader.shutdown)
        with pytest.warns(RuntimeWarning, match="left behind"):  # by whichever thread: the hook is stuck
            ends.start()
            assert within(20, lambda: next(batches, "the end")) == "the end"
            ends.join(20)
    assert not ends.is_alive()


@windows
@sharing
@pytest.mark.parametrize("num_workers", [0, 3])
def test_break_leaves_no_thread_though_the_sampler_has_no_end(num_workers):
    arguments = for_training(Images(), num_workers=num_workers)
    loader = DataLoaderX(0, **arguments)
    for n, batch in zip(range(3), loader, strict=False):
        assert batch["images"].shape == (4, 3, 8, 4), n
    assert threads() == []
    for batch in loader:
        assert_equal(batch, next(iter(plain(arguments))))
        break
    assert threads() == []


@windows
@sharing
@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("draw", ["epoch", "loader"])
def test_dropping_it_ends_its_threads_without_a_collection(num_workers, taken, draw, without_collection):
    loader = DataLoaderX(0, **for_training(Images(), num_workers=num_workers))
    batches = iter(loader)
    for _ in range(taken):
        next(batches if draw == "epoch" else loader)
    assert threads() != []
    del loader
    assert threads() != []  # the epoch holds it
    next(batches)
    del batches
    assert threads() == []


def test_dropping_the_loader_alone_ends_what_next_of_it_began(without_collection):
    loader = DataLoaderX(0, Ramp(50))
    next(loader)
    assert threads() != []
    del loader
    assert threads() == []


@windows
@sharing
@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.parametrize("where", ["dataset", "collate"])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_an_exception_arrives_at_its_batch(num_workers, where, at):
    broken = [True]

    def in_dataset(i):
        if broken[0] and where == "dataset" and i == 4 * at + 2:
            raise OSError(f"image {i} is damaged")

    def in_collate(samples):
        if broken[0] and where == "collate" and samples[0]["img_paths"] == f"market/{4 * at:04}.jpg":
            raise OSError("images of different sizes")
        return collate(samples)

    arguments = for_tests(Images(hook=in_dataset), num_workers=num_workers) | {"collate_fn": in_collate}
    loader = DataLoaderX(0, **arguments)
    got = []
    with pytest.raises(OSError, match="damaged" if where == "dataset" else "different sizes"):
        for batch in loader:
            got.append(batch)
    assert len(got) == at
    broken[0] = False
    for one, expected in zip(got, plain(arguments), strict=False):
        assert_equal(one, expected)
    assert len(list(loader)) == 6


@windows
@pytest.mark.parametrize("taken", [0, 2])
def test_closing_an_epoch(taken):
    loader = DataLoaderX(0, Ramp(9))
    batches, other = iter(loader), iter(loader)
    for _ in range(taken):
        next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []
    assert vals(other) == list(range(9))
    assert eventually(lambda: not threads(), collect=False)  # that of the last epoch is ending, too


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_process_ends_though_nobody_shuts_it_down(num_workers):
    code, out, err = script(
        f"""
        import itertools
        from gpuprefetch import DataLoaderX
        warnings.simplefilter("ignore")
        loader = DataLoaderX(0, Ramp(4), batch_sampler=([i % 4] for i in itertools.count()), num_workers={num_workers})
        batches = iter(loader)
        print(*(int(next(batches)[0, 0]) for _ in range(5)), int(next(loader)[0, 0]))
        """
    )
    assert (code, out.split(), err) == (0, ["0", "1", "2", "3", "0", "1"], "")


# --- ranks


@windows
def test_each_rank_has_a_device_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr("gpuprefetch._dataloader_x.PrefetchIterator", lambda loader, device, **_: asked.append(device))
    for local_rank in range(4):
        DataLoaderX(local_rank, Ramp(4))
    assert asked == [0, 1, 2, 3]


@windows
def test_a_rank_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="local_rank=2 was asked for, but there are 2 devices, counted from 0"):
        DataLoaderX(2, Ramp(4))


@windows
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("local_rank", [0, 7])
def test_batches_stay_on_the_cpu_where_there_is_nothing_else(local_rank):
    loader = DataLoaderX(local_rank, Ramp(4))
    assert loader.device == torch.device("cpu")
    assert {batch.device for batch in loader} == {torch.device("cpu")}


def test_the_device_of_the_rank_is_current_where_an_epoch_begins(monkeypatch):
    current = []

    class Noted(torch.cuda.device):  # which torch asks isinstance() about
        def __init__(self, wanted):
            self.wanted = wanted

        def __enter__(self):
            current.append(self.wanted)

        def __exit__(self, *_):
            current.pop()

    begin = PrefetchIterator.__iter__
    begun_on = []
    monkeypatch.setattr(PrefetchIterator, "__iter__", lambda self: begun_on.append([*current]) or begin(self))
    loader = DataLoaderX(0, Ramp(4))
    monkeypatch.setattr(torch.cuda, "device", Noted)
    monkeypatch.setattr(DataLoaderX, "device", torch.device("cuda", 1))
    list(loader)
    next(loader)
    assert begun_on == [[torch.device("cuda", 1)]] * 2 and current == []


# --- with a GPU


class CurrentDevice(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.cuda.current_device()


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 4])
def test_the_dataset_runs_on_the_device_of_the_rank(num_workers):
    """Whichever one the loop has made current."""
    rank = torch.cuda.device_count() - 1
    if rank == 0:
        pytest.skip("one device")
    with torch.cuda.device(0):
        assert [batch.item() for batch in DataLoaderX(rank, CurrentDevice(), num_workers=num_workers)] == [rank] * 4
        assert torch.cuda.current_device() == 0


def on_cpu(batch):
    """A copy that is queued on the current stream, and waits for nothing."""
    if isinstance(batch, dict):
        return {key: on_cpu(value) for key, value in batch.items()}
    return batch.to("cpu", non_blocking=True) if isinstance(batch, torch.Tensor) else batch


def devices(batch):
    if isinstance(batch, dict):
        return set().union(*map(devices, batch.values()))
    return {batch.device} if isinstance(batch, torch.Tensor) else set()


@pytest.mark.gpu
@sharing
@pytest.mark.parametrize("num_workers", [0, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_values_are_right_on_the_device_without_any_wait(num_workers, rank, spin):
    if rank >= torch.cuda.device_count():
        pytest.skip("one device")
    arguments = for_training(Images(), num_workers=num_workers)
    loader = DataLoaderX(rank, **arguments)
    assert loader.device == torch.device("cuda", rank)
    kept = []
    with torch.cuda.device(rank):
        batches = iter(loader)
        for _ in range(30):
            batch = next(batches)
            assert devices(batch) == {torch.device("cuda", rank)}
            spin(2)  # the device is behind the host, and batches are dropped before it has read them
            batch["images"] += 1
            kept.append(on_cpu(batch))
            del batch
        torch.cuda.synchronize()
    loader.shutdown()
    assert threads() == []
    for got, expected in zip(kept, plain(arguments), strict=False):
        expected["images"] += 1
        assert_equal(got, expected)


@pytest.mark.gpu
@sharing
@pytest.mark.parametrize("num_workers", [0, 4])
def test_test_batches_on_the_device_in_each_pass(num_workers):
    arguments = for_tests(Images(), num_workers=num_workers)
    loader, expected = DataLoaderX(0, **arguments), list(plain(arguments))
    for _ in range(3):
        got = list(loader)
        assert len(got) == 6
        for one, other in zip(got, expected, strict=True):
            assert devices(one) == {torch.device("cuda", 0)}
            assert one["img_paths"] == other["img_paths"]
            assert_equal(on_cpu_now(one), other)


def on_cpu_now(batch):
    copied = on_cpu(batch)
    torch.cuda.synchronize()
    return copied


@pytest.mark.gpu
def test_a_rank_beyond_the_devices():
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"local_rank={count} was asked for, but there are {count} devices"):
        DataLoaderX(count, Ramp(4))
