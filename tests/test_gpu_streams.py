"""The consumer's streams: captures go on beside us, next() costs little, copies overlap the step."""

from __future__ import annotations

import statistics
import threading
import time
import warnings

import pytest
import torch
from loaders import THREADS, Ramp, vals, within
from torch.utils.data import DataLoader, IterableDataset

import gpuprefetch._copy_lane
from gpuprefetch import DataLoaderX, PrefetchIterator

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def passed_on(batches):
    """A loader that gives these batches as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


# --- captures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", THREADS)
def test_captures_in_the_default_mode_while_batches_grow(threads):
    """Each batch wants memory that the allocator does not have yet."""
    n = 30
    sources = [torch.full(((i + 1) << 18,), float(i)) for i in range(n)]
    loaded = [threading.Event() for _ in range(n + 1)]

    def batches():
        for i, source in enumerate(sources):
            loaded[i].set()
            yield source
        loaded[n].set()

    x = torch.ones(1024, device="cuda")
    torch.cuda.empty_cache()
    prefetched = PrefetchIterator(batches(), device="cuda", prefetch_batches=4, num_threads=threads)
    count = 0
    for i, batch in enumerate(prefetched):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            if threads:  # a batch more is loaded, and its copy is under way, while this captures
                assert loaded[min(i + 4, n) if i else 2].wait(30)  # before the second next() only one is ahead
            for _ in range(50):
                y = y + 1
        graph.replay()
        assert y.tolist() == [52.0] * 1024
        assert batch.shape == sources[i].shape
        assert (int(batch.amin()), int(batch.amax())) == (i, i)
        count += 1
        del graph, y
    assert count == n


@pytest.mark.parametrize("threads", THREADS)
def test_next_inside_a_capture_is_a_clear_error(threads):
    epoch = iter(PrefetchIterator(DataLoader(Ramp(5), batch_size=1), device="cuda", num_threads=threads))
    first = next(epoch)
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        with pytest.raises(RuntimeError, match=r"captures a CUDA graph: call iter\(\) and next\(\) outside"):
            next(epoch)
        y = y + 1
    graph.replay()
    assert y.tolist() == [3.0] * 8, "the capture was harmed"
    assert int(first[0, 0]) == 0
    # After an error an epoch is over. It would be as good if it went on, but it must not skip a batch.
    assert vals(within(30, lambda: list(epoch))) in ([], [1, 2, 3, 4])
    again = PrefetchIterator(DataLoader(Ramp(5), batch_size=1), device="cuda", num_threads=threads)
    assert vals(again) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("threads", THREADS)
def test_a_step_in_a_graph_reads_what_was_copied_into_its_input(threads):
    static = torch.zeros(MIB, device="cuda")
    low, high = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        low.copy_(static.amin()), high.copy_(static.amax())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        low.copy_(static.amin())
        high.copy_(static.amax())
    out = []
    for x in PrefetchIterator(DataLoader(Ramp(24, (MIB,)), batch_size=1), device="cuda", num_threads=threads):
        static.copy_(x[0])
        graph.replay()
        out.append(torch.stack([low, high]))
    assert [o.tolist() for o in out] == [[i, i] for i in range(24)]


# --- time, with wide limits -------------------------------------------------------------------------------------------


def small_tensors():
    dtypes = [torch.int64, torch.float32, torch.uint8]
    return {f"k{i}": torch.full((i % 7 + 1,), i, dtype=dtypes[i % 3]) for i in range(250)}


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("source", ["pageable", "pinned", "250 small ones"])
def test_next_costs_little_when_a_batch_is_ready(source, threads, spin):
    n = 40
    make = small_tensors if source == "250 small ones" else lambda: torch.zeros(16 * MIB)
    sources = [make() for _ in range(4)]
    if source == "pinned":
        sources = [s.pin_memory() for s in sources]
    batches = passed_on([sources[i % 4] for i in range(n)])
    epoch = iter(PrefetchIterator(batches, device="cuda", num_threads=threads))
    next(epoch)
    waits = []
    for _ in range(n - 5):
        spin(15)
        torch.cuda.current_stream().synchronize()
        began = time.perf_counter()
        batch = next(epoch)
        waits.append(time.perf_counter() - began)
        del batch
    assert statistics.median(waits) < 0.001


def test_next_does_not_wait_for_the_copy(spin):
    """The hand-over is a wait of the stream: a copy engine that is busy holds up the device, not the host."""
    big = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    sink, side = torch.empty_like(big, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    epoch = iter(PrefetchIterator(passed_on([torch.full((MIB,), float(i)) for i in range(8)]), device="cuda"))
    out = [next(epoch)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(50):  # about a second
            sink.copy_(big, non_blocking=True)
    out += [next(epoch) for _ in range(6)]
    assert not side.query(), "the consumer waited for the copy engine"
    assert vals(out + list(epoch)) == list(range(8))


@pytest.mark.parametrize("threads", THREADS)
def test_the_host_stays_a_few_steps_ahead_of_the_device(threads, spin):
    """next() lets the host run ahead by prefetch_batches, and not much further."""
    ahead, n = 2, 16
    size = 40 * MIB // 4  # not small: held back
    ends = []
    for x in PrefetchIterator(passed_on([torch.ones(size)] * n), "cuda", prefetch_batches=ahead, num_threads=threads):
        unfinished = sum(not end.query() for end in ends)
        assert unfinished <= ahead + 2
        spin(20)
        x.add_(1)
        ends.append(torch.cuda.Event())
        ends[-1].record()
        if len(ends) == n:
            assert not ends[-1].query(), "the host waited for the device"


@pytest.mark.parametrize("kind", ["PrefetchIterator", "DataLoaderX"])
def test_loading_copying_and_computing_overlap(kind, spin):
    load, n = 0.020, 40
    sources = [torch.zeros(6 * MIB) for _ in range(4)]

    class Batches(IterableDataset):
        def __iter__(self):
            for i in range(n):
                time.sleep(load)  # load
                yield sources[i % 4]

    def seconds_per_step(loader):
        batches = iter(loader)
        next(batches)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in batches:
            spin(20)
            torch.cuda.synchronize()  # as a loop does that looks at its loss
        return (time.perf_counter() - began) / (n - 1)

    serial = seconds_per_step(x.cuda() for x in Batches())
    if kind == "DataLoaderX":
        ours = seconds_per_step(DataLoaderX(0, Batches(), batch_size=None))
    else:
        ours = seconds_per_step(PrefetchIterator(DataLoader(Batches(), batch_size=None), device="cuda"))
    assert serial > 0.035
    assert ours < 0.7 * serial


@pytest.mark.parametrize("threads", THREADS)
def test_the_profiler_shows_copies_while_kernels_run(threads, spin):
    n = 10
    sources = [torch.full((8 * MIB,), float(i)) for i in range(n)]  # 32 MiB: a copy takes some tenths of a millisecond
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in PrefetchIterator(passed_on(sources), device="cuda", num_threads=threads):
            spin(40)
        torch.cuda.synchronize()

    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]

    def spans(name):
        return [(event.time_range.start, event.time_range.end) for event in on_device if name in event.name]

    kernels, copies = spans("spin_kernel"), spans("Memcpy HtoD (Pinned -> Device)")
    assert len(kernels) == n and copies, {event.name for event in on_device}
    hidden = sum(
        max(0, min(end, kernel_end) - max(begin, kernel_begin))
        for begin, end in copies
        for kernel_begin, kernel_end in kernels
    )
    assert hidden > 0.5 * sum(end - begin for begin, end in copies)  # the first batches have no step beside them


@pytest.mark.parametrize("threads", THREADS)
def test_the_users_code_has_the_callers_device(threads):
    """Where there is one only, it is the default as well."""
    device = torch.cuda.device_count() - 1
    seen = []
    with torch.cuda.device(device):
        torch.ones(1, device="cuda")  # else the device has never been used, and is left alone
        loader = DataLoader(Ramp(6, hook=lambda i: seen.append(torch.cuda.current_device())))
        assert vals(PrefetchIterator(loader, "cuda:0", num_threads=threads)) == list(range(6))
        assert torch.cuda.current_device() == device
    assert seen == [device] * 6


def test_copies_overlap_the_step_when_loading_on_the_calling_thread(spin):
    """num_threads=0: a step that keeps the host waiting hides the copy all the same."""
    n = 20
    sources = [torch.zeros(64 * MIB) for _ in range(3)]  # 256 MiB: a copy takes 6 ms or more

    def seconds_per_step(loader):
        batches = iter(loader)
        next(batches)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in batches:
            spin(40)
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / (n - 1)

    loader = passed_on([sources[i % 3] for i in range(n)])
    plain = seconds_per_step(x.cuda() for x in loader)
    ours = seconds_per_step(PrefetchIterator(loader, device="cuda", num_threads=0))
    copy = plain - 0.040
    assert copy > 0.003, "the copy is too short to tell"
    assert ours < 0.040 + 0.6 * copy


@pytest.mark.parametrize("threads", THREADS)
def test_an_overdue_batch_is_copied_all_the_same_with_one_warning(threads, monkeypatch, spin):
    """The consumer waits, and so does its stream: for a peer, perhaps, that waits for this very batch."""
    monkeypatch.setattr(gpuprefetch._copy_lane, "OVERDUE_SECONDS", 0.5)
    sources = [torch.full((40 * MIB // 4,), float(i)) for i in range(8)]
    epoch = iter(PrefetchIterator(passed_on(sources), "cuda", prefetch_batches=1, num_threads=threads))
    out = [next(epoch)]
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    spin(4000)
    end.record()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.monotonic()
        while len(out) < 4:
            out.append(next(epoch))
        took = time.monotonic() - began
        assert not end.query(), "the copy waited for the device"
        out += list(epoch)
    assert 0.4 < took < 3.5
    (warning,) = [w for w in caught if "held back" in str(w.message)]
    assert warning.category is RuntimeWarning and "it was copied all the same" in str(warning.message)
    assert [(int(x.amin()), int(x.amax())) for x in out] == [(i, i) for i in range(8)]


@pytest.mark.parametrize("threads", THREADS)
def test_a_batch_that_is_held_back_in_good_time_is_no_warning(threads, spin):
    sources = [torch.full((40 * MIB // 4,), float(i)) for i in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = []
        for x in PrefetchIterator(passed_on(sources), "cuda", prefetch_batches=1, num_threads=threads):
            spin(150)
            out.append(x.amax())
    assert [int(x) for x in out] == list(range(6))
