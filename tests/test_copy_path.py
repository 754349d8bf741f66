"""A batch's whole way to a CUDA device, without one: loader threads, lane, compiled copier, hand-over.

On the planted device a copy is done at once, so what streams and events have to keep apart is not shown here: the tests
marked ``gpu`` do that.
"""

import sys
import threading
import weakref

import numpy as np
import planted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import NO_GIL, THREADS, Ramp, bytes_of, eventually, passed_on, threads, vals, within
from planted import HOST, Planted, is_recorded
from test_property import EXAMPLES, batches, drawn, plans
from torch.utils.data import DataLoader, default_collate

from gpuprefetch import PrefetchIterator, _copier, _copy_lane
from gpuprefetch._batch import leaves
from gpuprefetch._copier import Copier
from gpuprefetch._extension import extension

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the planted device is built for Linux"),
    pytest.mark.usefixtures("device"),
]

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_signal_handler_that_draws_is_refused(num_threads, as_it_is_taken):
    """With num_threads=0, too, where what is loaded ahead is with the thread that copies."""
    it, refused = iter(Planted(DataLoader(Ramp(6)), "cpu", num_threads=num_threads)), []

    def draw():
        with pytest.raises(RuntimeError, match="can't be called by what it runs itself"):
            next(it)
        refused.append(True)

    as_it_is_taken(lambda record: record.number == 1, draw)
    assert within(20, lambda: vals(it)) == list(range(6))
    assert refused


def assert_copied(out, source, device):
    """Leaf for leaf: plain tensors are copies, dense with the strides that ``.to`` gives; all else is as it was."""
    plain = {id(tensor) for tensor in extension().split(leaves(source))[0]}
    sources, outs = leaves(source), leaves(out)
    assert len(outs) == len(sources)
    for made, given_in in zip(outs, sources, strict=True):
        if id(given_in) not in plain:
            assert made is given_in
            continue
        assert made is not given_in and type(made) is torch.Tensor
        expected = torch.empty_like(given_in).copy_(given_in)
        assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(bytes_of(made), bytes_of(expected))
        if made.numel():
            assert is_recorded(made, device)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support:UserWarning")
@EXAMPLES
@given(
    loaded=st.lists(batches, min_size=1, max_size=3),
    num_threads=st.sampled_from(THREADS),
    ahead=st.integers(1, 3),
    ring=st.sampled_from([0, MIB, 64 * MIB]),
)
@pytest.mark.filterwarnings("ignore:no pinned memory:RuntimeWarning")
def test_batches_are_the_plain_loaders(loaded, num_threads, ahead, ring, device):
    device.forget_recorded()
    with Planted(passed_on(loaded), "cpu", num_threads=num_threads, prefetch_batches=ahead, pinned_bytes=ring) as p:
        out = list(p)
    for moved, source in zip(out, loaded, strict=True):
        assert_copied(moved, source, device)


@settings(EXAMPLES, max_examples=60)
@given(plan=plans(), num_threads=st.integers(0, 5), ahead=st.integers(1, 4))
def test_batches_and_errors_are_the_plain_loaders(plan, num_threads, ahead):
    planted = Planted(plan.loader(), "cpu", num_threads=num_threads, prefetch_batches=ahead)
    assert drawn(planted) == drawn(plan.loader())


