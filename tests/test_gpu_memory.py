"""Memory in use is bounded, on the device and on the host, and does not grow."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import textwrap
import threading

import pytest
import torch
from loaders import PRELUDE, THREADS, Ramp, eventually, finish, handles, start
from torch.utils.data import DataLoader

from gpuprefetch import PrefetchIterator

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def passed_on(batches):
    """A loader that gives these batches as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


def peak_of(loop):
    """The most device memory that ``loop()`` has in use above what was in use before, in bytes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    loop()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["active_bytes.all.peak"] - before


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("mebibytes", [8, 40])
def test_a_host_that_runs_ahead_of_the_device_does_not_fill_its_memory(mebibytes, ahead, threads, spin):
    """The step is on the device only: the host launches as far ahead as it is let."""
    n = 40
    sources = [torch.full((mebibytes * MIB // 4,), float(i)) for i in range(4)]
    low = torch.empty(n, device="cuda")

    def step(i, x):
        spin(8)
        y = x * 2  # as large as the batch
        low[i] = y.amin()

    def alone():
        x = sources[0].cuda()
        for i in range(n):
            step(i, x)

    def ours():
        prefetched = PrefetchIterator(
            passed_on([sources[i % 4] for i in range(n)]), "cuda", prefetch_batches=ahead, num_threads=threads
        )
        for i, x in enumerate(prefetched):
            step(i, x)

    own = peak_of(alone)
    above = peak_of(ours) - own
    assert low.tolist() == [2 * (i % 4) for i in range(n)]
    assert above >= mebibytes * MIB, "nothing was prefetched"
    assert above <= max((ahead + 2) * mebibytes, 64) * MIB


def test_small_batches_take_64_mebibytes_at_most(spin):
    n, sources = 600, [torch.full((MIB // 4,), float(i)) for i in range(4)]

    def ours():
        with PrefetchIterator(passed_on([sources[i % 4] for i in range(n)]), "cuda", prefetch_batches=2) as prefetched:
            for x in prefetched:
                spin(0.3)
                x.add_(1)

    assert MIB <= peak_of(ours) <= 64 * MIB


def test_kept_batches_come_on_top(spin):
    """What the user holds is not counted: the window moves on."""
    n, size = 24, 16 * MIB
    sources = [torch.full((size // 4,), float(i)) for i in range(4)]
    kept = []

    def ours():
        for x in PrefetchIterator(passed_on([sources[i % 4] for i in range(n)]), "cuda", prefetch_batches=2):
            spin(2)
            kept.append(x)

    assert n * size <= peak_of(ours) <= (n + 4) * size
    assert [int(x[0]) for x in kept] == [i % 4 for i in range(n)]


def reserved_by_epochs(epoch):
    """Device memory that torch's allocator holds after ``epoch()`` ran twelve times, above what it held before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(12):
        epoch()
        torch.cuda.synchronize()
    return torch.cuda.memory_reserved() - before


# How many of its batches an epoch has in memory at a time depends on who is faster, so reserved memory rises now and
# then up to its limit: two prefetched, two more, the last one of the epoch before, and what `sum` takes.
RESERVED_LIMIT = (2 + 2 + 1) * 32 * MIB + 2 * MIB


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("fresh", [False, True], ids=["one object", "an object an epoch"])
def test_reserved_memory_is_bounded_over_epochs(fresh, threads):
    def make():
        loader = DataLoader(Ramp(8, (4 * MIB,)), batch_size=2)
        return PrefetchIterator(loader, device="cuda", prefetch_batches=2, num_threads=threads)

    prefetched = make()
    kept = []  # the last batch stays until the next epoch's first one

    def epoch():
        for x in make() if fresh else prefetched:
            x.sum()
            kept[:] = [x]

    assert 2 * 32 * MIB <= reserved_by_epochs(epoch) <= RESERVED_LIMIT


