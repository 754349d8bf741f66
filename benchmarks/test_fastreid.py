"""Where FastReID's DataLoaderX, rebuilt from its description, fails, and gpuprefetch's does not."""

import itertools
import threading

import pytest
import torch
from fastreid_described import Described, WaitsForEver
from torch.utils.data import BatchSampler, Dataset, Sampler

import gpuprefetch
from gpuprefetch import _dataloader_x

DEVICES = [
    "meta",  # on which it shows what was moved, without a GPU
    pytest.param("cuda", marks=pytest.mark.gpu),
]


class Images(Dataset):
    def __init__(self, broken=()):
        self.broken = broken

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if i in self.broken:
            raise ArithmeticError(f"image {i}")
        return {"images": torch.full((2,), float(i)), "path": f"{i}.jpg", "meta": {"box": torch.tensor([i])}}


class Endless(Sampler):
    def __iter__(self):
        return itertools.cycle(range(20))


def arguments(sampler=range(20), **options):
    return {"dataset": Images(**options), "batch_sampler": BatchSampler(sampler, 4, drop_last=True)}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "meta":
        monkeypatch.setattr(_dataloader_x, "_device", lambda rank: "meta")
    return request.param


def assert_no_thread_of_ours():
    for thread in threading.enumerate():
        if thread.name.startswith("gpuprefetch-"):
            thread.join(20)
            assert not thread.is_alive(), thread.name


def test_flat_dicts_are_alike(device):
    described = list(Described(device, **arguments()))
    batches = list(gpuprefetch.DataLoaderX(0, **arguments()))
    assert len(batches) == len(described) == 5
    for one, other in zip(batches, described, strict=True):
        assert one["path"] == other["path"]
        assert one["images"].device == other["images"].device
        assert one["images"].device.type == device
        assert one["images"].shape == other["images"].shape == (4, 2)
        assert device == "meta" or torch.equal(one["images"], other["images"])


def test_nested_dicts_arrive_with_ours_only(device):
    (described, *_), (batch, *_) = list(Described(device, **arguments())), gpuprefetch.DataLoaderX(0, **arguments())
    assert described["images"].device.type == batch["images"].device.type == device
    assert described["meta"]["box"].device.type == "cpu"
    assert batch["meta"]["box"].device.type == device


def test_an_error_arrives_with_ours_only(device, monkeypatch):
    unheard = []
    monkeypatch.setattr(threading, "excepthook", lambda report: unheard.append(report.exc_value))
    described = iter(Described(device, **arguments(broken=(9,))))
    next(described)
    with pytest.raises(WaitsForEver):  # before the batch that was there already
        next(described)
    assert [str(error) for error in unheard] == ["image 9"]

    batches = iter(gpuprefetch.DataLoaderX(0, **arguments(broken=(9,))))
    assert [next(batches)["path"][0], next(batches)["path"][0]] == ["0.jpg", "4.jpg"]
    with pytest.raises(ArithmeticError, match="image 9"):
        next(batches)
    assert_no_thread_of_ours()


def test_leaving_the_loop_ends_the_thread_of_ours_only(device):
    described = Described(device, **arguments(Endless()))
    for _ in described:
        break
    assert described.thread.is_alive()
    described.shutdown()

    loader = gpuprefetch.DataLoaderX(0, **arguments(Endless()))
    for _ in loader:
        break
    assert_no_thread_of_ours()
