"""How long copies take, each alone, and several methods in turn."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from copy_methods import Copy, through_lane
from copy_sources import LEAVES, Source, make_source
from target import Target
from torch.utils.data import default_collate

LEAST_SECONDS = 0.005  # of copies in a row, whose median is one repeat
MOST_COPIES = 1000
UNTIMED_COPIES = 3  # caches of the allocators, first touch
SPEED_SECONDS = 0.1
PAUSE_SECONDS = 0.03  # between turns: torch's threads spin for some milliseconds after each operation on all of them
CALLS, CALLS_IN_A_ROW = 1000, 100  # in a row fewer than fill the queue of the device: a call would wait for it
CALL_BYTES = 4096
STAGED_COPIES = 100


def time_copy(copy: Copy, target: Target) -> float:
    """Seconds from the call until the device is done. It must have had nothing to do before, and has nothing after."""
    start = time.perf_counter()
    copied = copy()
    target.synchronize()
    seconds = time.perf_counter() - start
    del copied
    target.synchronize()  # freed memory can be used again only once the device has passed an event that freeing records
    return seconds


def time_repeat(copy: Copy, target: Target, count: int) -> float:
    """Seconds of a copy: the median of `count` in a row."""
    return statistics.median(time_copy(copy, target) for _ in range(count))


def copies_a_repeat(copy: Copy, target: Target) -> int:
    """How many copies in a row take LEAST_SECONDS, at most MOST_COPIES."""
    seconds = time_repeat(copy, target, UNTIMED_COPIES)
    return MOST_COPIES if seconds * MOST_COPIES < LEAST_SECONDS else math.ceil(LEAST_SECONDS / seconds)


def time_in_turn(
    copies: dict[str, Copy],
    counts: dict[str, int],
    target: Target,
    repeats: int,
    pause: Callable[[], object],
    chance: random.Random,
) -> dict[str, list[float]]:
    """Seconds of each repeat, by name. Within a repeat each has its turn, in an order that is shuffled each time, after
    a pause."""
    seconds: dict[str, list[float]] = {name: [] for name in copies}
    names = list(copies)
    for _ in range(repeats):
        chance.shuffle(names)
        for name in names:
            pause()
            seconds[name].append(time_repeat(copies[name], target, counts[name]))
    return seconds


def bring_to_speed(copy: Copy, target: Target, seconds: float = SPEED_SECONDS) -> None:
    """Some untimed copies, since an idle link is a slow one."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time_copy(copy, target)


def time_call(call: Callable[[], object], target: Target) -> float:
    """Seconds of the host for one call: the median of CALLS, in which it does not wait for the device."""
    seconds = []
    for _ in range(CALLS // CALLS_IN_A_ROW):
        target.synchronize()
        for _ in range(CALLS_IN_A_ROW):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    target.synchronize()
    return statistics.median(seconds)


def time_calls(target: Target, repeats: int) -> dict[str, list[float]]:
    """Seconds of the host in each repeat for what a piece of the ring costs it: a copy to queue, an event to record.
    And to allocate the copies of many small tensors, which are packed."""
    from gpuprefetch._extension import extension  # here, since copy_variants.py chooses where it comes from

    on_device = torch.empty(CALL_BYTES, dtype=torch.uint8, device=target.device)
    pinned = torch.zeros(CALL_BYTES, dtype=torch.uint8, pin_memory=target.accelerated)
    native, leaves = extension(), make_source("leaves", LEAVES * CALL_BYTES, 0).tensors
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: on_device.copy_(pinned, non_blocking=True),
        "record": torch.cuda.Event().record,
        "allocate": lambda: native.allocate(leaves, [], target.device),
    }
    return {name: [time_call(call, target) for _ in range(repeats)] for name, call in calls.items()}


def time_stages(source: Source, target: Target, repeats: int) -> dict[str, list[float]]:
    """Seconds of the host in each repeat for each stage of a copy to a device that has nothing to do, medians of
    STAGED_COPIES. The last one, `device`, is the wait until that is done."""
    seconds: dict[str, list[float]] = {}
    collate = default_collate if source.collates else _as_it_is
    with contextmanager(through_lane)(source.tensors, collate, target) as copy:
        for _ in range(repeats):
            ended: list[tuple[str, float]] = []
            stages: dict[str, list[float]] = {}
            for _ in range(STAGED_COPIES):
                ended[:] = [("", time.perf_counter())]
                copied = copy(lambda stage, ended=ended: ended.append((stage, time.perf_counter())))
                target.synchronize()
                ended.append(("device", time.perf_counter()))
                del copied
                target.synchronize()
                for (_, begin), (stage, end) in itertools.pairwise(ended):
                    stages.setdefault(stage, []).append(end - begin)
            for stage, values in stages.items():
                seconds.setdefault(stage, []).append(statistics.median(values))
    return seconds


def _as_it_is(batch: Any) -> Any:
    return batch
