"""Every batch keeps its structure; tensors in it, and nothing else, are what ``tensor.to(device)`` gives."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import logging
import operator
import types
import typing
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils.data import DataLoader

from gpuprefetch import PrefetchIterator, _batch

# "meta" shows the walk over the batch on a machine without a GPU: on the CPU most batches pass straight through.
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", "meta", CUDA]
MOVING = ["meta", CUDA]

# Of beta features of torch, when they are first used.
pytestmark = [
    pytest.mark.windows,
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support:UserWarning"),
    pytest.mark.filterwarnings("ignore:Named tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
]


def deliver(batch, device, **options):
    """The batch as a prefetcher over nothing else hands it over."""
    with PrefetchIterator([batch], device, **options) as prefetched:
        (out,) = prefetched
    return out


def at(device):
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


# --- containers -------------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x y")


class Typed(typing.NamedTuple):
    x: torch.Tensor
    name: str = "unnamed"


class Summed(collections.namedtuple("Summed", "x y total")):
    """Takes other arguments than its fields."""

    def __new__(cls, x, y):
        return super().__new__(cls, x, y, "total")


class Bag(dict):
    def hello(self):
        return "hi"


class Mirror(collections.OrderedDict):
    """Its items are its attributes too, through __setitem__."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class AttributeDict(dict):
    """Its items are its attributes too: one dict for both."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """A dataclass and a mapping at once, as the outputs of large model libraries are."""

    x: torch.Tensor = None
    y: torch.Tensor = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class Row(list):
    pass


class Point(tuple):
    pass


class OwnCopy(collections.abc.MutableMapping):
    """A mapping that says how it is copied."""

    def __init__(self, content):
        self.content = dict(content)

    def __copy__(self):
        return type(self)(self.content)

    def __getitem__(self, key):
        return self.content[key]

    def __setitem__(self, key, value):
        self.content[key] = value

    def __delitem__(self, key):
        del self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


def with_attribute(container):
    container.note = "kept"
    return container


ITEMS = operator.itemgetter
# name: (makes it of one tensor, the tensors in it, what else must be equal in the result and the source)
CONTAINERS = {
    "dict": (lambda t: {"b": t, "a": 1, 3: t}, lambda c: [c["b"], c[3]], lambda c: (list(c), c["a"])),
    "OrderedDict": (lambda t: collections.OrderedDict(b=t, a=t), ITEMS("b", "a"), list),
    "defaultdict": (
        lambda t: collections.defaultdict(list, z=t),
        lambda c: [c["z"]],
        lambda c: (c.default_factory, list(c)),
    ),
    "Counter": (lambda t: collections.Counter({"n": 2, "t": t}), lambda c: [c["t"]], lambda c: (c["n"], c["none"])),
    "UserDict": (lambda t: collections.UserDict(t=t, n=1), lambda c: [c["t"], c.data["t"]], lambda c: c["n"]),
    "UserList": (lambda t: collections.UserList([t, 1]), lambda c: [c[0], c.data[0]], lambda c: c[1]),
    "ChainMap": (
        lambda t: collections.ChainMap({"t": t, "n": 1}, {"n": 2, "u": t}),
        ITEMS("t", "u"),
        lambda c: (sorted(c), c["n"]),
    ),
    "dict subclass": (lambda t: with_attribute(Bag(k=t)), lambda c: [c["k"]], lambda c: (c.hello(), c.note)),
    "mirroring setitem": (lambda t: Mirror(k=t, n=1), lambda c: [c["k"], c.k], lambda c: (list(c), c.n)),
    "mirroring dict": (lambda t: AttributeDict(k=t, n=1), lambda c: [c["k"], c.k], lambda c: (list(c), c.n)),
    "dataclass mapping": (lambda t: Output(x=t), lambda c: [c["x"], c.x], lambda c: (list(c), c.y)),
    "MappingProxyType": (lambda t: types.MappingProxyType({"t": t, "n": 1}), lambda c: [c["t"]], lambda c: c["n"]),
    "own copy": (lambda t: OwnCopy({"t": t, "n": 1}), lambda c: [c["t"]], lambda c: c["n"]),
    "list": (lambda t: [t, [t, None]], lambda c: [c[0], c[1][0]], lambda c: (len(c), c[1][1])),
    "list subclass": (lambda t: with_attribute(Row([t, 1])), lambda c: [c[0]], lambda c: (c[1], c.note)),
    "tuple": (lambda t: (t, (t,), 1), lambda c: [c[0], c[1][0]], lambda c: (len(c), c[2])),
    "tuple subclass": (lambda t: with_attribute(Point((t, 1))), lambda c: [c[0]], lambda c: (c[1], c.note)),
    "namedtuple": (lambda t: Pair(t, "y"), lambda c: [c.x], lambda c: (c.y, c._fields)),
    "NamedTuple": (lambda t: Typed(t), lambda c: [c.x], lambda c: c.name),
    "namedtuple, own new": (lambda t: Summed(t, 1), lambda c: [c.x], lambda c: (c.y, c.total)),
    "return_types": (lambda t: torch.max(t.reshape(1, -1), 0), lambda c: [c.values, c.indices], len),
    "deque": (lambda t: collections.deque([1, t], maxlen=3), lambda c: [c[1]], lambda c: (c[0], c.maxlen)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("threads", [0, 1])
def test_containers_keep_type_and_content(name, device, threads, same):
    make, tensors, rest = CONTAINERS[name]
    batch = make(torch.arange(3.0))
    before = tensors(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = deliver(batch, device, num_threads=threads)
    assert type(out) is type(batch)
    assert rest(out) == rest(batch)
    for moved, source in zip(tensors(out), before, strict=True):
        same(moved, source.to(device))
    assert all(now is then for now, then in zip(tensors(batch), before, strict=True)), "the caller's batch was changed"


@pytest.mark.parametrize("device", DEVICES)
def test_containers_inside_one_another(device):
    t = torch.ones(2)
    batch = {
        "p": Pair(t, t),
        "b": Bag(k=t),
        "o": collections.OrderedDict(b=t, a=t),
        "t": (t, [t]),
        "e": [],
        "et": (),
        "dd": collections.defaultdict(list, z=t),
    }
    (out,) = PrefetchIterator(DataLoader([batch], batch_size=None, collate_fn=lambda b: b), device=device)
    assert out["p"]._fields == ("x", "y") and out["b"].hello() == "hi" and list(out["o"]) == ["b", "a"]
    assert type(out["t"]) is tuple and type(out["t"][1]) is list and out["et"] == () and out["e"] == []
    assert out["dd"].default_factory is list and out["dd"]["z"].shape == t.shape
    leaves = [*out["p"], out["b"]["k"], *out["o"].values(), out["t"][0], out["t"][1][0], out["dd"]["z"]]
    assert {v.device.type for v in leaves} == {device}
    assert batch["p"].x is t and batch["dd"]["z"] is t


@pytest.mark.parametrize("device", DEVICES)
def test_deep_nesting(device):
    batch = torch.ones(1)
    for _ in range(50):
        batch = {"k": [(batch, None)]}
    out = deliver(batch, device)
    for _ in range(50):
        assert list(out) == ["k"] and type(out["k"]) is list and out["k"][0][1] is None
        out = out["k"][0][0]
    assert out.device.type == device


class Shared(collections.abc.MutableMapping):
    """Its copies share its content."""

    def __init__(self, content):
        self.content = content

    def __getitem__(self, key):
        return self.content[key]

    def __setitem__(self, key, value):
        self.content[key] = value

    def __delitem__(self, key):
        del self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


@pytest.mark.parametrize("device", MOVING)
@pytest.mark.parametrize("threads", [0, 1])
def test_a_container_that_cannot_be_rebuilt_is_handed_over_as_it_is_with_one_warning(device, threads):
    kind = type("SharedHere", (Shared,), {})  # a class is warned of once
    t = torch.ones(2)
    batches = [kind({"t": t, "n": 1}) for _ in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with PrefetchIterator(batches, device, num_threads=threads) as prefetched:
            out = list(prefetched) + list(prefetched)
    assert all(a is b for a, b in zip(out, batches * 2, strict=True))
    assert all(batch.content == {"t": t, "n": 1} and batch.content["t"] is t for batch in batches)
    (warning,) = [w for w in caught if "SharedHere" in str(w.message)]
    assert "handed over as it is" in str(warning.message) and "to(device" in str(warning.message)


@pytest.mark.parametrize("device", MOVING)
def test_a_list_that_refuses_changes_is_handed_over_as_it_is(device):
    class Frozen(list):
        def __setitem__(self, index, value):
            raise TypeError("immutable")

    batch = Frozen([torch.ones(2)])
    with pytest.warns(UserWarning, match="can't rebuild a .*Frozen"):
        (out,) = PrefetchIterator([batch], device)
    assert out is batch and out[0].device.type == "cpu"


@pytest.mark.parametrize("device", MOVING)
def test_a_container_whose_copy_fails_is_handed_over_as_it_is(device):
    class Uncopyable(list):
        def __copy__(self):
            raise TypeError("not to be copied")

    batch = Uncopyable([torch.ones(1)])
    with pytest.warns(UserWarning, match="Uncopyable"):
        out = deliver({"inner": batch, "t": torch.ones(1)}, device)
    assert out["inner"] is batch and out["t"].device.type == device


@pytest.mark.parametrize("device", MOVING)
def test_a_mapping_that_makes_its_values_anew_does_not_silently_stay(device):
    class Lazy(OwnCopy):
        def __getitem__(self, key):
            return super().__getitem__(key).view(-1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = deliver({"lazy": Lazy({"t": torch.ones(2)})}, device)
    assert out["lazy"]["t"].device.type == device or any("Lazy" in str(w.message) for w in caught)


# --- dataclasses ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


@dataclasses.dataclass
class Computed:
    x: torch.Tensor
    n: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.n = 3


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    rest: list


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    x: torch.Tensor
    rest: tuple = ()


@dataclasses.dataclass
class Child(Computed):
    y: torch.Tensor = None
    keyword: int = dataclasses.field(default=7, kw_only=True)


@dataclasses.dataclass
class Checked:
    """Its constructor refuses what is not on the CPU, and takes an argument that is no field."""

    x: torch.Tensor
    scale: dataclasses.InitVar[int]

    def __post_init__(self, scale):
        assert self.x.device.type == "cpu"
        self.extra = scale  # no field


@dataclasses.dataclass
class Unset:
    x: torch.Tensor
    never: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class Inner:
    frozen: Frozen
    items: list


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_dataclasses_keep_type_and_fields(device, threads):
    def x():
        return torch.ones(2)

    source = [
        Frozen(x(), "a"),
        Computed(x()),
        Slotted(x(), [torch.zeros(1), None]),
        FrozenSlotted(x(), (torch.zeros(1), "s")),
        Child(x(), x(), keyword=8),
        Checked(x(), 5),
        Unset(x()),
    ]
    tensors = [value.x for value in source]
    loader = DataLoader(source, batch_size=None, collate_fn=lambda b: b)
    out = list(PrefetchIterator(loader, device=device, num_threads=threads))
    assert [type(value) for value in out] == [type(value) for value in source]
    assert {value.x.device.type for value in out} == {device}
    assert all(value.x is t for value, t in zip(source, tensors, strict=True))
    frozen, computed, slotted, frozen_slotted, child, checked, unset = out
    assert frozen.name == "a" and computed.n == 3
    assert slotted.rest[0].device.type == device and slotted.rest[1] is None
    assert frozen_slotted.rest[0].device.type == device and frozen_slotted.rest[1] == "s"
    assert child.y.device.type == device and (child.n, child.keyword) == (3, 8)
    assert checked.extra == 5
    assert not hasattr(unset, "never")
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.name = "b"


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_dataclass_has_computed_of_its_tensors_is_computed_again(device):
    @dataclasses.dataclass
    class Sample:
        x: torch.Tensor

        @functools.cached_property
        def twice(self):
            return self.x * 2

    sample = Sample(torch.ones(2))
    kept = sample.twice
    out = deliver(sample, device)
    assert out.x.device.type == out.twice.device.type == device
    assert sample.twice is kept


def test_an_attribute_dict_keeps_its_items():
    class Items(dict):
        def __init__(self, **items):
            super().__init__(items)
            self.__dict__ = self

        @functools.cached_property
        def lengths(self):
            return torch.ones(1)

    out = deliver(Items(x=torch.ones(2), lengths=torch.zeros(2)), "meta")
    assert type(out) is Items and list(out) == ["x", "lengths"]
    assert out.x is out["x"] and {out.x.device.type, out.lengths.device.type} == {"meta"}


def test_a_dataclass_whose_field_cant_be_set_is_handed_over_as_it_is():
    @dataclasses.dataclass
    class Sample:
        x: torch.Tensor

    sample = Sample(torch.ones(2))
    Sample.x = property(lambda self: self.__dict__["x"])
    with pytest.warns(UserWarning, match="can't rebuild a .*Sample"):
        assert deliver(sample, "meta") is sample


@pytest.mark.parametrize("device", DEVICES)
def test_dataclasses_inside_one_another(device):
    t = torch.ones(2)
    batch = Inner(Frozen(t, "a"), [Computed(t), {"s": Slotted(t, [])}])
    out = deliver(batch, device)
    assert out.frozen.x is out.items[0].x is out.items[1]["s"].x and out.frozen.x.device.type == device
    assert out.frozen.name == "a" and batch.frozen.x is t and batch.items[1]["s"].x is t


@pytest.mark.parametrize("device", DEVICES)
def test_a_dataclass_with_a_to_of_its_own_moves_itself(device):
    @dataclasses.dataclass
    class Boxes:
        x: torch.Tensor
        moved: int = 0

        def to(self, device, non_blocking=False):
            return Boxes(self.x.to(device, non_blocking=non_blocking), self.moved + 1)

    batch = Boxes(torch.ones(2))
    out = deliver([batch], device)[0]
    assert type(out) is Boxes and out.x.device.type == device
    assert out.moved == (device != "cpu") and batch.moved == 0 and batch.x.device.type == "cpu"


@pytest.mark.parametrize("device", DEVICES)
def test_a_dataclass_type_is_no_batch(device):
    out = deliver([Frozen, torch.ones(1)], device)
    assert out[0] is Frozen


# --- what is not touched ----------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


def untouched():
    return {
        "none": None,
        "true": True,
        "int": 3,
        "big": 1 << 70,
        "float": 1.5,
        "complex": 1j,
        "str": "abc",
        "empty str": "",
        "bytes": b"xy",
        "bytearray": bytearray(b"xy"),
        "memoryview": memoryview(b"xy"),
        "array of numbers": array.array("d", [1.0]),
        "array": np.arange(3),
        "0-dim array": np.array(1.0),
        "object array": np.array(["a", None, torch.ones(1)], dtype=object),
        "record array": np.zeros(2, dtype=[("a", "f4"), ("b", "i8")]),
        "masked array": np.ma.array([1, 2], mask=[0, 1]),
        "numpy str": np.str_("q"),
        "numpy float": np.float32(1),
        "datetime64": np.datetime64("2024-01-01"),
        "function": len,
        "lambda": lambda: 0,
        "type": dict,
        "module": np,
        "set": {1, 2},
        "set of tensors": {torch.ones(1)},
        "frozenset": frozenset((1,)),
        "range": range(3),
        "slice": slice(1, 2),
        "ellipsis": ...,
        "generator": (i for i in range(3)),
        "iterator": iter([torch.ones(1)]),
        "keys": {"a": 1}.keys(),
        "date": datetime.date(2024, 1, 1),
        "decimal": decimal.Decimal("1.5"),
        "enum": Colour.RED,
        "namespace": types.SimpleNamespace(t=torch.ones(1)),
        "object": object(),
        "torch.Size": torch.Size([2, 3]),
        "torch.dtype": torch.float32,
        "torch.device": torch.device("cpu"),
        "torch.Generator": torch.Generator(),
        "list": [1, "a", [None, {"x": 2}]],
        "dict": {"a": {"b": (1, 2)}},
        "namedtuple": Pair(1, 2),
        "dataclass": Frozen(None, "a"),
        "deque": collections.deque([1]),
        "proxy": types.MappingProxyType({"a": 1}),
        "recarray row": np.zeros(1, dtype=[("a", "f4")])[0],
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_what_holds_no_tensor_is_the_identical_object(device, threads):
    batch = {**untouched(), "t": torch.ones(1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = deliver(batch, device, num_threads=threads)
    assert list(out) == list(batch)
    assert out["t"].device.type == device
    assert [key for key in batch if out[key] is not batch[key]] == ([] if device == "cpu" else ["t"])
    assert next(out["generator"]) == 0, "the generator was drawn from"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", list(untouched().values()), ids=list(untouched()))
def test_a_batch_without_tensors_is_the_identical_object(device, batch):
    assert deliver(batch, device) is batch


@pytest.mark.parametrize("device", DEVICES)
def test_untouched_subtrees_are_the_identical_objects(device):
    batch = {"still": [1, {"x": None}], "moves": [{"deep": [2, "s"]}, torch.ones(1)], "pair": Pair([3], (4,))}
    out = deliver(batch, device)
    assert out["still"] is batch["still"] and out["pair"] is batch["pair"]
    assert out["moves"][0] is batch["moves"][0]
    assert (out is batch) == (out["moves"] is batch["moves"]) == (device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_modules_stay_where_they_are(device):
    module = torch.nn.Linear(2, 2)
    before = list(module.parameters())
    out = deliver({"m": [module], "t": torch.ones(1)}, device)
    assert out["m"][0] is module and out["t"].device.type == device
    assert all(now is then for now, then in zip(module.parameters(), before, strict=True))
    assert {p.device.type for p in before} == {"cpu"}


class Length:
    """Its ``to`` changes the unit."""

    def __init__(self, value):
        self.value = value

    def to(self, unit):
        raise AssertionError("converted")


class Instant:
    def to(self, tz, *, fold=0):
        raise AssertionError("converted")


class Movable:
    @staticmethod
    def to():
        raise AssertionError("called")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [lambda: Length(1), Instant, Movable], ids=["unit", "time zone", "no argument"])
def test_objects_whose_to_takes_something_else_stay_as_they_are(device, kind):
    value = kind()
    out = deliver({"v": [value], "t": torch.ones(1)}, device)
    assert out["v"][0] is value and out["t"].device.type == device


# --- skip_keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_values_under_skip_keys_stay_the_identical_objects(device, threads):
    t, deep = torch.ones(2), [torch.zeros(1)]
    batch = {
        "meta": t,
        "x": t,
        3: deep,
        "list": [{"meta": deep, "x": [t]}, (collections.OrderedDict(meta=t, x=t),)],
        "data": Computed(t),
        "pair": Pair(t, {("a", 1): t}),
    }
    out = deliver(batch, device, skip_keys=["meta", 3, ("a", 1)], num_threads=threads)
    assert out["meta"] is t and out[3] is deep and deep[0].device.type == "cpu"
    assert out["list"][0]["meta"] is deep and out["list"][1][0]["meta"] is t
    assert out["pair"].y[("a", 1)] is t
    moved = [out["x"], out["list"][0]["x"][0], out["list"][1][0]["x"], out["data"].x, out["pair"].x]
    assert {v.device.type for v in moved} == {device} and len(set(map(id, moved))) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_skip_keys_are_keys_of_mappings_only(device):
    t = torch.ones(2)
    out = deliver([Frozen(t, "x"), Pair(t, t), [t]], device, skip_keys=("x", 0))
    assert {out[0].x.device.type, out[1].x.device.type, out[2][0].device.type} == {device}


@pytest.mark.parametrize("device", DEVICES)
def test_skip_keys_can_leave_nothing_to_move(device):
    batch = {"a": torch.ones(1), "b": [torch.ones(1)]}
    assert deliver(batch, device, skip_keys={"a", "b"}) is batch


# --- one tensor at several places -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_a_tensor_that_stands_twice_is_one_tensor_afterwards(device, threads):
    t, other = torch.ones(2), torch.ones(2)
    out = deliver({"a": t, "b": [t, (t, other)], "c": Computed(t)}, device, num_threads=threads)
    assert out["a"] is out["b"][0] is out["b"][1][0] is out["c"].x
    assert out["b"][1][1] is not out["a"]


@pytest.mark.parametrize("device", MOVING)
def test_views_of_one_storage_become_separate_tensors(device, same):
    base = torch.arange(12.0).reshape(3, 4)
    batch = [base, base[0], base[1:], base.t(), base.view(12)]
    out = deliver(batch, device)
    for moved, source in zip(out, batch, strict=True):
        same(moved, source.to(device))
    assert all(moved._base is None for moved in out)
    if device == "cuda":
        out[0].fill_(-1)
        for moved, source in zip(out[1:], batch[1:], strict=True):
            assert torch.equal(moved.cpu(), source)
    assert torch.equal(base.view(12), torch.arange(12.0))


@pytest.mark.parametrize("device", DEVICES)
def test_an_object_that_moves_itself_moves_once(device):
    class Counted:
        calls = 0

        def __init__(self, x):
            self.x = x

        def to(self, device, non_blocking=False):
            Counted.calls += 1
            return Counted(self.x.to(device, non_blocking=non_blocking))

    value = Counted(torch.ones(1))
    out = deliver([value, {"again": value}], device)
    assert out[0] is out[1]["again"] and out[0].x.device.type == device
    assert Counted.calls == (device != "cpu")


# --- objects that move themselves -------------------------------------------------------------------------------------


class ToDevice:
    """Takes a device, and nothing else."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return type(self)(self.x.to(device))


