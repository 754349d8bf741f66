"""What becomes of DataLoaderX's arguments: those that are about workers, those of ours, and wrong ones."""

import threading
import warnings

import pytest
import torch
from loaders import ABOUT_PROCESSES, Gate, Ramp, eventually, vals, within
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

from gpuprefetch import DataLoaderX, _arguments

windows = pytest.mark.windows
pytestmark = pytest.mark.usefixtures("nothing_is_left")


# --- what becomes of the arguments about workers


@windows
@pytest.mark.filterwarnings("ignore:with several num_threads")
@pytest.mark.parametrize(("num_workers", "at_once"), [(0, 1), (1, 1), (3, 3)])
def test_num_workers_are_threads(num_workers, at_once):
    meeting, names, infos = threading.Barrier(at_once), set(), []

    def hook(i):
        meeting.wait(20)
        names.add(threading.current_thread().name)
        infos.append(get_worker_info())

    loader = DataLoaderX(0, Ramp(12, hook=hook), batch_size=at_once, num_workers=num_workers)
    assert within(30, lambda: len(list(loader))) == 12 // at_once
    assert len(names) == at_once and all(name.startswith("gpuprefetch-") for name in names)
    assert infos == [None] * 12


def test_that_the_dataset_is_shared_is_said_once():
    _arguments._warn_of_sharing.cache_clear()
    with pytest.warns(RuntimeWarning, match="used by several threads at once") as caught:
        for num_workers in (0, 1, 2, 4):
            DataLoaderX(0, Ramp(4), num_workers=num_workers)
    (warning,) = caught
    assert warning.filename == __file__


@windows
def test_what_has_no_effect_is_accepted_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoaderX(0, Ramp(4), num_workers=1, **ABOUT_PROCESSES)
        assert [vals(loader), vals(loader)] == [[0, 1, 2, 3]] * 2


@windows
def test_worker_init_fn_is_not_called_and_that_is_said():
    called = []
    with pytest.warns(RuntimeWarning, match=r"worker_init_fn=.* is not called.*sample_generator") as caught:
        loader = DataLoaderX(0, Ramp(4), worker_init_fn=called.append)
    (warning,) = caught
    assert warning.filename == __file__
    assert (vals(loader), called) == ([0, 1, 2, 3], [])


@windows
def test_timeout_is_that_of_next():
    gate = Gate(1)
    loader = DataLoaderX(0, Ramp(3, hook=gate), timeout=0.2)
    batches = iter(loader)
    assert vals([next(batches)]) == [0]
    with gate, pytest.raises(TimeoutError, match="timeout=0.2"):
        next(batches)
    assert within(20, lambda: vals(batches)) == [1, 2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10))

    def __len__(self):
        return 10


@windows
@pytest.mark.parametrize("num_workers", [0, 4])
def test_an_iterable_dataset_has_one_thread(num_workers):
    def make():
        return DataLoaderX(0, Stream(), batch_size=4, num_workers=num_workers)

    if num_workers:
        with pytest.warns(
            RuntimeWarning, match="one thread iterates this loader: its dataset is an Iterable"
        ) as caught:
            loader = make()
        assert caught[0].filename == __file__
    else:
        loader = make()
    assert len(loader) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@windows
def test_what_a_prefetch_iterator_takes():
    loaded = []
    arguments = {"prefetch_batches": 5, "seed": 7, "skip_keys": ["images"], "pinned_bytes": 1 << 20}
    loader = DataLoaderX(0, Ramp(40, hook=loaded.append), sampler=RandomSampler(range(40)), **arguments)
    batches = iter(loader)
    first = vals([next(loader), next(loader)])  # on CUDA few are ahead until the loop has gone round once
    assert eventually(lambda: len(loaded) == 2 + 5)
    first += vals(batches)
    assert sorted(first) == list(range(40))
    assert vals(loader) != first
    loader.set_epoch(0)
    assert vals(loader) == first


# --- wrong arguments


SECOND = "local_rank comes first, and the dataset second: DataLoaderX(0, dataset, ...), not "
RANKS = "local_rank must be an integer from 0 to 2147483647, not "
WORKERS = "num_workers must be an integer from 0 to 256, not "


@windows
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"local_rank": -1}, ValueError, RANKS + "-1"),
        ({"local_rank": 1 << 31}, ValueError, RANKS + "2147483648"),
        ({"local_rank": True}, TypeError, RANKS + "True"),
        ({"local_rank": None}, TypeError, RANKS + "None"),
        ({"local_rank": 0.0}, TypeError, RANKS + "0.0"),
        ({"local_rank": "cuda:0"}, TypeError, RANKS + "'cuda:0'"),
        ({"local_rank": Ramp(3)}, TypeError, SECOND + "Ramp and Ramp"),
        ({"local_rank": [1, 2], "dataset": 32}, TypeError, SECOND + "list and int"),
        ({"local_rank": Ramp(3), "dataset": None}, TypeError, SECOND + "Ramp and NoneType"),
        ({"dataset": None}, TypeError, SECOND + "int and NoneType"),
        ({"num_workers": -1}, ValueError, WORKERS + "-1"),
        ({"num_workers": 257}, ValueError, WORKERS + "257"),
        ({"num_workers": 1.0}, TypeError, WORKERS + "1.0"),
        ({"num_workers": None}, TypeError, WORKERS + "None"),
        ({"num_workers": True}, TypeError, WORKERS + "True"),
        ({"timeout": -1}, ValueError, "timeout must be at least 0 seconds"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds, 0 for none, not '5'"),
        ({"prefetch_batches": 0}, ValueError, "prefetch_batches must be an integer from 1 to 10000, not 0"),
        ({"seed": "x"}, TypeError, "seed must be"),
        ({"skip_keys": "meta"}, TypeError, "skip_keys must be"),
        ({"pinned_bytes": -1}, ValueError, "pinned_bytes must be"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"shuffle": True, "sampler": [1]}, ValueError, "mutually exclusive"),
        ({"batch_sampler": [[1]], "batch_size": 2}, ValueError, "mutually exclusive"),
        ({"num_threads": 2}, TypeError, "num_threads"),
        ({"no_such_thing": 1}, TypeError, "no_such_thing"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error) as caught:
        DataLoaderX(**{"local_rank": 0, "dataset": Ramp(4), **arguments})
    assert text in str(caught.value)
    with pytest.raises(TypeError, match="local_rank"):
        DataLoaderX(dataset=Ramp(4))
