"""The compiled copier itself, without a device: ``planted_device.cpp`` stands for one's streams and events.

What it copies lies before memory that can't be read, so a byte read too many ends the process.
"""

import ctypes
import itertools
import mmap
import random
import sys

import pytest
import torch
from loaders import bytes_of
from planted import host_stream, planted_device

from gpuprefetch._copier import piece_bytes
from gpuprefetch._extension import extension

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planted device is built for Linux")

PREFETCH = 2
MIB = 1 << 20
PAGE = mmap.PAGESIZE
NO_ACCESS = 0  # PROT_NONE
DTYPES = [
    torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    with planted_device(tmp_path_factory.mktemp("planted")) as planted:
        yield planted


class Copier:
    """The copier of an epoch, and the consumer that asks for each batch at once."""

    def __init__(self, ring_bytes):
        native = extension()
        self.numbers = itertools.count()
        self.copier = native.DeviceCopier(host_stream(), 2)
        self.ring = torch.full((ring_bytes,), 0xAB, dtype=torch.uint8)
        self.copier.set_ring(self.ring.data_ptr(), piece_bytes(ring_bytes), list(range(1, 9)) if ring_bytes else [])
        events = range(1, 1 + native.Lane.events_needed(PREFETCH))  # which the planted device does not look at
        self.lane = native.Lane(self.copier, PREFETCH, list(events), 30_000, lambda: 1 << 60)

    def copied(self, tensors, stacks=(), finish=False):
        number = next(self.numbers)
        self.lane.ask()
        outputs, storages = self.lane.put(number, tensors, stacks, 0, finish)
        self.lane.hand_over(number, storages)
        return outputs


def last_before_unreadable(count, dtype, chance):
    """So many random numbers, behind which no byte can be read."""
    size = count * dtype.itemsize
    if size == 0:
        return torch.empty(0, dtype=dtype)
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    offset = pages * PAGE - size
    memory[offset:-PAGE] = bytes(chance.choices((0, 1), k=size)) if dtype == torch.bool else chance.randbytes(size)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + pages * PAGE), PAGE, NO_ACCESS) == 0
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).view(dtype)


def any_tensor(dtype, chance):
    def make(count):
        return last_before_unreadable(count, dtype, chance)

    def channels_last():
        n, c, h, w = (chance.randrange(1, most) for most in (4, 5, 40, 40))
        return make(n * c * h * w).view(n, h, w, c).permute(0, 3, 1, 2)

    def part():
        begin = chance.randrange(0, 10)
        return make(begin + chance.choice([1, 63, 64, 65, 4095, 4097, 20_000, 100_000, 300_000]))[begin:]

    def crop():
        n, h, w = chance.randrange(1, 4), chance.randrange(1, 40), chance.choice([2, 5, 16, 300, 3000])
        return make(n * h * w).view(n, h, w)[:, chance.randrange(h) :, chance.randrange(w) :]

    kinds = [
        lambda: make(1).reshape(()),
        lambda: make(0).reshape(chance.choice([(0,), (0, 3), (2, 0, 5)])),
        lambda: make(chance.randrange(1, 300)).unsqueeze(1).expand(-1, chance.randrange(1, 40)),
        lambda: make(chance.randrange(2, 5000))[:: chance.randrange(1, 5)],
        lambda: make(chance.randrange(20, 5000)).unfold(0, chance.randrange(1, 19), chance.randrange(1, 5)),
        channels_last,
        part,
        crop,
    ]
    return chance.choice(kinds)()


def any_stack(dtype, chance):
    count = chance.choice([1, 4096, 10_000, 70_000])
    return [last_before_unreadable(count, dtype, chance) for _ in range(chance.randrange(1, 9))]


def assert_same(output, expected):
    assert (output.dtype, output.shape, output.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(bytes_of(output), bytes_of(expected))


@pytest.mark.parametrize("ring_bytes", [0, MIB, 16 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_random_batches_arrive(ring_bytes, seed, device):
    chance = random.Random(seed)
    copier = Copier(ring_bytes)
    for _ in range(25):
        same = chance.choice(DTYPES) if chance.random() < 0.5 else None  # so that packs come about
        made = [any_tensor(same or chance.choice(DTYPES), chance) for _ in range(chance.choice([0, 1, 3, 12, 60]))]
        plain, others = extension().split(made)
        assert others == []
        stacks = [any_stack(chance.choice(DTYPES), chance) for _ in range(chance.choice([0, 0, 1, 3]))]
        outputs = copier.copied(plain, stacks, finish=chance.random() < 0.5)
        expected = [torch.empty_like(source).copy_(source) for source in plain] + list(map(torch.stack, stacks))
        for output, wanted in zip(outputs, expected, strict=True):
            assert_same(output, wanted)


@pytest.mark.parametrize("ring_bytes", [0, MIB])
def test_a_call_that_fails_is_an_error_of_its_batch_and_the_next_one_is_right(ring_bytes, device):
    chance = random.Random(1)
    sources = [last_before_unreadable(count, torch.uint8, chance) for count in (3 * MIB, *[500] * 20)]
    for failing in itertools.count():
        copier = Copier(ring_bytes)
        copier.copied(sources)
        device.fail_after(failing)
        error = None
        try:
            copier.copied(sources)
        except RuntimeError as raised:
            error = str(raised)
        device.fail_after(-1)
        if error is None:
            break
        assert "failed: planted" in error and "CUDA_LAUNCH_BLOCKING=1" in error
        assert any(what in error for what in ("copying batch 1 (3.0 MiB) to cpu", "batch 1 over", "progress"))
        for output, source in zip(copier.copied(sources), sources, strict=True):
            assert_same(output, source)
    assert failing >= (2 if ring_bytes == 0 else 6)


def test_each_storage_is_recorded_once(device):
    dtypes = [torch.int64, torch.float32, torch.uint8]
    device.forget_recorded()
    outputs = Copier(MIB).copied(
        [torch.full((i % 7 + 1,), i, dtype=dtypes[i % 3]) for i in range(250)] + [torch.ones(MIB)]
    )
    storages = {output.untyped_storage().data_ptr() for output in outputs}
    assert len(storages) < 20
    assert [device.times_recorded(storage) for storage in storages] == [1] * len(storages)


def test_only_at_the_end_does_the_copier_keep_what_it_handed_over(device):
    """Of what is still there, also that of which only a view is left."""

    def owners(storage):
        return torch._C._storage_Use_Count(storage._cdata)

    copier = Copier(MIB)
    for _ in range(300):  # gone by then, and more than are remembered
        copier.copied([torch.ones(9)])
    large, *small = copier.copied([torch.ones(MIB, dtype=torch.uint8)] + [torch.ones(9)] * 20)
    view, kept = large[5:], small[3]
    del large, small
    storages = [view.untyped_storage(), kept.untyped_storage()]
    before = list(map(owners, storages))
    copier.copier.leak_handed_over()
    del copier
    assert list(map(owners, storages)) == [count + 1 for count in before]
