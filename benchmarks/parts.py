"""What a step is made of, each part measured alone: load, stage, copy, compute. The bound follows from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from epoch import Batch, Checksum, Tally
from target import Target
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Parts:
    """Seconds a batch, each part alone with nothing beside it.

    load: the plain loader makes the batch on the host. fetch: the part of it before the samples are stacked, which is
    all that a loader needs that gathers samples on their way to the device; on the CPU none does. stage: the host
    copies it into pinned memory that is kept. copy: from there to the device. compute: the step, on batches that are on
    the device already. rested: the same where the host has loaded a batch since the step before, as it does where
    loading and computing take turns, without the time that the device waited. One at its power limit is faster then.
    Where that was not measured it is compute.
    """

    load: float
    fetch: float
    stage: float
    copy: float
    compute: float
    rested: float


@dataclass(frozen=True)
class BatchTimes:
    """Seconds that one batch took, part by part."""

    load: float
    fetch: float
    stage: float = 0.0
    copy: float = 0.0


class TransportTimer:
    """Loads, stages and copies the batches of an epoch in turn, and takes the time of each part: `advance` goes on
    where the last call ended. On the CPU nothing is staged or copied.

    times: of each batch so far.
    """

    def __init__(self, loader: DataLoader[Batch], target: Target) -> None:
        self.times: list[BatchTimes] = []
        self._target = target
        self._tally = Tally(target)
        self._slots: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._stacking = 0.0
        collate = loader.collate_fn

        def timed_collate(samples: Any) -> Any:
            start = time.perf_counter()
            batch = collate(samples)
            self._stacking = time.perf_counter() - start
            return batch

        loader.collate_fn = timed_collate
        self._batches = iter(loader)
        loader.collate_fn = collate  # the iterator has taken the other one

    def checksum(self) -> Checksum:
        """Of the batches so far, which after an epoch's last one the rows must reach too."""
        return self._tally.result()

    def advance(self, batches: int) -> None:
        """Time up to `batches` more of them."""
        for _ in range(batches):
            start = time.perf_counter()
            batch = next(self._batches, None)
            load = time.perf_counter() - start
            if batch is None:
                return
            if not self._target.accelerated:
                self.times.append(BatchTimes(load, fetch=load))
                self._tally.add(*batch)
            else:
                self.times.append(BatchTimes(load, load - self._stacking, *self._stage_and_copy(batch)))
            del batch  # freeing it takes as long as a copy, and is no part of making the next one

    def _stage_and_copy(self, batch: Batch) -> tuple[float, float]:
        target = self._target
        if self._slots is None:
            self._slots = [(_pinned_like(leaf, target), torch.empty_like(leaf, device=target.device)) for leaf in batch]
            for leaf, (pinned, _) in zip(batch, self._slots, strict=True):
                pinned.copy_(leaf)  # first touch of fresh pages is no part of a steady copy
        start = time.perf_counter()
        for leaf, (pinned, _) in zip(batch, self._slots, strict=True):
            pinned.copy_(leaf)
        stage = time.perf_counter() - start
        copy = _time_copy(self._slots, target)
        self._tally.add(self._slots[0][1], self._slots[1][1])
        target.synchronize()  # so that the sums do not run into the next batch's times
        return stage, copy


def _pinned_like(leaf: torch.Tensor, target: Target) -> torch.Tensor:
    pinnable = target.streams is not None
    return torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=pinnable)


def _time_copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], target: Target) -> float:
    """Seconds from the first byte to the last, by the device's clock where it has events."""
    start = target.mark()
    for source, destination in pairs:
        destination.copy_(source, non_blocking=True)
    if target.streams is None:
        target.synchronize()  # the host's time is the copy's only when it is done
    end = target.mark()
    target.synchronize()
    return target.seconds_between(start, end)


class ResidentBatches:
    """`steps` batches that are on the device already, some different ones in turn, so that no cache holds the next."""

    POOL = 8  # batches, or as many as fit into POOL_BYTES
    POOL_BYTES = 1 << 30

    def __init__(self, loader: DataLoader[Batch], target: Target, steps: int) -> None:
        self.steps = steps
        self.pool: list[Batch] = []
        size = 0
        for images, labels in loader:
            self.pool.append((images.to(target.device), labels.to(target.device)))
            size += images.nbytes
            if len(self.pool) == self.POOL or size + images.nbytes > self.POOL_BYTES:
                break
        target.synchronize()

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.steps):
            yield self.pool[number % len(self.pool)]

    def after_loads(self, loader: DataLoader[Batch]) -> Iterator[Batch]:
        """The same, each after the host has loaded another batch, which goes nowhere."""
        for batch, _ in zip(self, loader, strict=True):
            yield batch
