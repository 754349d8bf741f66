"""One object used from several threads, or interrupted at an unlucky moment: refused or right, never a hang."""

import collections
import gc
import os
import sys
import threading
import traceback
import warnings
import weakref

import pytest
import torch
from loaders import NO_GIL, THREADS, Gate, Ramp, eventually, script, stands_in, threads, vals, within
from torch.utils.data import DataLoader

from gpuprefetch import DataLoaderX, PrefetchIterator, _threads

pytestmark = pytest.mark.windows


@pytest.fixture
def before():
    return set(threading.enumerate())


def in_four_threads(run):
    """What run(0) to run(3) gave, side by side."""
    results = [None] * 4

    def call(k):
        results[k] = run(k)

    callers = [threading.Thread(target=call, args=(k,), daemon=True) for k in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    return results


@pytest.mark.parametrize("num_threads", THREADS)
def test_consumers_that_share_an_epoch_take_turns(num_threads):
    for _ in range(10):
        epoch = iter(PrefetchIterator(DataLoader(Ramp(60), batch_size=1), device="cpu", num_threads=num_threads))
        got = in_four_threads(lambda _, epoch=epoch: vals(epoch))
        assert sorted(sum(got, [])) == list(range(60))
        assert all(mine == sorted(mine) for mine in got)


@pytest.mark.parametrize("make", [PrefetchIterator, lambda loader, device: DataLoaderX(0, loader.dataset)])
def test_threads_that_call_next_share_the_epoch_that_it_begins(make):
    for _ in range(20):
        batches, together = make(DataLoader(Ramp(12), batch_size=1), "cpu"), threading.Barrier(4)

        def draw(_, batches=batches, together=together):
            together.wait(20)
            return vals(iter(lambda: next(batches, None), None))

        got = in_four_threads(draw)
        assert sorted(sum(got, [])) == list(range(12))


class Watched:
    """Moves itself, and waits a moment inside for somebody to come in too."""

    met = threading.Event()
    _inside = 0
    _lock = threading.Lock()

    def __init__(self, value):
        self.value = value

    def to(self, device):
        with Watched._lock:
            Watched._inside += 1
            if Watched._inside > 1:
                Watched.met.set()
        Watched.met.wait(0.02)
        with Watched._lock:
            Watched._inside -= 1
        return Watched(torch.full((2,), self.value).to(device))


ALL_MOVE = ["meta", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", ALL_MOVE)
@pytest.mark.parametrize("num_threads", THREADS)
def test_objects_move_by_their_own_to_one_thread_at_a_time(num_threads, device):
    """Other libraries keep marks in module state meanwhile: tensordict did (tensordict#1700)."""
    Watched.met.clear()

    def run(k):
        loader = DataLoader([Watched(float(k)) for _ in range(6)], batch_size=None, collate_fn=lambda batch: batch)
        return [type(batch.value) for batch in PrefetchIterator(loader, device=device, num_threads=num_threads)]

    assert in_four_threads(run) == [[torch.Tensor] * 6] * 4
    assert not Watched.met.is_set()


@pytest.mark.parametrize("device", ALL_MOVE)
def test_a_collection_while_an_object_moves_does_not_wait_for_a_thread_that_wants_to_move_one(device, before):
    """The thread of an epoch that is garbage stands before the lock which the object that moves has taken."""

    class Cell:
        pass

    def abandon():
        cell = Cell()
        cell.epoch, cell.itself = iter(PrefetchIterator([Moves()] * 8, device=device)), cell
        return weakref.ref(cell.epoch), cell.epoch._epoch._workers[0].thread

    class Moves:
        def to(self, device):
            return torch.zeros(2).to(device)

    class Collects:
        def to(self, device):
            epoch, thread = abandon()
            assert eventually(lambda: "foreign" in stack_of(thread), collect=False), stack_of(thread)
            gc.collect()
            assert epoch() is None
            return torch.zeros(2).to(device)

    def stack_of(thread):
        frame = sys._current_frames().get(thread.ident)
        return "".join(traceback.format_stack(frame)) if frame else ""

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(PrefetchIterator([Collects()], device=device, num_threads=0))) == 1
    assert [str(warning.message) for warning in caught] == []  # such as "not stopped within 2 s"
    assert eventually(lambda: not threads(since=before))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_that_is_forked_while_an_object_moves_moves_its_own():
    code, out, err = script(
        """
        import faulthandler
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        inside, opened = threading.Event(), threading.Event()

        class Moves:
            def __init__(self, hook):
                self.hook = hook
            def to(self, device):
                self.hook()
                return torch.zeros(2).to(device)

        def hold():
            inside.set()
            assert opened.wait(60)

        epoch = iter(PrefetchIterator([Moves(hold)], device="meta"))
        assert inside.wait(20)
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(20, exit=True)
            # num_threads=0: a new thread may get the name of the parent's, and so its lock
            print(len(list(PrefetchIterator([Moves(lambda: None)] * 3, device="meta", num_threads=0))))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        opened.set()
        print(len(list(epoch)))
        """
    )
    assert (code, out.split()) == (0, ["3", "1"]), err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(
    "make", ["PrefetchIterator(DataLoader(data, sampler=order), 'cpu')", "DataLoaderX(0, data, 1, sampler=order)"]
)
def test_a_child_that_is_forked_while_another_thread_begins_an_epoch_begins_its_own(make):
    code, out, err = script(
        f"""
        import faulthandler
        from gpuprefetch import DataLoaderX
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        inside, opened = threading.Event(), threading.Event()

        class Order:
            def __iter__(self):
                if threading.current_thread() is not threading.main_thread():
                    inside.set()
                    assert opened.wait(60)
                return iter(range(4))

        data, order = torch.arange(4), Order()
        batches = {make}
        thread = threading.Thread(target=lambda: print(int(next(batches))))
        thread.start()
        assert inside.wait(20)
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(20, exit=True)
            print(int(next(batches)), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        opened.set()
        thread.join(20)
        """
    )
    assert (code, out.split()) == (0, ["0", "0"]), err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_that_is_forked_while_another_thread_waits_in_next_gets_an_error():
    code, out, err = script(
        """
        import faulthandler
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        inside, opened = threading.Event(), threading.Event()

        def hold(i):
            inside.set()
            assert opened.wait(60)

        def waits():
            frame = sys._current_frames()[thread.ident]
            while frame is not None and frame.f_code.co_name != "_wait":
                frame = frame.f_back
            return frame is not None

        epoch = iter(PrefetchIterator(DataLoader(Ramp(1, hook=hold)), device="cpu"))
        thread = threading.Thread(target=lambda: print(int(next(epoch)[0, 0])))
        thread.start()
        assert inside.wait(20)
        end = time.monotonic() + 20
        while not waits() and time.monotonic() < end:
            pass
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(20, exit=True)
            try:
                next(epoch)
            except RuntimeError as error:
                print("was the process forked" in str(error), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        opened.set()
        thread.join(20)
        """
    )
    assert (code, out.split()) == (0, ["True", "0"]), err


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensordicts_in_several_threads(device):
    tensordict = pytest.importorskip("tensordict").TensorDict

    def run(k):
        batches = [tensordict({"a": torch.full((64, 64), float(i + k))}, batch_size=[64]) for i in range(50)]
        loader = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
        out = []
        for batch in PrefetchIterator(loader, device=device):
            assert type(batch) is tensordict and batch["a"].device.type == device and batch.batch_size == (64,)
            out.append(batch["a"] if device == "meta" else (int(batch["a"].min()), int(batch["a"].max())))
        return out

    got = in_four_threads(run)
    if device == "meta":
        assert [len(out) for out in got] == [50] * 4
    else:
        assert got == [[(i + k, i + k) for i in range(50)] for k in range(4)]


def test_a_dataset_that_draws_from_its_own_epoch_gets_an_error(before):
    def hook(i):
        if i == 2:
            next(epoch)

    epoch = iter(PrefetchIterator(DataLoader(Ramp(9, hook=hook), batch_size=1), device="cpu", prefetch_batches=1))
    got = within(20, lambda: [next(epoch), next(epoch)])
    assert vals(got) == [0, 1]
    with pytest.raises(RuntimeError, match="the dataset that it loads"):
        within(20, lambda: next(epoch))


def test_close_beside_iter_and_next(before):
    """Every epoch that close() finds is ended, whatever begins or ends at the same time."""
    p = PrefetchIterator(DataLoader(Ramp(50), batch_size=1), device="cpu")
    stop = threading.Event()
    errors = []

    def use():
        try:
            while not stop.is_set():
                for n, _ in enumerate(iter(p)):
                    if n == 3:
                        break
                next(p, None)
        except BaseException as error:
            errors.append(error)

    users = [threading.Thread(target=use, daemon=True) for _ in range(2)]
    for user in users:
        user.start()
    for _ in range(300):
        p.close()
    stop.set()
    for user in users:
        user.join(20)
        assert not user.is_alive()
    p.close()
    assert errors == []
    assert eventually(lambda: not threads(since=before))


class Closing(Exception):
    pass


def test_close_ends_the_others_where_one_raises(before):
    class Loader:
        def __iter__(self):
            try:
                for i in range(9):
                    yield torch.tensor([i])
            finally:
                raise Closing

    p = PrefetchIterator(Loader(), device="cpu", num_threads=0)
    epochs = [iter(p), iter(p), iter(p)]
    assert vals([next(epoch) for epoch in epochs]) == [0, 0, 0]
    with pytest.raises(Closing):
        p.close()
    assert [next(epoch, "ended") for epoch in epochs] == ["ended"] * 3


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_interrupt_while_the_thread_starts_leaves_no_thread(num_threads, before, monkeypatch):
    start = threading.Thread.start

    def interrupted(self):
        start(self)
        if self.name.startswith("gpuprefetch"):
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    p = PrefetchIterator(DataLoader(Ramp(9), batch_size=1), device="cpu", num_threads=num_threads)
    if num_threads:
        with pytest.raises(KeyboardInterrupt):
            iter(p)
    assert eventually(lambda: not threads(since=before))
    assert eventually(lambda: not _threads._running)
    monkeypatch.undo()
    assert vals(p) == list(range(9))


@pytest.mark.process
def test_a_new_epoch_of_persistent_workers_ends_the_one_before(before):
    loader = DataLoader(Ramp(40), batch_size=2, num_workers=1, persistent_workers=True)
    p = PrefetchIterator(loader, device="cpu")
    for _ in range(3):
        epoch = iter(p)
        assert vals([next(epoch), next(epoch)]) == [0, 2]
    older, epoch = epoch, iter(p)
    assert vals(epoch) == list(range(0, 40, 2))
    with pytest.raises(RuntimeError, match=r"ended by a later iter\(\): .* persistent workers"):
        next(older)
    assert next(epoch, "ended") == "ended"
    again = iter(p)  # one that had come to its own end is not meant
    assert next(epoch, "ended") == "ended" and vals(again) == list(range(0, 40, 2))


def test_who_waits_for_an_epoch_that_is_replaced_is_told_so():
    with Gate(at=1) as gate:

        def batches():
            for i in range(4):
                gate(i)
                yield torch.tensor([i])

        p = PrefetchIterator(batches(), device="cpu")
        epoch = iter(p)
        assert vals([next(epoch)]) == [0]
        errors = []

        def wait():
            try:
                next(epoch)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert stands_in("_wait", thread)
        with pytest.warns(RuntimeWarning, match="left behind"):
            iter(p)
        thread.join(20)
    assert [type(error) for error in errors] == [RuntimeError] and "later iter()" in str(errors[0])


@pytest.mark.skipif(
    NO_GIL and sys.version_info < (3, 14),
    reason="without a GIL, Python 3.13 keeps every class for ever",
)
def test_a_class_for_each_batch_is_not_kept():
    import collections
    import gc
    import weakref

    kinds = []

    def batches():
        for i in range(600):
            kind = collections.namedtuple("Batch", "x")
            kinds.append(weakref.ref(kind))
            yield kind(torch.tensor([i]))

    for _ in PrefetchIterator(batches(), device="meta"):
        pass
    gc.collect()
    assert sum(ref() is not None for ref in kinds) <= 300


class Both:
    """An iterator class whose ``iter()`` starts afresh all the same."""

    def __iter__(self):
        return iter([torch.tensor([i]) for i in range(5)])

    def __next__(self):
        raise AssertionError("iter() is what is asked")


@pytest.mark.parametrize("nested", [False, True])
def test_two_epochs_of_a_loader_that_starts_afresh(nested):
    p = PrefetchIterator(PrefetchIterator(Both(), device="cpu") if nested else Both(), device="cpu")
    assert [(int(a), int(b)) for a, b in zip(p, p, strict=True)] == [(i, i) for i in range(5)]


def test_close_does_not_wait_for_a_loader_that_begins():
    gate, reached = threading.Event(), threading.Event()

    class Slow:
        def __iter__(self):
            reached.set()
            assert gate.wait(30)
            return iter([torch.tensor([1])])

    p = PrefetchIterator(Slow(), device="cpu")
    got = []
    beginner = threading.Thread(target=lambda: got.append(vals(p)), daemon=True)
    beginner.start()
    assert reached.wait(20)
    within(5, p.close)
    gate.set()
    beginner.join(20)
    assert got == [[1]]


@pytest.mark.parametrize("num_threads", THREADS)
def test_skipped_values_are_not_looked_into(num_threads):
    class Lazy(dict):
        def __getitem__(self, key):
            raise OSError("remote")

        def items(self):
            raise OSError("remote")

    lazy = Lazy(a=1)
    batch = {"x": torch.ones(1), "meta": lazy, "more": [{"meta": lazy}]}
    (out,) = PrefetchIterator([batch], device="cpu", num_threads=num_threads, skip_keys=["meta"])
    assert out["meta"] is lazy and out["more"][0]["meta"] is lazy
    (out,) = PrefetchIterator([batch], device="meta", num_threads=num_threads, skip_keys=["meta"])
    assert out["meta"] is lazy and out["x"].device.type == "meta"


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_skipped_value_is_not_asked_for(num_threads):
    class Video(collections.UserDict):
        def __getitem__(self, key):
            if key == "frames":
                raise OSError("remote")
            return super().__getitem__(key)

    video = Video({"x": torch.ones(1), "frames": 1})
    (out,) = PrefetchIterator([video], device="cpu", num_threads=num_threads, skip_keys=["frames"])
    assert out is video
