"""The wrapped loader's iterator, begun on the calling thread."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from gpuprefetch._crew import Crew, Enough
from gpuprefetch._dataset import fetches_one_by_one
from gpuprefetch._samples import Batch, Samples
from gpuprefetch._seeds import SeededDataset, Seeds

Collate = Callable[[Any], Any]

_ORIGINALS = "_before_gpuprefetch"


class Source:
    """``iter(loader)``, with every random number drawn that the order of its batches depends on.

    A DataLoader draws its base seed in ``iter()`` and its sampler's seed with the first index. Drawn in a loader
    thread, the second would interleave with what the caller draws meanwhile.

    ``adapt_collate`` gives what takes the place of a DataLoader's collate function in this epoch. With several threads
    (``enough.most``) the samples come from ``samples``; to make those threads is up to the caller. With none, ``seeds``
    seed what a batch draws from the global generators: in a loader thread the step would draw from them meanwhile.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        adapt_collate: Callable[[Collate], Collate],
        enough: Enough,
        seeds: Seeds | None = None,
    ) -> None:
        self._seeds_each_batch = seeds if enough.most == 0 else None
        self._numbers = itertools.count()
        self._iterator = _begun(loader) if seeds is None else seeds.call("order", _begun_alike, loader)
        self._is_the_users = self._iterator is loader
        self._give_back: Callable[[], None] | None = None
        self.loads_in_processes = isinstance(self._iterator, _MultiProcessingDataLoaderIter)
        self.samples: Samples | None = None
        if isinstance(self._iterator, _SingleProcessDataLoaderIter):
            # A subclass may look at what its fetcher gives.
            is_torchs_own = type(self._iterator) is _SingleProcessDataLoaderIter
            fetcher = self._iterator._dataset_fetcher
            if self._is_the_users:  # who may go on with it by hand
                adapt_collate, seeds = _as_it_is, None
            # A thread that loads whole batches may have one buffer for all, of which a collated batch is a copy.
            if not is_torchs_own or (enough.most > 1 and not fetches_one_by_one(fetcher.dataset)):
                adapt_collate = _as_it_is
            self._give_back = _own_fetcher(fetcher, adapt_collate, seeds)
            if enough.most > 1 and is_torchs_own:
                self.samples = _spread(self._iterator, Crew(enough))

    def __next__(self) -> Any:
        if self._seeds_each_batch is None:
            return next(self._iterator)
        return self._seeds_each_batch.call(next(self._numbers), next, self._iterator)

    def close(self) -> None:
        """Drops the iterator. A generator or nested prefetcher that ``iter()`` made is closed first: it need not wait
        to be collected. One that runs, in another thread, sees its own end."""
        if self.samples is not None:
            self.samples.close()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:  # the loader may have given the same iterator to others, who go on with it
            give_back()
        iterator, self._iterator = self._iterator, iter(())
        close = getattr(iterator, "close", None)
        if callable(close) and not self._is_the_users and not getattr(iterator, "gi_running", False):
            close()


def why_one_thread(loader: Iterable[Any]) -> str | None:
    """Why several threads can't share the work of this loader, or None where they can."""
    if not isinstance(loader, DataLoader):
        return "it is no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "its dataset is an IterableDataset"
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return f"{kind.__name__} iterates in a way of its own"
    return None


def _begun(loader: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(loader)
    if isinstance(iterator, _SingleProcessDataLoaderIter):
        _draw_first_index(iterator)
    return iterator


def _begun_alike(loader: Iterable[Any]) -> Iterator[Any]:
    """With the same draws in each epoch. Persistent workers have one iterator, which draws its base seed but once."""
    if getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None:
        torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))
    return _begun(loader)


def _spread(source: _SingleProcessDataLoaderIter, crew: Crew) -> Samples | None:
    """Puts threads between the iterator's sampler and its fetcher."""
    fetcher = source._dataset_fetcher
    if not isinstance(fetcher, _utils.fetch._MapDatasetFetcher):
        return None
    samples = Samples(source._sampler_iter, fetcher.dataset, fetcher.collate_fn, fetcher.auto_collation, crew)
    source._sampler_iter = samples
    fetcher.fetch = Batch.result  # type: ignore[method-assign]
    return samples


def _as_it_is(collate: Collate) -> Collate:
    return collate


def _draw_first_index(source: _SingleProcessDataLoaderIter) -> None:
    indices = source._sampler_iter
    try:
        first = [next(indices)]
    except StopIteration:
        first = []
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised again where the first batch would have been
        indices = _raise([error])
        first = []
    source._sampler_iter = itertools.chain(first, indices)


def _raise(errors: list[BaseException]) -> Iterator[Any]:
    raise errors.pop()  # its traceback will hold this frame, which must not hold the error
    yield


def _own_fetcher(fetcher: Any, adapt_collate: Callable[[Collate], Collate], seeds: Seeds | None) -> Callable[[], None]:
    """Adapts the collate function, seeds samples, and turns StopIteration out of ``dataset[i]`` or ``collate_fn`` into
    an error. The result puts all back, unless another epoch has meanwhile.

    The loader would take that for the end. On the epoch's own fetcher, never on the user's loader.
    """
    _give_back(fetcher, getattr(fetcher, _ORIGINALS, {}))  # from an epoch that has not ended
    originals = {"collate_fn": fetcher.collate_fn, "dataset": fetcher.dataset}
    setattr(fetcher, _ORIGINALS, originals)
    if getattr(fetcher, "auto_collation", False):
        fetcher.collate_fn = adapt_collate(fetcher.collate_fn)
    if isinstance(fetcher, _utils.fetch._MapDatasetFetcher):
        if seeds is not None:
            fetcher.dataset = SeededDataset(fetcher.dataset, seeds)
        # The class's function, bound weakly: a fetcher that held its own method would be freed by collections only.
        fetch = functools.partial(type(fetcher).fetch, weakref.proxy(fetcher))
        fetcher.fetch = _without_stop_iteration(fetch)  # type: ignore[method-assign]
    elif isinstance(fetcher, _utils.fetch._IterableDatasetFetcher):  # whose dataset ends by StopIteration
        fetcher.collate_fn = _without_stop_iteration(fetcher.collate_fn)
    return functools.partial(_give_back, fetcher, originals)


def _give_back(fetcher: Any, originals: dict[str, Any]) -> None:
    if vars(fetcher).get(_ORIGINALS) is originals:
        for name in ("fetch", _ORIGINALS):  # the class has a fetch(), too
            vars(fetcher).pop(name, None)
        vars(fetcher).update(originals)


def _without_stop_iteration(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any) -> Any:
        try:
            return function(*args)
        except StopIteration as error:
            raise RuntimeError("the dataset or collate_fn raised StopIteration") from error

    return guarded
