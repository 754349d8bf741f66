"""No process, no pickle, no shared memory: what worker processes fail at on Windows and in notebooks works."""

import functools
import multiprocessing.shared_memory
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import types
import zipfile
from multiprocessing.process import BaseProcess

import pytest
import torch
from loaders import THREADS, Ramp, eventually, threads, vals, within
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpuprefetch import PrefetchIterator, _arguments

windows = pytest.mark.windows  # on what is quick under wine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Started(Exception):
    pass


@pytest.fixture
def no_processes(monkeypatch):
    """Whatever starts a process, or maps memory that another one could open, raises."""

    def refuse(*_, **__):
        raise Started

    owners = {
        BaseProcess: ["start"],
        subprocess.Popen: ["__init__"],
        multiprocessing.shared_memory.SharedMemory: ["__init__"],
        os: ["fork", "forkpty", "posix_spawn", "spawnv", "spawnve", "system"],
        torch.UntypedStorage: [name for name in dir(torch.UntypedStorage) if "share" in name and name != "is_shared"],
    }
    for owner, names in owners.items():
        for name in names:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, refuse)


@windows
def test_workers_would_not_get_past_this(no_processes):
    with pytest.raises(Started):
        next(iter(DataLoader(Ramp(2), num_workers=1)))
    with pytest.raises(Started):
        torch.ones(1).share_memory_()


# --- what can't be pickled


class Holding(Dataset):
    """Sample i is what ``read(i)`` makes of what is held."""

    def __init__(self, held, read):
        self.held, self.read = held, read

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.as_tensor(self.read(i))


def module_function(i):
    return i + 1


def hold_local_class(folder):
    class Local(Ramp):
        pass

    return Local(6)


def hold_lambda(folder):
    return Holding(None, lambda i: i * i)


def hold_lock(folder):
    return Holding(threading.Lock(), module_function)


def hold_generator(folder):
    numbers, lock = (7 for _ in iter(int, 1)), threading.Lock()

    def read(i):
        with lock:
            return next(numbers) + i

    return Holding(numbers, read)


def hold_open_file(folder):
    (folder / "samples").write_bytes(bytes(range(50, 56)))
    file, lock = open(folder / "samples", "rb"), threading.Lock()

    def read(i):
        with lock:
            file.seek(i)
            return file.read(1)[0]

    return Holding(file, read)


def hold_database(folder):
    database, lock = sqlite3.connect(":memory:", check_same_thread=False), threading.Lock()

    def read(i):
        with lock:
            return database.execute("select ? + 1", (i,)).fetchone()[0]

    return Holding(database, read)


def hold_model_with_a_hook(folder):
    model = torch.nn.Linear(1, 1).requires_grad_(False)
    model.register_forward_hook(lambda module, inputs, output: output + 1)
    return Holding(model, lambda i: model(torch.tensor([float(i)])).tolist())


DATASETS = [
    hold_local_class,
    hold_lambda,
    hold_lock,
    hold_generator,
    hold_open_file,
    hold_database,
    hold_model_with_a_hook,
]


@windows
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("make", DATASETS)
def test_datasets_that_can_not_be_pickled(make, num_threads, device, tmp_path, no_processes):
    dataset = make(tmp_path)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(dataset)
    loader = DataLoader(dataset, batch_size=2)
    plain = [batch.tolist() for batch in loader]
    p = PrefetchIterator(loader, device=device, num_threads=num_threads)
    for _ in range(3):
        assert [batch.tolist() for batch in p] == plain
    close = getattr(getattr(dataset, "held", None), "close", None)
    if close is not None:
        close()


@pytest.mark.gpu
@pytest.mark.parametrize("num_threads", THREADS)
def test_samples_on_the_gpu_stay_in_this_process(num_threads, no_processes):
    """Sharing a CUDA tensor is what a worker process would do, and Windows can't."""
    model = torch.nn.Linear(1, 1).requires_grad_(False).cuda()
    dataset = Holding(model, lambda i: model(torch.tensor([float(i)], device="cuda")))
    loader = DataLoader(dataset, batch_size=2)
    plain = [batch.tolist() for batch in loader]
    for batches in [PrefetchIterator(loader, device="cuda", num_threads=num_threads)] * 2:
        assert [batch.tolist() for batch in batches] == plain


@windows
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("part", ["collate_fn", "sampler", "batch_sampler", "iterable dataset", "loader"])
def test_other_parts_that_can_not_be_pickled(part, num_threads, no_processes):
    class Local:
        def __init__(self, items):
            self.items, self.lock = items, threading.Lock()

        def __iter__(self):
            return iter(self.items)

        def __len__(self):
            return len(self.items)

    class Stream(Local, IterableDataset):
        pass

    loader = {
        "collate_fn": lambda: DataLoader(Ramp(4), batch_size=2, collate_fn=lambda samples: torch.stack(samples)),
        "sampler": lambda: DataLoader(Ramp(4), batch_size=2, sampler=Local(range(4))),
        "batch_sampler": lambda: DataLoader(Ramp(4), batch_sampler=Local([[0, 1], [2, 3]])),
        "iterable dataset": lambda: DataLoader(Stream(torch.arange(4)), batch_size=2),
        "loader": lambda: Local([torch.tensor([0, 1]), torch.tensor([2, 3])]),
    }[part]()
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(loader)
    p = PrefetchIterator(loader, device="cpu", num_threads=num_threads)
    for _ in range(2):
        assert vals(p) == [0, 2]


