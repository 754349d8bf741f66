"""Run the rows and the parts, interleaved over the repeats, and turn the raw times into figures."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import footprint
from calibration import Plan
from epoch import Batch, Checksum, Epoch, time_epoch
from footprint import Footprint
from parts import BatchTimes, Parts, ResidentBatches, TransportTimer
from rows import Loader, Row
from target import Target, Unusable
from tqdm import tqdm

COMPUTE, RESTED = "compute", "rested"
FOOTPRINT_STEPS = 26  # of an epoch: more than any queue holds
STEPS_A_READING = 5  # one takes some milliseconds
SPEED_SECONDS = 0.25
TIMED_BATCHES = 50  # of an epoch's, in each repeat, whose parts are timed: more would take longer than the rows
PART_NAMES = tuple(field.name for field in dataclasses.fields(Parts))
TRANSPORT_NAMES = tuple(field.name for field in dataclasses.fields(BatchTimes))
HOST_NAMES = ("load", "fetch", "stage")
TOLERANCE = 0.02  # a row may be this much below its bound before that counts as wrong


def figure(raw: list[float]) -> dict[str, Any]:
    """Median and interval (lowest to highest) of the repeats, which come along."""
    return {"median": statistics.median(raw), "low": min(raw), "high": max(raw), "raw": raw}


def run(
    plan: Plan,
    rows: list[Row],
    loader: Loader,
    target: Target,
    prefetch_batches: int,
    sync_every_step: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure everything; gives `parts_ms`, `compute_waited_share`, `rows` and `left_out` of the result.

    A peer that fails before it is timed is left out, with its error.
    """
    transports: list[list[BatchTimes]] = []
    expected: Checksum | None = None
    computes: list[Epoch] = []
    rested: list[Epoch] = []
    alone: dict[str, list[Epoch]] = {COMPUTE: computes}
    if sync_every_step and target.streams is not None:  # a bound asks for it, and events tell how long the device works
        alone[RESTED] = rested
    epochs: dict[str, list[Epoch]] = {}
    footprints: dict[str, Footprint] = {}
    sources: dict[str, Iterable[Batch]] = {}
    left_out: list[dict[str, str]] = []
    tqdm.monitor_interval = 0  # its thread would take the GIL now and then
    progress = tqdm(
        total=plan.repeats * (len(alone) + len(rows)) + 2 * len(rows), leave=False, unit="cell", disable=None
    )

    with ExitStack() as open_rows, progress:
        resident = ResidentBatches(loader, target, plan.steps)
        for row in rows:
            progress.set_description(f"footprint: {row.name}")
            target.restore_intra_op_threads()
            with _excused(row, left_out):
                footprints[row.name] = _footprint_alone(row, loader, plan, target, prefetch_batches)
            progress.update()
        for row in (row for row in rows if row.name in footprints):
            progress.set_description(f"untimed: {row.name}")
            target.restore_intra_op_threads()
            gc.collect()  # a forked worker that collects what other rows left aborts at a tensor on the device
            with _excused(row, left_out):
                sources[row.name] = open_rows.enter_context(row.make(loader, target, prefetch_batches))
                _warm_up(sources[row.name], plan, target)
                epochs[row.name] = []
            progress.update()
        rows = [row for row in rows if row.name in epochs]
        if not rows:
            raise Unusable("no row could run: " + "; ".join(f"{row['name']}: {row['reason']}" for row in left_out))
        taken = alone | epochs
        cells = list(taken)
        chance = random.Random(seed)
        timed = min(plan.steps, TIMED_BATCHES)

        start = time.perf_counter()
        for repeat in range(plan.repeats):
            expected_end = (time.perf_counter() - start) * (repeat + 1) / max(repeat, 1)
            if plan.deadline_seconds is not None and repeat > 0 and expected_end > plan.deadline_seconds:
                plan.notes.append(f"stopped after {repeat} of {plan.repeats} repeats: they took longer than expected")
                break
            chance.shuffle(cells)  # so that no row always comes after the same one
            timer = TransportTimer(loader, target)
            # Some batches before each cell, and the rest after the last: where others use the host too it is slow for
            # seconds, which must not be all that the parts see. Cut at random, as the first after a cell finds cold
            # caches.
            cuts = sorted(chance.choices(range(timed + 1), k=len(cells)))
            for cell, cut in zip(cells, cuts, strict=True):
                progress.set_description(f"repeat {repeat + 1}/{plan.repeats}: {cell}")
                gc.collect()
                target.restore_intra_op_threads()
                timer.advance(cut - len(timer.times))
                _bring_to_speed(resident, plan, target)
                on_device: dict[str, Iterable[Batch]] = {COMPUTE: resident, RESTED: resident.after_loads(loader)}
                source = (sources | on_device)[cell]
                taken[cell].append(time_epoch(source, plan.steps, plan.step, target, sync_every_step))
                progress.update()
            target.restore_intra_op_threads()
            timer.advance((timed if expected else plan.steps) - len(timer.times))
            transports.append(timer.times[:timed])
            expected = expected or timer.checksum()  # the same in each repeat: a sample depends on its index alone

    parts = [
        _parts(times, compute, rest)
        for times, compute, rest in zip(transports, computes, rested or [None] * len(computes), strict=True)
    ]
    least = _least_host_parts(parts, transports)
    # On the CPU nothing is staged, copied or gathered.
    names = [name for name in PART_NAMES if rested or name != RESTED] if target.accelerated else ["load", "compute"]
    return {
        "parts_ms": {name: figure([getattr(part, name) * 1e3 for part in parts]) for name in names},
        "left_out": left_out,
        "compute_waited_share": figure([compute.waited_share for compute in computes]),
        "rows": [
            {
                **_row_result(row, epochs[row.name], least, computes, plan, sync_every_step),
                "host_bytes": footprints[row.name].host,
                "pinned_bytes": footprints[row.name].pinned,
                "wrong_repeats": [
                    repeat for repeat, epoch in enumerate(epochs[row.name]) if epoch.checksum != expected
                ],
            }
            for row in rows
        ],
    }


