"""``create_dataloader``: the arguments of a DataLoader, with threads for workers."""

import inspect
import os
import platform
import sys
import threading
import warnings

import pytest
import torch
from loaders import ABOUT_PROCESSES, THREADS, Ramp, lists, vals
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

import gpuprefetch
from gpuprefetch import PrefetchIterator, _create_dataloader, _doctor_probes, _recommended, create_dataloader

pytestmark = [pytest.mark.windows, pytest.mark.filterwarnings("ignore:num_workers of create_dataloader:UserWarning")]

N = 24


class Augmented(Ramp):
    """Sample i is i and a draw of its own generator."""

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand((), generator=gpuprefetch.sample_generator())], dtype=torch.float64)


def on_cpu(dataset=None, **arguments):
    return create_dataloader(Ramp(N) if dataset is None else dataset, device="cpu", **arguments)


@pytest.fixture
def fresh_notices():
    """As in a process that has not been told yet."""
    _create_dataloader._say_that_workers_are_threads.cache_clear()


# --- what it makes


def test_the_defaults_are_those_of_a_dataloader():
    batches = on_cpu()
    assert type(batches) is PrefetchIterator
    assert type(batches._loader) is DataLoader
    assert lists(batches) == lists(DataLoader(Ramp(N)))
    assert batches.batch_size == 1 and batches.num_workers == 0 and batches._num_threads == 0


@pytest.mark.parametrize("windows", [True, False, None])
@pytest.mark.parametrize("threads", THREADS)
def test_a_call_of_the_older_interface_by_keyword(threads, windows):
    batches = create_dataloader(
        dataset=Augmented(N),
        batch_size=5,
        shuffle=True,
        num_workers=threads,
        seed=42,
        force_zero_workers_on_windows=windows,
        device="cpu",
    )
    assert batches._num_threads == threads  # whatever the flag says, on every platform
    again = PrefetchIterator(DataLoader(Augmented(N), 5, shuffle=True), "cpu", seed=42, num_threads=0)
    expected = torch.cat(list(again))
    assert torch.equal(torch.cat(list(batches)), expected)
    assert sorted(expected[:, 0].tolist()) == list(range(N)) != expected[:, 0].tolist()
    assert len(expected[:, 1].unique()) == N


def test_the_signature_that_was_promised():
    parameters = inspect.signature(create_dataloader).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    by_position = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == ["dataset", "batch_size", "shuffle", "num_workers", "seed"]
    assert [defaults[name] for name in by_position[1:]] == [1, False, 0, None]
    assert defaults["device"] is defaults["force_zero_workers_on_windows"] is None


def test_arguments_by_position_are_in_the_order_of_the_older_interface():
    with pytest.raises(TypeError, match="positional"):
        create_dataloader(Ramp(N), 5, True, 0, 7, "cpu")
    batches = create_dataloader(Augmented(N), 5, True, 0, 7)
    assert batches._seed == 7 and batches.batch_size == 5
    assert list(batches)[0].shape == (5, 2)


@pytest.mark.parametrize("threads", THREADS)
def test_the_workers_are_threads_of_this_process(threads):
    seen = set()
    list(on_cpu(Ramp(N, hook=lambda i: seen.add((os.getpid(), threading.current_thread().name))), num_workers=threads))
    assert {process for process, _ in seen} == {os.getpid()}
    kind = {0: threading.main_thread().name, 1: "gpuprefetch-loader"}.get(threads, "gpuprefetch-sample")
    assert all(name.startswith(kind) for _, name in seen)


def test_arguments_of_a_dataloader_are_passed_on():
    batches = on_cpu(batch_size=5, sampler=range(7, 0, -1), drop_last=True, collate_fn=lambda samples: samples[-1])
    assert vals(batches) == [3]
    assert vals(on_cpu(batch_sampler=[[2, 1], [5]])) == [2, 5]
    assert vals(on_cpu(batch_size=None, shuffle=None)) == list(range(N))
    generator = torch.Generator().manual_seed(3)
    plain = DataLoader(Ramp(N), shuffle=True, generator=torch.Generator().manual_seed(3))
    assert vals(on_cpu(shuffle=True, generator=generator)) == vals(plain)


def test_arguments_of_the_wrapper_are_passed_on():
    batches = on_cpu(prefetch_batches=5, skip_keys=["label"], pinned_bytes=1 << 20, timeout=7)
    assert (batches._prefetch_batches, batches._skip_keys) == (5, {"label"})
    assert (batches._pinned_bytes, batches._timeout) == (1 << 20, 7.0)
    assert batches._loader.timeout == 0


def test_what_is_about_processes_is_accepted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = on_cpu(batch_size=5, num_workers=1, worker_init_fn=None, in_order=False, **ABOUT_PROCESSES)
    assert vals(batches) == [0, 5, 10, 15, 20]
    assert batches.pin_memory is False and batches.persistent_workers is False and batches.prefetch_factor is None


def test_an_iterable_dataset_is_loaded_by_one_thread():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6))

    with pytest.warns(RuntimeWarning, match="one thread iterates this loader: its dataset is an IterableDataset"):
        batches = on_cpu(Stream(), batch_size=4, num_workers=4)
    assert lists(batches) == [[0, 1, 2, 3], [4, 5]]


# --- what it says


