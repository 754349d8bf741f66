"""The copy stream, pinned ring and events of one CUDA device, shared by all objects of the process."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gpuprefetch._environment import relaxed_capture_mode
from gpuprefetch._extension import extension
from gpuprefetch._recommended import usable_cpus
from gpuprefetch._reused import Reused

if TYPE_CHECKING:
    from gpuprefetch import _C

DEFAULT_PINNED_BYTES = 64 << 20
_LEAST_PINNED_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_LEAST_PIECES = 8
_MOST_COPY_THREADS = 8
_NOT_YET = -1  # what nobody asks for

_copiers: dict[torch.device, Copier] = {}
_lock = threading.RLock()  # re-entrant: a collection may close a Share at any allocation


def piece_bytes(ring_bytes: int) -> int:
    """Of the pieces that a ring of so many bytes is cut into."""
    return min(_PIECE_BYTES, ring_bytes // _LEAST_PIECES)


class Copier:
    """What one device's copies share.

    One copy stream for all: the allocator keeps free memory for each stream apart, so a stream an object or an epoch
    would make reserved memory grow. From the high-priority pool, since torch hands pool streams out in turn and one
    from the usual pool may be the user's too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.native: _C.DeviceCopier = extension().DeviceCopier(self.stream, _copy_threads())
        self._events = Reused(self._make_event)
        self._shares: dict[int, int] = {}
        self._pinned_bytes: int | None = None
        self._fitting = False
        self._ring: torch.Tensor | None = None
        self._ring_events: list[torch.cuda.Event] = []

    @classmethod
    def of(cls, device: torch.device) -> Copier:
        """The device's one copier."""
        with _lock, relaxed_capture_mode(), torch.cuda.device(device):
            if device not in _copiers:
                _copiers[device] = cls(device)
            return _copiers[device]

    def take_events(self, owner: object, count: int) -> list[torch.cuda.Event]:
        """Events on which a wait sleeps. They are the owner's until it is gone."""
        return self._events.take(owner, count)

    def _make_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)  # makes the handle
        return event

    def open(self, key: int, pinned_bytes: int) -> None:
        with _lock:
            self._shares[key] = pinned_bytes
            self._fit_ring()

    def close(self, key: int) -> None:
        with _lock:
            if self._shares.pop(key, None) is not None:
                self._fit_ring()

    def close_all(self) -> None:
        with _lock:
            self._shares.clear()
            self._fit_ring()
        try:
            self.stream.query()
        except RuntimeError:
            self.native.leak_handed_over()

    def _fit_ring(self) -> None:
        if self._fitting:  # a collection on the way closed another share: the loop below looks again
            return
        self._fitting = True
        try:
            while (wanted := max(self._shares.values(), default=None)) != self._pinned_bytes:
                self._pinned_bytes = _NOT_YET  # Ctrl-C may come before the end
                with relaxed_capture_mode(), torch.cuda.device(self.device):
                    self._drop_ring()
                    if wanted is not None:
                        self._make_ring(wanted)
                    self._pinned_bytes = wanted
        finally:
            self._fitting = False

    def _drop_ring(self) -> None:
        if self._ring is None:
            return
        try:
            self.native.set_ring(0, 0, [])
        except RuntimeError:
            _leak(self._ring, *self._ring_events)  # the device is beyond reach, and may still use them
            self._ring, self._ring_events = None, []
            return
        self._ring, self._ring_events = None, []
        self.stream.synchronize()  # the allocator waits for it before it counts the memory as free
        if hasattr(torch._C, "_host_emptyCache"):
            torch._C._host_emptyCache()

    def _make_ring(self, pinned_bytes: int) -> None:
        wanted = size = 1 << max(pinned_bytes.bit_length() - 1, 0)
        reason, remedy = f"pinned_bytes={pinned_bytes} is below {_LEAST_PINNED_BYTES}", "raise pinned_bytes"
        while size >= _LEAST_PINNED_BYTES and self._ring is None:
            try:
                self._ring = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                reason, remedy = str(error).splitlines()[0], "free pinned memory, or raise the memory limit"
                if sys.platform == "win32":  # there one refusal makes later ones fail as well
                    remedy = "start again with a smaller pinned_bytes"
                    break
                size //= 2
        if self._ring is None:
            warnings.warn(
                f"no pinned memory for copies to {self.device} ({reason}): they leave from pageable memory, several "
                f"times slower, unless you {remedy}",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        piece = piece_bytes(size)
        self._ring_events = self.take_events(self._ring, size // piece)
        self.native.set_ring(self._ring.data_ptr(), piece, [event.cuda_event for event in self._ring_events])
        if size < wanted:
            warnings.warn(
                f"{size >> 20} MiB of pinned memory for copies to {self.device}, since more was refused ({reason}): "
                f"copies may be slower, unless you {remedy}",
                RuntimeWarning,
                stacklevel=2,
            )


class Share:
    """One open object's part in its device's copier. The last one to close gives the pinned memory back."""

    def __init__(self, copier: Copier, pinned_bytes: int) -> None:
        self.copier = copier
        self._pid = os.getpid()
        copier.open(id(self), pinned_bytes)

    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked child has neither the threads nor the device
            self.copier.close(id(self))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # then the exit hook has given the memory back, and modules may be gone
            self.close()


def _copy_threads() -> int:
    """Half of the CPUs that this process may use, since the other half has a loader and a training loop to run."""
    return min(max(usable_cpus() // 2, 1), _MOST_COPY_THREADS)


def _leak(*things: object) -> None:
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def close_all() -> None:
    """Gives all pinned memory back, while the driver is still there. At exit only."""
    for copier in list(_copiers.values()):
        copier.close_all()
