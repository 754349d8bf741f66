"""Small tensors of a batch that share device storages: exact, each its own, and no burden on anything else."""

from __future__ import annotations

import collections
import copy
import gc
import io
import threading
import warnings

import pytest
import torch
from loaders import THREADS, eventually, within
from torch.utils.data import DataLoader

from gpuprefetch import PrefetchIterator

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ALIGNMENT = 512
SMALL = 128 << 10
PACK = 256 << 10
LEAST = 8  # of a dtype: fewer are left alone


def passed_on(batches):
    """A loader that gives these batches as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


def delivered(batch, **options):
    with PrefetchIterator(passed_on([batch]), "cuda", **options) as prefetched:
        (out,) = prefetched
    return out


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def storages(tensors):
    """(address, bytes) of each."""
    return {(storage(t), t.untyped_storage().nbytes()) for t in tensors}


def gaps(tensors):
    """What lies between the tensors of one storage, which they are all there is of."""
    whole = torch.empty(0, dtype=torch.uint8, device="cuda").set_(tensors[0].untyped_storage()).cpu()
    covered = torch.zeros(whole.numel(), dtype=torch.bool)
    for tensor in tensors:
        begin = tensor.storage_offset() * tensor.element_size()
        covered[begin : begin + tensor.nbytes] = True
    return whole[~covered]


@pytest.fixture(scope="module")
def noise():
    """Random bytes."""
    return torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# --- bytes ------------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


def assorted(noise, seed=0):
    """Small and large tensors of many dtypes, shapes and strides."""
    tensors = []

    def take(dtype, *shape):
        size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        begin = (len(tensors) * 4096 + seed * 64 * 4096) % (8 * MIB)
        raw = noise[begin : begin + size].clone()
        if dtype is torch.bool:
            raw &= 1
        tensors.append(raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype))
        return tensors[-1]

    for dtype in DTYPES:
        for shape in ((), (1,), (7,), (0,), (3, 0, 2), (5, 3), (64, 2), (100, 5), (33, 41)):
            take(dtype, *shape)
        tensors[-2] = tensors[-2].t()
        tensors[-1] = tensors[-1][:, ::2]
        take(dtype, 2, 3, 4, 5)
        tensors[-1] = tensors[-1].to(memory_format=torch.channels_last)
        tensors.append(tensors[-1][1:, :, 1:3])
        tensors.append(tensors[-3][:1].expand(4, -1))
    for size in (SMALL - 1, SMALL, SMALL + 1, PACK - 1, PACK, PACK + 1, 5 * MIB + 3):
        take(torch.uint8, size)
    return tensors


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("ring", [MIB, 64 * MIB])
def test_packed_tensors_are_what_to_gives(ring, threads, noise, same):
    """At 1 MiB pieces are smaller than packs."""
    batches = [assorted(noise, seed) for seed in range(4)]
    with PrefetchIterator(passed_on(batches), "cuda", pinned_bytes=ring, num_threads=threads) as prefetched:
        out = list(prefetched)
    for moved, sources in zip(out, batches, strict=True):
        for x, source in zip(moved, sources, strict=True):
            same(x, source.to("cuda"))
            if x.nbytes > SMALL:
                assert x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes
            elif x.numel():
                assert x.data_ptr() % ALIGNMENT == 0
    sharing = collections.defaultdict(list)
    for x in out[0]:
        if x.numel():
            sharing[storage(x)].append(x)
    packs = [shared for shared in sharing.values() if len(shared) > 1]
    assert len(packs) >= len(DTYPES)
    for shared in packs:
        assert len({x.dtype for x in shared}) == 1 and shared[0].untyped_storage().nbytes() <= PACK
        assert not gaps(shared).any()


@pytest.mark.parametrize("threads", THREADS)
def test_two_hundred_tensors(threads, noise):
    sources = [noise[i * 4096 : (i + 1) * 4096].view(torch.float32) for i in range(200)]
    out = delivered(sources, num_threads=threads)
    assert all(torch.equal(x.view(torch.int32), s.cuda().view(torch.int32)) for x, s in zip(out, sources, strict=True))
    assert len(storages(out)) == 4 and max(size for _, size in storages(out)) <= PACK


def test_the_few_tensors_of_an_ordinary_batch_share_nothing(noise):
    sources = [noise[: 8 * MIB], *(noise[i * 1000 :][:40] for i in range(LEAST - 1)), torch.tensor([1, 2])]
    for x, source in zip(delivered(sources), sources, strict=True):
        assert torch.equal(x, source.cuda())
        assert x.storage_offset() == 0 and x.untyped_storage().nbytes() == source.nbytes


def test_a_pack_is_one_copy(noise):
    from torch.profiler import ProfilerActivity, profile

    sources = [noise[i * 4096 : (i + 1) * 4096] for i in range(200)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        out = list(PrefetchIterator(passed_on([sources] * 5), "cuda"))
        torch.cuda.synchronize()
    assert all(torch.equal(x, s.cuda()) for x, s in zip(out[-1], sources, strict=True))
    copies = [event.name for event in profiled.events() if "HtoD" in event.name]
    assert copies, "the profiler sees no copies"
    assert len(copies) <= 5 * 4 and all("Pinned" in name for name in copies)


@pytest.mark.parametrize("threads", THREADS)
def test_small_gathered_samples_are_packed_too(threads):
    def sample(i):
        small = {name: torch.arange(1024.0 + n) * n + i for n, name in enumerate("abcdefgh")}
        return {**small, "large": torch.full((64, 1024), float(i))}

    loader = DataLoader([sample(i) for i in range(24)], batch_size=8)
    out = list(PrefetchIterator(loader, "cuda", num_threads=threads))
    for moved, wanted in zip(out, loader, strict=True):
        assert list(moved) == [*"abcdefgh", "large"]
        assert all(torch.equal(moved[key], wanted[key].cuda()) for key in wanted)
        assert all(moved[key].stride() == wanted[key].stride() for key in wanted)
        assert storage(moved["a"]) == storage(moved["b"]) != storage(moved["large"])


def test_what_lies_between_is_zero():
    """And not what the ring, or device memory, held before."""
    full = [torch.full((MIB,), 255, dtype=torch.uint8) for _ in range(80)]
    small = [torch.full((24 + i,), 255, dtype=torch.uint8) for i in range(100)]
    with PrefetchIterator(passed_on([*full, small]), "cuda", pinned_bytes=MIB) as prefetched:
        *_, last = prefetched
    assert len(storages(last)) == 1
    between = gaps(last)
    assert len(between) > 99 * 300 and not between.any()
    assert all(x.eq(255).all() for x in last)


def test_without_pinned_memory_packs_are_right(noise):
    sources = [noise[i * 1000 :][: 100 + i] for i in range(60)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that there is none; test_gpu_copy.py looks at it
        out = delivered(sources, pinned_bytes=0)
    assert all(torch.equal(x, s.cuda()) for x, s in zip(out, sources, strict=True))
    assert len(storages(out)) == 1 and not gaps(out).any()


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("kind", ["pageable", "pinned", "every second"])
def test_a_collate_that_reuses_one_buffer(kind, threads, spin):
    """A small pinned source is staged like the others, and has been read when the loader is asked again."""
    n, leaves = 60, 40
    buffer = torch.empty(leaves, 200, pin_memory=kind == "pinned")
    low, high = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")

    def batches():
        for i in range(n):
            buffer.fill_(i)
            yield [row[::2] if kind == "every second" else row for row in buffer]
            buffer.fill_(-1)

    for i, batch in enumerate(PrefetchIterator(batches(), "cuda", num_threads=threads)):
        if i % 4 == 0:
            spin(5)
        both = torch.stack(batch)
        low[i], high[i] = both.amin(), both.amax()
    assert low.tolist() == high.tolist() == list(range(n))


def test_pinned_and_pageable_sources_share_a_pack(noise):
    sources = [noise[i * 1000 :][:500].pin_memory() if i % 2 else noise[i * 1000 :][:500] for i in range(20)]
    out = delivered(sources)
    assert all(torch.equal(x, s.cuda()) for x, s in zip(out, sources, strict=True))
    assert len(storages(out)) == 1


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_packs_are_not_reused_while_the_consumer_reads_them(threads, spin):
    """One small tensor of each batch stays until its kernel is queued; the allocator knows the pack by any of them."""
    n, leaves = 200, 30
    batches = [[torch.full((100 + k,), float(i)) for k in range(leaves)] for i in range(n)]
    low, high = torch.empty(n, device="cuda"), torch.empty(n, device="cuda")
    epoch = iter(PrefetchIterator(passed_on(batches), "cuda", num_threads=threads))
    for i in range(n):
        kept = next(epoch)[i % leaves]  # enumerate() would hold the others until the next batch is there
        if i % 20 == 0:
            spin(20)
        low[i], high[i] = kept.amin(), kept.amax()
        del kept
    assert low.tolist() == high.tolist() == list(range(n))


def test_record_stream_of_one_keeps_the_pack(spin):
    n, leaves = 100, 8
    batches = [[torch.full((1000,), float(i)) for _ in range(leaves)] for i in range(n)]
    low, high = torch.full((n,), -1.0, device="cuda"), torch.full((n,), -1.0, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    epoch = iter(PrefetchIterator(passed_on(batches), "cuda"))
    for i in range(n):
        one = next(epoch)[i % leaves]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if i % 10 == 0:
                spin(10)
            low[i], high[i] = one.amin(), one.amax()
        one.record_stream(side)
        del one
    torch.cuda.synchronize()
    assert low.tolist() == high.tolist() == list(range(n))


def test_a_kept_small_tensor_keeps_no_large_one_alive():
    def batches():
        for i in range(8):
            yield {"image": torch.zeros(8 * MIB), "label": torch.tensor([i]), **{k: torch.ones(9) for k in "abcdefgh"}}

    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = []
    with PrefetchIterator(batches(), "cuda") as prefetched:
        for batch in prefetched:
            kept += [batch["label"], batch["c"]]
            del batch
    assert eventually(lambda: torch.cuda.memory_allocated() - before <= 8 * 2 * PACK)
    assert [int(x) for x in kept[::2]] == list(range(8))
    assert all(x.tolist() == [1.0] * 9 for x in kept[1::2])


def test_a_kept_pack_is_not_written_by_later_batches():
    kept, n = [], 100
    batches = [[torch.full((50,), float(i)) for _ in range(10)] for i in range(n)]
    with PrefetchIterator(passed_on(batches), "cuda") as prefetched:
        for _ in range(2):
            kept += [batch[3] for batch in prefetched]
    assert [(int(x.min()), int(x.max())) for x in kept] == [(i, i) for i in range(n)] * 2


@pytest.mark.parametrize("threads", THREADS)
def test_nothing_grows(threads):
    batches = [[torch.full((1000,), float(i)) for _ in range(100)] for i in range(20)]
    prefetched = PrefetchIterator(passed_on(batches), "cuda", num_threads=threads)
    allocated = []
    for _ in range(20):
        assert [int(batch[7][0]) for batch in prefetched] == list(range(20))
        gc.collect()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert eventually(lambda: torch.cuda.memory_allocated() <= max(allocated[:10])), allocated


def test_epochs_that_share_one_small_ring(noise):
    def run(seed):
        batches = [
            [noise[(7 * i + seed) * 997 + k * 4096 :][: 300 + 50 * k] for k in range(60)] + [noise[i : i + 2 * MIB]]
            for i in range(30)
        ]
        with torch.cuda.stream(torch.cuda.Stream()):
            for i, batch in enumerate(PrefetchIterator(passed_on(batches), "cuda", pinned_bytes=MIB)):
                right.append(all(torch.equal(x, s.cuda()) for x, s in zip(batch, batches[i], strict=True)))

    right = []
    workers = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not any(worker.is_alive() for worker in workers), "hang"
    assert right == [True] * 90


# --- each its own -----------------------------------------------------------------------------------------------------


def test_work_in_place_disturbs_neither_the_others_nor_their_autograd():
    a, b, c, *_ = delivered([torch.full((5,), float(i)) for i in range(LEAST)])
    assert storage(a) == storage(b) == storage(c)
    versions = [x._version for x in (a, b, c)]
    weight = torch.ones(5, device="cuda", requires_grad=True)
    loss = (weight * a).sum() + (weight * b).sum()
    c.normal_().add_(1)
    assert [x._version - v for x, v in zip((a, b, c), versions, strict=True)] == [0, 0, 2]
    loss.backward()
    assert weight.grad.tolist() == [1.0] * 5
    assert a.tolist() == [0.0] * 5 and b.tolist() == [1.0] * 5
    a.requires_grad_()
    (a * 3).sum().backward()
    assert a.grad.tolist() == [3.0] * 5 and not b.requires_grad
    assert all(not x._is_view() and x._base is None for x in (a, b, c))


def test_one_that_would_outgrow_the_pack_is_an_error():
    """It would lie over the others. torch has changed its sizes by then, so nobody may look at it afterwards."""
    a, b, c, *_ = delivered([torch.full((5,), float(i)) for i in range(LEAST)])
    b.clone().resize_(MIB).fill_(7)
    assert b.tolist() == [1.0] * 5
    with pytest.raises(RuntimeError, match="not resizable"):
        b.resize_(MIB)
    assert a.tolist() == [0.0] * 5 and c.tolist() == [2.0] * 5


def test_copies_and_files_hold_a_pack_at_most(noise):
    sources = [noise[i * 4096 : (i + 1) * 4096] for i in range(200)]
    out = delivered([*sources, noise[: 8 * MIB]])
    copied = copy.deepcopy(out[70])
    assert torch.equal(copied, out[70]) and storage(copied) != storage(out[70])
    assert copied.untyped_storage().nbytes() <= PACK
    file = io.BytesIO()
    torch.save(out[70], file)
    assert file.tell() <= PACK + 4096
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), out[70])
    assert out[70].clone().untyped_storage().nbytes() == 4096
    assert out[-1].untyped_storage().nbytes() == 8 * MIB


# --- all else goes on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_a_batch_without_memory_fails_whole_and_the_next_is_right(threads, noise):
    """The packs of the failed batch go, too."""
    sources = [noise[i * 4096 : (i + 1) * 4096] for i in range(100)]
    too_large = torch.zeros(1, dtype=torch.uint8).expand(torch.cuda.mem_get_info()[1] + MIB)  # one byte on the host

    def batches():
        yield sources
        yield [*sources, too_large]

    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    def loop():
        epoch = iter(PrefetchIterator(batches(), "cuda", num_threads=threads))
        first = next(epoch)
        assert all(torch.equal(x, s.cuda()) for x, s in zip(first, sources, strict=True))
        with pytest.raises(torch.OutOfMemoryError, match="batch 1"):
            next(epoch)

    within(120, loop)
    assert eventually(lambda: torch.cuda.memory_allocated() <= before)
    again = delivered(sources, num_threads=threads)
    assert all(torch.equal(x, s.cuda()) for x, s in zip(again, sources, strict=True))
