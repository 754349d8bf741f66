"""Objects that move themselves, and what they hold on the device, on its way to a CUDA device without one."""

import collections
import collections.abc
import sys
import threading
import types

import pytest
import torch
from loaders import passed_on, vals
from planted import Planted, is_recorded

from gpuprefetch import _batch, _copy_lane

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the planted device is built for Linux"),
    pytest.mark.usefixtures("device"),
]


class Moves:
    """Its tensor is in sight."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, non_blocking=False):
        return type(self)(self.tensor.clone())


class Records(Moves):
    def record_stream(self, stream):
        self.recorded_by = threading.current_thread().name


OUT_OF_SIGHT = []


class Opaque:
    """Its tensor can't be found, so it moves at the hand-over."""

    def __init__(self, tensor, moved_by=None):
        self.number, self.moved_by = len(OUT_OF_SIGHT), moved_by
        OUT_OF_SIGHT.append(tensor)

    def get(self):
        return OUT_OF_SIGHT[self.number]

    def to(self, device, non_blocking=False):
        return Opaque(self.get().clone(), threading.current_thread().name)


class Holds(Moves):
    """The same by way of something else."""

    def __init__(self, tensor, wrap):
        self.wrap, self.held = wrap, wrap(tensor)

    def to(self, device, non_blocking=False):
        (tensor,) = _batch.within_reach(self.held)
        return type(self)(tensor.clone(), self.wrap)


@pytest.mark.parametrize(
    "wrap",
    [lambda t: types.SimpleNamespace(t=t), lambda t: {t}, lambda t: lambda: t, lambda t: collections.deque([[t]])],
    ids=["namespace", "set", "closure", "deque"],
)
def test_all_tensors_of_an_object_that_moved_are_recorded(wrap, device):
    device.forget_recorded()
    (batch,) = Planted(passed_on([Holds(torch.ones(4), wrap)]), "cpu")
    (tensor,) = _batch.within_reach(batch.held)
    assert is_recorded(tensor, device)


def test_a_tensor_in_a_closure_is_no_proof_that_an_objects_memory_was_found():
    """It moves at the hand-over, too."""

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    class Normalised(Opaque):
        def __init__(self, tensor, moved_by=None):
            super().__init__(tensor, moved_by)
            mean = torch.ones(1).as_subclass(Elsewhere)
            self.normalise = lambda x: x - mean

        def to(self, device, non_blocking=False):
            return Normalised(self.get().clone(), threading.current_thread().name)

    (batch,) = Planted(passed_on([Normalised(torch.ones(4))]), "cpu")
    assert batch.moved_by == threading.current_thread().name


class Table(collections.abc.Mapping):
    """Its tensors are in an object that is no part of it as far as Python knows, and not to be found without asking."""

    def __init__(self, x, mask, moved_by=None):
        self.store, self.mask, self.moved_by = Store(x), mask, moved_by

    def __getitem__(self, key):
        return {"x": self.store.x}[key]

    def __iter__(self):
        return iter(["x"])

    def __len__(self):
        return 1

    def to(self, device, non_blocking=False):
        return Table(self.store.x.clone(), self.mask.clone(), threading.current_thread().name)


class Store:
    def __init__(self, x):
        self.x = x


def test_what_a_mapping_gives_is_found_as_well(device, monkeypatch):
    waited_for = []
    wait = _copy_lane.CopyLane._wait_for_loading
    monkeypatch.setattr(
        _copy_lane.CopyLane,
        "_wait_for_loading",
        lambda self, record, found: (waited_for.extend(found), wait(self, record, found)),
    )
    device.forget_recorded()
    table = Table(torch.ones(4), torch.zeros(4))
    table.note = types.SimpleNamespace(y=torch.ones(2))
    (out,) = Planted(passed_on([table]), "cpu")
    assert out.moved_by != threading.current_thread().name
    assert is_recorded(out["x"], device) and is_recorded(out.mask, device)
    assert {id(tensor) for tensor in waited_for} == {id(table.mask), id(table["x"]), id(table.note.y)}


@pytest.mark.parametrize("num_threads", [0, 1])
def test_all_tensors_under_skipped_keys_are_waited_for(num_threads, monkeypatch):
    """However many there are, in plain containers."""
    waited_for = []
    monkeypatch.setattr(_copy_lane.CopyLane, "_wait_for_loading", lambda self, record, found: waited_for.extend(found))
    tensor = torch.ones(1)
    batch = {"offsets": [[(i, i) for i in range(100)] for _ in range(300)], "boxes": [[{"boxes": [tensor]}]]}
    (out,) = Planted(passed_on([batch]), "cpu", num_threads=num_threads, skip_keys=["offsets", "boxes"])
    assert len(waited_for) == 1 and waited_for[0] is tensor


def test_what_hangs_together_in_long_chains_is_handed_over():
    class Document:
        def __init__(self):
            self.first = None
            for _ in range(20_000):
                self.first = (self.first,)

    document = Document()
    (out,) = Planted(passed_on([{"x": torch.ones(1), "document": document}]), "cpu")
    assert out["document"] is document


@pytest.mark.parametrize("num_threads", [0, 1])
def test_the_consumer_waits_for_what_is_handed_over_as_it_is(num_threads, monkeypatch):
    """It may hold what the dataset has made on the device."""
    waited_for = []
    monkeypatch.setattr(_copy_lane.CopyLane, "_wait_for_loading", lambda self, record, found: waited_for.extend(found))
    a, b, c = (torch.ones(1) for _ in range(3))
    batch = {"x": types.SimpleNamespace(a=a), "skip": [b], "y": [{"skip": c}, "name", 3]}
    (out,) = Planted(passed_on([batch]), "cpu", num_threads=num_threads, skip_keys={"skip"})
    assert out["x"] is batch["x"] and out["skip"] is batch["skip"] and out["y"][0]["skip"] is c
    assert {id(tensor) for tensor in waited_for} == {id(a), id(b), id(c)}


@pytest.mark.parametrize("num_threads", [0, 1])
def test_objects_with_a_to_of_their_own(num_threads, device):
    def make(i):
        tensor = torch.full((4,), i)
        return {"plain": tensor, "moves": Moves(tensor), "records": Records(tensor), "opaque": Opaque(tensor)}

    loaded = [make(i) for i in range(6)]
    device.forget_recorded()
    for i, batch in enumerate(Planted(passed_on(loaded), "cpu", num_threads=num_threads)):
        tensors = [batch["plain"], batch["moves"].tensor, batch["records"].tensor, batch["opaque"].get()]
        assert vals(tensors) == [i] * 4
        assert all(tensor is not loaded[i]["plain"] for tensor in tensors)
        here = threading.current_thread().name
        assert batch["records"].recorded_by == batch["opaque"].moved_by == here
        assert is_recorded(batch["plain"], device) and is_recorded(batch["moves"].tensor, device)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_an_object_that_finds_no_memory_is_moved_again_when_its_batch_is_due(num_threads):
    """Invariant 11."""
    tried = []

    class Large(Moves):
        def to(self, device, non_blocking=False):
            tried.append(int(self.tensor[0]))
            if tried.count(3) == 1 and tried[-1] == 3:
                raise torch.OutOfMemoryError("planted")
            return super().to(device, non_blocking)

    loaded = [Large(torch.full((4,), i)) for i in range(6)]
    out = list(Planted(passed_on(loaded), "cpu", num_threads=num_threads))
    assert [int(batch.tensor[0]) for batch in out] == list(range(6))
    assert tried == [0, 1, 2, 3, 3, 4, 5]
