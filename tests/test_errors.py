"""An error of the user's code arrives as it is, at its own place, after every batch before it, and ends the epoch."""

import contextlib
import dataclasses
import gc
import re
import sys
import threading
import traceback
import warnings
import weakref

import pytest
import torch
from loaders import THREADS, Gate, Ramp, eventually, threads, vals, within
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gpuprefetch import PrefetchIterator

pytestmark = pytest.mark.windows

HAS_NOTES = sys.version_info >= (3, 11)


class Unusual(BaseException):
    """Not an Exception."""


class SixthSample(Exception):
    pass


class Failing:
    """All the places where a loader of ten samples can raise ``error`` instead of the sample or batch ``at``."""

    def __init__(self, error, at=5):
        self.error, self.at = error, at

    def fail_here(self, i=None):
        if i is None or i == self.at:
            raise self.error

    def dataset(self):
        return DataLoader(Ramp(10, hook=self.fail_here), batch_size=1)

    def single_samples(self):
        return DataLoader(Ramp(10, hook=self.fail_here), batch_size=None)

    def collate(self):
        def collate(samples):
            self.fail_here(int(samples[0][0]))
            return default_collate(samples)

        return DataLoader(Ramp(10), batch_size=1, collate_fn=collate)

    def sampler(self):
        def indices():
            for i in range(10):
                self.fail_here(i)
                yield i

        return DataLoader(Ramp(10), batch_size=1, sampler=_Resampled(indices))

    def batch_sampler(self):
        def batches():
            for i in range(10):
                self.fail_here(i)
                yield [i]

        return DataLoader(Ramp(10), batch_sampler=_Resampled(batches))

    def iterable_dataset(self):
        outer = self

        class Stream(IterableDataset):
            def __iter__(self):
                for i in range(10):
                    outer.fail_here(i)
                    yield torch.full((4,), float(i))

        return DataLoader(Stream(), batch_size=1)

    def iterable_collate(self):
        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.arange(10))

        def collate(samples):
            self.fail_here(int(samples[0]))
            return default_collate(samples)

        return DataLoader(Stream(), batch_size=1, collate_fn=collate)

    def generator(self):
        for i in range(10):
            self.fail_here(i)
            yield torch.full((4,), float(i))

    def iterator(self):
        return map(lambda i: self.fail_here(i) or torch.full((4,), float(i)), range(10))

    def nested(self):
        return PrefetchIterator(self.dataset(), device="cpu")


PLACES = [name for name in vars(Failing) if not name.startswith("_") and name != "fail_here"]


class _Resampled:
    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        return self.begin()

    def __len__(self):
        return 10


class Itself:
    """A batch that moves itself, or raises ``error``."""

    def __init__(self, value, error=None):
        self.value, self.error = value, error

    def to(self, device, non_blocking=False):
        if self.error is not None:
            raise self.error
        return Itself(torch.empty(self.value.shape, device=device))


def taken(it, seconds=20):
    """The batches before the error, and the error."""
    got = []

    def run():
        try:
            for batch in it:
                got.append(batch)
        except BaseException as error:
            return error
        return None

    return got, within(seconds, run)


