"""How much to measure: batch size, steps and repeats that keep the defaults under two minutes, from a short trial."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from epoch import time_epoch
from parts import ResidentBatches
from rows import Row
from steps import Kernels, Step, Wait, make_step
from target import Target
from workloads import MakeImage, make_loader

BUDGET_SECONDS = 60.0  # for all that is timed; import, data and warm-up come on top
MIN_STEPS, MAX_STEPS = 50, 200  # fewer would let the first batch weigh too much
MIN_REPEATS, MAX_REPEATS = 3, 7
LARGEST_BATCH, SMALLEST_BATCH = 64, 4
LONGEST_KERNELS_SECONDS = 0.025
SHORTEST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.005, 0.050
DEADLINE_SECONDS = 85.0  # after which no further repeat starts, where the trial was too hopeful


@dataclass
class Plan:
    step: Step
    batch_size: int
    steps: int
    repeats: int
    notes: list[str] = field(default_factory=list)
    deadline_seconds: float | None = None  # None: the user asked for what takes longer


def make_plan(
    step_name: str,
    target: Target,
    make: MakeImage,
    rows: list[Row],
    batch_size: int | None,
    steps: int | None,
    repeats: int | None,
) -> Plan:
    """What the user gave stays; what is None is chosen: the largest batch up to 64, then repeats, then steps."""
    notes: list[str] = []
    deadline = DEADLINE_SECONDS if (batch_size, steps, repeats) == (None, None, None) else None
    load = _seconds_per_sample(make)
    step, compute = None, None
    if target.accelerated or step_name == "none":
        step, compute = _calibrated_step(step_name, target, make, batch_size or LARGEST_BATCH, notes)

    def seconds(batch: int, step_count: int) -> float:
        """The first repeat: every row, and the two passes that measure the parts; later ones load less for those."""
        loading = load * batch
        computing = compute if compute is not None else _wait_seconds(loading)
        in_rows = sum(max(loading, computing) if row.loads_beside else loading + computing for row in rows)
        return step_count * (in_rows + loading + computing)

    chosen = batch_size or LARGEST_BATCH
    if batch_size is None:
        allowed = BUDGET_SECONDS / (repeats or MIN_REPEATS)
        while chosen > SMALLEST_BATCH and seconds(chosen, steps or MIN_STEPS) > allowed:
            chosen //= 2
        if chosen < LARGEST_BATCH:
            notes.append(f"batch size {chosen}: the largest that keeps this run short; --batch-size sets another")
    if repeats is None:
        fitting = int(BUDGET_SECONDS / seconds(chosen, steps or MIN_STEPS))
        repeats = min(max(fitting, MIN_REPEATS), MAX_REPEATS)
    if steps is None:
        fitting = int(BUDGET_SECONDS / repeats / seconds(chosen, 1))
        steps = min(max(fitting // 10 * 10, MIN_STEPS), MAX_STEPS)
    if step is None:
        step = Wait(_wait_seconds(load * chosen))
        notes.append(f"no accelerator: the figures show that the rows run, and no more; a wait stands for {step_name}")
    elif not target.accelerated:
        notes.append("no accelerator: nothing is copied, so the figures are those of loading alone")
    return Plan(step, chosen, steps, repeats, notes, deadline)


def _seconds_per_sample(make: MakeImage) -> float:
    """Of loading and collate, from a few small batches; the median, so that one hiccup does not decide."""
    size = 8
    batches = iter(make_loader(make, size, 33))
    next(batches)  # imports, first touch
    end = time.perf_counter() + 0.7
    taken: list[float] = []
    while len(taken) < 32 and time.perf_counter() < end:
        start = time.perf_counter()
        next(batches)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / size


def _wait_seconds(load: float) -> float:
    return min(max(load, SHORTEST_WAIT_SECONDS), LONGEST_WAIT_SECONDS)


def _calibrated_step(
    name: str, target: Target, make: MakeImage, batch_size: int, notes: list[str]
) -> tuple[Step, float]:
    """The step and its seconds. Where the fixed matrix products would take too long, smaller ones, with a note."""
    resident = ResidentBatches(make_loader(make, batch_size, 1), target, steps=10)
    step = make_step(name, target)
    while True:
        time_epoch(resident, resident.steps, step, target, sync_every_step=False)
        seconds = time_epoch(resident, resident.steps, step, target, sync_every_step=False).step_seconds
        if not isinstance(step, Kernels):
            return step, seconds
        if seconds <= LONGEST_KERNELS_SECONDS or step.size <= 1024:
            if step.size != Kernels.SIZE:
                notes.append(f"the step is made of smaller matrices: {Kernels.SIZE} takes too long on this device")
            return step, seconds
        size = step.size // 2
        kind = type(step)
        del step  # before the next one takes its memory
        step = kind(target, size)