# --- programs without a main guard

PROGRAM = """
import multiprocessing, sys, threading, warnings
import torch
from torch.utils.data import DataLoader, Dataset
from gpuprefetch import PrefetchIterator

print("begun", __name__)
multiprocessing.set_start_method("spawn")
warnings.simplefilter("ignore")
make = lambda i: torch.full((2,), i)

def run(num_threads):
    class Local(Dataset):
        lock = threading.Lock()
        def __len__(self):
            return 4
        def __getitem__(self, i):
            with self.lock:
                return make(i)
    batches = PrefetchIterator(DataLoader(Local(), batch_size=2), device="cpu", num_threads=num_threads)
    return [batch[:, 0].tolist() for batch in batches]

print(run(0), run(1), run(3), multiprocessing.active_children())
"""


def as_file(folder):
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    return ["train.py"], None


def as_command(folder):
    return ["-c", PROGRAM], None


def as_input(folder):
    return ["-"], PROGRAM


def as_zip(folder):
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return ["train.zip"], None


def as_frozen(folder):
    """As PyInstaller does it: sys.frozen is set, and the program is code without a file, run as __main__."""
    return ["-c", f"import sys; sys.frozen = True; exec(compile({PROGRAM!r}, 'train', 'exec'))"], None


def by_runpy(folder):
    as_file(folder)
    return ["-c", "import runpy; runpy.run_path('train.py', run_name='__main__')"], None


WAYS = [pytest.param(as_file, marks=windows), as_command, as_input, as_zip, as_frozen, by_runpy]


@pytest.mark.process
@pytest.mark.parametrize("way", WAYS)
def test_a_program_without_a_main_guard(way, tmp_path):
    """Where processes are spawned, as on Windows, each would run the program again and need the dataset pickled."""
    arguments, text = way(tmp_path)
    done = subprocess.run(
        [sys.executable, *arguments], input=text, cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")
    batches = "[[0, 1], [2, 3]]"
    assert done.stdout.splitlines() == ["begun __main__", f"{batches} {batches} {batches} []"]


# --- a loader that has workers all the same


def run(p, leave):
    out = []
    for batch in p:
        # With later ones the loader may be at its end already, and its workers gone.
        assert out or multiprocessing.active_children()
        out += vals([batch])
        if leave == "by break":
            break
    return out


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("leave", ["at the end", "by break"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_a_loader_with_workers_leaves_no_process(device, num_threads, persistent, leave):
    before = set(multiprocessing.active_children())

    def workers():
        return set(multiprocessing.active_children()) - before

    pinned = device == "cuda"  # needs an accelerator
    context = "spawn" if pinned or sys.platform == "win32" else "fork"
    loader = DataLoader(
        Ramp(12),
        batch_size=2,
        num_workers=2,
        persistent_workers=persistent,
        pin_memory=pinned,
        multiprocessing_context=context,
    )
    p = PrefetchIterator(loader, device=device, num_threads=num_threads)
    for _ in range(2):
        assert within(100, functools.partial(run, p, leave)) == (
            list(range(0, 12, 2)) if leave == "at the end" else [0]
        )
        assert persistent or eventually(lambda: not workers())
    assert len(workers()) == (2 if persistent else 0)
    del p, loader  # persistent workers are the loader's
    assert eventually(lambda: not workers())
    assert eventually(lambda: not threads())


def on(monkeypatch, platform):
    """As in a process on that platform that has warned of nothing yet."""
    monkeypatch.setattr(_arguments, "sys", types.SimpleNamespace(platform=platform, _getframe=sys._getframe))
    _arguments._warn_of_workers.cache_clear()


@windows
@pytest.mark.parametrize("num_threads", [0, 1])
def test_workers_on_windows_are_one_warning(num_threads, monkeypatch):
    on(monkeypatch, "win32")
    loaders = [DataLoader(Ramp(4), num_workers=workers) for workers in (0, 1, 2)]
    with pytest.warns(RuntimeWarning, match="set num_workers=0, and give that number to .*, as num_threads") as caught:
        for loader in loaders:
            PrefetchIterator(loader, device="cpu", num_threads=num_threads)
    (warning,) = caught
    assert warning.filename == __file__


@windows
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_workers_elsewhere_are_no_warning(platform, monkeypatch, recwarn):
    on(monkeypatch, platform)
    PrefetchIterator(DataLoader(Ramp(4), num_workers=2), device="cpu")
    assert not recwarn.list


@windows
def test_only_a_data_loader_has_worker_processes(monkeypatch, recwarn):
    class Batches(list):
        num_workers = 2

    on(monkeypatch, "win32")
    PrefetchIterator(Batches([torch.ones(1)]), device="cpu")
    inner = PrefetchIterator(DataLoader(Ramp(4)), device="cpu")
    PrefetchIterator(inner, device="cpu")
    assert not recwarn.list