class ToPositional(ToDevice):
    def to(self, *args):
        return type(self)(self.x.to(*args))


class ToNonBlocking(ToDevice):
    def to(self, device, non_blocking=False):
        new = type(self)(self.x.to(device, non_blocking=non_blocking))
        new.asked = non_blocking
        return new


class ToAnything(ToDevice):
    def to(self, *args, **kwargs):
        return type(self)(self.x.to(*args, **kwargs))


class ToSlots(ToNonBlocking):
    __slots__ = ("hidden",)


class ToInPlace(ToDevice):
    """Moves itself in place, as text encodings do."""

    def to(self, device, *, non_blocking=False):
        self.x = self.x.to(device, non_blocking=non_blocking)
        return self


class ToNothing(ToDevice):
    """The same, and gives nothing back."""

    def to(self, device):
        self.x = self.x.to(device)

    def pin_memory(self):
        self.x = self.x.pin_memory()


class ToWithHooks(ToNonBlocking):
    pinned = False
    streams = 0

    def pin_memory(self):
        new = type(self)(self.x.pin_memory())
        new.pinned = True
        return new

    def record_stream(self, stream):
        self.x.record_stream(stream)
        self.streams += 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize(
    "kind",
    [ToDevice, ToPositional, ToNonBlocking, ToAnything, ToSlots, ToInPlace, ToNothing, ToWithHooks],
    ids=lambda k: k.__name__,
)
def test_objects_with_a_to_move_themselves(kind, device, threads):
    x = torch.arange(4.0)
    value = kind(x)
    batch = deliver({"v": (value,), "beside": torch.ones(2)}, device, num_threads=threads)
    assert batch["beside"].device.type == device
    out = batch["v"][0]
    assert type(out) is kind and out.x.device.type == device
    if device == "cpu" or kind in (ToInPlace, ToNothing):
        assert out is value
    else:
        assert value.x is x
    if device == "cuda":
        assert torch.equal(out.x.cpu(), x)
        assert getattr(out, "asked", True), "the copy was not asked to be non-blocking"
    if kind is ToWithHooks:
        assert out.streams == (device == "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_a_mapping_with_a_to_of_its_own_moves_itself(device):
    class Encoding(collections.UserDict):
        moves = 0

        def to(self, device, non_blocking=False):
            new = Encoding({key: value.to(device, non_blocking=non_blocking) for key, value in self.items()})
            new.moves = self.moves + 1
            return new

    batch = Encoding(ids=torch.arange(3), mask=torch.ones(3))
    out = deliver(batch, device)
    assert type(out) is Encoding and out.moves == (device != "cpu")
    assert {v.device.type for v in out.values()} == {device} and batch["ids"].device.type == "cpu"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_a_mapping_that_is_iterated_by_rows_moves_itself(device, threads):
    """As a TensorDict is. What holds its memory is found by its keys."""

    class Rows(collections.UserDict):
        def __iter__(self):
            return ({name: column[i] for name, column in self.data.items()} for i in range(3))

        def keys(self):
            return self.data.keys()

        def to(self, device, non_blocking=False):
            return made({name: column.to(device, non_blocking=non_blocking) for name, column in self.data.items()})

    def made(columns):
        rows = Rows()
        rows.data = columns
        return rows

    batch = made({"ids": torch.arange(3), "mask": torch.ones(3)})
    assert [id(tensor) for tensor in _batch.tensors_in(batch)] == [id(column) for column in batch.data.values()]
    out = deliver(batch, device, num_threads=threads)
    assert type(out) is Rows and list(out.data) == ["ids", "mask"]
    assert {column.device.type for column in out.data.values()} == {device}
    if device != "meta":
        assert out.data["ids"].tolist() == [0, 1, 2] and out.data["mask"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("device", MOVING)
@pytest.mark.parametrize("threads", [0, 1])
def test_an_error_of_an_objects_to_arrives(device, threads):
    class Broken:
        def to(self, device, non_blocking=False):
            raise KeyError("no way")

    with PrefetchIterator([torch.ones(1), Broken(), torch.ones(1)], device, num_threads=threads) as prefetched:
        iterator = iter(prefetched)
        assert next(iterator).device.type == device
        with pytest.raises(KeyError, match="no way"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_packed_sequences(device, threads, same):
    unsorted = pack_sequence([torch.arange(2.0), torch.arange(4.0)], enforce_sorted=False)
    padded = pack_padded_sequence(torch.arange(12.0).reshape(4, 3), torch.tensor([4, 3, 1]))
    out = deliver((unsorted, [padded]), device, num_threads=threads)
    for moved, source in ((out[0], unsorted), (out[1][0], padded)):
        assert type(moved) is PackedSequence
        expected = source.to(device)
        same(moved.data, expected.data)
        same(moved.batch_sizes, source.batch_sizes)
        for name in ("sorted_indices", "unsorted_indices"):
            if getattr(source, name) is None:
                assert getattr(moved, name) is None
            else:
                same(getattr(moved, name), getattr(expected, name))


# --- tensors ----------------------------------------------------------------------------------------------------------


def every_dtype():
    return sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def expected(tensor, device):
    try:
        return tensor.to(device)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        pytest.skip(f"torch itself can't: {str(error).splitlines()[0][:100]}")


def numbers(dtype, *shape):
    """Every byte counts: random ones, NaNs among them, where the dtype takes any."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).view(torch.bool)
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8).view(dtype).reshape(shape)


def can_gather(tensor):
    try:
        tensor.t().contiguous()
    except RuntimeError:  # the dtypes of less than a byte, of which torch copies whole runs only
        return False
    return True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", every_dtype(), ids=lambda d: str(d).removeprefix("torch."))
def test_every_dtype(dtype, device, same):
    if dtype in (torch.qint8, torch.quint8, torch.qint32):
        dense = torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3), 0.1, 1, dtype)
        batch = [dense, dense.t(), dense[:, ::2]]
    else:
        try:
            dense = numbers(dtype, 4, 6)
            dense.view(torch.uint8)
        except (RuntimeError, NotImplementedError) as error:
            pytest.skip(f"torch can't make such a tensor: {str(error).splitlines()[0][:100]}")
        batch = [dense, dense[1:3], dense[0, 0], dense[:0]]
        if can_gather(dense):
            batch += [dense.reshape(2, 3, 4).transpose(0, 2), dense[:, ::2], dense[:1].expand(3, 6)]
    wanted = [expected(tensor, device) for tensor in batch]
    assert wanted[0].dtype == dtype
    for out, want in zip(deliver(batch, device), wanted, strict=True):
        same(out, want)


def strided():
    base = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    volume = torch.arange(2 * 3 * 2 * 4 * 5.0).reshape(2, 3, 2, 4, 5)
    return {
        "contiguous": base,
        "0-dim": torch.tensor(3.5),
        "0-dim of a larger one": base[1, 2, 3, 4],
        "no elements": torch.empty(0),
        "no elements, 3-d": torch.empty(3, 0, 2),
        "no elements, permuted": torch.empty(2, 0, 3).permute(2, 0, 1),
        "one element": torch.ones(1, 1, 1),
        "one element, odd strides": torch.ones(8).as_strided((1, 1), (5, 7)),
        "transposed": base.transpose(1, 3),
        "permuted": base.permute(3, 2, 1, 0),
        "channels_last": base.to(memory_format=torch.channels_last),
        "channels_last, one channel": torch.arange(8.0).reshape(2, 1, 2, 2).to(memory_format=torch.channels_last),
        "channels_last_3d": volume.to(memory_format=torch.channels_last_3d),
        "transposed matrix": base[0, 0].t(),
        "narrowed": base[1:, 1:2],
        "offset": base.reshape(-1)[7:90],
        "stepped": base[:, :, ::2, 1:],
        "stepped, permuted": base[:, :, ::2].permute(2, 0, 3, 1),
        "flipped": base.flip(0),
        "column": base[0, 0, :, 2],
        "expanded": torch.arange(3.0).expand(4, 3),
        "expanded scalar": torch.tensor(2.0).expand(2, 3),
        "expanded, permuted": torch.arange(3.0).view(3, 1).expand(3, 5).t(),
        "expanded to nothing": torch.ones(1, 3).expand(0, 3),
        "overlapping": torch.arange(8.0).unfold(0, 4, 1),
        "diagonal": base[0, 0].diagonal(),
        "dense with a hole": torch.arange(12.0).as_strided((2, 3), (6, 1)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", strided())
def test_strides_are_those_of_dot_to(name, device, same):
    source = strided()[name]
    out = deliver({"t": source}, device)["t"]
    same(out, source.to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_all_strides_in_one_batch(device, threads, same):
    batch = strided()
    out = deliver(batch, device, num_threads=threads)
    for name, source in batch.items():
        same(out[name], source.to(device))


class Box(torch.Tensor):
    """Carries its format through every operation, as image boxes do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Box) and isinstance(args[0], Box):
            out.fmt = getattr(args[0], "fmt", None)
        return out


class Wrapped(torch.Tensor):
    """Has no memory of its own, and says through which tensors it holds it."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self):
        return ["inner", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["inner"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            (self,), options = args, {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
            return cls(self.inner.to(**options), self.scale.to(**options))
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        raise NotImplementedError(f"{func}")


class Silent(torch.Tensor):
    """Has no memory of its own, and does not say where it is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].inner.to(kwargs["device"], non_blocking=kwargs.get("non_blocking", False)))
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func}")


