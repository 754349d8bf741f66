"""A wrong argument is named, with its value and what is allowed, before anything is begun."""

import fractions
import sys
import threading
import warnings

import numpy
import pytest
import torch
from loaders import vals
from torch.utils.data import IterableDataset, Subset, TensorDataset

from gpuprefetch import PrefetchIterator, _arguments, _extension

pytestmark = pytest.mark.windows


class Untouched:
    """A loader that must not be begun."""

    def __iter__(self):
        raise AssertionError("iterated")

    def __len__(self):
        raise AssertionError("measured")

    def __getitem__(self, i):
        raise AssertionError("indexed")


NAN, INFINITY = float("nan"), float("inf")
TENSOR = torch.tensor(2)

# argument, value, error, what its text must hold beside the argument's name and the value
WRONG = [
    ("prefetch_batches", 0, ValueError, "an integer from 1 to 10000"),
    ("prefetch_batches", -3, ValueError, "an integer from 1 to 10000"),
    ("prefetch_batches", 1.5, TypeError, "an integer from 1 to 10000"),
    ("prefetch_batches", 2.0, TypeError, "an integer from 1 to 10000"),
    ("prefetch_batches", "2", TypeError, "an integer from 1 to 10000"),
    ("prefetch_batches", None, TypeError, "an integer from 1 to 10000"),
    ("prefetch_batches", True, TypeError, "an integer from 1 to 10000"),
    ("prefetch_batches", TENSOR, TypeError, "an integer from 1 to 10000"),
    ("num_threads", -1, ValueError, "an integer from 0 to 256"),
    ("num_threads", 257, ValueError, "an integer from 0 to 256"),
    ("num_threads", "auto", TypeError, "an integer from 0 to 256"),
    ("num_threads", 1.0, TypeError, "an integer from 0 to 256"),
    ("num_threads", None, TypeError, "an integer from 0 to 256"),
    ("num_threads", False, TypeError, "an integer from 0 to 256"),
    ("skip_keys", "label", TypeError, "a collection of mapping keys, such as a list"),
    ("skip_keys", b"label", TypeError, "a collection of mapping keys, such as a list"),
    ("skip_keys", 5, TypeError, "a collection of mapping keys, such as a list"),
    ("skip_keys", None, TypeError, "a collection of mapping keys, such as a list"),
    ("skip_keys", [["label"]], TypeError, "mapping keys"),
    ("seed", -1, ValueError, "an integer from 0 to 18446744073709551615"),
    ("seed", 1 << 64, ValueError, "an integer from 0 to 18446744073709551615"),
    ("seed", 1.0, TypeError, "an integer from 0 to 18446744073709551615"),
    ("seed", "5", TypeError, "an integer from 0 to 18446744073709551615"),
    ("seed", True, TypeError, "an integer from 0 to 18446744073709551615"),
    ("pinned_bytes", -1, ValueError, "an integer from 0 to 1099511627776"),
    ("pinned_bytes", 1e9, TypeError, "an integer from 0 to 1099511627776"),
    ("pinned_bytes", "64M", TypeError, "an integer from 0 to 1099511627776"),
    ("pinned_bytes", True, TypeError, "an integer from 0 to 1099511627776"),
    ("timeout", -1, ValueError, "at least 0 seconds"),
    ("timeout", -0.5, ValueError, "at least 0 seconds"),
    ("timeout", NAN, ValueError, "at least 0 seconds"),
    ("timeout", INFINITY, ValueError, "at least 0 seconds"),
    ("timeout", "3", TypeError, "a number of seconds, 0 for none"),
    ("timeout", None, TypeError, "a number of seconds, 0 for none"),
    ("timeout", True, TypeError, "a number of seconds, 0 for none"),
    ("timeout", 1j, TypeError, "a number of seconds, 0 for none"),
    ("device", "gpu", ValueError, "a torch device, such as 'cuda:0' or 'cpu'"),
    ("device", "", ValueError, "a torch device, such as 'cuda:0' or 'cpu'"),
    ("device", "cuda:x", ValueError, "a torch device, such as 'cuda:0' or 'cpu'"),
    ("device", -1, ValueError, "a torch device, such as 'cuda:0' or 'cpu'"),
    ("device", 1.5, TypeError, "a torch.device, a string, an index or None"),
    ("device", True, TypeError, "a torch.device, a string, an index or None"),
    ("device", ["cpu"], TypeError, "a torch.device, a string, an index or None"),
    ("device", TENSOR, TypeError, "a torch.device, a string, an index or None"),
]


