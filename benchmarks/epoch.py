"""One timed epoch: from `iter()` to a device sync after the last step."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from steps import Step
from target import Target

Batch = tuple[torch.Tensor, torch.Tensor]  # images [N, C, H, W], labels [N]


class Tally:
    """A hash of the batches of an epoch, kept on the device: it costs a few launches a step, one of which reads the
    batch, and no sync.

    Exact, so that one wrong bit changes it: of each sample the bytes are added up as integers of 64 bits, and its
    label; and each such sum counts by its place in the batch, each batch by its place in the epoch. What changes places
    within a sample is not seen. On the CPU only every 16th word of every 16th line counts, since the sum would compete
    with loading for the cores.
    """

    def __init__(self, target: Target) -> None:
        self.hash = torch.zeros((), dtype=torch.int64, device=target.device)
        self.stride = 1 if target.accelerated else 16
        self.batches = 0

    @torch.no_grad()
    def add(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.batches += 1
        in_words = images.shape[-1] * images.element_size() % 8 == 0  # shorter integers would be widened in a copy
        bits = images.contiguous().view(torch.int64 if in_words else torch.uint8)
        counted = bits[..., :: self.stride, :: self.stride].flatten(1)
        samples = counted.sum(1, dtype=torch.int64).add_(labels)
        # Running sums hold the first sample once for each place. All wraps around at 2**64, which a hash may.
        self.hash.mul_(31).add_(samples.cumsum(0).sum())

    def result(self) -> Checksum:
        return Checksum(self.batches, int(self.hash.item()))


@dataclass(frozen=True)
class Checksum:
    batches: int
    hash: int


@dataclass(frozen=True)
class Epoch:
    """What one timed epoch gave. Times in seconds, memory in bytes (None where the device can't tell).

    steady_step_seconds: of a step after the first batch was there. waited_share: of the epoch's time, how much the
    device had no step to work on because the next batch was not there; without events, how much the loop spent in
    `next()`.
    """

    step_seconds: float
    steady_step_seconds: float
    first_batch_seconds: float
    waited_share: float
    active_bytes_above_start: int | None
    checksum: Checksum


def time_epoch(batches: Iterable[Batch], steps: int, step: Step, target: Target, sync_every_step: bool) -> Epoch:
    """Run `step` over all of `batches`, which should be `steps`. The first batch counts as any other; when it was there
    is kept too. The time ends when the device has done the last step: what an iterator does at its end is not in it."""
    marks: list[tuple[Any, Any]] = []  # of each step, before and after: reached by the device in the order of its work
    target.synchronize()
    tally = Tally(target)  # an allocation after a sync: memory that an earlier epoch freed stops counting as active
    target.synchronize()
    target.reset_peak_memory()
    start_bytes = target.memory_stat("active_bytes.all.current")

    start_mark = target.mark()
    first_on_host = 0.0
    start = time.perf_counter()
    for images, labels in batches:
        # The device gets here when its stream has the batch: a copy may go on after next() has returned.
        before = target.mark()
        if tally.batches == 0:
            first_on_host = time.perf_counter() - start
        loss = step(images, labels)
        tally.add(images, labels)
        marks.append((before, target.mark()))
        if sync_every_step:
            loss.item()
        if len(marks) == steps:
            target.synchronize()
            seconds = time.perf_counter() - start
        del images, labels
    if len(marks) < steps:
        target.synchronize()
        seconds = time.perf_counter() - start

    if not marks:
        raise RuntimeError("the loader gave no batch")
    first = target.seconds_between(start_mark, marks[0][0])
    waited = first + sum(target.seconds_between(done, ready) for (_, done), (ready, _) in itertools.pairwise(marks))
    peak = target.memory_stat("active_bytes.all.peak")
    above = None if peak is None or start_bytes is None else peak - start_bytes
    return Epoch(
        step_seconds=seconds / len(marks),
        steady_step_seconds=(seconds - max(first, first_on_host)) / len(marks),
        first_batch_seconds=max(first, first_on_host),
        waited_share=waited / seconds,
        active_bytes_above_start=above,
        checksum=tally.result(),
    )
