"""What trainers ask of the object beside batches, and that it works where there is nothing but a CPU."""

import copy
import functools
import pickle
import re
import threading
import warnings

import pytest
import torch
from loaders import PRELUDE, THREADS, Ramp, script, vals
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import gpuprefetch
from gpuprefetch import PrefetchIterator

pytestmark = pytest.mark.windows


def once(loader, **arguments):
    return PrefetchIterator(loader, device="cpu", **arguments)


def twice(loader):
    return once(once(loader))


LAYERS = [once, twice]


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(5))


# --- len()


@pytest.mark.parametrize("wrap", LAYERS)
@pytest.mark.parametrize(("n", "drop", "batches"), [(10, False, 3), (10, True, 2), (8, False, 2), (0, False, 0)])
def test_len_is_the_loaders(n, drop, batches, wrap):
    p = wrap(DataLoader(Ramp(n), batch_size=4, drop_last=drop))
    assert len(p) == batches
    assert len(vals(p)) == batches
    assert len(p) == batches


@pytest.mark.parametrize("wrap", LAYERS)
@pytest.mark.parametrize(
    "loader",
    [lambda: DataLoader(Unsized(), batch_size=2), lambda: iter([]), lambda: (x for x in ())],
    ids=["iterable dataset", "iterator", "generator"],
)
def test_no_length_is_invented(loader, wrap):
    with pytest.raises(TypeError):
        len(wrap(loader()))


def test_len_follows_the_loader():
    batches = [torch.ones(1)]
    p = once(batches)
    assert len(p) == 1
    batches.append(torch.ones(1))
    assert len(p) == 2


def test_an_empty_loader_is_false_as_the_plain_one():
    assert bool(once(DataLoader(Ramp(0)))) is bool(DataLoader(Ramp(0))) is False
    assert bool(once(DataLoader(Ramp(1)))) is True


# --- attributes


@pytest.mark.parametrize("wrap", LAYERS)
@pytest.mark.parametrize(
    "name",
    [
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "drop_last",
        "collate_fn",
        "generator",
        "num_workers",
        "pin_memory",
        "persistent_workers",
        "worker_init_fn",
        "multiprocessing_context",
    ],
)
def test_attributes_are_the_loaders(name, wrap):
    loader = DataLoader(Ramp(10), batch_size=4, generator=torch.Generator())
    assert getattr(wrap(loader), name) is getattr(loader, name)


@pytest.mark.parametrize("wrap", LAYERS)
def test_a_missing_attribute(wrap):
    p = wrap(DataLoader(Ramp(10)))
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = p.no_such_thing
    assert not hasattr(p, "no_such_thing")
    assert getattr(p, "no_such_thing", 5) == 5


@pytest.mark.parametrize("wrap", LAYERS)
def test_attributes_and_methods_of_the_users_own_loader(wrap):
    class Own(DataLoader):
        epochs_seen = 3

        def describe(self, word):
            return f"{word} {self.batch_size}"

        @property
        def broken(self):
            raise ValueError("inside the property")

    p = wrap(Own(Ramp(4), batch_size=2))
    assert p.epochs_seen == 3
    assert p.describe("size") == "size 2"
    with pytest.raises(ValueError, match="inside the property"):
        _ = p.broken


@pytest.mark.parametrize("wrap", LAYERS)
@pytest.mark.parametrize("name", ["no_such_thing", "batch_size", "dataset", "sampler"])
def test_attributes_can_not_be_set(name, wrap):
    """Set on the wrapper, it would shadow the loader's without effect."""
    loader = DataLoader(Ramp(4), batch_size=2)
    p, before = wrap(loader), getattr(loader, name, None)
    with pytest.raises(AttributeError, match="is set on the loader"):
        setattr(p, name, 5)
    assert getattr(loader, name, None) is before
    with pytest.raises(AttributeError):
        p.device = "meta"
    assert p.device == torch.device("cpu")


@pytest.mark.parametrize("wrap", LAYERS)
@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_the_loaders_state_is_not_forwarded(name, wrap):
    """It is ahead by what was prefetched."""

    class Stateful:
        def __iter__(self):
            return iter(())

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    p = wrap(Stateful())
    assert not hasattr(p, name)
    with pytest.raises(AttributeError, match=name):
        getattr(p, name)


def test_special_methods_are_not_forwarded():
    class Special(list):
        def __array__(self):
            raise AssertionError("forwarded")

        def __torch_function__(self):
            raise AssertionError("forwarded")

    p = once(Special())
    for name in ("__array__", "__torch_function__", "__dict__", "__getstate_of_no_one__"):
        assert not hasattr(p, name), name