@pytest.mark.parametrize(
    ("name", "value", "kind", "allowed"), WRONG, ids=[f"{name}={value!r}" for name, value, _, _ in WRONG]
)
def test_wrong_argument(name, value, kind, allowed):
    before = threading.active_count()
    with pytest.raises(kind) as caught:
        PrefetchIterator(Untouched(), **{"device": "cpu", name: value})
    text = str(caught.value)
    assert type(caught.value) is kind
    assert text.startswith(name)
    assert repr(value) in text
    assert allowed in text
    assert "\n" not in text
    assert threading.active_count() == before


@pytest.mark.parametrize("loader", [5, None, 1.5, object(), PrefetchIterator])
def test_wrong_loader(loader):
    with pytest.raises(TypeError) as caught:
        PrefetchIterator(loader, device="cpu")
    assert str(caught.value) == f"loader must be an iterable of batches, not {type(loader).__name__}"


@pytest.mark.parametrize("dataset", [TensorDataset(torch.ones(4)), Subset([1, 2], [0])])
def test_a_dataset_is_no_loader(dataset):
    with pytest.raises(TypeError) as caught:
        PrefetchIterator(dataset, device="cpu")
    name = type(dataset).__name__
    assert str(caught.value) == f"loader must be an iterable of batches; wrap a DataLoader of the dataset {name}"


def test_a_dataset_that_iterates_is_a_loader():
    class Batches(IterableDataset):
        def __iter__(self):
            return iter([torch.ones(2), torch.zeros(2)])

    assert [batch.tolist() for batch in PrefetchIterator(Batches(), device="cpu")] == [[1, 1], [0, 0]]


@pytest.mark.parametrize("later", ["transform", "static_buffers", "batch_size", "prefetch_factor"])
def test_an_argument_that_does_not_exist(later):
    with pytest.raises(TypeError, match=f"'{later}'"):
        PrefetchIterator(Untouched(), device="cpu", **{later: None})


def test_arguments_after_the_device_have_names():
    with pytest.raises(TypeError, match="positional"):
        PrefetchIterator(Untouched(), "cpu", 2)


def test_the_loader_is_required():
    with pytest.raises(TypeError, match="loader"):
        PrefetchIterator()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)], ids=repr)
def test_cuda_without_cuda(device):
    before = threading.active_count()
    with pytest.raises(RuntimeError) as caught:
        PrefetchIterator(Untouched(), device=device)
    text = str(caught.value)
    assert f"device {device!r} was asked for" in text
    assert ("built without CUDA" in text) == (torch.version.cuda is None)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"prefetch_batches": numpy.int64(3)},
        {"num_threads": numpy.uint8(1)},
        {"pinned_bytes": 0},
        {"pinned_bytes": numpy.int32(1 << 20)},
        {"timeout": numpy.float32(30)},
        {"timeout": fractions.Fraction(61, 2)},
        {"timeout": 30},
        {"skip_keys": {"label": 1}.keys()},
        {"skip_keys": ("label", 3, None)},
        {"device": torch.device("cpu")},
        {"device": "cpu:0"},
    ],
    ids=repr,
)
def test_what_is_allowed(arguments):
    p = PrefetchIterator([torch.tensor([i]) for i in range(3)], **{"device": "cpu", **arguments})
    assert vals(p) == [0, 1, 2]
    assert vals([next(p)]) == [0]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="torch is a GPU build")
@pytest.mark.parametrize("there", [True, False], ids=["driver", "no driver"])
def test_a_cpu_build_of_torch_beside_a_driver(there, monkeypatch):
    always_there = "kernel32.dll" if sys.platform == "win32" else None  # None: the program itself
    monkeypatch.setattr(_arguments, "driver_library", lambda: always_there if there else "no-such-library")
    _arguments._warn_if_nvidia_driver.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert PrefetchIterator([]).device == torch.device("cpu")
        PrefetchIterator([])
    _arguments._warn_if_nvidia_driver.cache_clear()
    assert len(caught) == there  # once, if at all
    for warning in caught:
        text = str(warning.message)
        assert "this machine has an NVIDIA driver, but this torch is built without CUDA" in text
        assert "`python -m gpuprefetch` says more" in text
        assert warning.filename == __file__
        assert "\n" not in text


