"""The bytes on the device are the loader's, whatever else the device, the pinned ring and the host do meanwhile."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import mmap
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from loaders import THREADS, Ramp, eventually, passed_on, vals, within
from torch.utils.data import DataLoader

from gpuprefetch import PrefetchIterator

pytestmark = pytest.mark.gpu

MIB = 1 << 20
PIECE = 4 * MIB  # of a ring of 32 MiB or more
DEFAULT_RING = 64 * MIB


class Ranges:
    """The smallest and the largest value of each batch, found on the device without waiting for it."""

    def __init__(self, count):
        self.low = torch.full((count,), -1.0, device="cuda")
        self.high = torch.full((count,), -1.0, device="cuda")

    def note(self, i, batch):
        self.low[i], self.high[i] = batch.amin(), batch.amax()

    def assert_ramp(self):
        torch.cuda.synchronize()
        count = list(range(len(self.low)))
        assert self.low.tolist() == count
        assert self.high.tolist() == count


def pinned_bytes():
    """What torch's host allocator has pinned, handed out or cached, in whole MiB: without the single bytes that it pins
    for the answers of equal() and item()."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) & -MIB


needs_host_stats = pytest.mark.skipif(
    not hasattr(torch.cuda, "host_memory_stats"), reason="this torch does not count pinned memory"
)


@pytest.fixture
def no_ring():
    """The test begins with no object open and no pinned memory in torch's cache."""
    torch.cuda.init()
    gc.collect()
    torch.cuda.synchronize()
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


