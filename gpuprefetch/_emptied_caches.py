"""All caches of a dataset, empty for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from gpuprefetch._cached_dataset import CachedDataset, _Kept


@contextlib.contextmanager
def emptied_caches(dataset: Any) -> Iterator[None]:
    """The caches in the dataset keep nothing at first, and afterwards what they kept before, and nothing else.

    Looks into ``dataset`` and ``datasets``, as torch's own wrappers name what they hold, and into each attribute that
    is a Dataset.
    """
    before = [(cache, cache._kept) for cache in _caches(dataset)]
    try:
        for cache, _ in before:
            cache._kept = _Kept()
        yield
    finally:
        for cache, kept in before:
            cache._kept = kept


def _caches(dataset: Any) -> list[CachedDataset]:
    found: dict[int, Any] = {}
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = each
        attributes = getattr(each, "__dict__", {})
        several = attributes.get("datasets", ())
        waiting += (
            several.values() if isinstance(several, dict) else several if isinstance(several, (list, tuple)) else ()
        )
        waiting += [attributes.get("dataset"), *(value for value in attributes.values() if isinstance(value, Dataset))]
    return [each for each in found.values() if isinstance(each, CachedDataset)]