# --- where warnings point


def within_module(name, function):
    """Calls it from a function of a module of that name."""
    names = {"__name__": name, "function": function}
    exec("def call(): return function()", names)
    return names["call"]


@pytest.mark.parametrize(
    "between, passed",
    [
        (["gpuprefetch._a"], True),
        (["contextlib"], True),
        (["gpuprefetch._a", "contextlib", "gpuprefetch._b"], True),
        (["contextlibs"], False),
        (["gpuprefetcher._a"], False),
        (["contextlib", "another", "gpuprefetch._a"], False),
    ],
    ids=str,
)
def test_where_a_warning_points(between, passed):
    call = within_module("gpuprefetch._asks", _arguments.callers_level)
    for name in reversed(between):
        call = within_module(name, call)
    expected = 2 + len(between) if passed else 2 + next(i for i, n in enumerate(reversed(between)) if n not in PASSED)
    assert call() == expected


PASSED = ("contextlib", "gpuprefetch._a", "gpuprefetch._b")


# --- the compiled module


def test_a_module_built_for_another_torch():
    for built, running in [((2, 6), "2.7.0"), ((2, 1), "2.13.0+cpu"), ((2, 13), "2.1.3"), ((2, 13), "3.13.0")]:
        with pytest.raises(ImportError) as caught:
            _extension.check_torch(built, running)
        text = str(caught.value)
        assert f"built for torch {built[0]}.{built[1]}," in text
        assert f"torch {running} is running" in text
        assert f"rebuild it with {_extension.REBUILD}" in text
        assert "\n" not in text


@pytest.mark.parametrize("running", ["2.13.0", "2.13.1+cu130", "2.13.0a0+git12ab", "2.13.0.dev20260101+cpu"])
def test_a_module_built_for_this_torch(running):
    assert _extension.check_torch((2, 13), running) is None


def test_a_missing_module(monkeypatch, tmp_path):
    monkeypatch.setattr(_extension, "__file__", str(tmp_path / "gpuprefetch" / "_extension.py"))
    text = _extension._missing(ImportError("libc10.so: no such file"))
    assert "libc10.so: no such file" in text
    assert f"rebuild it with {_extension.REBUILD}" in text
    assert "\n" not in text


def test_a_source_folder_that_hides_the_installed_package(monkeypatch, tmp_path):
    (tmp_path / "setup.py").touch()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "gpuprefetch").mkdir()
    monkeypatch.setattr(_extension, "__file__", str(tmp_path / "gpuprefetch" / "_extension.py"))
    text = _extension._missing(ImportError("No module named 'gpuprefetch._C'"))
    assert str(tmp_path) in text
    assert "would hide an installed package" in text
    assert "install it (`python -m pip install .`) and start Python in another folder" in text
    assert "\n" not in text


@pytest.mark.parametrize("name", ["_C.cpython-311-x86_64-linux-gnu.so", "_C.cp312-win_amd64.pyd"])
def test_an_editable_install_whose_module_does_not_load(name, monkeypatch, tmp_path):
    """The module is there: the loader's own words say why it can't be used, and not where Python was started."""
    (tmp_path / "setup.py").touch()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "gpuprefetch").mkdir()
    (tmp_path / "gpuprefetch" / name).touch()
    monkeypatch.setattr(_extension, "__file__", str(tmp_path / "gpuprefetch" / "_extension.py"))
    text = _extension._missing(ImportError("undefined symbol: _ZN3c10"))
    assert "undefined symbol: _ZN3c10" in text
    assert "rebuild it with" in text
    assert "has no compiled module" not in text


@pytest.mark.parametrize("epoch, error", [(-1, ValueError), (1.0, TypeError), ("2", TypeError)])
def test_set_epoch_with_a_seed_takes_a_number(epoch, error):
    with pytest.raises(error, match="epoch must be an integer from 0 to 18446744073709551615, not"):
        PrefetchIterator(Untouched(), "cpu", seed=1, num_threads=0).set_epoch(epoch)
