"""What a batch is made of: find what moves to a device, put the moved things in its place.

``torch.utils._pytree`` takes subclasses of dict and list, dataclasses and mappings for leaves; batches are made of
them.
"""

from __future__ import annotations

import array
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import os
import threading
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Set
from typing import Any

import numpy
import torch

_HOLDERS = (  # whose items and attributes are part of what they are in
    *(Mapping, MutableSequence, tuple, Set, types.SimpleNamespace, types.MappingProxyType),
    *(functools.partial, types.CellType, torch.Tensor),
)
_SIZED = frozenset({dict, list, tuple, set, frozenset})
_MOST_LOOKED_AT = 1_000  # less than a millisecond
_TO_IS_OTHERWISE = (torch.nn.Module, numpy.ndarray, torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
foreign = threading.RLock()
"""For other libraries' ``to``, one thread at a time: it may keep marks in module state while it copies."""


def _renew_foreign() -> None:
    global foreign
    foreign = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_foreign)  # a thread that a child does not have may hold it

ATOMS = frozenset({int, float, bool, str, bytes, type(None)})  # told at a glance: lists of numbers can be long


@dataclasses.dataclass(eq=False)
class Stack:
    """What ``torch.stack(samples)`` would be: plain, contiguous tensors of one shape and dtype, at least one."""

    samples: list[torch.Tensor]


def leaves(batch: Any, skip_keys: Collection[Any] = ()) -> list[Any]:
    """The tensors of a batch and its objects that move themselves, each once, in order."""
    return _collected(batch, skip_keys, None)


def sort_out(batch: Any, skip_keys: Collection[Any]) -> tuple[list[Any], list[Any]]:
    """The same; and what is handed over as it is: all other objects but numbers and strings, and what is under skipped
    keys."""
    kept: list[Any] = []
    return _collected(batch, skip_keys, kept), kept


def _collected(batch: Any, skip_keys: Collection[Any], kept: list[Any] | None) -> list[Any]:
    found: dict[int, Any] = {}
    try:
        _collect(batch, skip_keys, found, kept)
    except RecursionError as error:
        raise RecursionError("the batch contains itself, or is nested too deeply to be looked through") from error
    return list(found.values())


def replace(batch: Any, moved: Mapping[int, Any], skip_keys: Collection[Any] = ()) -> Any:
    """The batch with ``moved[id(leaf)]`` in place of each leaf, for all of ``leaves(batch)``, which must be alive.

    Containers keep their type and are new where something in them changed; the caller's are left as they are.
    """
    if id(batch) in moved:
        return moved[id(batch)]
    changes = {}
    for key, child in children(batch, skip_keys):
        new = moved.get(id(child))
        if new is None:
            if type(child) in ATOMS:
                continue
            if _is_leaf(child):
                return _unchanged(batch)  # it makes its values anew each time it is asked
            new = replace(child, moved, skip_keys)
        if new is not child:
            changes[key] = new
    return _with(batch, changes) if changes else batch


def moves_itself(value: Any) -> bool:
    """True for an object, not a tensor, with a ``to(device, ...)`` of its own.

    A module is not taken for one: its ``to`` moves it in place, and whoever puts a module into a batch wants it where
    it is. Nor is an object whose ``to`` takes something else, such as a unit.
    """
    kind: Any = type(value)
    return _type_moves_itself(kind)


def move(value: Any, device: torch.device, **options: Any) -> Any:
    """``value.to(device, **options)``, without the options that the object's own ``to`` does not know. Of one that
    moves itself in place and gives nothing: the object."""
    kind: Any = type(value)
    if kind is torch.Tensor:
        return value.to(device, **options)
    if not isinstance(value, torch.Tensor):
        options = {name: option for name, option in options.items() if _accepts(kind, name)}
    with foreign:
        moved = value.to(device, **options)
    return value if moved is None else moved