def test_reserved_memory_is_bounded_where_the_dataset_works_on_the_device():
    """The loader thread's side stream is used again, too."""
    loader = DataLoader(range(6), batch_size=1, collate_fn=lambda s: torch.full((8 * MIB,), float(s[0]), device="cuda"))

    def epoch():
        for x in PrefetchIterator(loader, device="cuda", prefetch_batches=2):
            x.sum()

    # One more: what the dataset makes itself is not held back, so another one may be in the making.
    assert reserved_by_epochs(epoch) <= RESERVED_LIMIT + 32 * MIB


def resources():
    """What a leak would add to. Pinned: of the process, with what torch caches."""
    gc.collect()
    torch.cuda.synchronize()
    pinned = getattr(torch.cuda, "host_memory_stats", dict)()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "pinned": pinned.get("allocated_bytes.current", 0),
        "threads": threading.active_count(),
        "system threads": len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0,
        "handles": handles(),
    }


def assert_no_more_than(early):
    last = {}

    def settled():
        last.update(resources())
        return all(last[name] <= early[name] for name in early)

    assert eventually(settled, 5), (early, last)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("fresh", [False, True], ids=["one object", "an object an epoch"])
def test_nothing_grows_over_200_epochs(fresh, threads):
    n = 200 if not fresh else 60  # an object an epoch pins its memory anew each time

    def make():
        return PrefetchIterator(loader, device="cuda", num_threads=threads)

    loader = passed_on([torch.full((MIB // 4,), float(i)) for i in range(10)])
    prefetched = None if fresh else make()
    early = None
    for epoch in range(n):
        total = sum(float(x[0]) for x in (make() if fresh else prefetched))
        assert total == 45
        if epoch == 20:
            early = resources()
    assert_no_more_than(early)


def test_nothing_grows_over_a_thousand_short_epochs_of_eight_threads():
    loader = DataLoader(Ramp(5, (MIB // 4,)), batch_size=2)
    prefetched = PrefetchIterator(loader, device="cuda", num_threads=8)
    early = None
    for epoch in range(1000):
        taken = [int(x[0, 0]) for x in itertools.islice(prefetched, epoch % 4)]  # in turn none, some and all
        assert taken == [0, 2, 4][: epoch % 4]
        if epoch == 100:
            early = resources()
    assert_no_more_than(early)


# --- little memory ----------------------------------------------------------------------------------------------------

# The device as a smaller one: the limit is torch's own, so its caching and its errors are the real ones.
SMALL_DEVICE = """
    import json
    from gpuprefetch import PrefetchIterator

    MIB = 1 << 20
    BATCH = 256 * MIB
    sources = [torch.full((BATCH // 4,), float(i)) for i in range(3)]

    class Batches:
        def __init__(self, n):
            self.n = n
        def __iter__(self):
            return (sources[i % 3] for i in range(self.n))

    def limit(size):
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])

    def needs(loop):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        loop()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def plain(n):
        return (x.to("cuda") for x in Batches(n))
"""


def fits(threads):
    return f"""
        model = torch.zeros(512 * MIB // 4, device="cuda")
        work = torch.zeros(BATCH // 4, device="cuda")

        def loop(batches):
            sums = []
            for x in batches:
                torch.mul(x, 2, out=work)
                torch.cuda._sleep(20_000_000)
                sums.append(work.amax())
            return [int(s) for s in sums]

        limit(needs(lambda: loop(plain(6))) + BATCH + 8 * MIB)
        assert loop(plain(6)) == [0, 2, 4] * 2
        print(json.dumps(loop(PrefetchIterator(Batches(24), "cuda", prefetch_batches=6, num_threads={threads}))))
    """


def fits_with_steps_that_take_memory(threads):
    return f"""
        model = torch.zeros(512 * MIB // 4, device="cuda")

        def loop(batches, pause=0.0):
            sums = []
            for x in batches:
                time.sleep(pause)  # load: a slow step, in which what can be is prefetched
                y = x * 2
                z = y + x
                torch.cuda._sleep(10_000_000)
                sums.append(z.amax())
                del y, z
            return [int(s) for s in sums]

        limit(needs(lambda: loop(plain(6))) + BATCH + 8 * MIB)
        assert loop(plain(6)) == [0, 3, 6] * 2
        print(json.dumps(loop(PrefetchIterator(Batches(12), "cuda", num_threads={threads}), 0.2)))
    """


def fits_by_its_own_to(threads):
    return f"""
        class Tagged(torch.Tensor):
            pass

        class Mixed(Batches):
            def __iter__(self):
                for i in range(self.n):
                    parts = sources[i % 3].view(4, -1)
                    yield [parts[0], *(part.as_subclass(Tagged) for part in parts[1:])]

        def loop(batches):
            sums = []
            for parts in batches:
                torch.cuda._sleep(20_000_000)
                sums.append(sum(part.as_subclass(torch.Tensor).amax() for part in parts))
            return [int(s) for s in sums]

        limit(3 * BATCH + 16 * MIB)
        print(json.dumps(loop(PrefetchIterator(Mixed(18), "cuda", prefetch_batches=6, num_threads={threads}))))
    """


def cannot_fit(threads):
    return f"""
        class Tagged(torch.Tensor):
            pass

        plain_one = torch.ones(6 * BATCH // 4)

        class Growing:
            def __init__(self, large):
                self.large = large
            def __iter__(self):
                yield from sources
                yield {{"large": self.large, "small": sources[0]}}
                yield sources[0]

        def loop(large):
            epoch = iter(PrefetchIterator(Growing(large), "cuda", num_threads={threads}))
            got = [int(next(epoch)[0]) for _ in range(3)]
            try:
                next(epoch)
            except torch.OutOfMemoryError as error:
                got += [str(error), getattr(error, "__notes__", [])]
            return [*got, next(epoch, "ended")]

        limit(5 * BATCH)
        results = [loop(plain_one), loop(plain_one.as_subclass(Tagged))]
        batches = [sources[1], sources[2]]  # out of memory is no end of the device
        print(json.dumps([*results, [int(x[0]) for x in PrefetchIterator(batches, "cuda", num_threads={threads})]]))
    """


@pytest.fixture(scope="module", params=[0, 1])
def small_devices(request):
    """What the processes say, run at the same time: most of it is their start."""
    bodies = (fits, fits_with_steps_that_take_memory, fits_by_its_own_to, cannot_fit)
    prelude = PRELUDE + textwrap.dedent(SMALL_DEVICE)
    processes = {body.__name__: start(body(request.param), prelude=prelude) for body in bodies}
    results = {}
    for name, process in processes.items():
        try:
            results[name] = finish(process, 100)
        except AssertionError as error:
            results[name] = error

    def result(body):
        if isinstance(results[body.__name__], AssertionError):
            raise results[body.__name__]
        code, out, err = results[body.__name__]
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    return result


def test_a_loop_that_has_its_memory_from_the_start_fits_with_one_batch_to_spare(small_devices):
    """Only copies find no memory. They wait until their batch is due."""
    assert small_devices(fits) == [0, 2, 4] * 8


def test_a_loop_that_takes_memory_in_each_step_fits_with_one_batch_to_spare(small_devices):
    """What was prefetched must not be what the loop's own step lacks."""
    assert small_devices(fits_with_steps_that_take_memory) == [0, 3, 6] * 4


def test_what_moves_by_its_own_to_waits_for_memory_as_well(small_devices):
    assert small_devices(fits_by_its_own_to) == [0, 4, 8] * 6


def test_a_batch_that_cannot_fit_is_an_error_at_its_place(small_devices):
    plain, tagged, afterwards = small_devices(cannot_fit)
    for got in (plain, tagged):
        assert got[:3] == [0, 1, 2] and got[-1] == "ended"
        assert len(got) == 6, "no torch.OutOfMemoryError"
    message, _ = plain[3:5]
    assert "batch 3 (1792.0 MiB) to cuda:0" in message and "use a smaller batch" in message
    message, notes = tagged[3:5]
    assert "out of memory" in message.lower() or "no memory" in message
    if sys.version_info >= (3, 11):
        assert any("at batch 3" in note for note in notes)
    assert afterwards == [1, 2]
