"""``set_seed``: every generator and flag, and a report of them."""

import os
import random

import numpy
import pytest
import torch
from loaders import script
from torch.utils.data import DataLoader, TensorDataset

from gpuprefetch import PrefetchIterator, set_seed

pytestmark = pytest.mark.windows

ALWAYS = {
    "random",
    "numpy.random",
    "torch",
    "torch.use_deterministic_algorithms",
    "torch.use_deterministic_algorithms.warn_only",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.benchmark",
    "PYTHONHASHSEED",
}
VARIABLES = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")


def flags():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    deterministic, warn_only, cudnn_deterministic, benchmark = flags()
    python, legacy = random.getstate(), numpy.random.get_state()
    for name in VARIABLES:
        monkeypatch.setenv(name, "remembered")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        yield
    random.setstate(python)
    numpy.random.set_state(legacy)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn_deterministic, benchmark


def drawn():
    return random.random(), numpy.random.rand(), float(torch.rand(()))


def test_every_generator_begins_at_the_seed():
    set_seed(7)
    first = drawn()
    assert first == (random.Random(7).random(), numpy.random.RandomState(7).rand(), first[2])
    assert first[2] == float(torch.rand((), generator=torch.Generator().manual_seed(7)))
    set_seed(seed=7)
    assert drawn() == first
    set_seed(8)
    assert all(a != b for a, b in zip(drawn(), first, strict=True))


def test_the_defaults():
    done = set_seed()
    assert done["random"] == done["numpy.random"] == done["torch"] == 42
    assert flags() == (True, True, True, False)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("benchmark", [True, False])
def test_flags_are_set_and_set_back(deterministic, benchmark):
    set_seed(1, deterministic=not deterministic, benchmark=not benchmark)
    done = set_seed(1, deterministic=deterministic, benchmark=benchmark)
    assert flags() == (deterministic, deterministic, deterministic, benchmark)
    assert done["torch.use_deterministic_algorithms"] is deterministic
    assert done["torch.use_deterministic_algorithms.warn_only"] is deterministic
    assert done["torch.backends.cudnn.deterministic"] is deterministic
    assert done["torch.backends.cudnn.benchmark"] is benchmark


def test_it_returns_what_it_set_and_only_that():
    accelerator = {"torch.cuda"} if torch.cuda.is_available() else set()
    assert set(set_seed(5)) == ALWAYS | accelerator | {"CUBLAS_WORKSPACE_CONFIG"}
    assert set(set_seed(5)) == ALWAYS | accelerator  # the variable was set by then
    done = set_seed(5, deterministic=False)
    assert set(done) == ALWAYS | accelerator
    assert all(done[name] == 5 for name in {"random", "numpy.random", "torch"} | accelerator)


def test_variables():
    set_seed(5, deterministic=False)
    assert os.environ["PYTHONHASHSEED"] == "5" and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert set_seed(6)["PYTHONHASHSEED"] == os.environ["PYTHONHASHSEED"] == "6"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    set_seed(6, deterministic=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in set_seed(6)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.process
def test_sets_of_strings_have_one_order_in_child_processes():
    def order():
        code, out, err = script("print(list(set('abcdefghijklmnop')))", prelude="")
        assert code == 0, err
        return out

    set_seed(3)
    first = order()
    assert order() == first
    set_seed(4)
    assert order() != first


def test_the_order_without_a_seed_of_the_wrappers_comes_from_it():
    def order():
        set_seed(9)
        return torch.cat(list(PrefetchIterator(DataLoader(torch.arange(50), 10, shuffle=True), "cpu"))).tolist()

    first = order()
    assert order() == first and sorted(first) == list(range(50)) != first


@pytest.mark.process
def test_cuda_is_not_initialised():
    code, out, err = script("import gpuprefetch; gpuprefetch.set_seed(3); print(torch.cuda.is_initialized())")
    assert (code, out.strip()) == (0, "False"), err


@pytest.mark.gpu
def test_every_cuda_device_begins_at_the_seed():
    for seed in (3, 4):
        assert set_seed(seed)["torch.cuda"] == seed
        for i in range(torch.cuda.device_count()):
            expected = torch.rand(3, device=f"cuda:{i}", generator=torch.Generator(f"cuda:{i}").manual_seed(seed))
            assert torch.equal(torch.rand(3, device=f"cuda:{i}"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [0, 1, 3])
def test_batches_are_right_where_torch_fills_new_memory(threads):
    """With the deterministic algorithms it does, with a kernel that must not come after the copy."""
    set_seed(3)
    data = torch.rand(12, 1 << 18)
    loader = DataLoader(TensorDataset(data), 2, collate_fn=lambda rows: torch.stack([row for (row,) in rows]))
    for batches in (loader, DataLoader(data, 2)):  # copied whole, and gathered
        for _ in range(3):
            got = [batch.cpu() for batch in PrefetchIterator(batches, "cuda", num_threads=threads)]
            assert torch.equal(torch.cat(got), data)


INTEGER, BOOL = "an integer from 0 to 4294967295", "True or False"


@pytest.mark.parametrize(
    "name, value, error, allowed",
    [
        ("seed", -1, ValueError, INTEGER),
        ("seed", 1 << 32, ValueError, INTEGER),
        ("seed", 1.0, TypeError, INTEGER),
        ("seed", "42", TypeError, INTEGER),
        ("seed", None, TypeError, INTEGER),
        ("seed", True, TypeError, INTEGER),
        ("deterministic", 1, TypeError, BOOL),
        ("deterministic", None, TypeError, BOOL),
        ("benchmark", "yes", TypeError, BOOL),
        ("benchmark", 0, TypeError, BOOL),
    ],
)
def test_wrong_argument_sets_nothing(name, value, error, allowed):
    torch.manual_seed(1)
    before = flags(), random.getstate(), torch.get_rng_state().tolist(), dict(os.environ)
    with pytest.raises(error) as caught:
        set_seed(**{name: value})
    assert str(caught.value) == f"{name} must be {allowed}, not {value!r}"
    assert (flags(), random.getstate(), torch.get_rng_state().tolist(), dict(os.environ)) == before


@pytest.mark.parametrize("seed", [0, (1 << 32) - 1, numpy.int64(12)])
def test_which_seeds_are_allowed(seed):
    done = set_seed(seed)
    assert done["random"] == seed and type(done["random"]) is int
    assert os.environ["PYTHONHASHSEED"] == str(int(seed))