def frames(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# --- where it comes from


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("place", PLACES)
def test_from_every_place(place, num_threads):
    error = SixthSample("sample five")
    it = iter(PrefetchIterator(getattr(Failing(error), place)(), device="cpu", num_threads=num_threads))
    got, raised = taken(it)
    assert vals(got) == [0, 1, 2, 3, 4]
    assert raised is error
    assert raised.args == ("sample five",)
    assert "fail_here" in frames(raised)
    for _ in range(3):
        assert within(10, lambda: next(it, "ended")) == "ended"


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("place", PLACES)
def test_from_the_first_sample_of_every_place(place, num_threads):
    error = SixthSample("the first")
    it = iter(PrefetchIterator(getattr(Failing(error, at=0), place)(), device="cpu", num_threads=num_threads))
    got, raised = taken(it)
    assert got == []
    assert raised is error
    assert "fail_here" in frames(raised)
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("ahead", [1, 2, 4, 20])
def test_at_every_position(ahead, num_threads):
    for at in range(10):
        error = SixthSample(at)
        p = PrefetchIterator(
            Failing(error, at).dataset(), device="cpu", prefetch_batches=ahead, num_threads=num_threads
        )
        got, raised = taken(p)
        assert (vals(got), raised) == (list(range(at)), error)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(
    "error",
    [
        Unusual("rare"),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        TimeoutError("the dataset's own"),
        RuntimeError("plain"),
        MemoryError(),
        AssertionError(),
        OSError(2, "No such file"),
        StopAsyncIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("place", ["dataset", "collate", "sampler", "iterator"])
def test_of_every_kind(place, error, num_threads):
    before = threads()
    it = iter(PrefetchIterator(getattr(Failing(error), place)(), device="cpu", num_threads=num_threads, timeout=30))
    got, raised = taken(it)
    assert vals(got) == [0, 1, 2, 3, 4]
    assert raised is error
    assert next(it, "ended") == "ended"
    assert eventually(lambda: not threads(since=before))


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("place", ["dataset", "single_samples", "collate", "iterable_collate"])
def test_stop_iteration_is_not_taken_for_the_end(place, num_threads):
    error = StopIteration("forgotten next()")
    it = iter(PrefetchIterator(getattr(Failing(error), place)(), device="cpu", num_threads=num_threads))
    got, raised = taken(it)
    assert vals(got) == [0, 1, 2, 3, 4]
    assert type(raised) is RuntimeError
    assert "StopIteration" in str(raised)
    assert raised.__cause__ is error
    assert "fail_here" in frames(error)
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", THREADS)
def test_stop_iteration_of_the_first_sample(num_threads):
    it = iter(PrefetchIterator(Failing(StopIteration(), at=0).dataset(), device="cpu", num_threads=num_threads))
    with pytest.raises(RuntimeError, match="StopIteration"):
        within(10, lambda: next(it))


@pytest.mark.parametrize("num_threads", THREADS)
def test_the_users_loader_is_left_as_it_is(num_threads):
    """StopIteration is told from the end on the epoch's own fetcher: the loader alone behaves as torch's."""
    loader = Failing(StopIteration()).dataset()
    collate, before = loader.collate_fn, dict(vars(loader))
    taken(PrefetchIterator(loader, device="cpu", num_threads=num_threads))
    after = dict(vars(loader))
    for changing in ("_iterator", "_DataLoader__initialized"):
        before.pop(changing, None), after.pop(changing, None)
    assert loader.collate_fn is collate
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert vals(loader) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("error", [ValueError("own to"), Unusual(), StopIteration("own to")], ids=repr)
def test_from_a_batchs_own_to(error, num_threads):
    batches = [Itself(torch.ones(2)), Itself(torch.ones(3)), Itself(torch.ones(4), error), Itself(torch.ones(5))]
    it = iter(PrefetchIterator(batches, device="meta", num_threads=num_threads))
    got, raised = taken(it)
    assert [b.value.shape for b in got] == [(2,), (3,)]
    if isinstance(error, StopIteration):  # else the loop would end in silence
        assert type(raised) is RuntimeError
        assert raised.__cause__ is error
    else:
        assert raised is error
    assert "to" in frames(error)
    assert next(it, "ended") == "ended"


@pytest.mark.parametrize("num_threads", THREADS)
def test_from_iter_itself(num_threads):
    class Sometimes:
        def __init__(self):
            self.calls = 0

        def __iter__(self):
            self.calls += 1
            if self.calls == 1:
                raise OSError("not mounted")
            return iter([torch.tensor([1]), torch.tensor([2])])

    p = PrefetchIterator(Sometimes(), device="cpu", num_threads=num_threads)
    before = threading.active_count()
    with pytest.raises(OSError, match="not mounted"):
        iter(p)
    assert threading.active_count() == before
    assert vals(p) == [1, 2]


@pytest.mark.parametrize("num_threads", THREADS)
def test_from_iter_within_next(num_threads):
    class Sometimes:
        def __init__(self):
            self.calls = 0

        def __iter__(self):
            self.calls += 1
            if self.calls == 1:
                raise OSError("not mounted")
            return iter([torch.tensor([1])])

    p = PrefetchIterator(Sometimes(), device="cpu", num_threads=num_threads)
    with pytest.raises(OSError, match="not mounted"):
        next(p)
    assert vals([next(p)]) == [1]


def test_iter_that_returns_no_iterator():
    class Wrong:
        def __iter__(self):
            return 5

    with pytest.raises(TypeError, match="iter"):
        iter(PrefetchIterator(Wrong(), device="cpu"))


# --- what comes with it


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes from Python 3.11 on")
def test_the_note_names_batch_and_thread_and_the_way_out():
    name = []

    def hook(i):
        name.append(threading.current_thread().name)
        if i == 5:
            raise SixthSample

    _, raised = taken(PrefetchIterator(DataLoader(Ramp(10, hook=hook), batch_size=1), device="cpu"))
    (note,) = raised.__notes__
    assert re.search(r"\bbatch 5\b", note)
    assert name[0].startswith("gpuprefetch-") and name[0] in note
    assert note.endswith("num_threads=0 of PrefetchIterator runs the dataset on the calling thread")


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("kind", [SixthSample, Unusual])
def test_the_note_of_the_calling_thread(kind):
    name = threading.current_thread().name
    it = iter(PrefetchIterator(Failing(kind(), at=2).dataset(), device="cpu", num_threads=0))
    with pytest.raises(kind) as caught:
        vals(it)
    (note,) = caught.value.__notes__
    assert re.search(r"\bbatch 2\b", note)
    assert name in note
    assert "num_threads" not in note


@pytest.mark.skipif(not HAS_NOTES, reason="exceptions have notes from Python 3.11 on")
@pytest.mark.parametrize("place", ["sampler", "batch_sampler"])
def test_the_note_of_a_first_index_names_batch_0(place):
    _, raised = taken(PrefetchIterator(getattr(Failing(SixthSample(), at=0), place)(), device="cpu"))
    (note,) = raised.__notes__
    assert re.search(r"\bbatch 0\b", note)


def test_an_error_that_takes_no_note_arrives_as_well():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    error = Frozen(5)
    got, raised = taken(PrefetchIterator(Failing(error).dataset(), device="cpu"))
    assert vals(got) == [0, 1, 2, 3, 4]
    assert raised is error
    with pytest.raises(Frozen) as caught:
        next(PrefetchIterator(Failing(error, at=0).sampler(), device="cpu"))
    assert caught.value is error


@pytest.mark.parametrize("num_threads", THREADS)
def test_cause_and_context_are_kept(num_threads):
    def hook(i):
        if i == 3:
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise SixthSample("outer") from error

    got, raised = taken(
        PrefetchIterator(DataLoader(Ramp(9, hook=hook), batch_size=1), device="cpu", num_threads=num_threads)
    )
    assert vals(got) == [0, 1, 2]
    assert type(raised) is SixthSample
    assert type(raised.__cause__) is KeyError
    assert raised.__context__ is raised.__cause__


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_new_epoch_after_an_error(num_threads):
    failures = [SixthSample("once")]

    def hook(i):
        if i == 5 and failures:
            raise failures.pop()

    p = PrefetchIterator(DataLoader(Ramp(10, hook=hook), batch_size=1), device="cpu", num_threads=num_threads)
    got, raised = taken(p)
    assert (vals(got), type(raised)) == ([0, 1, 2, 3, 4], SixthSample)
    assert vals(p) == list(range(10))


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_error_of_one_epoch_leaves_the_other_alone(num_threads):
    failures = [SixthSample("once")]

    def hook(i):
        if i == 2 and failures:
            raise failures.pop()

    p = PrefetchIterator(
        DataLoader(Ramp(6, hook=hook), batch_size=1), device="cpu", num_threads=num_threads, prefetch_batches=1
    )
    one = iter(p)
    got, raised = taken(one)
    two = iter(p)
    assert vals([next(two)]) == [0]
    assert next(one, "ended") == "ended"
    assert (vals(got), type(raised)) == ([0, 1], SixthSample)
    assert vals(two) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_error_in_the_loop_ends_the_epochs_thread(num_threads):
    before = threads()
    with pytest.raises(ZeroDivisionError):
        for batch in PrefetchIterator(DataLoader(Ramp(1000), batch_size=1), device="cpu", num_threads=num_threads):
            1 // int(batch[0, 0])
    assert eventually(lambda: not threads(since=before))


def plain(loader):
    return loader


def on_the_calling_thread(loader):
    return PrefetchIterator(loader, device="cpu", num_threads=0)


def on_a_thread(loader):
    return PrefetchIterator(loader, device="cpu", num_threads=1)


@pytest.mark.parametrize("wrap", [plain, on_the_calling_thread, on_a_thread])
@pytest.mark.parametrize("place", ["dataset", "collate", "sampler", "iterator"])
@pytest.mark.parametrize("at", [0, 3])
def test_an_error_that_was_dealt_with_keeps_nothing_alive(at, place, wrap):
    """Not even until the next garbage collection, which loops switch off. The plain loader keeps nothing either."""

    class Heavy(Exception):
        pass

    class Fresh(Failing):
        def fail_here(self, i=None):
            if i == self.at:
                heavy = Heavy()  # holds, by its traceback, all that the frames on its way hold
                refs.append(weakref.ref(heavy))
                try:
                    raise heavy
                finally:
                    del heavy

    def run():
        try:
            for _ in wrap(getattr(Fresh(None, at), place)()):
                pass
        except Heavy:
            return

    refs = []
    gc.collect()
    gc.disable()
    try:
        run()
        assert len(refs) == 1
        assert eventually(lambda: refs[0]() is None, seconds=1, collect=False)
    finally:
        gc.enable()


# --- tensors that are written to while they wait, on the CPU


def test_a_queued_tensor_that_was_written_to_is_an_error():
    """On the CPU nothing is copied: a loader with one buffer can't be loaded ahead, and must not be silently wrong."""
    buffer, loaded = torch.zeros(4), []

    def batches():
        for i in range(6):
            loaded.append(i)
            yield buffer.fill_(i)

    it = iter(PrefetchIterator(batches(), device="cpu", prefetch_batches=3))
    assert eventually(lambda: len(loaded) == 3)
    with pytest.raises(RuntimeError, match="batch 0 was written to") as caught:
        next(it)
    assert "num_threads=0" in str(caught.value)
    assert next(it, "ended") == "ended"


def test_a_written_tensor_deep_in_a_batch_is_an_error():
    buffer, loaded = torch.zeros(4), []

    def batches():
        for i in range(6):
            loaded.append(i)
            yield {"label": i, "parts": (torch.ones(1), [buffer[:2].fill_(i)])}

    it = iter(PrefetchIterator(batches(), device="cpu", prefetch_batches=3))
    assert eventually(lambda: len(loaded) == 3)
    with pytest.raises(RuntimeError, match="batch 0 was written to"):
        next(it)


def test_a_loop_that_writes_into_the_loaders_memory_is_told():
    shared = [torch.zeros(4)] * 6
    loaded = []
    it = iter(PrefetchIterator(map(lambda b: loaded.append(0) or b, shared), device="cpu", prefetch_batches=2))
    batch = next(it)
    assert eventually(lambda: len(loaded) == 3)
    batch.add_(1)
    with pytest.raises(RuntimeError, match="batch 1 was written to"):
        next(it)


def test_batches_before_the_written_one_arrive():
    kept, loaded = [torch.full((2,), float(i)) for i in range(4)], []

    def batches():
        for i in range(4):
            if i == 3:
                kept[2].zero_()
            loaded.append(i)
            yield kept[i]

    it = iter(PrefetchIterator(batches(), device="cpu", prefetch_batches=4))
    assert eventually(lambda: len(loaded) == 4)
    got, raised = taken(it)
    assert vals(got) == [0, 1]
    assert type(raised) is RuntimeError
    assert "batch 2" in str(raised)


@pytest.mark.parametrize("num_threads", THREADS)
def test_inference_tensors_have_no_version_and_pass(num_threads):
    with torch.inference_mode():
        batches = [torch.full((2,), float(i)) for i in range(4)]
        assert vals(PrefetchIterator(batches, device="cpu", num_threads=num_threads)) == [0, 1, 2, 3]
    assert vals(PrefetchIterator(batches, device="cpu", num_threads=num_threads)) == [0, 1, 2, 3]


# --- timeouts


def stuck_in_the_sample(gate):
    def stand_here(i):
        gate(i)

    return DataLoader(Ramp(5, hook=stand_here), batch_size=1)


def test_a_timeout_names_the_thread_and_shows_where_it_stands():
    before = threads()
    with Gate(at=2) as gate:
        it = iter(PrefetchIterator(stuck_in_the_sample(gate), device="cpu", timeout=0.2))
        assert vals([next(it), next(it)]) == [0, 1]
        with pytest.raises(TimeoutError) as caught:
            within(10, lambda: next(it))
        text = str(caught.value)
        (thread,) = threads(since=before)
        assert "timeout=0.2" in text
        assert thread.name in text
        assert "in stand_here" in text
        assert "test_errors.py" in text and "opened.wait" in text


def test_a_timeout_keeps_nothing_of_its_callers_alive(without_collection):
    class Local:
        pass

    def loop(gate):
        local = Local()
        it = iter(PrefetchIterator(stuck_in_the_sample(gate), device="cpu", timeout=0.1))
        next(it)
        with contextlib.suppress(TimeoutError):
            next(it)
        gate.opened.set()
        return weakref.ref(local)

    before = threads()
    with Gate(at=1) as gate:
        local = loop(gate)
        assert local() is None
        assert eventually(lambda: not threads(since=before), collect=False)


def test_iteration_goes_on_after_a_timeout():
    with Gate(at=2) as gate:
        it = iter(PrefetchIterator(stuck_in_the_sample(gate), device="cpu", timeout=0.1))
        assert vals([next(it), next(it)]) == [0, 1]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                within(10, lambda: next(it))
        gate.opened.set()
        got = []
        assert eventually(lambda: got.append(next_or_none(it)) or got[-1] == 4)
        assert [value for value in got if value is not None] == [2, 3, 4]
        assert next(it, "ended") == "ended"


def next_or_none(it):
    try:
        return int(next(it)[0, 0])
    except TimeoutError:
        return None


def test_a_timeout_of_next_on_the_object_goes_on_too():
    with Gate(at=1) as gate:
        p = PrefetchIterator(stuck_in_the_sample(gate), device="cpu", timeout=0.1)
        assert next_or_none(p) == 0
        assert next_or_none(p) is None
        gate.opened.set()
        assert eventually(lambda: next_or_none(p) == 1)


def test_a_timeout_counts_from_next_and_not_from_the_batch_before():
    loader = DataLoader(Ramp(4), batch_size=1)
    it = iter(PrefetchIterator(loader, device="cpu", timeout=1, prefetch_batches=1))
    for i in range(4):
        threading.Event().wait(0.4)  # load: four steps together take longer than the timeout
        assert next_or_none(it) == i


def test_an_epoch_that_was_dropped_after_a_timeout_ends():
    def run(gate):
        it = iter(PrefetchIterator(stuck_in_the_sample(gate), device="cpu", timeout=0.1, prefetch_batches=1))
        next(it)
        with pytest.raises(TimeoutError):
            next(it)
        gate.opened.set()

    before = threads()
    with Gate(at=1) as gate:
        run(gate)
        assert eventually(lambda: not threads(since=before), seconds=3)


def test_the_datasets_own_timeout_error_ends_the_epoch():
    error = TimeoutError("storage")
    it = iter(PrefetchIterator(Failing(error, at=1).dataset(), device="cpu", timeout=20))
    got, raised = taken(it)
    assert (vals(got), raised) == ([0], error)
    assert next(it, "ended") == "ended"


def test_no_timeout_without_a_thread_to_wait_for():
    loader = DataLoader(Ramp(2, hook=lambda i: threading.Event().wait(0.15)), batch_size=1)
    assert vals(PrefetchIterator(loader, device="cpu", num_threads=0, timeout=0.01)) == [0, 1]


# --- no noise


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_error_prints_nothing_by_itself(num_threads, capfd):
    before = threads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, raised = taken(PrefetchIterator(Failing(SixthSample()).dataset(), device="cpu", num_threads=num_threads))
        assert eventually(lambda: not threads(since=before))
    assert type(raised) is SixthSample
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_dataset_that_can_not_be_indexed(num_threads):
    class NoItems(Dataset):
        def __len__(self):
            return 3

    got, raised = taken(PrefetchIterator(DataLoader(NoItems()), device="cpu", num_threads=num_threads))
    assert got == []
    assert type(raised) is NotImplementedError


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_batch_that_contains_itself(num_threads):
    batch = [torch.ones(1)]
    batch.append(batch)
    it = iter(PrefetchIterator([[torch.zeros(1)], batch], device="cpu", num_threads=min(num_threads, 1)))
    assert next(it) == [0]
    with pytest.raises(RecursionError, match="the batch contains itself, or is nested too deeply"):
        next(it)