def _parts(times: list[BatchTimes], compute: Epoch, rested: Epoch | None) -> Parts:
    mean = {name: statistics.fmean(getattr(batch, name) for batch in times) for name in TRANSPORT_NAMES}
    alone = compute.step_seconds
    return Parts(**mean, compute=alone, rested=rested.step_seconds * (1 - rested.waited_share) if rested else alone)


def _least_host_parts(parts: list[Parts], transports: list[list[BatchTimes]]) -> list[Parts]:
    """With the least that each batch has taken of the host in any repeat: what else runs on a machine can only add to
    that.

    The device's parts stay those of their repeat, since its clock drifts either way.
    """
    of_batches = list(zip(*transports, strict=True))  # each in all repeats
    least = {
        name: statistics.fmean(min(getattr(times, name) for times in batch) for batch in of_batches)
        for name in HOST_NAMES
    }
    return [dataclasses.replace(part, **least) for part in parts]


@contextmanager
def _excused(row: Row, left_out: list[dict[str, str]]) -> Iterator[None]:
    """A peer that fails is left out; the plain loader and our own rows may not."""
    try:
        yield
    except Exception as error:
        if row.is_ours or row.name == "dataloader":
            raise
        left_out.append({"name": row.name, "reason": f"{type(error).__name__}: {error}".splitlines()[0]})


def _footprint_alone(row: Row, loader: Loader, plan: Plan, target: Target, prefetch_batches: int) -> Footprint:
    """The highest of some steps, with no other row open: what rows share would count for the first one only."""
    before = footprint.read_released(target)
    with row.make(loader, target, prefetch_batches) as source:
        readings = [footprint.read(target)]
        batches = iter(source)
        for number, (images, labels) in enumerate(itertools.islice(batches, FOOTPRINT_STEPS)):
            plan.step(images, labels)
            target.synchronize()
            if number % STEPS_A_READING == 0:
                readings.append(footprint.read(target))
            del images, labels
        if hasattr(batches, "close"):
            batches.close()
    return footprint.highest(readings).above(before)


def _warm_up(source: Iterable[Batch], plan: Plan, target: Target) -> None:
    """An epoch that nobody times: first touch of pinned memory, allocator caches, kernel choice. To its end, since some
    clean up only in the next epoch after one that was left."""
    for images, labels in source:
        plan.step(images, labels)
    target.synchronize()


def _bring_to_speed(resident: ResidentBatches, plan: Plan, target: Target) -> None:
    """Some untimed steps, since a device that was idle before runs at another clock than one that was not."""
    if not target.accelerated:
        return
    end = time.perf_counter() + SPEED_SECONDS
    while time.perf_counter() < end:
        plan.step(*resident.pool[0]).item()


def _row_result(
    row: Row, epochs: list[Epoch], parts: list[Parts], computes: list[Epoch], plan: Plan, sync_every_step: bool
) -> dict[str, Any]:
    bound = row.bound_for(sync_every_step)
    seconds = [epoch.step_seconds for epoch in epochs]
    bounds = [bound.seconds(part) for part in parts]
    # Compared within a repeat, so that a clock that drifts between the repeats does not show up as a gain or a loss.
    multiple = figure([own / least for own, least in zip(seconds, bounds, strict=True)])
    memory = [
        epoch.active_bytes_above_start - compute.active_bytes_above_start
        for epoch, compute in zip(epochs, computes, strict=True)
        if epoch.active_bytes_above_start is not None and compute.active_bytes_above_start is not None
    ]
    return {
        "name": row.name,
        "description": row.description,
        "loads_beside": row.loads_beside,
        "ours": row.is_ours,
        "ms_per_step": figure([value * 1e3 for value in seconds]),
        "steady_ms_per_step": figure([epoch.steady_step_seconds * 1e3 for epoch in epochs]),
        "samples_per_s": figure([plan.batch_size / value for value in seconds]),
        "bound_formula": bound.formula,
        "bound_ms": figure([value * 1e3 for value in bounds]),
        "multiple_of_bound": multiple,
        "below_bound": multiple["median"] < 1 - TOLERANCE,
        "multiple_of_compute": figure(
            [own / compute.step_seconds for own, compute in zip(seconds, computes, strict=True)]
        ),
        "waited_share": figure([epoch.waited_share for epoch in epochs]),
        "first_batch_ms": figure([epoch.first_batch_seconds * 1e3 for epoch in epochs]),
        "device_bytes_above_model": max(memory) if memory else None,
        "device_bytes_above_model_raw": memory,
    }
