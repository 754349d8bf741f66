"""What a map-style dataset is asked for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import StackDataset, Subset


def fetches_one_by_one(dataset: Any) -> bool:
    """False if a batch of samples is one call of the dataset's ``__getitems__``.

    Those of torch's own that have it only to pass it on are asked for one sample at a time where there is nothing to
    pass it on to.
    """
    if not getattr(dataset, "__getitems__", None):
        return True
    if type(dataset) is Subset:
        return fetches_one_by_one(dataset.dataset)
    if type(dataset) is StackDataset:
        children = dataset.datasets
        return all(map(fetches_one_by_one, children.values() if isinstance(children, dict) else children))
    return False
