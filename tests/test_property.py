"""Whatever a batch is made of, it is the plain loader's."""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
import types

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loaders import THREADS
from torch.utils.data import DataLoader

from gpuprefetch import PrefetchIterator, _batch
from gpuprefetch._extension import extension

pytestmark = [pytest.mark.windows, pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support:UserWarning")]

EXAMPLES = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

Pair = collections.namedtuple("Pair", "first second")


class Bag(dict):
    pass


class Row(list):
    pass


@dataclasses.dataclass(frozen=True)
class Record:
    value: object
    label: object = None


DTYPES = [
    dtype
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex32 complex64 "
        "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if (dtype := getattr(torch, name, None)) is not None
]


@st.composite
def tensors(draw):
    """A dense tensor of random bytes, and then a view of it."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    seed = draw(st.integers(0, 2**32 - 1))
    size = torch.empty(0, dtype=dtype).element_size()
    top = 2 if dtype is torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, top, int(np.prod(shape, dtype=int)) * size, dtype=np.uint8)
    tensor = (
        torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=dtype)
    )
    for _ in range(draw(st.integers(0, 3))):
        tensor = draw(views(tensor))
    return tensor


KINDS = ["permute", "step", "narrow", "select", "expand", "new axis", "channels_last", "clone"]


@st.composite
def views(draw, tensor):
    kind = draw(
        st.sampled_from(["permute", "step", "narrow", "select", "expand", "new axis", "channels_last", "clone"])
    )
    if kind == "new axis":
        return tensor.unsqueeze(draw(st.integers(0, tensor.dim()))) if tensor.dim() < 5 else tensor
    if kind == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
    if kind == "clone":
        return tensor.clone()
    if tensor.dim() == 0:
        return tensor.expand(draw(st.lists(st.integers(0, 3), max_size=2))) if kind == "expand" else tensor
    if kind == "permute":
        return tensor.permute(draw(st.permutations(range(tensor.dim()))))
    axis = draw(st.integers(0, tensor.dim() - 1))
    length = tensor.shape[axis]
    if kind == "step":
        begin = draw(st.integers(0, length))
        index = [slice(None)] * tensor.dim()
        index[axis] = slice(begin, None, draw(st.integers(1, 3)))
        return tensor[tuple(index)]
    if kind == "narrow":
        begin = draw(st.integers(0, length))
        return tensor.narrow(axis, begin, draw(st.integers(0, length - begin)))
    if kind == "select":
        return tensor.select(axis, draw(st.integers(0, length - 1))) if length else tensor
    shape = [draw(st.integers(0, 4)) if n == 1 else n for n in tensor.shape]
    return tensor.expand([draw(st.integers(1, 3))] * (tensor.dim() < 4) + shape)


def others():
    """What is no tensor."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=3),
        st.binary(max_size=3),
        st.integers(0, 4).map(np.arange),
        st.just(torch.float16),
        st.builds(types.SimpleNamespace, t=tensors()),
        st.builds(torch.nn.Identity),
    )


def containers(children):
    keys = st.one_of(st.text(max_size=2), st.integers(0, 9), st.tuples(st.booleans()))
    items = st.lists(children, max_size=4)
    mapping = st.dictionaries(keys, children, max_size=4)
    return st.one_of(
        items,
        items.map(tuple),
        items.map(Row),
        items.map(collections.deque),
        st.builds(Pair, children, children),
        st.builds(Record, children, children),
        mapping,
        mapping.map(Bag),
        mapping.map(collections.OrderedDict),
        mapping.map(lambda m: collections.defaultdict(list, m)),
        children.map(lambda c: [c, {"again": c}, c]),
    )


batches = st.recursive(st.one_of(tensors(), tensors(), others()), containers, max_leaves=12)


def assert_equal(out, source, device, same, seen):
    """Walks both, in another way than the package does."""
    if isinstance(source, torch.Tensor):
        same(out, source.to(device))
        assert seen.setdefault(id(source), out) is out, "one tensor became two"
        return
    assert type(out) is type(source)
    if isinstance(source, dict):
        assert list(out) == list(source)
        pairs = [(out[key], source[key]) for key in source]
    elif isinstance(source, (list, tuple, collections.deque)):
        assert len(out) == len(source)
        pairs = list(zip(out, source, strict=True))
    elif isinstance(source, Record):
        pairs = [(out.value, source.value), (out.label, source.label)]
    else:
        assert out is source
        return
    for a, b in pairs:
        assert_equal(a, b, device, same, seen)