def test_the_device_has_its_own_attribute():
    assert once([]).device == torch.device("cpu")
    assert PrefetchIterator([], device="meta").device == torch.device("meta")


# --- set_epoch()


class Recorder:
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class RecordingSampler(Recorder, SequentialSampler):
    def __init__(self, data):
        Recorder.__init__(self)
        SequentialSampler.__init__(self, data)


class RecordingBatchSampler(Recorder, BatchSampler):
    def __init__(self, sampler):
        Recorder.__init__(self)
        BatchSampler.__init__(self, sampler, 2, False)


class RecordingDataset(Recorder, Ramp):
    def __init__(self):
        Recorder.__init__(self)
        Ramp.__init__(self, 4)


class RecordingStream(Recorder, IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4))


class RecordingLoader(Recorder, DataLoader):
    def __init__(self, *arguments, **named):
        Recorder.__init__(self)
        DataLoader.__init__(self, *arguments, **named)


@pytest.mark.parametrize("wrap", LAYERS)
def test_set_epoch_reaches_every_owner_once(wrap):
    data = RecordingDataset()
    inner = RecordingSampler(data)
    outer = RecordingBatchSampler(inner)
    loader = RecordingLoader(data, batch_sampler=outer)
    p = wrap(loader)
    p.set_epoch(3)
    p.set_epoch(4)
    assert [owner.epochs for owner in (loader, outer, inner, data)] == [[3, 4]] * 4


@pytest.mark.parametrize("wrap", LAYERS)
def test_set_epoch_reaches_a_sampler_that_stands_twice_once(wrap):
    data = Ramp(4)
    sampler = RecordingSampler(data)  # loader.sampler and loader.batch_sampler.sampler
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    wrap(loader).set_epoch(7)
    assert sampler.epochs == [7]


def test_set_epoch_of_an_iterable_dataset_and_of_any_loader():
    data = RecordingStream()
    once(DataLoader(data, batch_size=2)).set_epoch(2)
    assert data.epochs == [2]

    class Loader(Recorder):
        def __iter__(self):
            return iter(())

    loader = Loader()
    once(loader).set_epoch(5)
    assert loader.epochs == [5]


@pytest.mark.parametrize("wrap", LAYERS)
def test_set_epoch_is_always_there(wrap):
    for loader in ([], DataLoader(Ramp(3)), iter(())):
        p = wrap(loader)
        assert hasattr(p, "set_epoch")
        assert p.set_epoch(1) is None


def test_an_error_of_set_epoch_arrives():
    class Loader:
        def __iter__(self):
            return iter(())

        def set_epoch(self, epoch):
            raise ValueError(f"no epoch {epoch}")

    with pytest.raises(ValueError, match="no epoch 9"):
        once(Loader()).set_epoch(9)


# --- copies, text, types


@pytest.mark.parametrize("do", [copy.copy, copy.deepcopy, pickle.dumps, functools.partial(pickle.dumps, protocol=0)])
def test_copies_are_refused_in_words(do):
    p = once(DataLoader(Ramp(3), batch_size=1))
    before = threading.active_count()
    with pytest.raises(TypeError, match="PrefetchIterator can't be copied or pickled.*wrap it again"):
        do(p)
    with pytest.raises(TypeError, match="wrap it again"):
        do({"loaders": [p]}) if do is not copy.copy else do(p)
    assert threading.active_count() == before
    it = iter(p)
    with pytest.raises(TypeError, match="epoch of a PrefetchIterator can't be copied or pickled"):
        do(it)
    assert vals(it) == [0, 1, 2]


def test_repr_shows_loader_device_and_arguments():
    assert repr(once([1], prefetch_batches=3, num_threads=0)) == (
        "PrefetchIterator([1], device='cpu', prefetch_batches=3, num_threads=0)"
    )
    loader = DataLoader(Ramp(3))
    assert repr(once(loader)) == f"PrefetchIterator({loader!r}, device='cpu', prefetch_batches=2, num_threads=1)"
    assert repr(twice([])).count("PrefetchIterator(") == 2


def test_public_names():
    assert gpuprefetch.__all__ == [
        "CachedDataset",
        "DataLoaderX",
        "PrefetchIterator",
        "create_dataloader",
        "get_recommended_num_workers",
        "is_windows",
        "print_dataloader_config",
        "recommended_num_threads",
        "sample_generator",
        "sample_rng",
        "set_seed",
        "verify_reproducibility",
    ]
    assert re.fullmatch(r"\d+\.\d+\.\d+", gpuprefetch.__version__)


