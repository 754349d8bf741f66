"""How much host memory a row takes while it runs: of this process and its children, and pinned."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from epoch import Batch
from rows import Loader, Row
from target import Target

BATCHES = 5  # enough for queues to fill


@dataclass(frozen=True)
class Footprint:
    """The highest of some readings during an epoch, above the reading before the row was opened, in bytes.

    pinned: what torch's allocator has pinned, cached memory included; None where it can't tell.
    """

    host: int
    pinned: int | None


def measure(
    row: Row, loader: Loader, target: Target, prefetch_batches: int, step: Callable[..., torch.Tensor]
) -> Footprint:
    """Open the row alone, take a few steps, and close it."""
    _release()
    host_before, pinned_before = host_bytes(), pinned_bytes(target)
    host, pinned = host_before, pinned_before
    with row.make(loader, target, prefetch_batches) as source, contextlib.ExitStack() as epoch:
        batches = iter(source)
        epoch.callback(getattr(batches, "close", _nothing))
        batch: Batch
        for number, batch in enumerate(batches, start=1):
            step(*batch)
            target.synchronize()
            host = max(host, host_bytes())
            if pinned is not None:
                pinned = max(pinned, pinned_bytes(target) or 0)
            if number == BATCHES:
                break
    return Footprint(host - host_before, None if pinned is None or pinned_before is None else pinned - pinned_before)


def host_bytes() -> int:
    """Of this process and its children. What several share counts once on Linux, and not at all elsewhere."""
    total = 0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            total += memory.pss if hasattr(memory, "pss") else memory.uss
    return total


def pinned_bytes(target: Target) -> int | None:
    if target.device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _release() -> None:
    """Give what is free, and only cached, back to the system: else one row's memory serves the next unseen."""
    gc.collect()
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)


def _nothing() -> None:
    pass