def check(loaded, threads, ahead, device, same):
    loader = DataLoader(loaded, batch_size=None, collate_fn=lambda batch: batch)
    plain = list(loader)
    before = [repr(batch) for batch in plain]
    with PrefetchIterator(loader, device, num_threads=threads, prefetch_batches=ahead) as prefetched:
        out = list(prefetched)
    assert len(out) == len(plain)
    for moved, source in zip(out, plain, strict=True):
        assert_equal(moved, source, torch.device(device), same, {})
    assert [repr(batch) for batch in plain] == before, "the loader's own batches were changed"


anything = given(
    loaded=st.lists(batches, min_size=1, max_size=3), threads=st.sampled_from(THREADS), ahead=st.integers(1, 3)
)


@EXAMPLES
@anything
def test_batches_on_the_cpu_are_the_plain_loaders(loaded, threads, ahead, same):
    check(loaded, threads, ahead, "cpu", same)


@EXAMPLES
@anything
def test_batches_on_meta_are_the_plain_loaders(loaded, threads, ahead, same):
    check(loaded, threads, ahead, "meta", same)


@pytest.mark.gpu
@settings(EXAMPLES, max_examples=300)
@anything
def test_batches_on_cuda_are_the_plain_loaders(loaded, threads, ahead, same):
    check(loaded, threads, ahead, torch.device("cuda", torch.cuda.current_device()), same)


@pytest.mark.gpu
@settings(EXAMPLES, max_examples=100)
@given(loaded=st.lists(tensors(), min_size=1, max_size=40), ring=st.sampled_from([1 << 20, 1 << 26]))
def test_many_tensors_on_cuda_are_the_plain_loaders(loaded, ring, same):
    device = torch.device("cuda", torch.cuda.current_device())
    (out,) = PrefetchIterator([loaded], device, pinned_bytes=ring)
    for moved, source in zip(out, loaded, strict=True):
        same(moved, source.to(device))


@EXAMPLES
@given(batch=batches, skipped=st.sets(st.text(max_size=1), max_size=3))
def test_skipped_keys_are_the_identical_objects(batch, skipped):
    (out,) = PrefetchIterator([batch], "meta", skip_keys=skipped)

    def walk(moved, source):
        if isinstance(source, torch.Tensor):
            assert moved.device.type == "meta"
        elif isinstance(source, dict):
            for key in source:
                if key in skipped:
                    assert moved[key] is source[key]
                else:
                    walk(moved[key], source[key])
        elif isinstance(source, (list, tuple, collections.deque)):
            for a, b in zip(moved, source, strict=True):
                walk(a, b)
        elif isinstance(source, Record):
            walk(moved.value, source.value)
            walk(moved.label, source.label)

    walk(out, batch)


# --- samples on several threads ---------------------------------------------------------------------------------------


class Samples:
    """Sample i is i. Those in ``failing`` raise, and each takes another time."""

    def __init__(self, n, failing):
        self.n, self.failing = n, failing

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        time.sleep((7 * i) % 5 * 1e-4)  # load
        if i in self.failing:
            raise LookupError(i)
        return torch.tensor(i)


class SamplesOfABatch(Samples):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


@dataclasses.dataclass(frozen=True)
class Plan:
    dataset: Samples
    order: list[int]
    batch_size: int | None
    drop_last: bool
    refused: frozenset[int]  # what makes collate raise

    def collate(self, samples):
        if self.refused.intersection(found := torch.as_tensor(samples).flatten().tolist()):
            raise ArithmeticError(found)
        return samples

    def loader(self):
        return DataLoader(
            self.dataset, self.batch_size, sampler=self.order, drop_last=self.drop_last, collate_fn=self.collate
        )


@st.composite
def plans(draw):
    n = draw(st.integers(1, 30))
    order = draw(st.permutations(range(n)) | st.lists(st.integers(0, n - 1), max_size=40))
    raising = st.just(frozenset()) | st.frozensets(st.sampled_from(order or [0]), min_size=1, max_size=3)
    kind = draw(st.sampled_from([Samples, SamplesOfABatch]))
    batch_size = draw(st.none() | st.integers(1, 12))
    return Plan(
        dataset=kind(n, draw(raising)),
        order=order,
        batch_size=batch_size,
        drop_last=batch_size is not None and draw(st.booleans()),
        refused=draw(raising),
    )


