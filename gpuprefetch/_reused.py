"""What is made once for a device, and then used again: streams and events."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Reused(Generic[T]):
    """Things that whoever takes them keeps until it is gone; then they are given to others.

    There is no finalizer that gives them back: Ctrl-C that arrives in one is lost. And there is no lock, since a
    collection, at any allocation, may take some, too: what is shared is changed by single operations of a list or a
    dict.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._taken: dict[object, tuple[weakref.ref[Any], list[T]]] = {}
        self._free: list[T] = []

    def take(self, owner: object, count: int) -> list[T]:
        """As many things, for ``owner``."""
        for key in list(self._taken):  # not its items, which would be allocated one by one
            taken = self._taken.get(key)
            if taken is not None and taken[0]() is None and self._taken.pop(key, None) is not None:
                self._free += taken[1]
        things: list[T] = []
        while len(things) < count:
            try:
                things.append(self._free.pop())
            except IndexError:
                things.append(self._make())
        self._taken[object()] = weakref.ref(owner), things
        return things
