"""How much memory a copy takes at its highest, beside the batch that it makes."""

from __future__ import annotations

from typing import Any

import footprint
import torch
from copy_methods import Method
from copy_sources import Source
from footprint import Footprint
from target import Target

COPIES = 3


def measure_peak(method: Method, source: Source, target: Target) -> dict[str, Any]:
    """Bytes above what was in use before the method was opened, the source among it; None where it can't be told.

    Host memory is read while all that the copy took is still held; the other peaks are those of the allocators.
    """
    with method.make(source, target) as copy:
        copy()  # what the first copy leaves for ever is not this method's alone
        target.synchronize()
    del copy
    before = footprint.read_released(target)
    pinned_before = _pinned_bytes(target, "current")
    _reset_pinned_peak(target)
    torch.zeros((), device=target.device)  # an allocation after a sync: what was freed before stops counting as active
    target.reset_peak_memory()
    device_before = target.memory_stat("active_bytes.all.current")

    readings: list[Footprint] = []
    with method.make(source, target) as copy:
        for _ in range(COPIES):
            copied = copy()
            target.synchronize()
            readings.append(footprint.read(target))
            del copied
            target.synchronize()
        pinned, device = _pinned_bytes(target, "peak"), target.memory_stat("active_bytes.all.peak")
    own = (device_before or 0) + source.nbytes  # which the batch takes too
    return {
        "source": source.name,
        "method": method.name,
        "bytes": source.nbytes,
        "pinned_bytes": None if pinned is None or pinned_before is None else pinned - pinned_before,
        "device_bytes_above_batch": None if device is None or device_before is None else device - own,
        "host_bytes": footprint.highest(readings).above(before).host,
    }


def _pinned_bytes(target: Target, kind: str) -> int | None:
    """Of torch's host allocator, what it caches included: `current` or `peak`. Releases differ in what they call it."""
    if target.device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    stats: dict[str, Any] = torch.cuda.host_memory_stats()
    names = (f"allocated_bytes.{kind}", f"reserved_bytes.{kind}")
    return max((int(stats[name]) for name in names if name in stats), default=None)


def _reset_pinned_peak(target: Target) -> None:
    if target.device.type == "cuda" and hasattr(torch.cuda, "reset_peak_host_memory_stats"):
        torch.cuda.reset_peak_host_memory_stats()