def notices(**arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_cpu(**arguments)
    return [(warning.category, str(warning.message), warning.filename) for warning in caught]


def test_it_says_once_that_workers_are_threads(fresh_notices):
    assert notices(num_workers=0) == []
    ((kind, text, file),) = notices(num_workers=1)
    assert kind is UserWarning
    assert text == (
        "num_workers of create_dataloader is a number of threads in this process, on every platform: no worker process "
        "is started, and nothing is pickled"
    )
    assert file == __file__  # it points at the call
    assert notices(num_workers=1) == []


def test_it_says_that_worker_init_fn_is_not_called(fresh_notices):
    def never(worker):
        raise AssertionError("called")

    for _ in range(2):  # another loader may have another function
        ((kind, text, file),) = notices(worker_init_fn=never)
        assert kind is RuntimeWarning
        assert text.startswith(f"worker_init_fn={never!r} is not called: there are no worker processes")
        assert "gpuprefetch.sample_generator()" in text
        assert file == __file__


# --- wrong arguments


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"num_workers": -1}, ValueError, "num_workers must be an integer from 0 to 256, not -1"),
        ({"num_workers": 257}, ValueError, "num_workers must be an integer from 0 to 256, not 257"),
        ({"num_workers": 2.0}, TypeError, "num_workers must be an integer from 0 to 256, not 2.0"),
        ({"num_workers": None}, TypeError, "num_workers must be an integer from 0 to 256, not None"),
        ({"num_workers": True}, TypeError, "num_workers must be an integer from 0 to 256, not True"),
        ({"seed": "5"}, TypeError, "seed must be an integer from 0 to 18446744073709551615, not '5'"),
        ({"timeout": None}, TypeError, "timeout must be a number of seconds, 0 for none, not None"),
        ({"prefetch_batches": 0}, ValueError, "prefetch_batches must be an integer from 1 to 10000, not 0"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"shuffle": True, "sampler": SequentialSampler(range(3))}, ValueError, "sampler option is mutually exclusive"),
        ({"num_threads": 4}, TypeError, "unexpected keyword argument 'num_threads'"),
    ],
)
def test_wrong_argument(arguments, error, text):
    before = threading.active_count()
    with pytest.raises(error) as caught:
        on_cpu(**arguments)
    assert text in str(caught.value)
    assert threading.active_count() == before


# --- how many, and what will run


@pytest.mark.parametrize("usable, expected", [(1, 1), (3, 3), (8, 8), (9, 8), (256, 8)])
def test_the_recommended_number_is_that_of_the_usable_cpus_up_to_eight(usable, expected, monkeypatch):
    monkeypatch.setattr(_recommended, "granted_cpus", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)), raising=False)
    assert gpuprefetch.recommended_num_threads() == expected
    monkeypatch.setattr(os, "cpu_count", lambda: usable)
    monkeypatch.delattr(os, "sched_getaffinity")  # Windows, macOS
    assert gpuprefetch.recommended_num_threads() == expected


@pytest.mark.parametrize("granted, expected", [(None, 6), (0.5, 1), (1.0, 1), (1.5, 1), (2.5, 2), (6.0, 6), (64.0, 6)])
def test_what_a_container_is_granted_counts(granted, expected, monkeypatch):
    monkeypatch.setattr(_recommended, "granted_cpus", lambda: granted)
    monkeypatch.setattr(_recommended, "allowed_cpus", lambda: 6)
    assert gpuprefetch.recommended_num_threads() == _recommended.usable_cpus() == expected


def test_a_machine_that_does_not_know_its_cpus(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert gpuprefetch.recommended_num_threads() == 1


@pytest.mark.filterwarnings("ignore:with several num_threads")
def test_the_doctor_names_the_threads_that_run():
    named = _doctor_probes.host_facts().threads
    assert list(named) == ["0", "1", "2", "4", "8"]
    for requested, running in named.items():
        fetching = set()
        meeting = threading.Barrier(max(1, int(requested)))  # as many threads as workers fetch at the same time

        def hook(i, meeting=meeting, fetching=fetching):
            meeting.wait(20)
            fetching.add(threading.current_thread())

        list(on_cpu(Ramp(N, hook=hook), batch_size=8, num_workers=int(requested)))
        assert len(fetching) == max(1, running) and running == int(requested)
        assert (threading.main_thread() in fetching) == (running == 0)


def test_the_older_name():
    assert gpuprefetch.get_recommended_num_workers() == gpuprefetch.recommended_num_threads()


def test_is_windows(monkeypatch):
    assert gpuprefetch.is_windows() is (os.name == "nt")
    for name, expected in [("win32", True), ("linux", False), ("darwin", False), ("cygwin", False)]:
        monkeypatch.setattr(sys, "platform", name)
        assert gpuprefetch.is_windows() is expected


def test_printing_the_configuration(capsys, monkeypatch):
    monkeypatch.setattr(_create_dataloader, "recommended_num_threads", lambda: 6)
    gpuprefetch.print_dataloader_config(num_workers=4, batch_size=32, seed=42, shuffle=True)
    first = f"platform:   {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    assert capsys.readouterr().out.splitlines() == [
        first,
        "threads:    4, no processes; recommended: 6",
        "batch size: 32",
        "seed:       42",
        "shuffle:    True",
    ]
    gpuprefetch.print_dataloader_config(0, None)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "threads:    0, samples are loaded on the calling one; recommended: 6",
        "batch size: None",
        "seed:       none",
        "shuffle:    False",
    ]
    with pytest.raises(TypeError, match="num_workers must be an integer from 0 to 256, not '4'"):
        gpuprefetch.print_dataloader_config("4", 32)
    assert capsys.readouterr().out == ""
