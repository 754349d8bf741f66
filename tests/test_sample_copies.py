"""What a ``CachedDataset`` keeps and gives are copies that share nothing, and it knows how much memory they take."""

import dataclasses
import functools
import threading
from collections import deque

import numpy
import pytest
import torch
from caches import PLENTY, Holder, N, WithItsOwnCopy, cached, ramp
from loaders import vals

pytestmark = pytest.mark.windows


@dataclasses.dataclass
class Point:
    x: torch.Tensor


@pytest.mark.parametrize(
    "make, change, read",
    [
        (ramp, lambda s: s.add_(1), lambda s: s.tolist()),
        (ramp, lambda s: s.numpy().fill(9), lambda s: s.tolist()),
        (lambda i: [ramp(i)], lambda s: s.append(1), lambda s: len(s)),
        (lambda i: {"a": (ramp(i), 1)}, lambda s: s["a"][0].zero_(), lambda s: s["a"][0].tolist()),
        (lambda i: numpy.full(3, i + 1), lambda s: s.fill(0), lambda s: s.tolist()),
        (lambda i: Holder([i]), lambda s: s.value.append(5), lambda s: s.value),
        (lambda i: Point(ramp(i)), lambda s: s.x.zero_(), lambda s: s.x.tolist()),
        (lambda i: bytearray(b"abc"), lambda s: s.clear(), bytes),
    ],
    ids=["tensor", "through numpy", "list", "nested", "array", "object", "dataclass", "bytearray"],
)
def test_a_sample_that_is_changed_in_place(make, change, read):
    cache, dataset = cached(make)
    for _ in range(3):
        sample = cache[3]
        assert read(sample) == read(make(3))
        change(sample)
        assert read(sample) != read(make(3))
    assert dataset.asked == [3]


def test_a_dataset_that_fills_one_buffer_again_and_again():
    buffer = torch.zeros(4)
    cache, _ = cached(lambda i: buffer.fill_(i))
    assert vals(cache[i] for i in range(N)) == vals(cache[i] for i in range(N)) == list(range(N))


def test_a_view_keeps_only_its_own_part():
    storage = torch.arange(4000.0).reshape(N - 2, 400)
    cache, _ = cached(lambda i: {"row": storage[i], "column": storage[:, i], "wide": torch.tensor([i]).expand(7)})
    for _ in range(2):
        sample = cache[3]
        assert torch.equal(sample["row"], storage[3]) and torch.equal(sample["column"], storage[:, 3])
        assert sample["wide"].tolist() == [3] * 7
    kept = cache._kept[3]
    assert [tensor.untyped_storage().nbytes() for tensor in kept.values()] == [1600, 40, 56]
    assert cache._kept.bytes >= 1600 + 40 + 56


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Mover(Holder):
    """Neither a container nor a tensor, but one that a batch would move."""

    def to(self, device):
        return Mover(self.value.to(device))


def object_array(value):
    array = numpy.empty(1, dtype=object)
    array[0] = value
    return array


def with_attribute(value):
    tensor = torch.zeros(0)
    tensor.part = value
    return tensor


@pytest.mark.parametrize(
    "wrap, unwrap",
    [
        (Holder, lambda s: s.value),
        (Slotted, lambda s: s.value),
        (Mover, lambda s: s.value),
        (lambda t: Holder(Slotted([t])), lambda s: s.value.value[0]),
        (object_array, lambda s: s[0]),
        (lambda t: {t}, lambda s: next(iter(s))),
        (lambda t: frozenset({t}), lambda s: next(iter(s))),
        (lambda t: deque([t]), lambda s: s[0]),
        (lambda t: functools.partial(len, t), lambda s: s.args[0]),
        (with_attribute, lambda s: s.part),
        (lambda t: ValueError(t), lambda s: s.args[0]),
        (lambda t: t.as_subclass(WithItsOwnCopy), lambda s: s),
        (torch.nn.Parameter, lambda s: s.detach()),
    ],
    ids=[
        *("object", "slots", "moves itself", "nested", "object array", "set", "frozenset", "deque", "partial"),
        *("attribute of a tensor", "exception", "copies itself", "parameter"),
    ],
)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_view_inside_of_anything_keeps_only_its_own_part(wrap, unwrap, device):
    storage = torch.arange(100_000.0)
    cache, dataset = cached(lambda i: wrap(storage[i * 100 : i * 100 + 100]), device=device)
    for _ in range(2):
        assert unwrap(cache[3]).tolist() == list(range(300, 400))
    assert dataset.asked == [3]
    assert unwrap(cache._kept[3]).untyped_storage().nbytes() == 400
    assert unwrap(cache[3]).data_ptr() != unwrap(cache._kept[3]).data_ptr()
    assert 400 <= cache._kept.bytes < 1500


@pytest.mark.parametrize("wrap", [Holder, Slotted, object_array, lambda a: {"key": deque([a])}, with_attribute])
def test_arrays_inside_of_anything_are_counted(wrap):
    cache, _ = cached(lambda i: wrap(numpy.zeros(1000)[:500]))
    cache[0]
    assert 4000 <= cache._kept.bytes < 5500


def test_an_exception_counts_without_what_its_traceback_holds():
    def fail(i):
        large = bytes(PLENTY)
        try:
            raise ValueError(len(large))
        except ValueError as error:
            return error

    cache, _ = cached(fail)
    assert cache[0].args == cache[0].args == (PLENTY,)
    assert 0 < cache._kept.bytes < 1000


class Tagged(torch.Tensor):
    """With metadata, copied in a way of its own."""

    def __deepcopy__(self, memo):
        made = self.as_subclass(torch.Tensor).clone().as_subclass(Tagged)
        made.tags = [*self.tags, "copied"]
        return made


