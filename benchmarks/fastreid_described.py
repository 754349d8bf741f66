"""FastReID's DataLoaderX, rebuilt from its description: what a row times, and what fails where ours does not."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

AHEAD = 10  # batches


class WaitsForEver(Exception):
    """In place of a wait that nothing would end."""


class Described(DataLoader[Any]):
    """A daemon thread takes up to 10 batches ahead; next() moves the tensors of the next batch's dict on a side stream.
    Nothing tells the allocator of the stream that reads them. One epoch at a time."""

    def __init__(self, device: torch.device | str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.device = torch.device(device)
        self.streams = torch.get_device_module(self.device) if self.device.type in ("cuda", "xpu") else None
        self.stream = None if self.streams is None else self.streams.Stream(self.device)
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Any:
        self.ready: queue.Queue[Any] = queue.Queue(AHEAD)
        self.left = threading.Event()
        self.thread = threading.Thread(target=self._take, args=(super().__iter__(),), daemon=True)
        self.thread.start()
        self._preload()
        return self

    def _take(self, batches: Iterator[Any]) -> None:
        for batch in batches:
            if self.left.is_set():
                break
            self.ready.put(batch)
        self.ready.put(None)

    def _taken(self) -> Any:
        assert self.thread is not None
        while True:
            try:
                return self.ready.get(timeout=0.05)
            except queue.Empty:
                if not self.thread.is_alive() and self.ready.empty():
                    raise WaitsForEver from None

    def _preload(self) -> None:
        self.upcoming = self._taken()
        on_side_stream = contextlib.nullcontext() if self.streams is None else self.streams.stream(self.stream)
        with on_side_stream:
            for key, value in (self.upcoming or {}).items():
                if isinstance(value, torch.Tensor):
                    self.upcoming[key] = value.to(self.device, non_blocking=True)

    def __next__(self) -> Any:
        if self.streams is not None:
            self.streams.current_stream(self.device).wait_stream(self.stream)
        batch = self.upcoming
        if batch is None:
            raise StopIteration
        self._preload()
        return batch

    def shutdown(self) -> None:
        """What it has for a loop that was left."""
        if self.thread is None:
            return
        self.left.set()
        while self.thread.is_alive():  # it may wait for room in the queue
            with contextlib.suppress(queue.Empty):
                self.ready.get(timeout=0.05)