def drawn(loader):
    """The batches until the end or an error, and the error."""
    got, batches = [], iter(loader)
    try:
        for batch in batches:
            got.append(torch.as_tensor(batch).tolist())
    except (LookupError, ArithmeticError) as error:
        return got, type(error), error.args
    return got, None, ()


@settings(EXAMPLES, max_examples=100 if sys.platform != "win32" else 20)  # threads start slowly there
@given(plan=plans(), threads=st.integers(2, 9 if sys.platform != "win32" else 3), ahead=st.integers(1, 6))
def test_batches_and_errors_of_several_threads_are_the_plain_loaders(plan, threads, ahead):
    prefetched = PrefetchIterator(plan.loader(), "cpu", num_threads=threads, prefetch_batches=ahead)
    assert drawn(prefetched) == drawn(plan.loader())


# --- which tensors are nothing but their bytes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split():
    try:
        return extension().split
    except ImportError as error:
        pytest.skip(f"the compiled module can't be used: {error}")


@pytest.fixture(scope="module")
def is_plain(split):
    def ask(leaf):
        plain, others = split([leaf])
        assert [*map(id, plain), *map(id, others)] == [id(leaf)]
        return len(plain) == 1

    return ask


@EXAMPLES
@given(tensor=tensors())
def test_dense_tensors_and_their_views_are_plain(tensor, is_plain):
    assert is_plain(tensor)
    assert is_plain(tensor.detach())
    if tensor.is_floating_point() or tensor.is_complex():
        leaf = tensor.detach().requires_grad_()
        assert not is_plain(leaf)
        with torch.no_grad():
            assert is_plain(leaf.detach())
    if tensor.is_complex():
        assert not is_plain(tensor.conj())
        assert not is_plain(tensor.conj().imag)
        assert is_plain(tensor.conj().conj())


@EXAMPLES
@given(tensor=tensors(), short=st.integers(1, 8))
def test_a_tensor_whose_storage_is_too_short_is_not_plain(tensor, short, is_plain):
    tensor = tensor.clone()
    if tensor.numel() == 0:
        tensor.untyped_storage().resize_(0)
        assert is_plain(tensor), "it shows no bytes"
        return
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(max(0, size - short))
    assert not is_plain(tensor)
    tensor.untyped_storage().resize_(size)
    assert is_plain(tensor)


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func}")


class Plain(torch.Tensor):
    pass


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def inference():
    with torch.inference_mode():
        return torch.ones(2)


PLAIN = {
    "dense": lambda: torch.ones(3),
    "0-dim": lambda: torch.tensor(1),
    "empty": lambda: torch.empty(0),
    "expanded": lambda: torch.ones(1).expand(3),
    "array": lambda: torch.from_numpy(np.ones(3)),
    "shared": lambda: torch.ones(3).share_memory_(),
    "inference": inference,
    "detached": lambda: torch.ones(3, requires_grad=True).detach(),
    "conj of real": lambda: torch.ones(3).conj(),
    "resolved conj": lambda: torch.ones(3, dtype=torch.cfloat).conj().resolve_conj(),
}
NOT_PLAIN = {
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "not a leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(3), requires_grad=False),
    "subclass": lambda: torch.ones(3).as_subclass(Plain),
    "no tensor": lambda: _batch.Stack([torch.ones(3)]),
    "conj": lambda: torch.ones(3, dtype=torch.cfloat).conj(),
    "neg": lambda: torch.ones(3, dtype=torch.cfloat).conj().imag,
    "zero": lambda: torch._efficientzerotensor((3,)),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "wrapper subclass": lambda: Wrapped(torch.ones(3)),
    "dispatching subclass": lambda: torch.ones(3).as_subclass(Dispatching),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [*PLAIN, *NOT_PLAIN])
def test_what_is_plain(name, is_plain):
    assert is_plain({**PLAIN, **NOT_PLAIN}[name]()) is (name in PLAIN)


def test_what_is_plain_and_the_rest_keep_their_order(split):
    leaves = [torch.ones(1), torch.nn.Parameter(torch.ones(2)), torch.ones(3), None, torch.ones(4)]
    plain, others = split(leaves)
    assert list(map(id, plain)) == [id(leaves[i]) for i in (0, 2, 4)]
    assert list(map(id, others)) == [id(leaves[i]) for i in (1, 3)]


def test_autocast_and_modes_make_no_difference(is_plain):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert is_plain(torch.ones(3))
    with torch.inference_mode():
        assert is_plain(torch.ones(3))
        assert not is_plain(torch.ones(3, dtype=torch.cfloat).conj())
