"""Whether loading and copying overlap with computing here."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import torch

from gpuprefetch._copier import DEFAULT_PINNED_BYTES, Copier, Share
from gpuprefetch._copy_lane import CopyLane
from gpuprefetch._iterator import PrefetchIterator
from gpuprefetch._record import Record

_BATCHES = 3
_WAIT_SECONDS = 10.0

_COPY_BYTES = 32 << 20
_WARM_SECONDS = 0.3  # an idle link is a slow one, and so is an idle card's clock
_MEASURE_SECONDS = 1.0
_LEAST_ROUNDS = 5
_KERNEL_TO_COPY = 1.5  # so that all of the copy has something to hide behind
_MOST_KERNEL_SECONDS = 0.25  # Windows resets a card that is busy for 2 s
_TRIAL_CYCLES = 5_000_000


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Medians, in seconds, and the share of the copy that took no time of its own."""

    copy_seconds: float
    kernel_seconds: float
    both_seconds: float
    hidden: float


def hidden_share(copy: float, kernel: float, both: float) -> float:
    """(copy + kernel - both) / min(copy, kernel), and 0 or 1 where noise leads beyond.

    Raises:
        ValueError: a time is not above 0.
    """
    if not all(seconds > 0 for seconds in (copy, kernel, both)):
        raise ValueError(f"times must be above 0 seconds, not {copy}, {kernel} and {both}")
    return min(1.0, max(0.0, (copy + kernel - both) / min(copy, kernel)))


def loads_ahead(device: torch.device) -> bool:
    """True if, during each step, the next batch is asked for on another thread; no clock decides that.

    Raises:
        RuntimeError: a batch arrived with wrong values, or not at all.
    """
    asked = [threading.Event() for _ in range(_BATCHES)]

    def load() -> Iterator[torch.Tensor]:
        for number, event in enumerate(asked):
            event.set()
            yield torch.full((4,), float(number))

    arrived = []
    with PrefetchIterator(load(), device, timeout=_WAIT_SECONDS) as batches:
        for ahead, batch in enumerate(batches, start=1):
            if ahead < _BATCHES and not asked[ahead].wait(_WAIT_SECONDS):
                return False
            arrived.append(batch.tolist())
    if arrived != [[float(number)] * 4 for number in range(_BATCHES)]:
        raise RuntimeError(f"{_BATCHES} batches, filled with their numbers, arrived as {arrived}")
    return True


def measure_overlap(device: torch.device) -> Overlap:
    """Times a copy of 32 MiB the way batches go, a kernel half as long again, and both, in turn, about two seconds.

    All is launched by one thread, the kernel first. Where launches wait, nothing overlaps.
    """
    with torch.cuda.device(device):
        share = Share(Copier.of(device), DEFAULT_PINNED_BYTES)
        try:
            return _measure(share.copier)
        finally:
            share.close()


def _measure(copier: Copier) -> Overlap:
    copy = _copying(copier)
    end = time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < end:
        _seconds(copy)
        _seconds(lambda: torch.cuda._sleep(_TRIAL_CYCLES))
    trial = statistics.median(_seconds(lambda: torch.cuda._sleep(_TRIAL_CYCLES)) for _ in range(3))
    wanted = _KERNEL_TO_COPY * statistics.median(_seconds(copy) for _ in range(3))
    cycles = int(_TRIAL_CYCLES * min(wanted, _MOST_KERNEL_SECONDS) / trial)

    def kernel() -> None:
        torch.cuda._sleep(cycles)

    def both() -> None:
        kernel()
        copy()

    times: dict[Callable[[], None], list[float]] = {copy: [], kernel: [], both: []}
    end = time.perf_counter() + _MEASURE_SECONDS
    while len(times[both]) < _LEAST_ROUNDS or time.perf_counter() < end:
        for run, seconds in times.items():
            seconds.append(_seconds(run))
    alone, beside, together = (statistics.median(seconds) for seconds in times.values())
    return Overlap(alone, beside, together, hidden_share(alone, beside, together))


def _copying(copier: Copier) -> Callable[[], None]:
    """A call that takes one more batch through all stages of a lane."""
    lane = CopyLane(copier, 1, (), on_loader_thread=False)
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)  # written to: the first touch of a page takes its time
    numbers = itertools.count()

    def copy() -> None:
        record = Record(next(numbers), batch=source)
        lane.ask()
        lane.prepare(record)
        lane.copy(record)
        lane.assemble(record)
        lane.hand_over(record)

    return copy


def _seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start
