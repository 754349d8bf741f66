"""A dataset that computes on the device, and what a step with it is made of, each part measured alone."""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from epoch import Batch, time_epoch
from in_process import on_device
from steps import Step
from target import Target
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from workloads import vary_photo

SMALL, FACTOR = 32, 4
DISTINCT_PHOTOS = 64
LAUNCHES_AT_ONCE = 400  # fewer than a driver queues before it makes the host wait


def shrunk_photos(pixels: int) -> Callable[[int], torch.Tensor]:
    """[3, 32, 32] in uint8 by number, each time decoded from a JPEG file in memory. Raises Unusable."""
    files = vary_photo(DISTINCT_PHOTOS, 0, (pixels, pixels))
    from PIL import Image

    def small(i: int) -> torch.Tensor:
        with Image.open(io.BytesIO(files[i % len(files)])) as photo:
            return torch.from_numpy(np.array(photo.convert("RGB").resize((SMALL, SMALL)))).permute(2, 0, 1)

    return small


def ready_crops(count: int) -> Callable[[int], torch.Tensor]:
    """The same, in memory already."""
    generator = torch.Generator().manual_seed(0)
    crops = torch.randint(0, 256, (count, 3, SMALL, SMALL), dtype=torch.uint8, generator=generator)
    return crops.__getitem__


class Shrunk(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is (a small photo, i), and collate() makes the net's pictures of a batch, by one call.

    Small photos are decoded from JPEG files of `photo_pixels` a side, and shrunk; with 0 they are in memory already.
    Raises Unusable if there is nothing to make the files from.
    """

    def __init__(self, count: int, photo_pixels: int, channels: int, layers: int, target: Target) -> None:
        self.count = count
        self.small = shrunk_photos(photo_pixels) if photo_pixels else ready_crops(count)
        self.device = target.device
        torch.manual_seed(0)
        inner: list[nn.Module] = []
        for _ in range(layers):
            inner += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
        first, last = nn.Conv2d(3, channels, 5, padding=2), nn.Conv2d(channels, 3 * FACTOR**2, 3, padding=1)
        self.net = nn.Sequential(first, nn.ReLU(), *inner, last, nn.PixelShuffle(FACTOR), nn.Sigmoid())
        self.net.eval().to(self.device)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.small(i), i

    def collate(self, samples: list[tuple[torch.Tensor, int]]) -> Batch:
        small, numbers = default_collate(samples)
        return self.upscale(small), numbers

    @torch.no_grad()
    def upscale(self, small: torch.Tensor) -> torch.Tensor:
        pictures: torch.Tensor = self.net(small.to(self.device).float() / 255)
        return pictures


class Upscaled(Shrunk):
    """Sample i is (the net's picture of a small photo, i), by a call of its own."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.upscale(self.small(i)[None])[0], i


class UpscaledApart(Upscaled):
    """The same, on a stream of each thread's own: as docs/choosing-threads.md shows it."""

    def __init__(self, *made_of: Any) -> None:
        super().__init__(*made_of)
        self.own = threading.local()

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if self.device.type != "cuda":
            return super().__getitem__(i)
        shared = torch.cuda.current_stream()
        if not hasattr(self.own, "stream"):
            self.own.stream = torch.cuda.Stream()
            self.own.stream.wait_stream(shared)  # behind what made the net
        with torch.cuda.stream(self.own.stream):
            picture, number = super().__getitem__(i)
        shared.wait_stream(self.own.stream)
        picture.record_stream(shared)
        return picture, number


@dataclass(frozen=True)
class Parts:
    """Seconds a batch, each alone, all in one repeat.

    loading: an epoch of the plain loader with no step. host: what the host takes to make a batch that the device need
    not be done with. made: the device, busy with the dataset's net. step: an epoch of the step on batches that are on
    the device. stepped: the device, busy with the step. made_beside_steps: as made, on a stream of its own while the
    device is kept busy with steps; None without streams. All others are alone.
    """

    loading: float
    host: float
    made: float
    step: float
    stepped: float
    made_beside_steps: float | None = None


class Resident:
    """Batches that are on the device, as often as an epoch has steps."""

    def __init__(self, loader: Iterable[Batch], steps: int, target: Target) -> None:
        self.steps = steps
        self.pool = list(itertools.islice(on_device(loader, target, non_blocking=False), 4))
        self.batch_size = len(self.pool[0][1])

    def __iter__(self) -> Iterator[Batch]:
        return (self.pool[number % len(self.pool)] for number in range(self.steps))


def busy_seconds(target: Target, work: Callable[[], object], beside: Callable[[], object] | None = None) -> float:
    """How long the device is busy with `work`, without the gaps in which it waits for the host: all is launched while
    the device is held up by something else. Without streams it is the host's time. With `beside`, which needs streams,
    the work has one of its own, and the device does that again and again besides."""
    target.synchronize()
    if target.device.type != "cuda":
        start = time.perf_counter()
        work()
        target.synchronize()
        return time.perf_counter() - start
    for cycles in (20_000_000 << shift for shift in range(6)):
        with torch.cuda.stream(torch.cuda.Stream(target.device) if beside else None):
            torch.cuda._sleep(cycles)
            begin = target.mark()
            work()
            end = target.mark()
        was_held_up = not begin.query()
        ahead: deque[Any] = deque()
        while beside and not end.query():
            beside()
            ahead.append(target.mark())
            if len(ahead) > 2:
                ahead.popleft().synchronize()
        target.synchronize()
        if was_held_up:
            return target.seconds_between(begin, end)
    raise RuntimeError("the device could not be held up while all of the work was launched")


def host_seconds(loader: Iterable[Batch], target: Target) -> float:
    """To make a batch, for the host alone: the device is idle when it begins, and is not waited for. Mean."""
    seconds, count = 0.0, 0
    batches = iter(loader)
    while True:
        target.synchronize()
        start = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            return seconds / count
        seconds += time.perf_counter() - start
        count += 1


def measure_parts(
    dataset: Shrunk, at_once: int, loader: DataLoader[Batch], resident: Resident, step: Step, target: Target
) -> Parts:
    """`at_once`: how many samples a call of the net takes."""
    target.synchronize()
    start = time.perf_counter()
    for batch in loader:
        del batch
    target.synchronize()
    loading = (time.perf_counter() - start) / len(loader)
    launches = 4 * sum(1 for _ in dataset.net.modules())  # a call of the net, at most
    count = min(len(dataset), max(1, LAUNCHES_AT_ONCE // launches) * at_once)
    calls = torch.stack([dataset.small(i) for i in range(count)]).to(target.device).split(at_once)

    def make() -> None:
        for small in calls:
            dataset.upscale(small)

    def take_step() -> None:
        step(*resident.pool[0])

    batches = count / resident.batch_size
    made, stepped = busy_seconds(target, make) / batches, busy_seconds(target, take_step)
    beside = busy_seconds(target, make, take_step) / batches if target.device.type == "cuda" else None
    alone = time_epoch(resident, resident.steps, step, target, sync_every_step=False)
    return Parts(loading, host_seconds(loader, target), made, alone.step_seconds, stepped, beside)
