"""What a batch holds, as digests that can be kept for a whole epoch, and where two batches differ."""

from __future__ import annotations

import array
import dataclasses
import datetime
import enum
import hashlib
import itertools
import numbers
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy
import torch

from gpuprefetch._batch import children, moves_itself, tensors_in

_SHOWN_BY_REPR = (
    str,
    bytes,
    bytearray,
    array.array,
    numbers.Number,
    type(None),
    range,
    enum.Enum,
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
)

_NOTHING = object()


class Value(NamedTuple):
    """A container or leaf of a batch."""

    path: str  # as one would write it behind the batch: ['images'][0]
    kind: str
    digest: bytes | None  # None: one whose value can't be seen


def fingerprint(batch: Any) -> list[Value]:
    """All containers and leaves of a batch, in order. Equal ones: the same structure, types, shapes and bytes."""
    return [_value(path, value) for path, value in _walk(batch, "")]


def first_difference(found: list[Value], expected: list[Value]) -> tuple[str, str] | None:
    """The path of the first value that differs, and how."""
    for a, b in itertools.zip_longest(found, expected):
        if a is None or b is None or a.path != b.path:
            reordered = {value.path for value in found} == {value.path for value in expected}
            return (a or b).path, "in another place among the keys" if reordered else "only in one of them"
        if a.kind != b.kind:
            return a.path, f"{a.kind}, but {b.kind}"
        if a.digest != b.digest:
            return a.path, f"a {a.kind} of other bytes"
    return None


def first_unequal_element(path: str, found: Any, expected: Any) -> tuple[str, str] | None:
    """Where in the leaf at ``path`` of two batches the first element differs, and the two; None if it has none."""
    ours, theirs = _at(path, found), _at(path, expected)
    if isinstance(ours, _SHOWN_BY_REPR) and isinstance(theirs, _SHOWN_BY_REPR):
        return None if repr(ours) == repr(theirs) else (path, f"{_short(ours)}, but {_short(theirs)}")
    a, b = _as_array(ours), _as_array(theirs)
    if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
        return None
    elements = [numpy.frombuffer(each.tobytes(), numpy.uint8).reshape(each.size, -1) for each in (a, b)]
    unequal = (elements[0] != elements[1]).any(axis=1)
    if not unequal.any():
        return None
    place = tuple(int(i) for i in numpy.unravel_index(int(unequal.argmax()), a.shape))
    return f"{path}{list(place) if place else ''}", f"{_short(a[place].item())}, but {_short(b[place].item())}"


def _at(path: str, batch: Any) -> Any:
    return next((value for at, value in _walk(batch, "") if at == path), _NOTHING)


def _walk(value: Any, path: str, around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    yield path, value
    around = (*around, id(value))
    held: Any
    if isinstance(value, (numpy.ndarray, numpy.void)) and value.dtype.names is not None:
        held = [(name, value[name]) for name in value.dtype.names]  # there may be any bytes between them
    elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        held = zip(numpy.ndindex(value.shape), value.ravel(), strict=True)
    elif isinstance(value, torch.Tensor) and value.is_nested:
        held = enumerate(value.unbind())
    else:
        held = children(value)
    for key, child in held:
        yield from _walk(child, path + (f".{key}" if dataclasses.is_dataclass(value) else f"[{key!r}]"), around)
    for name, child in _attributes(value).items():
        if id(child) not in around:  # an object may know what it is a part of
            yield from _walk(child, f"{path}.{name}", around)


def _attributes(value: Any) -> dict[str, Any]:
    """What a tensor, a container or an object that moves itself has beside its bytes, its items or its fields."""
    if isinstance(value, torch.Tensor):
        return {} if value.is_nested else value.__dict__  # a jagged one keeps its layout there
    is_container = isinstance(value, (Mapping, list, tuple))
    attributes = getattr(value, "__dict__", {}) if is_container or moves_itself(value) else {}
    return {} if attributes is value else attributes  # a mapping whose items are its attributes


def _value(path: str, value: Any) -> Value:
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        if value.is_nested:  # its parts are values of their own
            return Value(path, f"nested {name} of {len(value.unbind())}", b"")
        kind = f"{name} of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if value.is_meta:
            return Value(path, f"meta {kind}", None)
        return Value(path, kind, _digest([_tensor_bytes(part) for part in _strided_parts(value)]))
    if isinstance(value, numpy.ndarray):
        kind = f"{name} of {value.dtype} {list(value.shape)}"
        if value.dtype.hasobject or value.dtype.names is not None:  # its elements or fields are values of their own
            return Value(path, kind, b"")
        return Value(path, kind, _digest([_array_bytes(value)]))
    if isinstance(value, numpy.void) and value.dtype.names is not None:
        return Value(path, f"{name} of {value.dtype}", b"")
    if isinstance(value, _SHOWN_BY_REPR):
        return Value(path, name, _digest([repr(value).encode()]))
    if isinstance(value, (set, frozenset)) and all(isinstance(each, _SHOWN_BY_REPR) for each in value):
        return Value(path, f"{name} of {len(value)}", _digest([each.encode() for each in sorted(map(repr, value))]))
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        seen = all(isinstance(each, _SHOWN_BY_REPR) for each in ends)
        return Value(path, name, _digest([repr(value).encode()]) if seen else None)
    if hasattr(value, "__array_interface__"):  # a PIL image
        pixels = numpy.asarray(value)
        return Value(path, f"{name} of {pixels.dtype} {list(pixels.shape)}", _digest([pixels.tobytes()]))
    held = sum(1 for _ in children(value))
    if dataclasses.is_dataclass(value) or (isinstance(value, Collection) and held == len(value)):
        return Value(path, f"{name} of {held}", b"")  # a set, say, has a length and is not walked
    return Value(path, name, b"" if _attributes(value) else None)


def _digest(parts: list[Any]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return [tensor.to_dense()]
    return tensors_in(tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain: Any = tensor.detach().as_subclass(torch.Tensor)
    if any(getattr(plain, "names", ())):
        plain = plain.rename(None)
    if plain._is_zerotensor():
        plain = torch.zeros_like(plain)
    dense: torch.Tensor = plain.cpu().resolve_conj().resolve_neg().contiguous()
    return dense


def _tensor_bytes(tensor: torch.Tensor) -> Any:
    return _dense(tensor).reshape(-1).view(torch.uint8).numpy()


def _array_bytes(array: numpy.ndarray[Any, Any]) -> bytes:
    """Of its elements. Some bytes of a long double mean nothing, so they count by what they show."""
    if array.dtype.char in "gG":
        return repr(array.ravel().tolist()).encode()
    return array.tobytes()


def _as_array(value: Any) -> numpy.ndarray[Any, Any] | None:
    """An array that has the elements of a leaf, or None where it has no such form."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return None
        dense = _dense(value)
        if dense.dtype.is_floating_point or dense.dtype.is_complex:  # NumPy does not know all of them
            dense = dense.to(torch.complex128 if dense.dtype.is_complex else torch.float64)
        return dense.numpy()
    if isinstance(value, numpy.ndarray) and (value.dtype.hasobject or value.dtype.names or value.dtype.char in "gG"):
        return None
    if isinstance(value, numpy.ndarray) or hasattr(value, "__array_interface__"):
        return numpy.asarray(value)
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
