"""The dataset sees what the caller of iter() saw: modes, devices, dtype and intra-op threads."""

import contextlib
import threading

import pytest
import torch
from loaders import THREADS, eventually, within
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import PrefetchIterator

pytestmark = pytest.mark.windows

SAMPLES = 3


def modes():
    """What user code sees of the modes that torch keeps for each thread."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ torch.ones(2, 2)
    return {
        "grad": torch.is_grad_enabled(),
        "graph": product.requires_grad,
        "inference": torch.is_inference_mode_enabled(),
        "made in inference": torch.zeros(1).is_inference(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "product dtype": product.dtype,
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "made dtype": torch.tensor([0.5]).dtype,
        "device": str(torch.zeros(1).device),
        "intra-op threads": torch.get_num_threads(),
    }


class Modes(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return modes()


class ModesByCollate(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return i


class ModesOfAGenerator:
    def __iter__(self):
        for _ in range(SAMPLES):
            yield modes()


LOADERS = {
    "dataset": lambda: DataLoader(Modes(), batch_size=None),
    "collate": lambda: DataLoader(ModesByCollate(), batch_size=1, collate_fn=lambda samples: modes()),
    "generator": ModesOfAGenerator,
}


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def intra_op_threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def several():
    with torch.no_grad(), torch.autocast("cpu", torch.float16, cache_enabled=False), default_dtype(torch.float64):
        yield


MODES = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad in no_grad": lambda: _nested(torch.no_grad(), torch.enable_grad()),
    "inference": torch.inference_mode,
    "no inference in inference": lambda: _nested(torch.inference_mode(), torch.inference_mode(False)),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "autocast off in autocast": lambda: _nested(torch.autocast("cpu"), torch.autocast("cpu", enabled=False)),
    "default dtype": lambda: default_dtype(torch.float64),
    "one intra-op thread": lambda: intra_op_threads(1),
    "three intra-op threads": lambda: intra_op_threads(3),
    "several": several,
}
# A DataLoader draws its seed on the CPU and can't run under these.
DEVICE_MODES = {
    "device context": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "cpu in meta": lambda: _nested(torch.device("meta"), torch.device("cpu")),
}


@contextlib.contextmanager
def _nested(outer, inner):
    with outer, inner:
        yield


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("mode", MODES)
def test_modes_reach_the_users_code(mode, loader, num_threads):
    p = PrefetchIterator(LOADERS[loader](), device="cpu", num_threads=num_threads)
    with MODES[mode]():
        mine = modes()
        expected = dict(mine)
        if num_threads > 1 and loader != "generator":  # several share them
            expected["intra-op threads"] = max(1, mine["intra-op threads"] // num_threads)
        seen = list(p)
        assert seen == [expected] * SAMPLES
        assert modes() == mine
        assert within(10, torch.get_num_threads) == mine["intra-op threads"]  # what a new thread gets


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("mode", DEVICE_MODES)
def test_the_default_device_reaches_the_users_code(mode, num_threads):
    p = PrefetchIterator(ModesOfAGenerator(), device="cpu", num_threads=num_threads)
    with DEVICE_MODES[mode]():
        mine = modes()
        seen = list(p)
        assert seen == [mine] * SAMPLES
        assert modes() == mine
    assert [row["device"] for row in seen] == ["cpu" if mode == "cpu in meta" else "meta"] * SAMPLES


@pytest.mark.skipif(len(THREADS) < 3, reason="sample threads are not tested here")
def test_the_default_device_reaches_sample_threads():
    """It is what it is when `iter()` has drawn the loader's seed and the sampler's first index."""

    class Sampler(list):
        def __iter__(self):
            torch.set_default_device("meta")
            return super().__iter__()

    together = threading.Barrier(3, timeout=20)
    seen = []

    class Devices(Dataset):
        def __getitem__(self, i):
            together.wait()
            seen.append((threading.get_ident(), modes()["device"]))
            return i

    loader = DataLoader(Devices(), batch_size=3, sampler=Sampler(range(3)), collate_fn=lambda samples: samples)
    try:
        assert list(PrefetchIterator(loader, device="cpu", num_threads=3)) == [[0, 1, 2]]
    finally:
        torch.set_default_device(None)
    assert len({thread for thread, _ in seen}) == 3
    assert [device for _, device in seen] == ["meta"] * 3


def test_each_mode_shows_here():
    """Without this the comparisons above could not fail."""
    plain = modes()
    for name, mode in {**MODES, **DEVICE_MODES}.items():
        with mode():
            differs = modes() != plain
        inner_undoes_outer = name in ("none", "enable_grad in no_grad", "cpu in meta")
        if name not in ("one intra-op thread", "no inference in inference", "autocast off in autocast"):
            assert differs != inner_undoes_outer, name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modes_are_those_of_iter_and_not_of_the_constructor(device):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        p = PrefetchIterator(ModesOfAGenerator(), device=device)
    outside = list(p)
    assert outside == [modes()] * SAMPLES
    with torch.no_grad():
        inside = list(p)
        assert inside == [modes()] * SAMPLES
    assert outside != inside


def test_modes_are_those_of_iter_and_not_of_next():
    p = PrefetchIterator(ModesOfAGenerator(), device="cpu", prefetch_batches=1)
    with torch.no_grad():
        it = iter(p)
        expected = modes()
    with torch.autocast("cpu", torch.bfloat16):
        assert list(it) == [expected] * SAMPLES


def test_two_epochs_keep_their_own_modes():
    p = PrefetchIterator(ModesOfAGenerator(), device="cpu", prefetch_batches=1)
    with torch.no_grad():
        one, first = iter(p), modes()
    with torch.autocast("cpu", torch.bfloat16):
        two, second = iter(p), modes()
    assert list(zip(one, two, strict=True)) == [(first, second)] * SAMPLES


def test_modes_of_the_thread_that_calls_iter():
    p = PrefetchIterator(ModesOfAGenerator(), device="cpu")

    def in_a_thread():
        with torch.inference_mode():
            return list(p), modes()

    with torch.autocast("cpu", torch.bfloat16):
        seen, theirs = within(20, in_a_thread)
    assert seen == [theirs] * SAMPLES
    assert theirs["inference"] and not theirs["autocast"]


def test_the_loader_thread_leaves_the_callers_intra_op_threads_alone():
    with intra_op_threads(3):
        inside = []

        def batches():
            for _ in range(3):
                inside.append(torch.get_num_threads())
                torch.set_num_threads(1)  # the dataset's own choice, for its own thread
                yield torch.ones(1)

        assert [int(b) for b in PrefetchIterator(batches(), device="cpu")] == [1, 1, 1]
        assert inside == [3, 1, 1]
        assert torch.get_num_threads() == 3


def test_a_mode_that_the_dataset_sets_stays_in_its_thread():
    switched = threading.Event()

    def batches():
        torch.set_grad_enabled(False)
        switched.set()
        yield torch.ones(1)
        yield torch.tensor([float(torch.is_grad_enabled())])

    it = iter(PrefetchIterator(batches(), device="cpu"))
    assert eventually(switched.is_set)
    assert torch.is_grad_enabled()
    assert [int(b) for b in it] == [1, 0]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("num_threads", THREADS)
def test_generators_are_closed_in_the_same_modes(num_threads):
    closed = []

    class Batches:
        def __iter__(self):
            try:
                while True:
                    yield torch.ones(1)
            finally:
                closed.append(modes())

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = modes()
        for _ in PrefetchIterator(Batches(), device="cpu", num_threads=num_threads):
            break
        assert eventually(lambda: closed == [expected])


@pytest.mark.parametrize("num_threads", THREADS)
def test_batches_that_need_grad_keep_their_graph_as_the_caller_has_it(num_threads):
    leaf = torch.ones(2, requires_grad=True)
    batches = [leaf, leaf * 2]
    p = PrefetchIterator(batches, device="meta", num_threads=num_threads)
    assert [(b.requires_grad, b.grad_fn is not None) for b in p] == [
        (b.requires_grad, b.grad_fn is not None) for b in (leaf.to("meta"), (leaf * 2).to("meta"))
    ]
    with torch.no_grad():
        assert [b.requires_grad for b in p] == [b.to("meta").requires_grad for b in batches]
