"""Samples that the copy gathers: the same batch as ``default_collate`` makes, and its errors where it makes none."""

import collections
import collections.abc
import functools
import itertools
import types
import typing
import warnings
import weakref

import numpy as np
import pytest
import torch
from loaders import THREADS, eventually
from torch.utils.data import DataLoader, default_collate

from gpuprefetch import PrefetchIterator, _batch
from gpuprefetch._extension import extension
from gpuprefetch._gather import gathering

Pair = collections.namedtuple("Pair", "x y")


class Typed(typing.NamedTuple):
    x: torch.Tensor
    y: int


class Bag(dict):
    pass


class Checked(Pair):
    def __new__(cls, x, y):
        assert isinstance(x, torch.Tensor)
        return super().__new__(cls, x, y)


class Fields(tuple):
    """Not made by namedtuple(), though it looks so."""

    __slots__ = ()
    _fields = ("x",)

    def __new__(cls, x):
        assert isinstance(x, torch.Tensor)
        return super().__new__(cls, (x,))


class Asked(typing.NamedTuple):
    x: torch.Tensor
    y: int

    def __iter__(self):
        assert isinstance(self.x, torch.Tensor)
        return tuple.__iter__(self)


Doubled = collections.namedtuple("Doubled", "x y")
Doubled.__new__ = functools.wraps(Doubled.__new__)(lambda cls, x, y: tuple.__new__(cls, (x * 2, y)))


class Sub(torch.Tensor):
    pass


def image(i, **options):
    return torch.arange(2048.0, **options).add_(i).reshape(2, 32, 32)


def gathered(samples):
    """What collate leaves, and that with every stack made."""
    batch = gathering(default_collate, extension().can_gather)(samples)
    stacks = [leaf for leaf in _batch.leaves(batch) if isinstance(leaf, _batch.Stack)]
    moved = {id(leaf): leaf for leaf in _batch.leaves(batch)}
    moved |= {id(stack): torch.stack(stack.samples) for stack in stacks}
    return len(stacks), _batch.replace(batch, moved)


