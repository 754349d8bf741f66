"""Datasets that read from a file or database: one handle for each thread, as docs/slow-datasets.md shows it."""

import gc
import multiprocessing
import os
import pickle
import re
import sqlite3
import sys
import threading
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from loaders import NO_GIL, eventually, handles, threads, vals, within
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import PrefetchIterator

N, BATCH = 24, 3
LOCALS_WAIT = NO_GIL and sys.version_info >= (3, 14)  # what a threading.local holds, for a collection
PAGE = Path(__file__).parents[1] / "docs" / "slow-datasets.md"


def image(i):
    """Sample i, as every kind of file holds it."""
    return torch.arange(i, i + 100, dtype=torch.uint8)


# --- the code of the documentation


class PerThread(threading.local):
    """What ``open()`` gives: opened on first use, once in each thread, and let go of when the thread ends."""

    def __init__(self, open):  # runs again in each thread that uses the object
        self.open, self.handles = open, {}

    def __call__(self):
        process = os.getpid()  # a forked worker may not use what its parent opened
        if process not in self.handles:
            self.handles[process] = self.open()
        return self.handles[process]

    def __reduce__(self):
        return PerThread, (self.open,)


class Database:
    """A connection that is closed with this object: by itself it would wait for the garbage collector."""

    def __init__(self, connection):
        self.connection = connection

    def __del__(self):
        self.connection.close()


def open_database(path):
    return Database(sqlite3.connect(path, check_same_thread=False))  # the dataset may be dropped in another thread


class FromSqlite(Dataset):
    def __init__(self, path, length):
        self.length = length
        self.database = PerThread(partial(open_database, path))

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        connection = self.database().connection
        (image,) = connection.execute("select image from samples where id = ?", (i,)).fetchone()
        return torch.frombuffer(bytearray(image), dtype=torch.uint8)


class FromZip(Dataset):
    def __init__(self, path, length):
        self.length = length
        self.archive = PerThread(partial(zipfile.ZipFile, path))

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return torch.frombuffer(bytearray(self.archive().read(str(i))), dtype=torch.uint8)


def open_images(path):
    import h5py

    return h5py.File(path, "r")["images"]  # keeps its file open


class FromHdf5(Dataset):
    def __init__(self, path, length):
        self.length = length
        self.images = PerThread(partial(open_images, path))

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return torch.from_numpy(self.images()[i])


environments = {}
opening = threading.Lock()


def begin(path):
    """A read transaction, of the one environment that LMDB allows a process to open at a path."""
    import lmdb

    key = os.getpid(), path
    with opening:
        if key not in environments:
            environments[key] = lmdb.open(path, readonly=True)
    return environments[key].begin(buffers=True)


class FromLmdb(Dataset):
    def __init__(self, path, length):
        self.length = length
        self.transaction = PerThread(partial(begin, path))

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return torch.frombuffer(bytearray(self.transaction().get(str(i).encode())), dtype=torch.uint8)


# --- the files


def write_sqlite(path):
    db = sqlite3.connect(path)
    db.execute("create table samples (id integer primary key, image blob)")
    db.executemany("insert into samples values (?, ?)", [(i, image(i).numpy().tobytes()) for i in range(N)])
    db.commit()
    db.close()


def write_zip(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(N):
            archive.writestr(str(i), image(i).numpy().tobytes())


def write_hdf5(path):
    import h5py

    images = torch.stack([image(i) for i in range(N)]).numpy()
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(1, images.shape[1]), compression="gzip")


def write_lmdb(path):
    import lmdb

    with lmdb.open(path, map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        for i in range(N):
            transaction.put(str(i).encode(), image(i).numpy().tobytes())


KINDS = {
    FromSqlite: write_sqlite,
    FromZip: write_zip,
    FromHdf5: write_hdf5,
    FromLmdb: write_lmdb,
}
# Which not every Python has; .ci/run installs them. Older releases of lmdb open a database twice.
NEEDS = {FromHdf5: ("h5py",), FromLmdb: ("lmdb", "3.0")}
every_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(FromSqlite, marks=pytest.mark.windows),
        pytest.param(FromZip, marks=pytest.mark.windows),
        FromHdf5,  # wine has neither package
        FromLmdb,
    ],
)


@pytest.fixture
def data(kind, tmp_path):
    if kind in NEEDS:
        pytest.importorskip(*NEEDS[kind])
    path = str(tmp_path / "samples")
    KINDS[kind](path)
    yield kind(path, N)
    for key in [key for key in environments if key[1] == path]:
        environments.pop(key).close()


def assert_whole(batches):
    assert torch.equal(torch.cat(list(batches)), torch.stack([image(i) for i in range(N)]))


def prefetched(data, num_threads):
    return PrefetchIterator(DataLoader(data, batch_size=BATCH), device="cpu", num_threads=num_threads)


