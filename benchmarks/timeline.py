"""A few steps of a row, as spans of time on the lanes load, stage, copy and compute, and how busy the device was."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from rows import Loader, Row
from steps import Step
from target import Target
from torch.profiler import ProfilerActivity, profile
from torch.utils.data.dataloader import _BaseDataLoaderIter

ROWS = ("dataloader", "thread", "gpuprefetch")  # those that load in this process, one batch after the other
BATCHES = 48
SKIPPED = 16  # batches, until the queues have filled and the profiler has its memory
SHOWN_STEPS = 4  # of the slowest row
CLOCK_TRIES = 20
SLOTS = 400  # of the time shown, for each of which is told how busy the device was

Span = tuple[float, float]  # begin and end, in ms since the first batch shown was begun to be computed
Seconds = tuple[float, float]  # the same in seconds of time.perf_counter


def timelines(
    rows: list[Row], loader: Loader, target: Target, prefetch_batches: int, step: Step, sync_every_step: bool
) -> list[dict[str, Any]]:
    """For each row that can be shown its spans, all over the same length of time."""
    traced = [
        (row, _trace(row, loader, target, prefetch_batches, step, sync_every_step)) for row in rows if row.name in ROWS
    ]
    computing = [lanes["compute"] for _, lanes in traced]
    slowest = max((_step_seconds(spans) for spans in computing), default=0.0)
    traced_seconds = min((spans[-1][0] - spans[SKIPPED][0] for spans in computing), default=0.0)
    shown = min(SHOWN_STEPS * slowest, traced_seconds)  # of the fastest row too
    result = []
    for row, lanes in traced:
        begin = lanes["compute"][SKIPPED][0]
        kernels = lanes.pop("kernels", None)
        spans = {
            name: [
                [number, max(start - begin, 0.0) * 1e3, min(end - begin, shown) * 1e3]
                for number, (start, end) in enumerate(lane)
                if end > begin and start < begin + shown
            ]
            for name, lane in lanes.items()
        }
        told = {"name": row.name, "description": row.description, "shown_ms": shown * 1e3, "lanes": spans}
        if kernels is not None:
            told["busy"] = _busy_shares(kernels, begin, shown / SLOTS)
        result.append(told)
    return result


def _step_seconds(computing: list[Seconds]) -> float:
    return (computing[-1][0] - computing[SKIPPED][0]) / (len(computing) - 1 - SKIPPED)


def _trace(
    row: Row, loader: Loader, target: Target, prefetch_batches: int, step: Step, sync_every_step: bool
) -> dict[str, list[Seconds]]:
    """Load, stage and compute hold one span a batch; copy one for each piece that is on the bus at a time; kernels one
    for each that the device runs."""
    loading: list[Seconds] = []
    marks: list[tuple[Any, Any]] = []
    traces_device = target.device.type == "cuda" and torch.version.hip is None
    with (
        row.make(loader, target, prefetch_batches) as source,
        _timed_loading(loading),
        # Of the device alone: to follow torch's operators too would take as long as a small step.
        profile(activities=[ProfilerActivity.CUDA]) if traces_device else nullcontext() as profiler,
    ):
        target.restore_intra_op_threads()
        target.synchronize()
        origin, profilers_origin, origin_mark = _one_moment(target)
        batches: Any = iter(source)
        for batch in itertools.islice(batches, BATCHES):
            before = target.mark()
            loss = step(*batch)
            marks.append((before, target.mark()))
            if sync_every_step:
                loss.item()
            del batch
        target.synchronize()
        if hasattr(batches, "close"):
            batches.close()

    def on_host(mark: Any) -> float:
        return origin + target.seconds_between(origin_mark, mark)

    computing = [(on_host(before), on_host(after)) for before, after in marks]
    if profiler is None:
        return {"load": loading, "compute": computing}
    calls, copies, kernels = _device_activity(profiler, origin, profilers_origin)
    staging = _staging(loading, calls)
    return {"load": loading, "stage": staging, "copy": copies, "compute": computing, "kernels": kernels}


@contextmanager
def _timed_loading(spans: list[Seconds]) -> Iterator[None]:
    """Every `next()` of a DataLoader's iterator, on whichever thread. The class is patched: an iterator of another
    type would not be recognised by what treats torch's own better."""
    original = _BaseDataLoaderIter.__next__

    def timed(self: Any) -> Any:
        start = time.perf_counter()
        batch = original(self)  # the end of the epoch is no batch
        spans.append((start, time.perf_counter()))
        return batch

    _BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]


def _device_activity(
    profiler: Any, origin: float, profilers_origin: int
) -> tuple[list[Seconds], list[Seconds], list[Seconds]]:
    """The host's calls that queue copies to the device, those copies, and all else that the device does; in order."""
    events = profiler.profiler.kineto_results.events()  # profiler.events() takes 50 times as long to make its own

    def seconds(event: Any) -> Seconds:
        start, end = (origin + (ns - profilers_origin) * 1e-9 for ns in (event.start_ns(), event.end_ns()))
        return start, end

    copies, kernels, calls = [], [], []
    for event in events:
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            if event.name().startswith("cudaMemcpy"):
                calls.append(event)
        elif event.name().startswith("Memcpy HtoD"):
            copies.append(event)
        else:
            kernels.append(event)
    if not copies:
        raise RuntimeError("torch's profiler shows no copy to the device")
    queued = {event.correlation_id() for event in copies}  # a step may make copies of other kinds
    calls = [event for event in calls if event.correlation_id() in queued]
    return sorted(map(seconds, calls)), sorted(map(seconds, copies)), sorted(map(seconds, kernels))


def _one_moment(target: Target) -> tuple[float, int, Any]:
    """By the host's clock, by the profiler's, and marked on the device, which is idle: of several tries the one that
    nothing came between. The profiler's clock is read where it goes on: under Windows in steps of up to 16 ms."""
    tries = []
    for _ in range(CLOCK_TRIES):
        seen = time.time_ns()
        while True:
            host, profilers = time.perf_counter(), time.time_ns()
            if profilers != seen:
                break
        mark = target.mark()
        target.synchronize()
        tries.append((time.perf_counter() - host, host, profilers, mark))
    _, host, profilers, mark = min(tries, key=lambda each: each[0])
    return host, profilers, mark


def _busy_shares(spans: list[Seconds], begin: float, slot: float) -> list[float]:
    """How much of each slot from `begin` on lies within spans, which are in order and may lie over each other."""
    shares = [0.0] * SLOTS
    counted = begin
    for start, end in spans:
        start = max(start, counted)
        counted = max(end, counted)
        for number in range(int((start - begin) / slot), min(int((end - begin) / slot) + 1, SLOTS)):
            within = min(end, begin + (number + 1) * slot) - max(start, begin + number * slot)
            shares[number] += max(within, 0.0) / slot
    return [round(min(share, 1.0), 3) for share in shares]


def _staging(loading: list[Seconds], calls: list[Seconds]) -> list[Seconds]:
    """From a batch's being loaded until its last copy is queued, before the next batch is begun to be loaded.

    Where a batch goes in pieces its thread may wait for room before the first one, so that begins as long before its
    copy as the others do.
    """
    staging = []
    for (_, loaded), (next_begun, _) in itertools.pairwise([*loading, (float("inf"), 0.0)]):
        own = [(start, end) for start, end in calls if loaded <= start < next_begun]
        begun = loaded
        if len(own) > 2:
            between = statistics.median(start - before for (before, _), (start, _) in itertools.pairwise(own))
            begun = max(loaded, own[0][0] - between)
        staging.append((begun, max((end for _, end in own), default=loaded)))
    return staging