def same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (
            got.dtype == wanted.dtype and got.stride() == wanted.stride() and got.requires_grad == wanted.requires_grad
        )
        assert torch.equal(got.detach(), wanted.detach())
    elif isinstance(wanted, collections.abc.Mapping):
        assert list(got) == list(wanted)
        for key in wanted:
            same(got[key], wanted[key])
    elif isinstance(wanted, collections.abc.Sequence) and not isinstance(wanted, (str, bytes)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            same(one, other)
    else:
        assert got == wanted


SAMPLES = {
    "tensor": (1, image),
    "pair": (1, lambda i: (image(i), i)),
    "list": (1, lambda i: [image(i), "name"]),
    "dict, nested": (2, lambda i: {"a": image(i), "b": {"c": (image(i + 1), 1.5)}, "s": "x"}),
    "namedtuple": (1, lambda i: Pair(image(i), i)),
    "NamedTuple": (1, lambda i: Typed(image(i), i)),
    "numpy": (1, lambda i: (image(i).numpy(), i)),
    "uint8": (1, lambda i: image(0, dtype=torch.int64).to(torch.uint8).repeat(4, 1, 1)),
    "complex": (1, lambda i: image(i).to(torch.complex64)),
    "small": (1, lambda i: torch.tensor([i])),
    "one number": (1, lambda i: torch.tensor(i)),
    "array scalars": (1, lambda i: (np.float32(i), np.array(i), np.bool_(i % 2))),  # arrays become tensors
    "empty": (1, lambda i: torch.ones(0, 8)),
    # What stays default_collate's.
    "numbers": (0, lambda i: (i, float(i), "s", b"b")),
    "transposed": (0, lambda i: image(i).transpose(1, 2)),
    "channels_last": (0, lambda i: image(i)[None].to(memory_format=torch.channels_last)),
    "grey": (1, lambda i: image(i).reshape(64, 32, 1).permute(2, 0, 1)),  # its strides are unusual, not its bytes
    "channels_last, of one pixel": (0, lambda i: torch.ones(2, 2048, 1, 1).to(memory_format=torch.channels_last)),
    "expanded": (0, lambda i: torch.ones(1).expand(4096)),
    "conjugated": (0, lambda i: image(i).to(torch.complex64).conj()),
    "requires grad": (0, lambda i: image(i).requires_grad_()),
    "subclass": (0, lambda i: image(i).as_subclass(Sub)),
    "one of them a subclass": (0, lambda i: image(i).as_subclass(Sub) if i == 2 else image(i)),
    "mixed dtypes": (0, lambda i: image(i).to(torch.float64) if i == 1 else image(i)),
    "promoted arrays": (0, lambda i: image(i).numpy().astype([np.float16, np.int64, np.float32][i % 3])),
    "dict subclass": (0, lambda i: Bag(a=image(i))),
    "UserDict": (0, lambda i: collections.UserDict(a=image(i), b=i)),
    "mapping proxy": (0, lambda i: types.MappingProxyType({"a": image(i)})),
    "UserList": (0, lambda i: collections.UserList([image(i), i])),
    "deque": (0, lambda i: collections.deque([image(i), i])),
    "inside a dict subclass": (0, lambda i: (1, Bag(a=image(i)))),
    "namedtuple that checks": (0, lambda i: Checked(image(i), i)),
    "a tuple with fields": (0, lambda i: Fields(image(i))),
    "namedtuple with a __new__ put in": (0, lambda i: Doubled(image(i), i)),
    "namedtuple with an __iter__ of its own": (0, lambda i: Asked(image(i), i)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_gathered_batch_is_the_collated_one(name):
    stacks, make = SAMPLES[name]
    samples = [make(i) for i in range(5)]
    got = gathered(samples)
    same(got[1], default_collate(samples))
    assert got[0] == stacks


def test_no_sample_is_gathered_whose_stack_has_strides_of_its_own():
    """A dimension of size 1 may have any stride: all that are contiguous, up to five dimensions."""
    can_gather = extension().can_gather
    gathered_layouts, others = 0, 0
    for sizes in itertools.chain.from_iterable(itertools.product((1, 2, 3), repeat=d) for d in range(1, 6)):
        usual = torch.empty(sizes).stride()
        choices = [
            (stride, 1, 2, torch.Size(sizes).numel()) if size == 1 else (stride,)
            for size, stride in zip(sizes, usual, strict=True)
        ]
        for strides in set(itertools.product(*choices)):
            sample = torch.empty(500).as_strided(sizes, strides)
            if can_gather([sample, sample]):
                gathered_layouts += 1
                assert torch.stack([sample, sample]).stride() == torch.empty(2, *sizes).stride(), strides
            else:
                others += 1
    assert gathered_layouts > 20 * others > 0


FAULTS = {
    "ragged": lambda i: torch.ones(2048 + i),
    "no batch": None,
    "ragged arrays": lambda i: image(0).numpy()[: 1 + i],
    "ragged, with grad": lambda i: torch.ones(2048 + i, requires_grad=True),
    "an array of strings": lambda i: np.array(["a"] * 2048),
    "ragged in a dict": lambda i: {"a": image(i), "b": torch.ones(4096, 1 + i % 2)},
    "an object": lambda i: (image(i), object()),
    "sparse": lambda i: image(i).to_sparse(),
    "nested": lambda i: torch.nested.nested_tensor([image(i)], layout=torch.jagged),
    "other keys": lambda i: {str(i): image(i)},
    "lists of other lengths": lambda i: [image(i)] * (1 + i),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_are_those_of_default_collate(name):
    make = FAULTS[name]
    samples = [make(i) for i in range(3)] if make else []

    def error(collate):
        with pytest.raises(Exception) as raised:  # noqa: B017
            collate(samples)
        return type(raised.value), str(raised.value)

    assert error(gathered) == error(default_collate)


def test_samples_that_come_as_one_array_are_default_collates():
    array = np.ones((3, 2048), dtype=np.float32)
    got = gathering(default_collate, extension().can_gather)(array)
    same(got, default_collate(array))


def test_a_collate_function_of_the_users_is_left_alone():
    def collate(samples):
        return samples

    assert gathering(collate, extension().can_gather) is collate


def test_registered_collate_functions_stay_in_force(monkeypatch):
    functions = torch.utils.data._utils.collate.default_collate_fn_map
    monkeypatch.setitem(functions, np.ndarray, lambda batch, *, collate_fn_map=None: "mine")
    assert gathered([image(i).numpy() for i in range(2)]) == (0, "mine")
    monkeypatch.setitem(functions, torch.Tensor, lambda batch, *, collate_fn_map=None: "mine too")
    assert gathered([image(i) for i in range(2)]) == (0, "mine too")


class Graph:
    def __init__(self, x):
        self.x = x


REGISTERED = {
    "a class": (Graph, lambda batch: [sample.x for sample in batch], lambda i: (Graph(image(i)), image(i))),
    "arrays": (np.ndarray, lambda batch: list(map(torch.from_numpy, batch)), lambda i: {"a": image(i).numpy()}),
    "dicts": (dict, lambda batch: [sample["a"] for sample in batch], lambda i: [{"a": image(i)}, 1]),
    "lists": (list, lambda batch: [sample[0] for sample in batch], lambda i: {"a": [image(i)]}),
    "a base class": (object, lambda batch: [sample.x for sample in batch], lambda i: Graph(image(i))),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_function_that_collates_on_its_own_finds_tensors(monkeypatch, name):
    """It is given the map of functions to go on with, as torch's own do."""
    kind, parts, make = REGISTERED[name]

    def double(batch, *, collate_fn_map=None):
        return torch.utils.data._utils.collate.collate(parts(batch), collate_fn_map=collate_fn_map) * 2

    monkeypatch.setitem(torch.utils.data._utils.collate.default_collate_fn_map, kind, double)
    samples = [make(i) for i in range(3)]
    stacks, got = gathered(samples)
    same(got, default_collate(samples))
    assert stacks == 0


def test_a_registered_function_that_poses_as_torchs_own_finds_tensors(monkeypatch):
    """functools.wraps gives it the name and module of the function that it goes on with."""
    collate = torch.utils.data._utils.collate

    @functools.wraps(collate.collate_numpy_array_fn)
    def double(batch, *, collate_fn_map=None):
        return collate.collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map) * 2

    monkeypatch.setitem(collate.default_collate_fn_map, np.ndarray, double)
    samples = [image(i).numpy() for i in range(3)]
    stacks, got = gathered(samples)
    same(got, default_collate(samples))
    assert stacks == 0


def test_a_registration_that_isinstance_does_not_take(monkeypatch):
    """torch finds tensors by their exact type before it asks."""
    monkeypatch.setitem(torch.utils.data._utils.collate.default_collate_fn_map, list[int], lambda batch, **_: batch)
    samples = [image(i) for i in range(3)]
    stacks, got = gathered(samples)
    same(got, default_collate(samples))
    assert stacks == 0


def test_a_registration_for_something_else_does_not_keep_samples_from_being_gathered(monkeypatch):
    monkeypatch.setitem(torch.utils.data._utils.collate.default_collate_fn_map, Graph, lambda batch, **_: batch)
    assert gathered([image(i) for i in range(3)])[0] == 1


def test_grad_flows_back_to_the_samples():
    weight = torch.ones(2048, requires_grad=True)
    _, got = gathered([weight * i for i in range(3)])
    assert got.grad_fn is not None
    got.sum().backward()
    assert weight.grad.tolist() == [3.0] * 2048


@pytest.fixture
def warn_always():
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def test_read_only_arrays_warn_as_with_default_collate(warn_always):
    samples = [image(i).numpy() for i in range(3)]
    for sample in samples:
        sample.flags.writeable = False

    def caught(collate):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            result = collate(samples)
        return result, [(w.category, str(w.message), w.filename, w.lineno) for w in found]

    (stacks, _), told = caught(gathered)
    assert stacks == 1
    assert told == caught(default_collate)[1]
    assert len(told) == 3 and all("not writable" in message for _, message, *_ in told)


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("name", SAMPLES)
def test_gathered_batches_on_the_device(name, num_threads):
    _, make = SAMPLES[name]
    loader = DataLoader([make(i) for i in range(23)], batch_size=5)
    wanted = list(loader)
    got = list(PrefetchIterator(loader, "cuda", num_threads=num_threads, pinned_bytes=1 << 20))
    assert len(got) == len(wanted)

    def to_host(value):
        return {
            id(leaf): leaf.cpu() for leaf in _batch.leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda
        }

    for one, other in zip(got, wanted, strict=True):
        assert all(leaf.is_cuda for leaf in _batch.leaves(one))
        keep = to_host(one)
        same(_batch.replace(one, keep), other)


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", THREADS)
def test_samples_of_half_a_piece_and_more_cross_pieces(num_threads):
    data = torch.randn(40, 663_553)  # 2.7 MB each, pieces of 4 MiB
    loader = DataLoader(data, batch_size=16)
    got = list(PrefetchIterator(loader, "cuda", num_threads=num_threads))
    assert torch.equal(torch.cat(got).cpu(), data)


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_dataset_that_fills_the_same_samples_again(num_threads):
    """Invariant 3: the samples are the dataset's own memory, and read before it is asked for the next batch."""

    class Reusing(torch.utils.data.Dataset):
        def __init__(self):
            self.rows = torch.zeros(4, 1 << 16)

        def __len__(self):
            return 80

        def __getitem__(self, i):
            return self.rows[i % 4].fill_(i)

    loader = DataLoader(Reusing(), batch_size=4)
    got = [batch[:, ::4096].tolist() for batch in PrefetchIterator(loader, "cuda", num_threads=num_threads)]
    assert got == [[[float(i)] * 16 for i in range(n, n + 4)] for n in range(0, 80, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", THREADS)
def test_skipped_keys_hold_stacked_tensors(num_threads):
    """What stays on the host is never asked to the copy, and so has to be stacked by collate."""
    loader = DataLoader([{"x": image(i), "y": image(i + 1)} for i in range(9)], batch_size=3)
    p = PrefetchIterator(loader, "cuda", num_threads=num_threads, skip_keys=["x"])
    for got, wanted in zip(p, loader, strict=True):
        assert type(got["x"]) is torch.Tensor and not got["x"].is_cuda and torch.equal(got["x"], wanted["x"])
        assert got["y"].is_cuda and torch.equal(got["y"].cpu(), wanted["y"])


@pytest.mark.gpu
def test_skipped_gpu_work_of_the_dataset_is_waited_for():
    def collate(samples):
        x = torch.stack(samples)
        on_device = x.cuda()
        torch.cuda._sleep(20_000_000)
        return {"kept": on_device + 1, "x": x}

    loader = DataLoader([image(i) for i in range(24)], batch_size=1, collate_fn=collate)
    lowest = [b["kept"].amin() for b in PrefetchIterator(loader, "cuda", skip_keys=["kept"])]
    assert [int(v) for v in lowest] == [i + 1 for i in range(24)]


@pytest.mark.gpu
def test_samples_are_dropped_once_they_are_copied():
    samples = []

    class Fresh(torch.utils.data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, i):
            sample = image(i)
            samples.append(weakref.ref(sample))
            return sample

    epoch = iter(PrefetchIterator(DataLoader(Fresh(), batch_size=1), "cuda", prefetch_batches=4))
    held = [next(epoch), next(epoch)]
    assert eventually(lambda: len(samples) == 6 and all(ref() is None for ref in samples), collect=False)
    assert [int(b.amin()) for b in held] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", [0, 1])
def test_pinned_samples_without_a_ring_are_read_before_the_next_ones(num_threads):
    buffer = torch.zeros(4, 1 << 18).pin_memory()
    rows = torch.utils.data.default_collate  # the samples are rows of one pinned buffer, filled again for each batch

    class Reusing(torch.utils.data.Dataset):
        def __len__(self):
            return 120

        def __getitem__(self, i):
            return buffer[i % 4].fill_(i)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        p = PrefetchIterator(
            DataLoader(Reusing(), batch_size=4, collate_fn=rows), "cuda", num_threads=num_threads, pinned_bytes=0
        )
    got = [(batch.amin(1), batch.amax(1)) for batch in p]
    assert [low.tolist() for low, _ in got] == [high.tolist() for _, high in got]
    assert [low.tolist() for low, _ in got] == [[float(i) for i in range(n, n + 4)] for n in range(0, 120, 4)]
