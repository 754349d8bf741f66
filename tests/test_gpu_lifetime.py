"""Epochs, objects and processes end in time, and give back what they took, on the device too."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from loaders import THREADS, Ramp, eventually, finish, start, threads, vals, within
from torch.utils.data import DataLoader

from gpuprefetch import PrefetchIterator

pytestmark = pytest.mark.gpu

MIB = 1 << 20
NOISE = ("terminate called", "Fatal Python", "Exception ignored", "Segmentation", "Aborted")


def passed_on(batches):
    """A loader that gives these batches as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


# --- processes --------------------------------------------------------------------------------------------------------

ENDINGS = {
    "at the end of the script": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('the end')", 1),
    "deleted": ("del it", 0),
    "closed": ("p.close()", 0),
    "to the last batch": ("list(it)", 0),
    "work under way": ("torch.cuda._sleep(1_000_000_000); next(it)", 0),
    "two objects": ("q = iter(PrefetchIterator(loader, 'cuda', num_threads=1 - n)); next(q)", 0),
    "module torn down": ("sys.modules['keep'] = it; keep = [p, it, next(it)]", 0),
}


@pytest.fixture(scope="module", params=[0, 1])
def endings(request):
    """Processes that end in all ways, at the same time: most of it is their start."""
    processes = {
        name: start(f"""
            n = {request.param}
            loader = DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=8)
            p = PrefetchIterator(loader, device="cuda", num_threads=n)
            it = iter(p)
            next(it); next(it)
            print("reached", flush=True)
            {ending}
        """)
        for name, (ending, _) in ENDINGS.items()
    }
    results = {}
    for name, process in processes.items():
        try:
            results[name] = finish(process, 90)
        except AssertionError as error:
            results[name] = error
    return results


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends(ending, endings):
    result = endings[ending]
    if isinstance(result, AssertionError):
        raise result
    code, out, err = result
    assert code == ENDINGS[ending][1], err
    assert out.strip() == "reached"
    assert [word for word in NOISE if word in err] == []
    if ending != "exception":
        assert err.strip() == ""


BROKEN = [(where, n) for where in ("step", "dataset") for n in (0, 1)]


@pytest.fixture(scope="module")
def broken():
    """Processes in which a kernel of the step or the dataset fails an assertion: so does every later driver call.

    The loop keeps its batches. To free one that was recorded on a stream is a driver call of torch's own, which ends
    the process by abort where it is the first to meet the error.
    """
    processes = {
        (where, n): start(f"""
            wrong = torch.tensor([1000], device="cuda")
            table = torch.zeros(4, device="cuda")
            kept = []

            def batches():
                for i in range(2000):
                    if i == 8 and {where == "dataset"}:
                        table[wrong]
                    yield torch.full((1 << 16,), float(i))

            def loop():
                for i, x in enumerate(PrefetchIterator(batches(), "cuda", num_threads={n})):
                    kept.append(x)
                    if i == 5 and {where == "step"}:
                        table[wrong]
                    x.add_(1)
                    torch.cuda._sleep(1_000_000)

            began = time.monotonic()
            try:
                loop()
            except RuntimeError:
                print("error after", time.monotonic() - began, flush=True)
                raise
        """)
        for where, n in BROKEN
    }
    results = {}
    for key, process in processes.items():
        try:
            results[key] = finish(process, 60)
        except AssertionError as error:
            results[key] = error
    return results


@pytest.mark.parametrize(("where", "n"), BROKEN)
def test_a_broken_context_is_an_error_and_an_end(where, n, broken):
    """None of our calls may hang, or end the process by abort."""
    result = broken[where, n]
    if isinstance(result, AssertionError):
        raise result
    code, out, err = result
    assert out.startswith("error after"), err
    assert float(out.split()[2]) < 30
    assert code == 1, err
    assert "RuntimeError" in err or "AcceleratorError" in err
    assert [word for word in ("terminate called", "Fatal Python", "Aborted") if word in err] == []


