"""Copies of samples that share nothing that can be changed, and how much memory they take."""

from __future__ import annotations

import copy
import gc
import sys
import types
import weakref
from typing import Any

import numpy
import torch

from gpuprefetch import _batch

_SHARED_BY_COPIES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    types.TracebackType,  # not copied with its exception; its frames hold all there is
    types.FrameType,
    weakref.ref,
)


def copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy that shares nothing that can be changed, with the tensors that a batch would move on the device.

    Views become tensors of their own: the cache would keep all of the storage that they are a part of.
    """
    held = _held(value)  # alive until the end, since the memo knows them by their ids
    leaves = {} if device is None else {id(leaf): leaf for leaf in _batch.leaves(value)}
    tensors = [each for each in held.values() if isinstance(each, torch.Tensor)]
    tensors.sort(key=_copies_itself)  # last, when what they hold is copied
    memo: dict[int, Any] = {}
    for tensor in tensors:
        memo[id(tensor)] = _copied_tensor(tensor, device if id(tensor) in leaves else None, memo)
    for tensor in tensors:
        if attributes := _attributes(tensor):
            _copy_attributes(tensor, attributes, memo)
    if device is not None:
        for leaf in leaves.values():
            if not isinstance(leaf, torch.Tensor):
                memo[id(leaf)] = _batch.move(copy.deepcopy(leaf, memo), device)
    return copy.deepcopy(value, memo)


def wait_for_copies(sample: Any) -> None:
    """Until what is kept on CUDA devices is there.

    It is made on the stream of this epoch and read on those of later ones, and of other loaders, which then need not
    wait for an event of each sample. The host waits once for each sample, on its first load; with num_threads=0 for
    what the loop has queued, too.
    """
    tensors = [each for each in _held(sample).values() if isinstance(each, torch.Tensor)]
    for device in {part.device for each in tensors for part in _batch.tensors_in(each) if part.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def bytes_in(value: Any) -> int:
    """Of memory that a copy of the value takes, each object once."""
    return sum(map(_own_bytes, _held(value).values()))


def _held(value: Any) -> dict[int, Any]:
    """The value and what it holds, however deep, by id: what ``copy.deepcopy`` comes to, and never less."""
    held: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in held:
            continue
        if type(each) in _batch.ATOMS:  # told at a glance: lists of numbers can be long
            held[id(each)] = each
            continue
        if isinstance(each, _SHARED_BY_COPIES):
            continue
        held[id(each)] = each
        if isinstance(each, torch.Tensor):
            waiting += [] if _is_wrapper(each) else _attributes(each).values()
        elif _is_image(each):
            waiting += each.info.values()
        else:
            # Also what attributes, slots and compiled types hold, and no code of the object's runs.
            waiting += gc.get_referents(each)
            if isinstance(each, numpy.ndarray) and each.dtype.hasobject:  # which the collector does not see
                waiting += each.ravel().tolist()
    return held


def _own_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return sum(part.nbytes for part in _batch.tensors_in(value)) or value.numel() * value.element_size()
    if isinstance(value, numpy.ndarray):
        return value.nbytes
    if _is_image(value):
        width, height = value.size
        return int(width * height * (1 if value.mode in ("1", "L", "P") else 4))  # as Pillow stores them
    return sys.getsizeof(value, 0)


def _is_image(value: Any) -> bool:
    pillow: Any = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _copied_tensor(tensor: torch.Tensor, device: torch.device | None, memo: dict[int, Any]) -> torch.Tensor:
    if tensor.grad_fn is not None:
        raise RuntimeError("a CachedDataset can't keep a tensor that is part of an autograd graph: detach() it first")
    for part in _batch.tensors_in(tensor) if tensor.is_cuda else ():
        if part.is_cuda:
            # The cache may be dropped before this copy is done, and its memory belongs to another epoch's stream.
            part.record_stream(torch.cuda.current_stream(part.device))
    stays = device is None or device == tensor.device
    source = copy.deepcopy(tensor, memo) if _copies_itself(tensor) else tensor
    if source is not tensor and stays and _is_all_of_its_storage(source):
        return source
    plain = source.detach()
    made = plain.clone() if stays else plain.to(device, copy=True)
    if type(made) is not type(tensor) and not _is_wrapper(tensor):
        made = made.as_subclass(type(tensor))
    if source is not tensor:
        _give(made, _missing(made, _attributes(source)))
    return made.requires_grad_() if tensor.requires_grad else made


def _copy_attributes(tensor: torch.Tensor, attributes: dict[str, Any], memo: dict[int, Any]) -> None:
    made = memo[id(tensor)]
    if _copies_itself(tensor) or _is_wrapper(tensor):
        attributes = _missing(made, attributes)
    _give(made, copy.deepcopy(attributes, memo))


def _missing(made: torch.Tensor, attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if not hasattr(made, name)}


def _give(made: torch.Tensor, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(made, name, value)


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    if type(tensor) is torch.Tensor:
        return tensor.__dict__
    names = [name for kind in type(tensor).__mro__ for name in _batch.slots(kind)]
    return {**{name: getattr(tensor, name) for name in names if hasattr(tensor, name)}, **tensor.__dict__}


def _copies_itself(tensor: torch.Tensor) -> bool:
    """By a way of its class's own, as a Parameter does."""
    return type(tensor).__deepcopy__ is not torch.Tensor.__deepcopy__


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Of other tensors, which its operations look after."""
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _is_all_of_its_storage(tensor: torch.Tensor) -> bool:
    parts = _batch.tensors_in(tensor)
    return all(part.untyped_storage().nbytes() <= part.nbytes for part in parts)