def box():
    value = torch.arange(8.0).reshape(2, 4).as_subclass(Box)
    value.fmt = "xywh"
    return value


# Tensors that are more than the bytes they show, and tell it neither by device nor by layout.
UNUSUAL = {
    "conj": lambda: torch.randn(3, 2, dtype=torch.cfloat).conj(),
    "conj, transposed": lambda: torch.randn(3, 2, dtype=torch.cdouble).mH,
    "neg": lambda: torch.randn(3, dtype=torch.cfloat).conj().imag,
    "real part": lambda: torch.randn(3, dtype=torch.cfloat).real,
    "zero": lambda: torch._efficientzerotensor((2, 3)),
    "named": lambda: torch.arange(6.0).reshape(2, 3).refine_names("N", "C"),
    "coo": lambda: torch.eye(3).to_sparse(),
    "coo, uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)),
    "coo, hybrid": lambda: torch.arange(6.0).reshape(3, 2).to_sparse(1),
    "coo, empty": lambda: torch.zeros(3, 2).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3), 0.1, 3, torch.quint8),
    "quantized per channel": lambda: torch.quantize_per_channel(
        torch.arange(6.0).reshape(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.arange(3.0), torch.arange(2.0)]),
    "nested, jagged": lambda: torch.nested.nested_tensor([torch.arange(3.0), torch.arange(2.0)], layout=torch.jagged),
    "mkldnn": lambda: torch.arange(6.0).reshape(2, 3).to_mkldnn(),
    "parameter": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "buffer": lambda: torch.nn.Buffer(torch.arange(3.0)),
    "requires_grad": lambda: torch.arange(3.0).requires_grad_(),
    "not a leaf": lambda: torch.arange(3.0).requires_grad_() * 2,
    "subclass": box,
    "wrapper subclass": lambda: Wrapped(torch.arange(3.0), torch.ones(1)),
    "meta": lambda: torch.empty(2, 3, device="meta"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("threads", [0, 1])
def test_unusual_tensors_are_those_of_dot_to(name, device, threads, same):
    if name == "named" and not hasattr(torch.Tensor, "refine_names"):
        pytest.skip("this torch has no named tensors")
    source = UNUSUAL[name]()
    if name == "meta" and device != "meta":
        pytest.skip("a tensor without data can't be copied out of meta")
    want = expected(source, device)
    out = deliver({"t": [source], "plain": torch.ones(1)}, device, num_threads=threads)
    same(out["t"][0], want)
    assert out["plain"].device.type == device
    if device == "cpu":
        assert out["t"][0] is source


@pytest.mark.parametrize("device", DEVICES)
def test_a_subclass_keeps_its_class_and_metadata(device):
    out = deliver([box(), {"b": box()}], device)
    for value in (out[0], out[1]["b"]):
        assert type(value) is Box and value.fmt == "xywh" and value.device.type == device
    if device != "meta":
        assert torch.equal(out[0].as_subclass(torch.Tensor).cpu(), torch.arange(8.0).reshape(2, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_a_subclass_moves_by_a_to_of_its_own(device):
    class Own(torch.Tensor):
        def to(self, *args, **kwargs):
            new = self.as_subclass(torch.Tensor).to(*args, **kwargs).as_subclass(Own)
            new.by = "own"
            return new

    out = deliver([torch.ones(2).as_subclass(Own)], device)[0]
    assert type(out) is Own and out.device.type == device
    assert getattr(out, "by", None) == (None if device == "cpu" else "own")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=["grad", "no_grad", "inference"]
)
def test_moves_happen_in_the_callers_grad_mode(device, threads, mode, same):
    leaf = torch.arange(3.0, requires_grad=True)
    product = leaf * 2
    plain = torch.arange(3.0)
    with torch.inference_mode():
        inference = torch.arange(3.0)
    batch = [leaf, product, plain, inference]
    with mode():
        out = deliver(batch, device, num_threads=threads)
        for moved, source in zip(out, batch, strict=True):
            same(moved, source.to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_reach_the_source(device):
    leaf = torch.arange(3.0, requires_grad=True)
    (out,) = deliver([leaf], device)
    if device == "meta":
        assert out.grad_fn is not None
        return
    (out * 3).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threads", [0, 1])
def test_batches_of_a_dataloader_are_the_plain_ones(device, threads, same):
    samples = [
        {
            "image": torch.rand(3, 4, 4).permute(1, 2, 0),
            "array": np.full((2, 2), i, dtype=np.float64),
            "label": i,
            "weight": float(i),
            "name": f"sample {i}",
            "pair": Pair(torch.tensor(i), [torch.ones(2, dtype=torch.bool)]),
        }
        for i in range(10)
    ]
    loader = DataLoader(samples, batch_size=4)
    plain = list(loader)
    out = list(PrefetchIterator(loader, device, num_threads=threads))
    assert len(out) == len(plain) == 3
    for a, b in zip(out, plain, strict=True):
        assert list(a) == list(b) and a["name"] == b["name"] and type(a["pair"]) is Pair
        for key in ("image", "array", "label", "weight"):
            same(a[key], b[key].to(device))
        same(a["pair"].x, b["pair"].x.to(device))
        same(a["pair"].y[0], b["pair"].y[0].to(device))


# --- gpuprefetch._batch -----------------------------------------------------------------------------------------------


def identical(a, b):
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def test_leaves_are_found_once_and_in_order():
    a, b, c, d = (torch.ones(1) for _ in range(4))
    mover = ToDevice(torch.ones(1))
    batch = {"x": [b, (a, None)], "y": Pair(a, mover), "z": Frozen(c, "n"), "w": collections.deque([d, b]), "v": mover}
    assert identical(_batch.leaves(batch), [b, a, mover, c, d])
    assert identical(_batch.leaves(a), [a]) and identical(_batch.leaves(mover), [mover])
    assert _batch.leaves(None) == _batch.leaves([]) == _batch.leaves("abc") == []


def test_leaves_leave_out_skip_keys():
    a, b = torch.ones(1), torch.ones(1)
    batch = {"x": [{"y": a}], "y": b, "z": [b]}
    assert identical(_batch.leaves(batch, {"y"}), [b])
    assert identical(_batch.leaves(batch, {"z"}), [a, b])
    assert _batch.leaves(batch, {"x", "y", "z"}) == []


def test_replace_puts_the_moved_in_place_and_leaves_the_source():
    a, b = torch.zeros(1), torch.zeros(1)
    new = torch.ones(1)
    batch = {"x": [a, b], "y": (a,), "z": [b]}
    out = _batch.replace(batch, {id(a): new, id(b): b})
    assert out["x"][0] is new and out["x"][1] is b and out["y"][0] is new and out["z"] is batch["z"]
    assert batch["x"][0] is a and batch["y"][0] is a
    assert _batch.replace(a, {id(a): new}) is new


def test_replace_gives_the_batch_itself_where_nothing_moved():
    a = torch.zeros(1)
    batch = {"x": [a], "y": Frozen(a, "n")}
    assert _batch.replace(batch, {id(a): a}) is batch
    assert _batch.replace(batch, {id(a): torch.ones(1)}, {"x", "y"}) is batch


def test_buffers_of_numbers_are_not_walked():
    """A megabyte of them would take seconds."""

    class Bytes(bytearray):
        def __iter__(self):
            raise AssertionError("walked")

        __getitem__ = __iter__

    class Array(array.array):
        def __iter__(self):
            raise AssertionError("walked")

        __getitem__ = __iter__

    t = torch.ones(1)
    batch = {"bytes": Bytes(b"xy"), "array": Array("d", [1.0]), "t": t}
    assert identical(_batch.leaves(batch), [t])
    out = deliver(batch, "meta")
    assert out["bytes"] is batch["bytes"] and out["array"] is batch["array"]


@pytest.mark.parametrize(
    ("value", "moves"),
    [
        (torch.ones(1), False),
        (box(), False),
        (torch.nn.Linear(1, 1), False),
        (np.ones(1), False),
        (Length(1), False),
        (Instant(), False),
        (Movable(), False),
        (Movable, False),
        (ToDevice, False),
        ("abc", False),
        (None, False),
        (types.SimpleNamespace(to=lambda device: None), False),
        (ToDevice(None), True),
        (ToPositional(None), True),
        (ToAnything(None), True),
        (ToInPlace(None), True),
        (ToWithHooks(None), True),
        (pack_sequence([torch.ones(1)]), True),
    ],
    ids=lambda v: v if isinstance(v, bool) else getattr(v, "__name__", type(v).__name__),
)
def test_what_moves_itself(value, moves):
    assert _batch.moves_itself(value) is moves


def test_an_object_that_records_streams_moves_itself_whatever_its_to_is_called_with():
    class Renamed:
        def to(self, target):
            return self

        def record_stream(self, stream):
            pass

    assert _batch.moves_itself(Renamed())


def test_move_leaves_out_options_that_an_object_does_not_know():
    class Noted:
        def to(self, device, non_blocking=False):
            return device, non_blocking

    class Any_:
        def to(self, *args, **kwargs):
            return args, kwargs

    class Plain:
        def to(self, device):
            return device

    meta = torch.device("meta")
    assert _batch.move(Noted(), meta, non_blocking=True) == (meta, True)
    assert _batch.move(Any_(), meta, non_blocking=True) == ((meta,), {"non_blocking": True})
    assert _batch.move(Plain(), meta, non_blocking=True) is meta
    assert _batch.move(torch.ones(1), meta, non_blocking=True).device == meta


def memory(value):
    return {tensor.data_ptr() for tensor in _batch.tensors_in(value)}


def test_tensors_in_tensors():
    t = torch.ones(3)
    assert identical(_batch.tensors_in(t), [t])
    coo = torch.eye(3).to_sparse()
    assert memory(coo) == {coo._indices().data_ptr(), coo._values().data_ptr()}
    csr = torch.eye(3).to_sparse_csr()
    assert memory(csr) == {csr.crow_indices().data_ptr(), csr.col_indices().data_ptr(), csr.values().data_ptr()}
    bsc = torch.eye(4).to_sparse_bsc((2, 2))
    assert memory(bsc) == {bsc.ccol_indices().data_ptr(), bsc.row_indices().data_ptr(), bsc.values().data_ptr()}
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    assert {jagged.values().data_ptr(), jagged.offsets().data_ptr()} <= memory(jagged)
    inner, scale = torch.ones(3), torch.ones(1)
    assert identical(_batch.tensors_in(Wrapped(inner, scale)), [inner, scale])
    twice = Wrapped(Wrapped(inner, scale), scale)
    assert {id(tensor) for tensor in _batch.tensors_in(twice)} == {id(inner), id(scale)}


def test_a_wrapper_that_says_nothing_is_not_taken_for_its_memory():
    """Its own storage is none: recorded on a stream, it would keep nothing alive."""
    inner = torch.ones(3)
    found = _batch.tensors_in(Silent(inner))
    assert all(tensor is inner for tensor in found)


def test_tensors_in_objects():
    a, b, c, d = (torch.ones(1) for _ in range(4))

    class Slots:
        __slots__ = ("one", "unset")

        def __init__(self, one):
            self.one = one

    class Both(Slots):
        def __init__(self, one, more):
            super().__init__(one)
            self.more = more
            self.itself = self

        def to(self, device):
            return self

    value = Both(a, [b, {"k": Frozen(c, "n")}, ToDevice(d)])
    assert {id(tensor) for tensor in _batch.tensors_in(value)} == {id(t) for t in (a, b, c, d)}
    assert _batch.tensors_in(object()) == _batch.tensors_in(3) == _batch.tensors_in("s") == []
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    assert {id(packed.data), id(packed.sorted_indices), id(packed.unsorted_indices)} <= {
        id(tensor) for tensor in _batch.tensors_in(packed)
    }


def test_what_is_within_reach():
    a, b, c, d, e = (torch.ones(1) for _ in range(5))

    class Plain:
        __slots__ = ("__private", "more", "unset")

        def __init__(self, private, more=None):
            self.__private, self.more = private, more

    class Tagged(torch.Tensor):
        pass

    for thing in [
        types.SimpleNamespace(x=a),
        {a},
        lambda: a,
        lambda x=a: x,
        functools.partial(print, [a]),
        Frozen(a, ""),
    ]:
        for value in (thing, Plain(thing), Plain([thing], ToDevice(thing)), ToDevice([thing])):
            assert identical(_batch.within_reach(value), [a])
    tagged = torch.ones(1).as_subclass(Tagged)
    tagged.scores = a
    assert {id(tensor) for tensor in _batch.within_reach(tagged)} == {id(tagged), id(a)}
    assert identical(_batch.tensors_in(tagged), [tagged])  # its memory is its own
    coo = torch.eye(3).to_sparse()
    assert len(_batch.within_reach(coo, {"x": [b, {"y": (c, d)}]}, e, e)) == 6


def test_what_is_out_of_reach():
    """A reference to another object, a class or a module is no part of a batch."""
    stranger = types.SimpleNamespace(x=torch.ones(1))

    class Trainer:
        shared = torch.ones(1)

        def __init__(self):
            self.state = [stranger]

    class Lazy:
        """A proxy before there is something behind it."""

        @property
        def __class__(self):
            raise RuntimeError("nothing there")

    class Unloaded(type):
        def __getattr__(cls, name):
            raise RuntimeError("not loaded")

    class Module(metaclass=Unloaded):
        pass

    gone = weakref.proxy(Trainer())
    value = types.SimpleNamespace(trainer=Trainer(), kind=Trainer, module=types, gone=gone, lazy=Lazy(), none=None)
    value.unloaded = Module()
    assert _batch.within_reach(value, [value], ToDevice(value)) == []


def test_the_nearest_tensors_of_a_large_object_are_within_reach():
    linked = types.SimpleNamespace(x=torch.ones(1))
    for _ in range(3_000):
        linked = types.SimpleNamespace(next=linked)
    own = torch.ones(1)
    assert identical(_batch.within_reach(types.SimpleNamespace(next=linked, own=own)), [own])


def test_tensors_in_an_object_are_its_own():
    """A reference to a module, a logger or a model is no part of a batch."""
    everything = types.ModuleType("everything")
    everything.stranger = torch.ones(1)

    class Encoding(ToDevice):
        pass

    own = torch.ones(1)
    value = Encoding(own)
    value.library, value.logger = everything, logging.getLogger("gpuprefetch-test")
    assert identical(_batch.tensors_in(value), [own])