# --- epochs and objects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", THREADS)
def test_an_epoch_closes_promptly_while_the_device_is_busy(n, spin):
    sources = [torch.ones(40 * MIB // 4)] * 50
    prefetched = PrefetchIterator(passed_on(sources), "cuda", num_threads=n)
    epoch = iter(prefetched)
    next(epoch)
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    spin(3000)
    end.record()
    next(epoch)  # the copy after this one, if not this one, is held back
    began = time.monotonic()
    epoch.close()
    took = time.monotonic() - began
    assert not end.query(), "close() waited for the device"
    assert took < 1
    assert eventually(lambda: threads() == [], 1)
    assert next(epoch, "ended") == "ended"


@pytest.mark.parametrize("n", THREADS)
def test_an_object_closes_within_bounds_while_the_device_is_busy(n, spin):
    """Giving pinned memory back may wait for the device. It waits for nothing else."""
    prefetched = PrefetchIterator(passed_on([torch.ones(40 * MIB // 4)] * 50), "cuda", num_threads=n)
    epoch = iter(prefetched)
    next(epoch)
    torch.cuda.synchronize()
    spin(2000)
    next(epoch)
    began = time.monotonic()
    prefetched.close()
    assert time.monotonic() - began < 4
    assert eventually(lambda: threads() == [], 1)


@pytest.mark.parametrize("n", THREADS)
def test_close_ends_a_next_that_waits(n, spin):
    """In another thread; as a signal handler or a trainer's shutdown would."""
    sources = [torch.ones(40 * MIB // 4)] * 50
    epoch = iter(PrefetchIterator(passed_on(sources), "cuda", prefetch_batches=1, num_threads=n))
    next(epoch)
    torch.cuda.synchronize()
    spin(4000)
    taken, waiting = [], threading.Event()

    def consume():
        try:
            for _ in range(20):
                waiting.set()
                next(epoch)
                taken.append(1)
        except BaseException as error:
            return error
        return None

    closer = threading.Timer(0.5, epoch.close)
    closer.start()
    began = time.monotonic()
    error = within(30, consume)
    assert time.monotonic() - began < 3
    assert isinstance(error, StopIteration) and len(taken) < 20
    closer.join(10)
    assert eventually(lambda: threads() == [])


@pytest.mark.parametrize("n", THREADS)
@pytest.mark.parametrize("where", ["dataset", "collate"])
def test_an_error_comes_at_its_place(where, n):
    def hook(i):
        if i == 5 and where == "dataset":
            raise KeyError("sample five")

    def collate(samples):
        if where == "collate" and int(samples[0][0]) == 5:
            raise KeyError("sample five")
        return torch.stack(samples)

    loader = DataLoader(Ramp(10, (MIB,), hook=hook), batch_size=1, collate_fn=collate)
    epoch = iter(PrefetchIterator(loader, device="cuda", num_threads=n))
    kept = [next(epoch) for _ in range(5)]
    with pytest.raises(KeyError, match="sample five") as raised:
        next(epoch)
    assert any(frame.name == ("hook" if where == "dataset" else "collate") for frame in raised.traceback)
    assert [(int(x.amin()), int(x.amax())) for x in kept] == [(i, i) for i in range(5)]
    assert next(epoch, "ended") == "ended"
    assert eventually(lambda: threads() == [])


@pytest.mark.parametrize("n", THREADS)
def test_abandoned_epochs_leave_nothing(n):
    gc.collect()
    torch.cuda.synchronize()
    dataset = Ramp(1000, (MIB,))
    alive = weakref.ref(dataset)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        for x in PrefetchIterator(DataLoader(dataset, batch_size=1), device="cuda", num_threads=n):
            assert int(x[0, 0]) == 0
            break
    del dataset, x
    assert eventually(lambda: threads() == [])
    assert eventually(lambda: alive() is None)
    torch.cuda.synchronize()
    assert eventually(lambda: torch.cuda.memory_allocated() <= before)


@pytest.mark.skipif(not hasattr(torch.cuda, "host_memory_stats"), reason="this torch does not count pinned memory")
@pytest.mark.parametrize("n", THREADS)
@pytest.mark.parametrize("how", ["close", "with", "collected", "collected with its epoch", "error"])
def test_pinned_memory_is_given_back(how, n):
    torch.cuda.init()
    gc.collect()
    torch.cuda.synchronize()
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()

    def pinned():
        return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)

    def hook(i):
        if how == "error" and i == 5:
            raise KeyError("sample five")

    before = pinned()
    prefetched = PrefetchIterator(DataLoader(Ramp(20, (4 * MIB,), hook=hook), batch_size=1), "cuda", num_threads=n)
    assert pinned() - before == 64 * MIB
    if how == "with":
        with prefetched:
            assert vals(prefetched) == list(range(20))
    elif how == "error":
        with prefetched, pytest.raises(KeyError):
            list(prefetched)
    else:
        epoch = iter(prefetched)
        assert vals([next(epoch), next(epoch)]) == [0, 1]
        if how == "close":
            prefetched.close()
        elif how == "collected":
            del prefetched
            assert vals(epoch) == list(range(2, 20)), "an epoch outlives its object"
            del epoch
        else:
            del epoch, prefetched
    assert eventually(lambda: pinned() == before)


@pytest.mark.parametrize("n", THREADS)
def test_an_epoch_outlives_its_object(n):
    epoch = iter(PrefetchIterator(DataLoader(Ramp(12, (MIB,)), batch_size=1), device="cuda", num_threads=n))
    gc.collect()
    assert vals(epoch) == list(range(12))


@pytest.mark.parametrize("n", THREADS)
def test_iterating_again_after_close(n):
    prefetched = PrefetchIterator(DataLoader(Ramp(6, (MIB,)), batch_size=1), device="cuda", num_threads=n)
    for _ in range(3):
        epoch = iter(prefetched)
        assert int(next(epoch)[0, 0]) == 0
        prefetched.close()
        assert next(epoch, "ended") == "ended"
    assert vals(prefetched) == list(range(6))
    prefetched.close()