def watched(data):
    """The list in which each opening of the dataset's notes its thread."""
    opened = []
    ((name, handle),) = ((name, value) for name, value in vars(data).items() if isinstance(value, PerThread))

    def open():
        opened.append(threading.get_ident())
        return handle.open()

    setattr(data, name, PerThread(open))
    return opened


# --- what it promises


@every_kind
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_each_thread_opens_once_and_every_sample_is_right(data, num_threads):
    opened, p = watched(data), prefetched(data, num_threads)
    for epoch in range(3):
        assert_whole(within(60, lambda: list(p)) if num_threads else p)
        if num_threads == 0:
            assert opened == [threading.get_ident()]
        else:
            assert threading.get_ident() not in opened
            assert len(opened) == len(set(opened)) <= num_threads, f"in epoch {epoch}"
            opened.clear()  # the next epoch's threads are others, and may have the same number


@every_kind
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_handles_end_with_their_threads(data, kind, num_threads):
    if num_threads == 0 or kind is FromLmdb:
        data[0]  # what stays open: the handle of this thread, or the environment
    before, p = handles(), prefetched(data, num_threads)
    for _ in range(20):
        assert_whole(p)
        assert eventually(lambda: handles() == before, collect=False)


@pytest.mark.skipif(sys.platform == "win32", reason="wine counts no handles")
@pytest.mark.parametrize("kind", [FromSqlite, FromZip, FromHdf5])
def test_the_count_of_handles_sees_them(data):
    before, batches = handles(), iter(prefetched(data, 3))
    next(batches)
    assert handles() > before
    batches.close()
    assert eventually(lambda: handles() == before, collect=False)


@pytest.mark.parametrize("kind", [FromLmdb])
def test_lmdb_has_one_environment_and_gets_its_reader_slots_back(data):
    import lmdb

    p = prefetched(data, 3)
    for _ in range(20):
        assert_whole(p)
        assert eventually(lambda: not threads(), collect=False)
    ((key, environment),) = environments.items()
    assert environment.info()["num_readers"] <= 5  # those of one epoch, the one that opening took, and one that is kept
    with pytest.raises(lmdb.Error, match="already open in this process"):
        lmdb.open(key[1], readonly=True)


@every_kind
def test_a_dataset_with_open_handles_can_be_pickled(data):
    data[0]
    copy = pickle.loads(pickle.dumps(data))
    opened = watched(copy)
    assert_whole(prefetched(copy, 3))
    assert 1 <= len(opened) <= 3


@every_kind
def test_a_dataset_may_be_dropped_in_another_thread(data):
    data[0]  # LMDB's environment, which stays
    if LOCALS_WAIT:
        gc.collect()
    copies, before = [pickle.loads(pickle.dumps(data))], handles()
    copies[0][0]
    within(20, copies.clear)
    if LOCALS_WAIT:
        gc.collect()
    assert handles() == before


@every_kind
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_opens_its_own(data, kind):
    if kind is not FromLmdb:  # which refuses in the child what is open in the parent
        data[0]
    loader = DataLoader(data, batch_size=BATCH, num_workers=2, multiprocessing_context="fork")
    assert_whole(within(60, lambda: list(loader)))
    assert_whole(prefetched(data, 3))


@pytest.mark.parametrize("kind", [FromLmdb])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_lmdb_says_so_where_it_was_open_before_a_fork(data):
    import lmdb

    data[0]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        with pytest.raises(lmdb.Error, match="already open in this process"):
            pool.apply_async(data.__getitem__, (0,)).get(60)


# --- without it


def test_a_dataset_bound_to_its_thread_says_so_itself():
    class Bound(Dataset):
        def __init__(self):
            self.db = sqlite3.connect(":memory:")

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return self.db.execute("select ?", (i,)).fetchone()[0]

    loader = DataLoader(Bound(), batch_size=1)
    for n in (1, 4):
        with pytest.raises(sqlite3.ProgrammingError):
            within(20, lambda n=n: list(PrefetchIterator(loader, device="cpu", num_threads=n)))
    assert vals(PrefetchIterator(loader, device="cpu", num_threads=0)) == [0, 1, 2]


# --- the documentation


def without_imports(code):
    """Imports stand elsewhere there, since h5py and lmdb are not everywhere where these tests run."""
    lines = [line for line in code.splitlines() if not line.lstrip().startswith(("import ", "from "))]
    return "\n".join(line for line in lines if line)


def test_the_documentation_shows_this_code():
    _, section = PAGE.read_text(encoding="utf-8").split("## One handle a thread")
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(blocks) == 1 + len(KINDS)
    here = without_imports(Path(__file__).read_text(encoding="utf-8"))
    for block in blocks:
        assert without_imports(block) in here