def test_objects_are_told_apart_by_identity():
    loader = DataLoader(Ramp(3))
    one, two = once(loader), once(loader)
    assert one != two and len({one, two, one}) == 2


def test_a_subclass_keeps_working():
    class Mine(PrefetchIterator):
        def __init__(self, loader):
            super().__init__(loader, device="cpu")
            self.name = "mine"

    p = Mine(DataLoader(Ramp(3), batch_size=1))
    assert (p.name, p.batch_size, vals(p)) == ("mine", 1, [0, 1, 2])


def test_a_subclass_that_forgets_the_constructor_gets_an_attribute_error():
    class Forgetful(PrefetchIterator):
        __slots__ = ("extra",)

        def __init__(self):
            pass

    with pytest.raises(AttributeError):
        _ = Forgetful().batch_size


# --- without an accelerator, without the compiled module


@pytest.mark.parametrize("num_threads", THREADS)
def test_the_cpu_is_silent(num_threads):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "with several num_threads")  # said once a process, so here or elsewhere
        p = PrefetchIterator(DataLoader(Ramp(4), batch_size=1), device="cpu", num_threads=num_threads)
        assert vals(p) == [0, 1, 2, 3]
        p.close()
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_no_device_is_the_cpu_where_there_is_no_accelerator():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where a driver is, and this torch can't use it
        p = PrefetchIterator(DataLoader(Ramp(4), batch_size=1))
    assert p.device == torch.device("cpu")
    assert vals(p) == [0, 1, 2, 3]


FAKE_DRIVER = """
import ctypes
class Driver:
    def __init__(self, name): loaded.append(name)
loaded = []
if torch.accelerator.is_available() or torch.version.cuda or torch.version.hip:
    print("[] warned 1")
else:
    real, ctypes.CDLL = ctypes.CDLL, Driver
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps = [PrefetchIterator([torch.ones(1)]) for _ in range(3)] + [PrefetchIterator([], device="cpu")]
    ctypes.CDLL = real
    assert all("cuda" in name for name in loaded), loaded
    assert all(w.category is RuntimeWarning and 'device="cpu"' in str(w.message) for w in caught)
    assert all("without CUDA" in str(w.message) for w in caught), caught
    print([str(p.device) for p in ps if str(p.device) != "cpu"], "warned", len(caught))
"""


@pytest.mark.process
def test_no_compiled_module_and_an_unused_driver():
    """One process for three cases: the module is blocked; what it weighs; a driver that this torch can't use."""
    code, out, err = script(
        """
        from gpuprefetch import _extension
        data = TensorDataset(torch.arange(6.))
        for num_threads in (0, 1):
            p = PrefetchIterator(DataLoader(data, batch_size=2), device="cpu", num_threads=num_threads)
            print([b[0].tolist() for b in p])
        print([b.device.type for b in PrefetchIterator([torch.ones(1)], device="meta")])
        try:
            _extension.extension()
        except ImportError as error:
            text = str(error)
        assert "gpuprefetch" in text and "install" in text and "\\n" not in text, text
        assert text.count(". ") == 0, text  # one sentence
        print("ImportError")
        """
        + FAKE_DRIVER.replace("\n", "\n        "),
        prelude="import sys; sys.modules['gpuprefetch._C'] = None\n" + PRELUDE,
    )
    assert code == 0, err
    assert err == ""
    assert out.splitlines() == [
        "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]",
        "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]",
        "['meta']",
        "ImportError",
        "[] warned 1",
    ]


IMPORT = """
import sys, time
import numpy, torch
before = set(sys.modules)
clock, cpu = time.perf_counter(), time.process_time()
import gpuprefetch
print(min(time.perf_counter() - clock, time.process_time() - cpu))
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
print("gpuprefetch._C" in sys.modules, torch.cuda.is_initialized())
"""


@pytest.mark.process
def test_the_import_is_light():
    """Under 100 ms more than torch's own, no further library, and neither the compiled module nor a device."""
    seconds = []
    for _ in range(3):  # a busy machine may need several tries
        code, out, err = script("", prelude=IMPORT)
        assert code == 0, err
        took, libraries, begun = out.splitlines()
        assert libraries == "['gpuprefetch']"
        assert begun == "False False"
        seconds.append(float(took))
        if seconds[-1] < 0.1:
            return
    raise AssertionError(f"import gpuprefetch took {seconds} s")