def is_moving() -> bool:
    """True inside another library's ``to``, on this thread: it must not wait for one that wants to move something."""
    return foreign._is_owned()  # type: ignore[attr-defined, no-any-return]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that a leaf holds its memory through: strided ones, with a storage of their own.

    Looks into sparse tensors, wrapper subclasses and the attributes of objects. Empty for an opaque object.
    """
    found: dict[int, torch.Tensor] = {}
    _collect_memory(value, found, set())
    return list(found.values())


def within_reach(*things: Any) -> list[torch.Tensor]:
    """Tensors by way of which objects may hold memory on a device, beside those of ``tensors_in()``.

    What their attributes and slots hold, and containers, namespaces, dataclasses and closures there, and again what
    objects in these hold that move themselves. Any other object is no part of a batch: a model, a logger. What one
    refers to is the collector's word, so that no property of its own runs. The nearest come first, and of very many
    the farthest are not looked at.
    """
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    near = list(things)  # grows, and keeps alive what the ids stand for
    for place, one in enumerate(near):
        if id(one) not in seen:
            seen.add(id(one))
            with contextlib.suppress(Exception):  # a class that can't even be asked what it has
                if issubclass(type(one), torch.Tensor):
                    found.update((id(part), part) for part in tensors_in(one))
                inside = (each for each in _held_by(one, place < len(things)) if type(each) not in ATOMS)
                near += itertools.islice(inside, max(len(things) + _MOST_LOOKED_AT - len(near), 0))
    return list(found.values())


def _held_by(value: Any, is_given: bool) -> list[Any]:
    kind: Any = type(value)  # not isinstance(), which asks a proxy for its class
    if kind is torch.Tensor or issubclass(kind, type):
        return []
    if not is_given and kind in _SIZED and len(value) > _MOST_LOOKED_AT:
        return []
    if kind is types.FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__]
    is_holder = issubclass(kind, _HOLDERS) or hasattr(kind, "__dataclass_fields__") or moves_itself(value)
    return gc.get_referents(value) if is_given or is_holder else []


def _collect(value: Any, skip_keys: Collection[Any], found: dict[int, Any], kept: list[Any] | None) -> None:
    if _is_leaf(value):
        found.setdefault(id(value), value)
        return
    is_empty = True
    for _, child in children(value, skip_keys):
        is_empty = False
        if type(child) is torch.Tensor:  # told at a glance, as atoms are: a batch may have hundreds
            found[id(child)] = child
        elif type(child) not in ATOMS:
            _collect(child, skip_keys, found, kept)
    if kept is None:
        return
    if skip_keys and issubclass(type(value), dict):
        for key, child in dict.items(value):
            if key in skip_keys:
                _collect_kept(child, kept)
    elif is_empty or (skip_keys and isinstance(value, Mapping)):  # which may make a value only when it is asked
        _collect_kept(value, kept)


def _collect_kept(value: Any, kept: list[Any]) -> None:
    if type(value) is dict:
        for child in value.values():
            if type(child) not in ATOMS:
                _collect_kept(child, kept)
    elif type(value) in (list, tuple):
        for child in value:
            if type(child) not in ATOMS:
                _collect_kept(child, kept)
    elif gc.is_tracked(value) or isinstance(value, torch.Tensor):  # else it refers to nothing that could be found
        kept.append(value)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Stack)) or moves_itself(value)


def children(value: Any, skip_keys: Collection[Any] = ()) -> Iterable[tuple[Any, Any]]:
    """(key, index or name of a field; value) of what a container holds. Nothing of what is none."""
    if type(value) is dict and not skip_keys:
        return value.items()
    if type(value) in (list, tuple):
        return enumerate(value)
    return _children_of_others(value, skip_keys)


def _children_of_others(value: Any, skip_keys: Collection[Any]) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (str, bytes, bytearray, array.array, numpy.ndarray)):
        return
    if isinstance(value, Mapping):
        keys = value.keys()  # a TensorDict gives its rows to whoever iterates over itself
        for key in keys:
            if not skip_keys or key not in skip_keys:
                yield key, value[key]
    elif isinstance(value, (list, tuple, MutableSequence)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield field.name, getattr(value, field.name)


def _with(value: Any, changes: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return {**value, **changes}
    if type(value) is list:
        return [changes.get(i, child) for i, child in enumerate(value)]
    if isinstance(value, tuple):
        return _tuple_with(value, [changes.get(i, child) for i, child in enumerate(value)])
    if isinstance(value, (MutableMapping, MutableSequence)):
        return _container_with(value, changes)
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType({**value, **changes})
    if isinstance(value, Mapping):
        return _unchanged(value)
    return _dataclass_with(value, changes)


def _tuple_with(value: tuple[Any, ...], children: list[Any]) -> Any:
    try:
        new = tuple.__new__(type(value), children)  # past a namedtuple's own __new__, which takes fields
    except TypeError:
        return type(value)(children)  # the tuples of torch.return_types
    if hasattr(value, "__dict__"):
        new.__dict__.update(value.__dict__)
    return _recomputed(new)


def _container_with(value: Any, changes: dict[Any, Any]) -> Any:
    try:
        new = copy.copy(value)
    except Exception:
        return _unchanged(value)
    if getattr(value, "__dict__", None) is value:  # its items are its attributes
        new.__dict__ = new
    for key, child in changes.items():
        old = value[key]
        try:
            new[key] = child
        except Exception:  # it can't be changed
            return _unchanged(value)
        if value[key] is not old:  # the copy shares its content with the original, which is the caller's
            value[key] = old
            return _unchanged(value)
    return _recomputed(new)


def _dataclass_with(value: Any, changes: dict[str, Any]) -> Any:
    try:
        new = copy.copy(value)  # not the constructor: it may compute, check or lack fields
        for name, child in changes.items():
            object.__setattr__(new, name, child)  # frozen ones too
    except Exception:
        return _unchanged(value)
    return _recomputed(new)


def _recomputed(new: Any) -> Any:
    """Without what a ``cached_property`` has kept: it was computed of tensors that have moved since."""
    try:
        attributes = object.__getattribute__(new, "__dict__")
    except AttributeError:
        return new
    if attributes is new:  # its items are its attributes
        return new
    for name in [name for name in attributes if _is_cached_property(type(new), name)]:
        del attributes[name]
    return new


def _is_cached_property(kind: type, name: Any) -> bool:
    return any(isinstance(vars(base).get(name), functools.cached_property) for base in kind.__mro__)


def _unchanged(value: Any) -> Any:
    kind: Any = type(value)
    _warn_unchanged(kind)
    return value


@functools.lru_cache(maxsize=256)  # bounded: a loader may make a class for each batch
def _warn_unchanged(kind: Any) -> None:
    warnings.warn(
        f"gpuprefetch can't rebuild a {kind.__module__}.{kind.__qualname__} with its tensors moved, so it is handed "
        "over as it is; give the class a to(device, non_blocking=False) method",
        stacklevel=2,
    )


@functools.lru_cache(maxsize=256)  # bounded: a loader may make a class for each batch
def _type_moves_itself(kind: Any) -> bool:
    if not callable(getattr(kind, "to", None)) or issubclass(kind, _TO_IS_OTHERWISE):
        return False
    if hasattr(kind, "pin_memory") or hasattr(kind, "record_stream"):
        return True
    parameters = _parameters(kind)[1:]  # without self
    if not parameters or parameters[0].kind is parameters[0].KEYWORD_ONLY:
        return False
    return parameters[0].name == "device" or parameters[0].kind is parameters[0].VAR_POSITIONAL


def _accepts(kind: Any, name: str) -> bool:
    parameters = _parameters(kind)
    return not parameters or any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


@functools.lru_cache(maxsize=256)  # bounded: a loader may make a class for each batch
def _parameters(kind: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(kind.to).parameters.values())
    except (TypeError, ValueError):  # compiled, without a signature
        return []


def _collect_memory(value: Any, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        for part in _parts(value):
            if _has_storage(part):
                found.setdefault(id(part), part)
            else:
                _collect_attributes(part, found, seen)
        return
    for _, child in children(value, ()):
        _collect_memory(child, found, seen)
    if moves_itself(value):  # not any object: a reference to a model or a logger is no part of a batch
        _collect_attributes(value, found, seen)


def _collect_attributes(value: Any, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    for attribute in getattr(value, "__dict__", {}).values():
        _collect_memory(attribute, found, seen)
    for name in (name for kind in type(value).__mro__ for name in slots(kind)):
        if hasattr(value, name):
            _collect_memory(getattr(value, name), found, seen)


def slots(kind: type) -> list[str]:
    """The names that the class itself, none of its bases, has given slots."""
    names = kind.__dict__.get("__slots__", ())
    return [names] if isinstance(names, str) else list(names)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper subclass has no memory of its own
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(tensor, name))]
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        return [tensor]


def _has_storage(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.untyped_storage().data_ptr() != 0
        except RuntimeError:  # a wrapper subclass
            return False
