"""Train a small net on a folder of images, with the plain loader and with gpuprefetch, in turn.

    python examples/train_images.py [FOLDER] [--device cuda]

FOLDER has one folder of images for each class, as torchvision's ImageFolder wants it. Without it, some images are made
in a temporary folder. Needs pillow.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import PrefetchIterator

try:
    from PIL import Image
except ModuleNotFoundError:
    sys.exit("train_images.py reads images with pillow, which is missing: python -m pip install pillow")

SIZE = 96
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
Batch = tuple[torch.Tensor, torch.Tensor]


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Image i, resized to [3, SIZE, SIZE] uint8, and the number of its class."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [
            (file, number)
            for number, name in enumerate(self.classes)
            for file in sorted((folder / name).rglob("*"))
            if file.suffix.lower() in SUFFIXES and file.is_file()
        ]
        if not self.files:
            sys.exit(f"{folder} has no folder with images in it; there must be one for each class")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[i]
        with Image.open(file) as image:
            pixels = numpy.array(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), label


def make_images(folder: Path, count: int) -> None:
    """`count` JPEG files of 400x400 pixels in two classes, one brighter than the other."""
    chance = numpy.random.default_rng(0)
    for number in range(count):
        label = number % 2
        small = chance.integers(60 * label, 196 + 60 * label, (25, 25, 3), dtype=numpy.uint8)
        file = folder / f"class{label}" / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(small).resize((400, 400), Image.Resampling.BICUBIC).save(file, quality=90)


def small_net(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


class Trainer:
    def __init__(self, classes: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = small_net(classes).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def epoch(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Milliseconds a step, and the mean loss."""
        losses = []
        start = time.perf_counter()
        for images, labels in batches:
            images, labels = (
                images.to(self.device),
                labels.to(self.device),
            )  # nothing to do where they are there already
            loss = nn.functional.cross_entropy(self.net(images.float() / 255), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()  # waits for the device
        return (time.perf_counter() - start) / len(losses) * 1e3, mean


@contextlib.contextmanager
def images_in(folder: Path | None, count: int) -> Iterator[Images]:
    if folder is not None:
        yield Images(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        make_images(Path(temporary), count)
        yield Images(Path(temporary))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of folders of images (some are made)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument("--epochs", type=positive, default=3, help="with each loader (3)")
    parser.add_argument("--num-threads", type=int, default=1, help="of gpuprefetch (1)")
    parser.add_argument("--quick", action="store_true", help="two epochs of a few images, to see that it runs")
    options = parser.parse_args()
    epochs = 2 if options.quick else options.epochs
    try:
        device = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:  # torch's own words
        parser.error(f"--device {options.device}: {error}")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"there is no folder {str(options.folder)!r}")
    if not 0 <= options.num_threads <= 256:
        parser.error(f"--num-threads must be 0 to 256, not {options.num_threads}")
    if device.type == "cpu":
        torch.set_num_threads(1)  # else the threads of one operation wait for each other where loading has their core

    with images_in(options.folder, 64 if options.quick else 320) as images:
        loader = DataLoader(images, batch_size=options.batch_size, shuffle=True)
        loaders: dict[str, Iterable[Batch]] = {
            "plain loader": loader,
            "gpuprefetch": PrefetchIterator(loader, device=device, num_threads=options.num_threads),
        }
        print(f"{len(images)} images in {len(images.classes)} classes, {len(loader)} steps an epoch, {device}")
        trainers = {name: Trainer(len(images.classes), device) for name in loaders}
        times: dict[str, list[float]] = {name: [] for name in loaders}
        for epoch in range(epochs + 1):
            for name in loaders:  # in turn, so that both meet the same machine
                milliseconds, loss = trainers[name].epoch(loaders[name])
                if epoch > 0:  # the first one warms up
                    times[name].append(milliseconds)
                    print(f"epoch {epoch}, {name}: {milliseconds:.1f} ms a step, loss {loss:.3f}")
        for name, milliseconds_each in times.items():
            print(f"{name}: {statistics.median(milliseconds_each):.1f} ms a step (median of {epochs} epochs)")
    if device.type == "cpu":
        print("On a CPU nothing is copied, and loading and computing share its cores: it may even take longer.")


if __name__ == "__main__":
    main()