@pytest.fixture(scope="module")
def noise():
    """Random bytes."""
    return torch.randint(0, 256, (100 * MIB + 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# --- races ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_memory_is_not_reused_while_the_consumer_reads_it(threads, ahead, spin):
    n = 32
    ranges = Ranges(n)
    loader = DataLoader(Ramp(n, (MIB,)), batch_size=1)
    for i, x in enumerate(PrefetchIterator(loader, device="cuda", prefetch_batches=ahead, num_threads=threads)):
        spin(10)
        ranges.note(i, x)
        del x
    ranges.assert_ramp()


@pytest.mark.parametrize("threads", THREADS)
def test_small_batches_are_not_reused_while_the_consumer_reads_them(threads, spin):
    """They may run further ahead."""
    n = 200
    ranges = Ranges(n)
    loader = passed_on([torch.full((1000,), float(i)) for i in range(n)])
    for i, x in enumerate(PrefetchIterator(loader, device="cuda", num_threads=threads)):
        if i % 20 == 0:
            spin(20)
        ranges.note(i, x)
        del x
    ranges.assert_ramp()


@pytest.mark.parametrize("ring", [MIB, 8 * MIB, DEFAULT_RING])
def test_staging_survives_a_busy_copy_engine(ring, no_ring):
    """Copies queue up behind a large one of somebody else's, and the ring is used many times over."""
    big = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    sink, side = torch.empty_like(big, device="cuda"), torch.cuda.Stream()
    n = 48
    ranges = Ranges(n)
    loader = DataLoader(Ramp(n, (MIB,)), batch_size=1)
    for i, x in enumerate(PrefetchIterator(loader, device="cuda", pinned_bytes=ring)):
        if i % 4 == 0:
            with torch.cuda.stream(side):
                sink.copy_(big, non_blocking=True)
        ranges.note(i, x)
    ranges.assert_ramp()


class Tagged(torch.Tensor):
    pass


def one_buffer(kind):
    """A buffer that a loader may reuse, how it makes a batch of it, and the tensors of that to look at."""
    if kind == "pinned":
        return torch.empty(MIB, pin_memory=True), lambda b: b, lambda batch: [batch]
    indices = torch.arange(1024)[None]
    make, look = {
        "plain": (lambda b: b, lambda batch: [batch]),
        "part": (lambda b: b[:, ::2], lambda batch: [batch]),
        "transposed part": (lambda b: b[1:, 3:].t(), lambda batch: [batch]),
        "array": (lambda b: torch.from_numpy(b.numpy()), lambda batch: [batch]),
        "negative": (lambda b: torch.view_as_complex(b.view(1024, 512, 2)).conj().imag, lambda batch: [-batch]),
        "subclass": (lambda b: b.as_subclass(Tagged), lambda batch: [batch.as_subclass(torch.Tensor)]),
        "sparse": (lambda b: torch.sparse_coo_tensor(indices, b[0], (1024,)), lambda batch: [batch._values()]),
        "mixed": (
            lambda b: {"x": b, "y": [b[0], b.as_subclass(Tagged)]},
            lambda batch: [batch["x"], batch["y"][0], batch["y"][1].as_subclass(torch.Tensor)],
        ),
    }[kind]
    return torch.empty(1024, 1024), make, look


KINDS = ["plain", "part", "transposed part", "pinned", "array", "negative", "subclass", "sparse", "mixed"]


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_collate_that_reuses_one_buffer(kind, threads, spin):
    n = 24
    buffer, make, look = one_buffer(kind)
    filled = []

    def collate(samples):
        buffer.fill_(samples[0])
        filled.append(samples[0])
        return make(buffer)

    ranges = Ranges(n)
    loader = DataLoader(range(n), batch_size=1, collate_fn=collate)
    for i, batch in enumerate(PrefetchIterator(loader, device="cuda", num_threads=threads)):
        if i % 4 == 0:
            spin(10)
            assert eventually(lambda i=i: len(filled) >= min(i + 2, n), collect=False)
        ranges.note(i, torch.cat([x.reshape(-1) for x in look(batch)]))
    ranges.assert_ramp()


def test_a_collate_that_reuses_one_pinned_buffer_behind_a_busy_copy_engine():
    """From pinned memory the copy itself has to be over before the buffer is written again."""
    big = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
    sink, side = torch.empty_like(big, device="cuda"), torch.cuda.Stream()
    n = 32
    buffer = torch.empty(MIB, pin_memory=True)
    ranges = Ranges(n)

    def collate(samples):
        with torch.cuda.stream(side):
            sink.copy_(big, non_blocking=True)
        return buffer.fill_(samples[0])

    loader = DataLoader(range(n), batch_size=1, collate_fn=collate)
    for i, x in enumerate(PrefetchIterator(loader, device="cuda", prefetch_batches=4)):
        ranges.note(i, x)
    ranges.assert_ramp()


@pytest.mark.parametrize("threads", [0, 1])
def test_a_buffer_is_free_for_the_next_batch_only(threads):
    """The loader is asked again when the bytes have been read, not when the batch is handed over."""
    buffer = torch.empty(8 * MIB)

    def batches():
        for i in range(8):
            buffer.fill_(i)
            yield buffer
            buffer.fill_(-1)

    out = [(float(x.amin()), float(x.amax())) for x in PrefetchIterator(batches(), "cuda", num_threads=threads)]
    assert out == [(i, i) for i in range(8)]


# --- sizes, leaves, rings ---------------------------------------------------------------------------------------------

SIZES = [0, 1, 511, 512, 65_535, 65_536, 65_537, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 11 * PIECE // 2, 100 * MIB]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("ring", [MIB, 3 * MIB, DEFAULT_RING])
def test_sizes_around_the_borders_of_pieces(ring, threads, noise):
    # Each begins elsewhere: sources are aligned to nothing.
    sources = [noise[i : i + size] for i, size in enumerate(SIZES)]
    loader = passed_on([*sources, dict(enumerate(sources)), sources[::-1]])
    out = list(PrefetchIterator(loader, device="cuda", pinned_bytes=ring, num_threads=threads))
    for moved, source in zip(out, sources, strict=False):
        assert moved.shape == source.shape and torch.equal(moved, source.cuda())
    for i, source in enumerate(sources):
        assert torch.equal(out[-2][i], source.cuda())
        assert torch.equal(out[-1][len(sources) - 1 - i], source.cuda())


@pytest.mark.parametrize("threads", THREADS)
def test_batches_of_changing_size_use_the_ring_again_and_again(threads, noise):
    g = torch.Generator().manual_seed(1)
    begins = torch.randint(0, 50 * MIB, (150,), generator=g).tolist()
    sizes = torch.randint(0, 6 * MIB, (150,), generator=g).tolist()
    sources = [noise[b : b + s] for b, s in zip(begins, sizes, strict=True)]
    prefetched = PrefetchIterator(passed_on(sources), device="cuda", pinned_bytes=4 * MIB, num_threads=threads)
    right = [bool(torch.equal(x, sources[i].cuda())) for i, x in enumerate(prefetched)]
    assert right == [True] * 150


@pytest.mark.parametrize("threads", THREADS)
def test_many_small_leaves(threads):
    dtypes = [torch.int64, torch.float32, torch.uint8, torch.bool, torch.complex64]
    batch = {f"k{i}": torch.full((i % 7 + 1,), i % 2, dtype=dtypes[i % 5]) for i in range(1000)}
    batch["large"] = torch.arange(3 * MIB)
    (out,) = PrefetchIterator(passed_on([batch]), device="cuda", num_threads=threads)
    assert list(out) == list(batch)
    for key, source in batch.items():
        assert out[key].dtype == source.dtype and torch.equal(out[key].cpu(), source), key
        assert out[key].data_ptr() % 512 == 0, "not aligned as torch's own tensors are"


def test_small_leaves_do_not_share_what_is_written_to_them():
    batch = [torch.full((5,), float(i)) for i in range(20)]
    (out,) = PrefetchIterator(passed_on([batch]), device="cuda")
    versions = [x._version for x in out]
    out[3].fill_(-1)
    assert [x._version - v for x, v in zip(out, versions, strict=True)] == [int(i == 3) for i in range(20)]
    assert [x.tolist() for i, x in enumerate(out) if i != 3] == [x.tolist() for i, x in enumerate(batch) if i != 3]


@pytest.mark.parametrize("size", [0, MIB - 1])
def test_without_pinned_memory_copies_are_right_and_one_warning_says_so(size, noise, no_ring):
    sources = [noise[i * MIB : (i + 5) * MIB] for i in range(6)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with PrefetchIterator(passed_on(sources), device="cuda", pinned_bytes=size) as prefetched:
            for _ in range(2):
                out = list(prefetched)
                assert all(torch.equal(x, s.cuda()) for x, s in zip(out, sources, strict=True))
    (warning,) = [w for w in caught if "pinned memory" in str(w.message)]
    assert warning.category is RuntimeWarning
    assert f"pinned_bytes={size}" in str(warning.message) and "raise pinned_bytes" in str(warning.message)


@needs_host_stats
def test_the_ring_is_the_largest_of_the_open_objects_and_goes_with_the_last(noise, no_ring):
    sources = [noise[i * MIB : (i + 20) * MIB] for i in range(8)]
    before = pinned_bytes()

    def ring():
        return pinned_bytes() - before

    small = PrefetchIterator(passed_on(sources), device="cuda", pinned_bytes=5 * MIB)
    assert ring() == 4 * MIB
    epoch = iter(small)
    out = [next(epoch)]
    large = PrefetchIterator(passed_on(sources), device="cuda", pinned_bytes=16 * MIB)
    assert eventually(lambda: ring() == 16 * MIB)
    out += [next(epoch), *large]
    middle = PrefetchIterator(passed_on(sources), device="cuda", pinned_bytes=8 * MIB)
    assert eventually(lambda: ring() == 16 * MIB)
    large.close()
    assert eventually(lambda: ring() == 8 * MIB)
    out += [next(epoch)]
    del middle
    assert eventually(lambda: ring() == 4 * MIB)
    out += list(epoch)
    small.close()
    assert eventually(lambda: ring() == 0)
    wanted = [*sources[:2], *sources, *sources[2:]]
    assert all(torch.equal(x, s.cuda()) for x, s in zip(out, wanted, strict=True))
    # Iterating again starts afresh.
    assert torch.equal(next(iter(small)), sources[0].cuda())
    assert eventually(lambda: ring() == 4 * MIB)
    small.close()
    assert eventually(lambda: ring() == 0)


@needs_host_stats
def test_pinned_memory_is_bounded_for_variable_sizes(no_ring):
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(1 << 16, 5 << 20, (500,), generator=g).tolist()  # elements, float32
    before, peak, allocations = pinned_bytes(), 0, []
    loader = DataLoader(sizes, batch_size=None, collate_fn=torch.zeros)
    with PrefetchIterator(loader, device="cuda", pinned_bytes=16 * MIB) as prefetched:
        for i, x in enumerate(prefetched):
            assert x.numel() == sizes[i]
            peak = max(peak, pinned_bytes() - before)
            if i in (250, 499):
                allocations.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    assert 0 < peak <= 16 * MIB
    assert allocations[0] == allocations[1]


# --- several at once --------------------------------------------------------------------------------------------------


@needs_host_stats
def test_eight_objects_side_by_side_have_one_ring(no_ring, noise):
    before = pinned_bytes()
    sources = [[noise[(8 * step + i) * 1000 :][: 3 * MIB] for step in range(6)] for i in range(8)]
    epochs = [iter(PrefetchIterator(passed_on(own), "cuda", num_threads=i % 2)) for i, own in enumerate(sources)]
    for step in range(6):
        for epoch, own in zip(epochs, sources, strict=True):
            assert torch.equal(next(epoch), own[step].cuda())
            assert pinned_bytes() - before == 64 * MIB


@pytest.mark.parametrize("threads", THREADS)
def test_two_threads_share_one_small_ring(threads, noise):
    def run(seed):
        sources = [noise[(7 * i + seed) * 1000 :][: 3 * MIB] for i in range(60)]
        with torch.cuda.stream(torch.cuda.Stream()):
            prefetched = PrefetchIterator(passed_on(sources), device="cuda", pinned_bytes=MIB, num_threads=threads)
            for i, x in enumerate(prefetched):
                if not torch.equal(x, sources[i].cuda()):
                    wrong.append((seed, i))
            done.append(i + 1)

    wrong, done = [], []
    workers = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers), "hang"
    assert wrong == [] and done == [60] * 3


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_validation_loop_inside_a_paused_training_epoch(threads, ahead, noise):
    """The paused epoch holds nothing that the other one waits for."""
    options = {"device": "cuda", "pinned_bytes": MIB, "num_threads": threads, "prefetch_batches": ahead}
    train = [noise[i * 1000 :][: 9 * MIB] for i in range(12)]
    check = [noise[i * 999 :][: 5 * MIB] for i in range(10)]

    def loop():
        validation = PrefetchIterator(passed_on(check), **options)
        right = []
        for i, x in enumerate(PrefetchIterator(passed_on(train), **options)):
            if i % 4 == 0:
                right += [bool(torch.equal(y, check[k].cuda())) for k, y in enumerate(validation)]
            right.append(bool(torch.equal(x, train[i].cuda())))
        return right

    assert within(60, loop) == [True] * (3 * 10 + 12)


@pytest.mark.parametrize("threads", THREADS)
def test_two_epochs_of_one_object_side_by_side(threads):
    prefetched = PrefetchIterator(
        DataLoader(Ramp(20, (MIB,)), batch_size=1), device="cuda", pinned_bytes=MIB, num_threads=threads
    )
    pairs = within(60, lambda: list(zip(iter(prefetched), iter(prefetched), strict=True)))
    assert vals(a for a, _ in pairs) == vals(b for _, b in pairs) == list(range(20))
    assert all(a is not b and a.data_ptr() != b.data_ptr() for a, b in pairs)


@pytest.mark.parametrize("threads", THREADS)
def test_batches_kept_for_gradient_accumulation(threads):
    prefetched = PrefetchIterator(DataLoader(Ramp(64, (MIB,)), batch_size=1), device="cuda", num_threads=threads)

    def loop():
        kept, sums = [], []
        for x in prefetched:
            kept.append(x)
            if len(kept) == 16:
                sums.append([(float(x.amin()), float(x.amax())) for x in kept])
                kept.clear()
        return sums

    assert within(60, loop) == [[(i, i) for i in range(k, k + 16)] for k in range(0, 64, 16)]


# --- streams of the consumer's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_the_consumer_works_on_a_stream_of_its_own(threads, spin):
    n = 24
    ranges = Ranges(n)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        loader = DataLoader(Ramp(n, (MIB,)), batch_size=1)
        for i, x in enumerate(PrefetchIterator(loader, device="cuda", num_threads=threads)):
            spin(10)
            ranges.note(i, x)
            del x
    ranges.assert_ramp()


@pytest.mark.parametrize("threads", THREADS)
def test_the_consumer_changes_its_stream_between_batches(threads, spin):
    n = 36
    ranges = Ranges(n)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()]
    epoch = iter(PrefetchIterator(DataLoader(Ramp(n, (MIB,)), batch_size=1), device="cuda", num_threads=threads))
    for i in range(n):
        with torch.cuda.stream(streams[i % 3]):
            x = next(epoch)
            spin(5 + 10 * (i % 3))
            ranges.note(i, x)
            del x
    assert next(epoch, None) is None
    ranges.assert_ramp()


def test_record_stream_for_a_further_stream(spin):
    n = 24
    ranges = Ranges(n)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for i, x in enumerate(PrefetchIterator(DataLoader(Ramp(n, (MIB,)), batch_size=1), device="cuda")):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            spin(10)
            ranges.note(i, x)
        x.record_stream(side)
        del x
    ranges.assert_ramp()


@pytest.mark.parametrize("threads", THREADS)
def test_what_the_consumer_writes_into_a_batch_stays_there(threads):
    sources = [torch.full((MIB,), float(i)) for i in range(12)]
    prefetched = PrefetchIterator(passed_on(sources), device="cuda", num_threads=threads)
    for _ in range(2):
        kept = []
        for i, x in enumerate(prefetched):
            assert (float(x.amin()), float(x.amax())) == (i, i)
            kept.append(x.mul_(2).add_(1))
        assert [(float(x.amin()), float(x.amax())) for x in kept] == [(2 * i + 1, 2 * i + 1) for i in range(12)]
    assert [(float(s.min()), float(s.max())) for s in sources] == [(i, i) for i in range(12)]


def test_a_batch_outlives_its_epoch_and_its_object():
    prefetched = PrefetchIterator(DataLoader(Ramp(6, (MIB,)), batch_size=1), device="cuda")
    kept = [x for _, x in zip(range(4), prefetched, strict=False)]
    prefetched.close()
    del prefetched
    gc.collect()
    other = [x + 1 for x in PrefetchIterator(DataLoader(Ramp(16, (MIB,)), batch_size=1), device="cuda")]
    assert [(int(x.amin()), int(x.amax())) for x in kept] == [(i, i) for i in range(4)]
    assert vals(other) == list(range(1, 17))


# --- the GIL ----------------------------------------------------------------------------------------------------------


def test_arrays_are_freed_while_another_thread_holds_the_gil():
    """Freeing a tensor made of an array takes the GIL: a thread that Python did not make must never have to."""
    freed_by, freed = collections.Counter(), 0

    class Watched(np.ndarray):
        pass

    def note():
        nonlocal freed
        freed += 1
        freed_by[threading.current_thread().name] += 1

    def batches():
        for i in range(60):
            array = np.full(2 * MIB, i, dtype=np.float32).view(Watched)
            weakref.finalize(array, note)
            yield [torch.from_numpy(array), torch.from_numpy(array).view(1024, -1)[:, ::2]]

    library = ctypes.PyDLL(None)  # its calls keep the GIL
    started = threading.Event()

    def hold():
        for k in range(2):
            started.set()
            library.usleep(1_000_000 >> k)
            time.sleep(0.05)  # load: between two calls that keep the GIL

    def loop():
        out = []
        for i, (x, part) in enumerate(PrefetchIterator(batches(), device="cuda", prefetch_batches=4)):
            if i == 5:
                holder.start()
                assert started.wait(10)
            out.append((x.amin(), x.amax(), part.amin(), part.amax()))
        return [[int(v) for v in values] for values in out]

    holder = threading.Thread(target=hold, daemon=True)
    assert within(60, loop) == [[i] * 4 for i in range(60)]
    holder.join(10)
    assert eventually(lambda: freed == 60)
    assert all("Dummy" not in name for name in freed_by), freed_by


# --- tensors that are on a device already -----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_tensors_on_the_device_are_handed_over_as_they_are(threads):
    g = torch.ones(3, device="cuda")
    batch = (torch.zeros(3), g, None, {"g": [g]}, g.t())
    out, again = PrefetchIterator(passed_on([batch, batch]), device="cuda", num_threads=threads)
    for moved in (out, again):
        assert moved[0].is_cuda and moved[1] is g and moved[2] is None and moved[3]["g"][0] is g
        assert moved[4] is batch[4] and moved[3] is batch[3]
    assert out[0].tolist() == [0, 0, 0]


def test_a_batch_on_the_device_is_the_identical_object():
    batch = {"x": torch.ones(3, device="cuda"), "y": [torch.ones(2, device="cuda", requires_grad=True)]}
    (out,) = PrefetchIterator(passed_on([batch]), device="cuda")
    assert out is batch


@pytest.mark.parametrize("threads", THREADS)
def test_gpu_work_of_a_collate_is_ordered_before_the_consumer(threads, spin):
    w = torch.eye(256, device="cuda")

    def collate(samples):
        x = torch.stack(samples).cuda()
        spin(10)
        return x @ w

    loader = DataLoader(Ramp(16, (256,)), batch_size=1, collate_fn=collate)
    out = [x.amax() for x in PrefetchIterator(loader, device="cuda", num_threads=threads)]
    assert [int(v) for v in out] == list(range(16))


@pytest.mark.parametrize("threads", THREADS)
def test_gpu_work_before_iter_is_ordered_before_the_collates(threads, spin):
    """The dataset may use what the caller's stream has made by iter()."""
    w = torch.zeros(256, 256, device="cuda")
    torch.cuda.synchronize()
    spin(100)
    w.copy_(torch.eye(256, device="cuda"))
    loader = DataLoader(Ramp(4, (256,)), batch_size=1, collate_fn=lambda s: torch.stack(s).cuda() @ w)
    out = [x.amax() for x in PrefetchIterator(loader, device="cuda", num_threads=threads)]
    assert [int(v) for v in out] == list(range(4))


@pytest.mark.parametrize("threads", THREADS)
def test_memory_that_the_dataset_made_is_not_reused_while_the_consumer_reads_it(threads, spin):
    n = 24
    ranges = Ranges(n)
    loader = DataLoader(range(n), batch_size=1, collate_fn=lambda s: torch.full((MIB,), float(s[0]), device="cuda"))
    for i, x in enumerate(PrefetchIterator(loader, device="cuda", num_threads=threads)):
        spin(10)
        ranges.note(i, x)
        del x
    ranges.assert_ramp()


@pytest.mark.parametrize("kind", ["subclass", "sparse", "requires_grad", "object", "namespace in an object"])
def test_memory_that_moved_by_a_to_is_not_reused_while_the_consumer_reads_it(kind, spin):
    class Holder:
        def __init__(self, x):
            self.x = x

        def to(self, device, non_blocking=False):
            return Holder(self.x.to(device, non_blocking=non_blocking))

    class Outer:
        def __init__(self, inner):
            self.inner, self.seen = inner, torch.ones(1)

        def to(self, device, non_blocking=False):
            return Outer(types.SimpleNamespace(x=self.inner.x.to(device, non_blocking=non_blocking)))

    n = 24
    make, read = {
        "subclass": (lambda x: x.as_subclass(Tagged), lambda x: x.as_subclass(torch.Tensor)),
        "sparse": (lambda x: x.view(1024, -1).to_sparse(), lambda x: x._values()),
        "requires_grad": (lambda x: x.requires_grad_(), lambda x: x.detach()),
        "object": (Holder, lambda x: x.x),
        "namespace in an object": (lambda x: Outer(types.SimpleNamespace(x=x)), lambda x: x.inner.x),
    }[kind]
    ranges = Ranges(n)
    loader = passed_on([make(torch.full((MIB,), float(i + 1))) for i in range(n)])
    for i, batch in enumerate(PrefetchIterator(loader, device="cuda")):
        spin(10)
        ranges.note(i, read(batch) - 1)
        del batch
    ranges.assert_ramp()


@pytest.mark.parametrize("threads", THREADS)
def test_device_cpu_brings_tensors_back_complete(threads, spin):
    def collate(samples):
        x = torch.stack(samples).cuda()
        spin(10)
        return {"x": x + 1, "host": samples[0], "coo": (x + 1).to_sparse()}

    loader = DataLoader(Ramp(8, (1000,)), batch_size=1, collate_fn=collate)
    out = list(PrefetchIterator(loader, device="cpu", num_threads=threads))
    assert [(int(b["x"].min()), int(b["x"].max())) for b in out] == [(i + 1, i + 1) for i in range(8)]
    assert {b[k].device.type for b in out for k in b} == {"cpu"}
    assert [int(b["coo"].to_dense().min()) for b in out] == list(range(1, 9))


# --- pinned sources ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("collate", [None, torch.stack], ids=["gathered, so there is nothing to pin", "stacked"])
def test_batches_that_are_pinned_already(collate, threads, noise):
    samples = [noise[i * 1000 :][:MIB] for i in range(24)]
    loader = DataLoader(samples, batch_size=4, pin_memory=True, collate_fn=collate)
    out = list(PrefetchIterator(loader, device="cuda", num_threads=threads))
    assert [x.shape for x in out] == [(4, MIB)] * 6
    for k, x in enumerate(out):
        assert torch.equal(x, torch.stack(samples[4 * k : 4 * k + 4]).cuda())


def test_pinned_and_pageable_leaves_in_one_batch(noise):
    source = noise[: 8 * MIB]
    pinned = source.pin_memory()
    batch = [source, pinned, pinned.view(1024, -1)[:, ::2], source.view(1024, -1).t(), pinned[5:100]]
    out = [b for b in PrefetchIterator(passed_on([batch] * 5), device="cuda")]
    for moved in out:
        for x, s in zip(moved, batch, strict=True):
            assert x.stride() == s.cuda().stride() and torch.equal(x, s.cuda())


@contextlib.contextmanager
def registered(*tensors):
    """Pinned as other libraries pin memory that they already have."""
    cudart = torch.cuda.cudart()
    for tensor in tensors:
        assert int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0
    try:
        yield
    finally:
        torch.cuda.synchronize()
        for tensor in tensors:
            assert int(cudart.cudaHostUnregister(tensor.data_ptr())) == 0


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("thirds", [[0], [1], [2], [0, 1], [0, 2], [0, 1, 2]], ids=str)
def test_memory_that_another_library_pinned_in_part(thirds, threads, noise):
    """The driver copies no range that is pinned in part."""
    source = torch.frombuffer(mmap.mmap(-1, 12 * MIB), dtype=torch.uint8)  # whole pages
    source.copy_(noise[: len(source)])
    with registered(*(source[4 * MIB * third :][: 4 * MIB] for third in thirds)):
        batches = [[source, source[5 * MIB :], source[9 * MIB :]]] * 3  # views: of a storage that begins elsewhere
        out = list(PrefetchIterator(passed_on(batches), device="cuda", num_threads=threads))
        for begin, x in [each for moved in out for each in zip([0, 5 * MIB, 9 * MIB], moved, strict=True)]:
            assert torch.equal(x.cpu(), noise[begin : len(source)])


def test_samples_of_which_some_are_pinned(noise):
    samples = [noise[i * MIB :][:MIB] for i in range(12)]
    samples[2:3] = [samples[2].pin_memory()]
    samples[4:8] = [sample.pin_memory() for sample in samples[4:8]]
    out = torch.cat(list(PrefetchIterator(DataLoader(samples, batch_size=4), device="cuda")))
    assert torch.equal(out.view(-1), noise[: 12 * MIB].cuda())


@pytest.mark.parametrize("samples", [1, 16], ids=["one tensor", "gathered"])
@pytest.mark.parametrize("kind", ["pageable", "pinned", "registered"])
def test_copies_leave_from_pinned_memory(kind, samples, noise):
    from torch.profiler import ProfilerActivity, profile

    source = noise[: 16 * MIB].pin_memory() if kind == "pinned" else noise[: 16 * MIB].clone()
    pinned_by_another = registered(source) if kind == "registered" else contextlib.nullcontext()
    loader = passed_on([source] * 4) if samples == 1 else DataLoader([*source.view(samples, -1)] * 4, samples)
    with pinned_by_another, profile(activities=[ProfilerActivity.CUDA]) as profiled:
        out = list(PrefetchIterator(loader, device="cuda"))
        torch.cuda.synchronize()
    assert len(out) == 4 and all(torch.equal(x.view(-1), source.cuda()) for x in out)
    names = [event.name for event in profiled.events() if "HtoD" in event.name]
    assert names, "the profiler sees no copies"
    assert {name for name in names if "Pinned" not in name} == set()
    if kind == "pageable":
        assert len(names) <= 4 * 32, "more copies than runs"
    else:
        assert len(names) == 4 * samples, "not from where they lay"
