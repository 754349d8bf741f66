"""A few steps of a row, as spans of time on the lanes load, stage, copy and compute."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from rows import Loader, Row
from target import Target
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data.dataloader import _BaseDataLoaderIter

LANES = ("load", "stage", "copy", "compute")
ROWS = ("dataloader", "thread", "gpuprefetch")  # those that load in this process, one batch after the other
BATCHES = 48
SKIPPED = 16  # batches, until the queues have filled and the profiler has its memory
SHOWN_STEPS = 4  # of the slowest row

Span = tuple[float, float]  # begin and end, in ms since the first batch shown was begun to be computed
Seconds = tuple[float, float]  # the same in seconds of time.perf_counter


def timelines(
    rows: list[Row], loader: Loader, target: Target, prefetch_batches: int, step: Callable[..., torch.Tensor]
) -> list[dict[str, Any]]:
    """For each row that can be shown its spans, all over the same length of time."""
    traced = [(row, _trace(row, loader, target, prefetch_batches, step)) for row in rows if row.name in ROWS]
    computing = [lanes["compute"] for _, lanes in traced]
    slowest = max((_step_seconds(spans) for spans in computing), default=0.0)
    traced_seconds = min((spans[-1][0] - spans[SKIPPED][0] for spans in computing), default=0.0)
    shown = min(SHOWN_STEPS * slowest, traced_seconds)  # of the fastest row too
    result = []
    for row, lanes in traced:
        begin = lanes["compute"][SKIPPED][0]
        spans = {
            name: [
                [number, max(start - begin, 0.0) * 1e3, min(end - begin, shown) * 1e3]
                for number, (start, end) in enumerate(lane)
                if end > begin and start < begin + shown
            ]
            for name, lane in lanes.items()
        }
        result.append({"name": row.name, "description": row.description, "shown_ms": shown * 1e3, "lanes": spans})
    return result


def _step_seconds(computing: list[Seconds]) -> float:
    return (computing[-1][0] - computing[SKIPPED][0]) / (len(computing) - 1 - SKIPPED)


def _trace(
    row: Row, loader: Loader, target: Target, prefetch_batches: int, step: Callable[..., torch.Tensor]
) -> dict[str, list[Seconds]]:
    """Load, stage and compute hold one span a batch; copy one for each piece that is on the bus at a time."""
    loading: list[Seconds] = []
    marks: list[tuple[Any, Any]] = []
    traces_copies = target.device.type == "cuda" and torch.version.hip is None
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with (
        row.make(loader, target, prefetch_batches) as source,
        _timed_loading(loading),
        profile(activities=activities) if traces_copies else nullcontext() as profiler,
    ):
        target.restore_intra_op_threads()
        target.synchronize()
        with record_function("origin"):  # both clocks at one moment, and the device's: it is idle
            origin, origin_mark = time.perf_counter(), target.mark()
        batches: Any = iter(source)
        for batch in itertools.islice(batches, BATCHES):
            before = target.mark()
            step(*batch)
            marks.append((before, target.mark()))
            del batch
        target.synchronize()
        if hasattr(batches, "close"):
            batches.close()

    def on_host(mark: Any) -> float:
        return origin + target.seconds_between(origin_mark, mark)

    computing = [(on_host(before), on_host(after)) for before, after in marks]
    if profiler is None:
        return {"load": loading, "compute": computing}
    calls, copies = _copies(profiler, origin)
    return {"load": loading, "stage": _staging(loading, calls), "copy": copies, "compute": computing}


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


def _copies(profiler: Any, origin: float) -> tuple[list[Seconds], list[Seconds]]:
    """The host's calls that queue a copy, and the copies to the device; both in order."""
    events = profiler.events()
    (mark,) = (
        event for event in events if event.name == "origin" and event.device_type == torch.autograd.DeviceType.CPU
    )

    def seconds(event: Any) -> Seconds:
        start, end = (
            origin + (t - mark.time_range.start) * 1e-6 for t in (event.time_range.start, event.time_range.end)
        )
        return start, end

    calls = [seconds(event) for event in events if event.name.startswith("cudaMemcpy")]
    copies = [seconds(event) for event in events if event.name.startswith("Memcpy HtoD")]
    if not copies:
        raise RuntimeError("torch's profiler shows no copy to the device")
    return sorted(calls), sorted(copies)


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
