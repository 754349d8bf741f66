"""Batches whose samples are not stacked on the host: the copy to the device gathers them.

Stacking 64 images of 600 KB takes longer than all the rest of their way to the device, most of it for the fresh memory
that the stack is written to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import _utils, default_collate

from gpuprefetch._batch import Stack

# What torch stacks tensors by, at the import of this module: a function that the user put in its place is theirs.
_stack = _utils.collate.collate_tensor_fn


def gathering(collate: Callable[[Any], Any], can_gather: Callable[[list[torch.Tensor]], bool]) -> Callable[[Any], Any]:
    """``collate``, or one that leaves a ``Stack`` where ``default_collate`` would stack samples that can be gathered.

    Everything else, errors, type promotions and registered collate functions among it, stays ``default_collate``'s.
    """
    if collate is not default_collate:
        return collate

    def stack_or_gather(batch: Any, *, collate_fn_map: Any = None) -> Any:
        samples = list(batch)
        if all(type(sample) is torch.Tensor for sample in samples) and can_gather(samples):
            return Stack(samples)
        return _stack(batch, collate_fn_map=collate_fn_map)

    def collate_or_gather(samples: Any) -> Any:
        functions = _utils.collate.default_collate_fn_map
        if functions.get(torch.Tensor) is not _stack or type(samples) is not list or not samples:
            return collate(samples)
        try:
            is_simple = _is_simple(samples[0], _registered(functions))
        except TypeError:  # registered for what isinstance() does not take: torch may come by without asking it
            is_simple = False
        if not is_simple:
            return collate(samples)
        return _utils.collate.collate(samples, collate_fn_map={**functions, torch.Tensor: stack_or_gather})

    return collate_or_gather


def _registered(functions: dict[Any, Any]) -> tuple[Any, ...]:
    """The types for which a collate function of the user's is registered. It may call ``collate`` with the map that it
    is given, and must find tensors then."""
    return tuple(kind for kind, function in functions.items() if not _is_torchs_own(function))


def _is_torchs_own(function: Any) -> bool:
    """By more than its module and name, which ``functools.wraps`` copies."""
    return (
        getattr(function, "__module__", None) == _utils.collate.__name__
        and getattr(_utils.collate, function.__name__, None) is function
    )


def _is_simple(sample: Any, registered: tuple[Any, ...]) -> bool:
    """True if collating such samples makes no object of a class that might look at what it is given, and calls no
    function of the user's."""
    kind: Any = type(sample)
    if isinstance(sample, registered):
        return False
    if kind is dict:
        return all(_is_simple(value, registered) for value in sample.values())
    if kind in (list, tuple) or _is_namedtuple(kind):
        return all(_is_simple(value, registered) for value in sample)
    return isinstance(sample, (str, bytes)) or not isinstance(sample, (Mapping, Sequence))


@functools.lru_cache(maxsize=256)
def _is_namedtuple(kind: Any) -> bool:
    """As ``collections.namedtuple`` makes them, in a namespace of that name. A ``__new__`` or an ``__iter__`` of the
    user's may look at what it is given."""
    if kind.__bases__ != (tuple,) or not hasattr(kind, "_fields") or kind.__iter__ is not tuple.__iter__:
        return False
    return str(getattr(kind.__new__, "__globals__", {}).get("__name__")).startswith("namedtuple_")
