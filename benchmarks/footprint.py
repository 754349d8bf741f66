"""How much memory of the host is in use: by this process and its children, and pinned."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from dataclasses import dataclass

import psutil
import torch
from target import Target


@dataclass(frozen=True)
class Footprint:
    """In bytes. host: of this process and its children; what several share counts once on Linux, and not at all
    elsewhere. pinned: what torch's allocator has pinned, cached memory included; None where it can't tell.
    """

    host: int
    pinned: int | None

    def above(self, before: Footprint) -> Footprint:
        pinned = None if self.pinned is None or before.pinned is None else self.pinned - before.pinned
        return Footprint(self.host - before.host, pinned)


def read(target: Target) -> Footprint:
    host = 0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            host += memory.pss if hasattr(memory, "pss") else memory.uss
    pinned = None
    if target.device.type == "cuda" and hasattr(torch.cuda, "host_memory_stats"):
        pinned = int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    return Footprint(host, pinned)


def read_released(target: Target) -> Footprint:
    """After giving what is free, and only cached, back to the system: else one row's memory serves the next unseen."""
    gc.collect()
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
        if trim is not None:
            trim(0)
    return read(target)


def highest(readings: list[Footprint]) -> Footprint:
    pinned = [reading.pinned for reading in readings if reading.pinned is not None]
    return Footprint(max(reading.host for reading in readings), max(pinned, default=None))
