"""Traffic from pinned memory to the device, beside what is measured."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from target import Target

PINNED_BYTES = 64 << 20  # more than a cache holds
COPY_BYTES = 4 << 20
MOST_QUEUED = 16


class LinkLoad:
    """Inside the `with` statement a thread copies pinned memory to the device, at `gb_per_s` or as fast as it can get
    if that is less: what is late is not made up for. Its error is raised at the end of the statement."""

    def __init__(self, target: Target, gb_per_s: float) -> None:
        self._interval = COPY_BYTES / (gb_per_s * 1e9)
        self._source = torch.ones(PINNED_BYTES // COPY_BYTES, COPY_BYTES, dtype=torch.uint8).pin_memory()
        self._destination = torch.empty_like(self._source, device=target.device)
        self._stream = torch.cuda.Stream(target.device)
        target.synchronize()
        self._stopping = threading.Event()
        self._executor = ThreadPoolExecutor(1, "link-load")
        self._copied = 0

    def __enter__(self) -> LinkLoad:
        self._done = self._executor.submit(self._run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._executor.shutdown()
        self._done.result()

    @property
    def copied_bytes(self) -> int:
        """So far, without those on their way."""
        return self._copied

    def _run(self) -> None:
        queued: deque[torch.cuda.Event] = deque()
        due = time.perf_counter()
        for number in itertools.count():
            while time.perf_counter() < due:  # a sleep may be longer than a copy
                pass
            if self._stopping.is_set():
                break
            place = number % len(self._source)
            with torch.cuda.stream(self._stream):
                self._destination[place].copy_(self._source[place], non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record()
            queued.append(event)
            if len(queued) > MOST_QUEUED:
                queued.popleft().synchronize()
                self._copied += COPY_BYTES
            due = max(due, time.perf_counter()) + self._interval
        self._stream.synchronize()
