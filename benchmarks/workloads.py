"""The datasets: what it costs to make a sample on the host.

Every sample is `(image, index)`: a tensor [3, H, W], float32 (or, of one decoder, uint8), and the sample's place in the
epoch. All that looks random is a function of the seed and the index, so every row and every repeat makes exactly the
same batches: the rows do equal work, and what arrived can be compared.
"""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from decoders import DECODERS, IMAGE_SIZE, Crop, Decoder
from epoch import Batch
from target import Unusable
from torch.utils.data import DataLoader, Dataset

MakeImage = Callable[[int], torch.Tensor]

# What is in memory for each sample is repeated until the epoch is long enough, so that no workload needs much memory.
DISTINCT_SAMPLES = {"jpeg": 256, "memory": 512, "python": 1}

DESCRIPTIONS = {
    "jpeg": "JPEG decode, random resized crop, flip and normalise, [3, 224, 224] float32",
    "memory": "ready float32 tensors [3, 224, 224] in memory, only stacked",
    "python": "a pure Python loop that holds the GIL, then a small tensor [3, 32, 32]",
}


class EndlessImages(Dataset[tuple[torch.Tensor, int]]):
    """A map-style dataset of `length` samples; `make(index)` gives the image."""

    def __init__(self, make: MakeImage, length: int) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.make(index), index


def make_loader(make: MakeImage, batch_size: int, batches: int) -> DataLoader[Batch]:
    """The plain loader that every row wraps: no worker process, in order, pageable memory."""
    return _loader(EndlessImages(make, batch_size * batches), batch_size=batch_size)


def changed(loader: DataLoader[Batch], **options: Any) -> DataLoader[Batch]:
    """The same batches by a DataLoader with other options."""
    return _loader(loader.dataset, batch_size=loader.batch_size, **options)


def _loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Batch]:
    loader: Any = DataLoader(dataset, **options)
    return cast("DataLoader[Batch]", loader)  # torch's type names a sample where this one names a batch


def make_workload(name: str, samples: int, seed: int, folder: Path | None, decoder: str = "pil") -> MakeImage:
    """The function from index to image for workload `name`, with `samples` different samples behind it; `folder` and
    `decoder` are for jpeg. It can be pickled: worker processes get it. Raises Unusable if a package is missing."""
    if name == "jpeg":
        return Jpeg(samples, seed, folder, DECODERS[decoder])
    if name == "memory":
        return Memory(samples, seed)
    return HoldsTheGil(seed)


class Memory:
    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        # One tensor: a worker process is given a file handle for each.
        try:
            self.images = torch.rand(samples, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        except RuntimeError as error:
            raise Unusable(f"{samples} samples don't fit the memory: {str(error).splitlines()[0]}") from None

    def __call__(self, index: int) -> torch.Tensor:
        return self.images[index % len(self.images)]


class HoldsTheGil:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, index: int) -> torch.Tensor:
        value = self.seed + index
        for _ in range(10_000):  # about 0.6 ms, with the GIL held
            value = (value * 1_103_515_245 + 12_345) & 0x7FFF_FFFF
        return torch.full((3, 32, 32), value / 0x7FFF_FFFF)


class Jpeg:
    """Decode, random resized crop, flip and normalise, of files in `folder` or of variations of one photo."""

    def __init__(self, samples: int, seed: int, folder: Path | None, decoder: Decoder) -> None:
        if reason := decoder.missing():
            raise Unusable(reason)
        self.seed = seed
        self.decoder = decoder
        self.files: Sequence[Path | bytes] = (
            vary_photo(samples, seed) if folder is None else find_images(folder, decoder)[:samples]
        )

    def __call__(self, index: int) -> torch.Tensor:
        chance = random.Random(self.seed * 1_000_003 + index)
        source = self.files[index % len(self.files)]
        try:
            data = source if isinstance(source, bytes) else source.read_bytes()
            return self.decoder.decode(data, functools.partial(random_crop, chance))
        except Exception as error:  # a decoder knows no file name
            name = "a JPEG made by Pillow" if isinstance(source, bytes) else str(source)
            raise Unusable(f"--decoder {self.decoder.name} failed on {name}: {error}") from error


def random_crop(chance: random.Random, width: int, height: int) -> Crop:
    """8 to 100 % of the area and an aspect of 3/4 to 4/3, the usual choice for ImageNet; flipped every other time."""
    area = width * height * chance.uniform(0.08, 1.0)
    aspect = chance.uniform(3 / 4, 4 / 3)
    crop_width = max(1, min(width, round((area * aspect) ** 0.5)))
    crop_height = max(1, min(height, round((area / aspect) ** 0.5)))
    left = chance.randint(0, width - crop_width)
    top = chance.randint(0, height - crop_height)
    return Crop(left, top, crop_width, crop_height, flipped=chance.random() < 0.5)


def vary_photo(samples: int, seed: int, size: tuple[int, int] = (500, 400)) -> list[bytes]:
    """`samples` different JPEG files in memory, cut from the photo that matplotlib ships, of `size` pixels each."""
    try:
        from matplotlib.cbook import get_sample_data
    except Exception as error:  # one that is broken fails in any way
        raise Unusable(
            'photos are made from one of matplotlib (python -m pip install ".[bench]"), and throughput.py also takes '
            f"--data DIR: {error}"
        ) from None
    from PIL import Image, ImageEnhance

    chance = random.Random(seed)
    with Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)) as file:
        photo = file.convert("RGB")
    files = []
    for _ in range(samples):
        width = chance.randint(round(0.7 * photo.width), photo.width)
        height = chance.randint(round(0.6 * photo.height), round(0.8 * photo.height))
        left, top = chance.randint(0, photo.width - width), chance.randint(0, photo.height - height)
        varied = photo.crop((left, top, left + width, top + height)).resize(size)
        varied = ImageEnhance.Brightness(varied).enhance(chance.uniform(0.7, 1.3))
        buffer = io.BytesIO()
        varied.save(buffer, "JPEG", quality=90)
        files.append(buffer.getvalue())
    return files


def find_images(folder: Path, decoder: Decoder) -> Sequence[Path]:
    """The files under `folder` that `decoder` reads, sorted. Raises Unusable if there are none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in decoder.suffixes and path.is_file())
    if not paths:
        suffixes = ", ".join(sorted(decoder.suffixes))
        raise Unusable(f"--data {str(folder)!r} holds no image for --decoder {decoder.name}; looked for {suffixes}")
    return paths
