"""How much pinned memory is asked for, and what happens where the system refuses: shown without a device."""

import contextlib
import sys
import types
import warnings
import weakref

import pytest
import torch

from gpuprefetch._copier import Copier, Share

pytestmark = pytest.mark.windows

MIB = 1 << 20


@pytest.fixture
def make_ring(monkeypatch):
    """A copier that was asked for so many bytes of a system that pins so many at most; and what it requested."""

    def made(pinned_bytes, limit):
        requests = []
        empty = torch.empty

        def pin(size, *, dtype, device, pin_memory):
            assert pin_memory and device == "cpu"
            requests.append(size)
            if size > limit:
                raise RuntimeError("CUDA error: out of memory\nand a long text")
            return empty(size, dtype=dtype)

        copier = Copier.__new__(Copier)
        copier.device, copier._ring = torch.device("cuda", 0), None
        copier.take_events = lambda owner, count: [types.SimpleNamespace(cuda_event=n) for n in range(count)]
        copier.rings = []
        copier.native = types.SimpleNamespace(set_ring=lambda *ring: copier.rings.append(ring))
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", pin)
            copier._make_ring(pinned_bytes)
        return copier, requests

    return made


@pytest.mark.parametrize(
    ("pinned_bytes", "limit", "requests", "piece"),
    [
        (64 * MIB, 1 << 40, [64 * MIB], 4 * MIB),
        (100 * MIB, 1 << 40, [64 * MIB], 4 * MIB),
        (3 * MIB, 1 << 40, [2 * MIB], MIB // 4),
        (64 * MIB, 20 * MIB, [64 * MIB, 32 * MIB, 16 * MIB], 2 * MIB),
        (4 * MIB, MIB, [4 * MIB, 2 * MIB, MIB], MIB // 8),
    ],
)
def test_a_power_of_two_halved_until_the_system_agrees(make_ring, monkeypatch, pinned_bytes, limit, requests, piece):
    monkeypatch.setattr(sys, "platform", "linux")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copier, requested = make_ring(pinned_bytes, limit)
    assert requested == requests
    smaller = (
        f"{requests[-1] // MIB} MiB of pinned memory for copies to cuda:0, since more was refused (CUDA error: out of "
        "memory): copies may be slower, unless you free pinned memory, or raise the memory limit"
    )
    assert [str(warning.message) for warning in caught] == ([smaller] if len(requests) > 1 else [])
    ((address, piece_bytes, events),) = copier.rings
    assert (address, piece_bytes) == (copier._ring.data_ptr(), piece)
    assert piece_bytes * len(events) == requests[-1] == copier._ring.nbytes


@pytest.mark.parametrize(
    ("platform", "requests", "remedy"),
    [
        ("linux", [4 * MIB, 2 * MIB, MIB], "free pinned memory, or raise the memory limit"),
        ("win32", [4 * MIB], "start again with a smaller pinned_bytes"),
    ],
)
def test_a_system_that_refuses_is_one_warning(make_ring, monkeypatch, platform, requests, remedy):
    """On Windows one refusal makes later requests of the process fail as well: it is asked once."""
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.warns(RuntimeWarning) as caught:
        copier, requested = make_ring(4 * MIB, 0)
    assert requested == requests
    assert copier.rings == []
    assert len(caught) == 1
    assert str(caught[0].message) == (
        "no pinned memory for copies to cuda:0 (CUDA error: out of memory): they leave from pageable memory, several "
        f"times slower, unless you {remedy}"
    )


class Rings:
    """The native part: notes the sizes that it is given."""

    def __init__(self):
        self.now, self.sizes = 0, []

    def set_ring(self, memory, piece_bytes, events):
        self.now = piece_bytes * len(events)
        if events:
            self.sizes.append(self.now)


@pytest.fixture
def copier(monkeypatch):
    """A copier whose pinned memory is ordinary memory, and counted: ``pinned`` now, and ``most``."""
    empty = torch.empty
    copier = Copier.__new__(Copier)
    copier.pinned = copier.most = 0

    def freed(size):
        copier.pinned -= size

    def empty_cache():
        assert copier.pinned == 0, "what is not free yet stays in torch's cache, and pinned"

    def pin(size, *, dtype, device, pin_memory):
        assert pin_memory and device == "cpu"
        memory = empty(size, dtype=dtype)
        copier.pinned += size
        copier.most = max(copier.most, copier.pinned)
        weakref.finalize(memory, freed, size)
        return memory

    monkeypatch.setattr(torch, "empty", pin)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_host_emptyCache", empty_cache, raising=False)
    copier.device, copier._ring, copier._ring_events, copier._fitting = torch.device("cuda", 0), None, [], False
    copier._shares, copier._pinned_bytes = {}, None
    copier.stream = types.SimpleNamespace(synchronize=lambda: None)
    copier.take_events = lambda owner, count: [types.SimpleNamespace(cuda_event=n) for n in range(count)]
    copier.native = Rings()
    return copier


def test_eight_objects_side_by_side_share_one_ring(copier):
    """Train, validation and test loaders and more: never more pinned than the largest of them may take."""
    shares = [Share(copier, 64 * MIB) for _ in range(8)]
    assert copier.native.sizes == [64 * MIB]
    for share in shares[:-1]:
        share.close()
        assert copier.pinned == copier.native.now == 64 * MIB
    shares[-1].close()
    shares[-1].close()  # a second close is none of another object's
    assert copier.pinned == copier.native.now == 0
    assert copier.most == 64 * MIB


def test_the_ring_is_the_largest_of_the_open_objects(copier):
    """The old one goes before the new one is pinned, so their sum is never needed."""
    sizes = [4, 16, 8, 64, 64, 2, 32, 1]
    shares = []
    for size in sizes:
        shares.append(Share(copier, size * MIB))
        assert copier.pinned == copier.native.now == max(sizes[: len(shares)]) * MIB
    while shares:
        shares.pop().close()
        assert copier.pinned == copier.native.now == max(sizes[: len(shares)], default=0) * MIB
    assert copier.native.sizes == [4 * MIB, 16 * MIB, 64 * MIB, 16 * MIB, 4 * MIB]
    assert copier.most == 64 * MIB


def test_an_object_that_is_collected_gives_its_part_back(copier):
    large, small = Share(copier, 16 * MIB), Share(copier, 4 * MIB)
    del large
    assert copier.pinned == copier.native.now == 4 * MIB
    del small
    assert copier.pinned == copier.native.now == 0
