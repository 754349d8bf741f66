"""How much pinned memory is asked for, and what happens where the system refuses: shown without a device."""

import sys
import types
import warnings

import pytest
import torch

from gpuprefetch._copier import Copier

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
        copier.take_events = lambda count: [types.SimpleNamespace(cuda_event=n) for n in range(count)]
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
        (64 * MIB, 1 << 40, [64 * MIB], 2 * MIB),
        (100 * MIB, 1 << 40, [64 * MIB], 2 * MIB),
        (3 * MIB, 1 << 40, [2 * MIB], MIB // 4),
        (64 * MIB, 20 * MIB, [64 * MIB, 32 * MIB, 16 * MIB], 2 * MIB),
        (4 * MIB, MIB, [4 * MIB, 2 * MIB, MIB], MIB // 8),
    ],
)
def test_a_power_of_two_halved_until_the_system_agrees(make_ring, monkeypatch, pinned_bytes, limit, requests, piece):
    monkeypatch.setattr(sys, "platform", "linux")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copier, requested = make_ring(pinned_bytes, limit)
    assert requested == requests
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