class Mixed(Ramp):
    """Samples of which some parts are gathered by the copy, and others are stacked before."""

    def __getitem__(self, i):
        image = super().__getitem__(i)
        return {
            "image": image,
            "part": image[: self.shape[0] // 2],
            "channels": image.view(8, -1).t(),
            "array": np.full((2, KIB), i, np.float32),
            "pair": (torch.tensor(i), torch.full((KIB,), i)),
            "name": f"sample {i}",
            "label": i,
        }


@pytest.mark.parametrize("num_threads", THREADS)
def test_gathered_samples_are_the_stacked_ones(num_threads, device):
    device.forget_recorded()
    dataset = Mixed(23, (16 * KIB,))
    out = list(Planted(DataLoader(dataset, batch_size=5), "cpu", num_threads=num_threads))
    assert len(out) == 5
    for number, batch in enumerate(out):
        expected = default_collate([dataset[i] for i in range(5 * number, min(5 * number + 5, 23))])
        assert list(batch) == list(expected) and batch["name"] == expected["name"]
        for made, wanted in zip(leaves(batch), leaves(expected), strict=True):
            assert made.stride() == wanted.stride() and torch.equal(made, wanted)
            assert is_recorded(made, device)


def cut(tensor):
    """Parts of it that are not dense: in long rows, in short ones, one row again and again."""
    return {
        "rows": tensor[:, :, : tensor.shape[2] // 2],
        "row and offset": tensor[1:, 1, 3:],
        "permuted": tensor[:, ::2].permute(1, 0, 2),
        "crop": tensor.unflatten(2, (8, -1))[..., 1:-1, 1:-1],
        "elements": tensor[..., ::2],
        "transposed": tensor[:, 1:].transpose(1, 2),
        "expanded": tensor[0, 0].expand(9, -1),
        "windows": tensor.flatten().unfold(0, tensor.shape[2], 7)[:50],
    }


@pytest.mark.parametrize("columns", [16, 64, 8 * KIB])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("ring", [0, MIB])
@pytest.mark.filterwarnings("ignore:no pinned memory:RuntimeWarning")
def test_what_is_not_dense(columns, dtype, ring, device):
    """By the copying threads; by torch without a ring, or where few rows are at one constant step."""
    device.forget_recorded()
    buffer = torch.empty((5, 7, columns), dtype=dtype)
    random = torch.Generator().manual_seed(columns)
    fills = [torch.randint(256, buffer.shape, generator=random).to(dtype) for _ in range(4)]

    def batches():
        for fill in fills:
            buffer.copy_(fill)
            yield cut(buffer)

    for batch, fill in zip(Planted(batches(), "cpu", pinned_bytes=ring), fills, strict=True):
        for part, wanted in zip(leaves(batch), leaves(cut(fill)), strict=True):
            wanted = wanted.to("cpu", copy=True)
            assert part.stride() == wanted.stride() and torch.equal(part, wanted)
            assert is_recorded(part, device)


@pytest.mark.parametrize(("most", "told"), [(3 * MIB, "^2 MiB of pinned memory"), (0, "^no pinned memory")])
def test_where_the_system_refuses_to_pin_so_much(most, told, monkeypatch):
    """A smaller ring, or none; one warning, and the same bytes."""

    def empty(size, *, pin_memory, **options):
        if size > most:
            raise RuntimeError("planted")
        return torch.empty(size, **options)

    monkeypatch.setattr(planted._Torch, "empty", staticmethod(empty))
    dataset = Mixed(23, (MIB,))
    with pytest.warns(RuntimeWarning, match=told) as caught:
        out = list(Planted(DataLoader(dataset, batch_size=5), "cpu"))
    assert len(caught) == 1
    for made, wanted in zip(leaves(out), leaves(list(DataLoader(dataset, batch_size=5))), strict=True):
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("num_threads", THREADS)
def test_eight_loops_at_once_through_one_ring(num_threads):
    """Each in a thread of its own. Some batches hold more than the ring, others share a piece of it."""

    class Sharing(Planted):
        copier = Copier(HOST)

    noise = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8)
    got = {}

    def run(place):
        sources = [noise[place + 977 * i :][: [3 * MIB, 100 * KIB, MIB + i][i % 3]] for i in range(12)]
        with Sharing(passed_on(sources), "cpu", num_threads=num_threads, pinned_bytes=MIB) as prefetched:
            got[place] = [torch.equal(out, source) for out, source in zip(prefetched, sources, strict=True)]

    loops = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(8)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(120)
    assert got == {place: [True] * 12 for place in range(8)}
    assert Sharing.copier._ring is None and Sharing.copier._shares == {}


@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("shape", [(), (KIB,), (3, MIB)], ids=["number", "small", "large"])
def test_a_buffer_that_collate_fills_again_is_read_first(shape, num_threads):
    """Invariant 3."""
    buffer = torch.empty(shape)
    loader = DataLoader(range(30), batch_size=1, collate_fn=lambda samples: buffer.fill_(samples[0]))
    out = list(Planted(loader, "cpu", num_threads=num_threads, pinned_bytes=4 * MIB))
    assert [(int(x.min()), int(x.max())) for x in out] == [(i, i) for i in range(30)]


@pytest.mark.parametrize("num_threads", THREADS)
def test_a_call_of_the_device_that_fails_is_an_error_of_one_epoch(num_threads, device):
    p = Planted(DataLoader(Ramp(12, (64 * KIB,)), batch_size=1), "cpu", num_threads=num_threads)
    failures = 0
    for failing in range(0, 60, 3):
        it, got = iter(p), []
        device.fail_after(failing)
        try:
            for batch in it:
                got += vals([batch])
        except RuntimeError as error:
            failures += 1
            assert "failed: planted" in str(error)
            if "recording the consumer's progress" not in str(error):  # then no batch was taken, and one may ask again
                assert next(it, "ended") == "ended"
        finally:
            device.fail_after(-1)
        assert got == list(range(len(got)))
        assert vals(p) == list(range(12))
    assert failures >= 10
    p.close()


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_epoch_left_at_any_batch_leaves_nothing(num_threads):
    before = threads()
    p = Planted(DataLoader(Ramp(6, (8 * KIB,)), batch_size=1), "cpu", num_threads=num_threads)
    for leave_after in range(7):
        for number, batch in enumerate(p):
            assert int(batch[0, 0]) == number
            if number == leave_after:
                break
    share = p._share
    assert share.copier._ring is not None
    p.close()
    assert share.copier._ring is None and share.copier._shares == {}
    assert threads(since=before) == []


def watched(made):
    """A loader of batches whose largest tensors ``made`` refers to."""

    def collate(samples):
        batch = {"x": torch.stack(samples), "small": [torch.ones(3) for _ in range(9)]}
        made.append(weakref.ref(batch["x"]))
        return batch

    return DataLoader(Ramp(8), batch_size=1, collate_fn=collate)


@pytest.mark.parametrize("num_threads", THREADS)
def test_ctrl_c_before_the_first_line_of_a_finalizer_leaves_no_thread(num_threads, interrupted_finalizer):
    epoch = iter(Planted(DataLoader(Ramp(400), batch_size=4), "cpu", num_threads=num_threads))
    next(epoch)
    assert threads()
    with interrupted_finalizer():
        del epoch
    assert eventually(lambda: not threads())


@pytest.mark.parametrize("num_threads", THREADS)
def test_an_epoch_has_one_finalizer(num_threads, finalizers):
    epochs = Planted(DataLoader(Ramp(40), batch_size=4), "cpu", num_threads=num_threads)
    with finalizers() as called:
        list(epochs)
    assert called == {"EpochIterator"}


@pytest.mark.parametrize("num_threads", THREADS)
def test_sources_and_batches_go_without_a_collection(num_threads, without_collection):
    made, handed_over = [], []
    with Planted(watched(made), "cpu", num_threads=num_threads) as p:
        for batch in p:
            handed_over.append(weakref.ref(batch["x"]))
            del batch
    assert len(made) == len(handed_over) == 8
    assert eventually(lambda: all(ref() is None for ref in made + handed_over), collect=False)


@pytest.mark.parametrize("num_threads", [1] if NO_GIL and sys.version_info < (3, 14) else [1, 3])  # see test_samples.py
def test_a_batch_that_is_ready_holds_no_source(num_threads, without_collection):
    made = []
    it = iter(Planted(watched(made), "cpu", num_threads=num_threads))
    next(it), next(it)  # before the second one a single batch is ahead
    assert eventually(lambda: len(made) == 4 and all(ref() is None for ref in made), collect=False)
    assert len(list(it)) == 6


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_epoch_that_ends_while_its_thread_waits_for_room_holds_nothing(num_threads, without_collection):
    """That wait ends by an exception, whose traceback would hold the batch."""
    made = []

    class Watched(Ramp):
        def __getitem__(self, i):
            sample = super().__getitem__(i)
            made.append(weakref.ref(sample))
            return sample

    it = iter(Planted(DataLoader(Watched(400, shape=(MIB,)), batch_size=4), "cpu", num_threads=num_threads))
    next(it)
    ready = it._epoch._ready._items
    assert eventually(lambda: len(made) >= 12 and ready.qsize() == 1, collect=False)  # the third one waits
    epoch = weakref.ref(it._epoch)
    it.close()
    del it
    assert eventually(lambda: epoch() is None and all(ref() is None for ref in made), collect=False)


def test_a_constructor_that_was_interrupted_leaves_a_ring_to_the_next(monkeypatch):
    """Where its traceback is kept, as notebooks do, its share of the ring is, too."""

    class Fresh(Planted):
        copier = Copier(HOST)

    interrupts = [KeyboardInterrupt]

    def interrupted(*size, pin_memory, **options):
        if interrupts:
            raise interrupts.pop()
        return torch.empty(*size, **options)

    monkeypatch.setattr(_copier.torch, "empty", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:
        next(iter(Fresh(passed_on([torch.ones(4)]), "cpu")))
    assert Fresh.copier._ring is None
    with Fresh(passed_on([torch.ones(4)]), "cpu") as prefetched:
        assert vals(prefetched) == [1] and Fresh.copier._ring is not None
    del kept


@pytest.mark.parametrize("at", ["_drop_ring", "_make_ring"])
@pytest.mark.parametrize("before", [True, False])
def test_a_ring_fits_again_after_an_interrupt(at, before, monkeypatch):
    copier = Copier(HOST)
    function, interrupts = getattr(copier, at), []

    def interrupted(*arguments):
        if before and interrupts:
            raise interrupts.pop()
        function(*arguments)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(copier, at, interrupted)
    copier.open(1, MIB)
    interrupts.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        copier.open(2, 2 * MIB)
    copier.open(3, MIB)
    assert copier._ring.nbytes == 2 * MIB
    copier.close(2)
    assert copier._ring.nbytes == MIB
    copier.close_all()
    assert copier._ring is None


def test_a_thread_may_fill_a_buffer_of_its_own_with_each_batch(monkeypatch):
    """As default_collate allows, which copies it."""
    made_by, filled_again = {}, threading.Event()

    class Buffers(Ramp):
        buffers = threading.local()

        def __getitems__(self, indices):
            if not hasattr(self.buffers, "one"):
                self.buffers.one = torch.empty(4, MIB)
            for place, i in enumerate(indices):
                self.buffers.one[place] = i
            made_by[indices[0]] = threading.get_ident()
            if 0 in made_by and list(made_by.values()).count(made_by[0]) > 1:
                filled_again.set()
            return list(self.buffers.one)

    prepare = _copy_lane.CopyLane.prepare

    def late(self, record):
        assert filled_again.wait(20)
        prepare(self, record)

    monkeypatch.setattr(_copy_lane.CopyLane, "prepare", late)
    loader = DataLoader(Buffers(100), batch_size=4)
    with Planted(loader, "cpu", num_threads=2, prefetch_batches=20) as prefetched:
        assert [batch[:, 0].tolist() for batch in prefetched] == [list(range(i, i + 4)) for i in range(0, 100, 4)]


class Resumable:
    """Gives the loader's own iterator, and can go on with it."""

    def __init__(self, loader):
        self.iterator = iter(loader)

    def __iter__(self):
        return self.iterator


@pytest.mark.parametrize("num_threads", [0, 1])
def test_an_iterator_that_others_go_on_with_is_left_as_it_was(num_threads):
    resumable = Resumable(DataLoader([torch.full((3,), float(i)) for i in range(80)], batch_size=2))
    with Planted(resumable, "cpu", num_threads=num_threads) as prefetched:
        assert next(prefetched).tolist() == [[0] * 3, [1] * 3]
    following = next(resumable.iterator)
    assert following.shape == (2, 3)
    assert all(batch.shape == (2, 3) for batch in PrefetchIterator(resumable, "cpu"))


@pytest.mark.parametrize("first", [0, 1])
def test_an_iterator_that_two_epochs_have_is_left_as_it_was(first):
    resumable = Resumable(DataLoader([torch.full((3,), float(i)) for i in range(80)], batch_size=2))
    plain = vars(resumable.iterator._dataset_fetcher).copy()
    epochs = [iter(Planted(resumable, "cpu", num_threads=0)), iter(PrefetchIterator(resumable, "cpu", num_threads=0))]
    assert all(next(epoch).shape == (2, 3) for epoch in epochs)
    epochs.pop(first).close()
    assert next(epochs[0]).shape == (2, 3)
    epochs[0].close()
    assert vars(resumable.iterator._dataset_fetcher) == plain and next(resumable.iterator).shape == (2, 3)


def test_a_device_that_does_not_go_on_is_waited_for_and_then_passed_by(device, monkeypatch):
    """A rank may wait for a peer that waits for it."""
    monkeypatch.setattr(_copy_lane, "OVERDUE_SECONDS", 0.2)
    p = Planted(DataLoader(Ramp(8, (8 * MIB,)), batch_size=1), "cpu")
    device.be_slow(1)
    try:
        with pytest.warns(RuntimeWarning, match="held back for within") as caught:
            assert vals(p) == list(range(8))
    finally:
        device.be_slow(0)
    assert len(caught) == 1