class Plain(torch.Tensor):
    __slots__ = ("slot",)


def tagged():
    tensor = torch.ones(2).as_subclass(Tagged)
    tensor.tags = []
    return tensor


def plain():
    tensor = torch.ones(2).as_subclass(Plain)
    tensor.tags, tensor.slot = ["t"], ["s"]
    return tensor


def tensor_with_tags(kind=torch.Tensor):
    tensor = kind(torch.ones(2))
    tensor.tags = ["t"]
    return tensor


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize(
    "make, kind, tags",
    [
        (tensor_with_tags, torch.Tensor, ["t"]),
        (plain, Plain, ["t"]),
        (tagged, Tagged, ["copied", "copied"]),
        (lambda: tensor_with_tags(torch.nn.Parameter), torch.nn.Parameter, ["t"]),
        (lambda: tensor_with_tags(torch.nn.Buffer), torch.nn.Buffer, ["t"]),
    ],
    ids=["tensor", "subclass", "copies itself", "parameter", "buffer"],
)
def test_types_and_attributes_of_tensors(make, kind, tags, device):
    cache, dataset = cached(lambda i: [make()], device=device)
    for _ in range(2):
        (tensor,) = cache[3]
        assert isinstance(tensor, kind) and tensor.tags == tags and tensor.device.type == (device or "cpu")
        assert tensor.requires_grad == (kind is torch.nn.Parameter) and tensor.is_leaf
        if kind is Plain:
            assert tensor.slot == ["s"]
            tensor.slot.append("changed")
        tensor.tags.append("changed")
    assert dataset.asked == [3]


def test_a_tensor_with_attributes_that_lead_back_to_it():
    def loop(i):
        tensor, other = ramp(i), torch.zeros(1000)[:1]
        tensor.other, other.back = [other], tensor
        return tensor

    cache, _ = cached(loop)
    for _ in range(2):
        tensor = cache[3]
        assert tensor.other[0].back is tensor and tensor.other[0].untyped_storage().nbytes() == 4


def test_a_tensor_that_stands_twice_in_a_sample_is_one():
    def twice(i):
        tensor = ramp(i)
        return tensor, {"again": tensor}

    cache, _ = cached(twice)
    first, second = cache[1], cache[1]
    assert first[0] is first[1]["again"] and second[0] is second[1]["again"] and first[0] is not second[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.ones(2, requires_grad=True),
        lambda: torch.tensor([1 + 2j]).conj(),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(5),
    ],
    ids=["sparse", "channels last", "requires grad", "conj", "empty", "scalar"],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_kinds_of_tensors(make, same):
    cache, dataset = cached(lambda i: make())
    for _ in range(2):
        same(cache[0], make().clone().detach().requires_grad_(make().requires_grad))
    assert dataset.asked == [0]


def test_a_tensor_made_in_inference_mode_can_be_used_for_training():
    cache, _ = cached(ramp)
    with torch.inference_mode():
        cache[1]
    weight = torch.ones(4, requires_grad=True)
    (cache[1] * weight).sum().backward()
    assert weight.grad.tolist() == [1.0] * 4


def test_a_tensor_of_a_graph_is_refused():
    weight = torch.ones(4, requires_grad=True)
    cache, _ = cached(lambda i: ramp(i) * weight)
    with pytest.raises(RuntimeError, match=r"can't keep a tensor that is part of an autograd graph: detach\(\) it"):
        cache[1]
    assert cache._kept.bytes == 0 and cache._kept == {} and cache._turns == {}


def test_a_sample_that_can_not_be_copied_takes_no_room():
    cache, _ = cached(lambda i: threading.Lock())
    with pytest.raises(TypeError, match="lock"):
        cache[1]
    assert cache._kept.bytes == 0 and cache._kept == {}


# --- how much


SHARED = torch.zeros(8)


@pytest.mark.parametrize(
    "sample, low, high",
    [
        (torch.zeros(100), 400, 400),
        (torch.zeros(100)[:10], 40, 40),
        (torch.zeros(1).expand(10), 40, 40),
        (torch.zeros(0), 0, 0),
        (numpy.zeros((3, 4)), 96, 96),
        (b"x" * 1000, 1000, 1100),
        ("x" * 1000, 1000, 1100),
        ({"a": [torch.zeros(100)], "b": numpy.zeros(100, numpy.uint8)}, 500, 1000),
        ([SHARED, SHARED], 32, 132),
        (Holder(b"x" * 1000), 1000, 1700),
        ({b"x" * 1000, b"y" * 1000}, 2000, 2500),
        (numpy.array([b"x" * 1000, None], dtype=object), 1016, 1100),
        (len, 0, 0),
    ],
)
def test_how_much_a_sample_takes(sample, low, high):
    cache, _ = cached(lambda i: sample)
    cache[0]
    assert low <= cache._kept.bytes <= high


@pytest.mark.parametrize("mode, size", [("L", 12), ("RGB", 48), ("RGBA", 48)])
def test_how_much_an_image_takes(mode, size):
    image = pytest.importorskip("PIL.Image")
    cache, _ = cached(lambda i: image.new(mode, (4, 3), 7))
    cache[0].putpixel((0, 0), 1)
    assert cache[0].getpixel((0, 0)) == image.new(mode, (1, 1), 7).getpixel((0, 0))
    assert cache._kept.bytes == size


def test_a_sample_that_holds_itself():
    def loop(i):
        sample = [ramp(i)]
        sample.append({"self": sample.copy()})
        return sample

    cache, _ = cached(loop)
    assert cache[0][1]["self"][0].tolist() == cache[0][0].tolist()
    assert 16 <= cache._kept.bytes < 500
