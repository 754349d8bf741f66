"""A dataset that runs a net on the device: super-resolution of face crops, made while an embedding net is trained.

    python examples/gpu_dataset.py [--device cuda]

The dataset can't be given to worker processes, since it holds a net on the device. So the choice used to be to load by
turns or to compute all pictures beforehand. PrefetchIterator takes it as it is. Crops and weights are random here: what
is shown is the time of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpuprefetch import PrefetchIterator

PEOPLE = 16
Batch = tuple[torch.Tensor, torch.Tensor]


def super_resolution() -> nn.Module:
    """From [N, 3, 32, 32] to [N, 3, 128, 128]."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.PixelShuffle(4),
        nn.Sigmoid(),
    ).eval()


class SharpFaces(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is a crop as the net makes it, [3, 128, 128] float32 on the device, and who it shows."""

    def __init__(self, count: int, model: nn.Module, device: torch.device) -> None:
        self.crops = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
        self.model = model.to(device)
        self.device = device

    def __len__(self) -> int:
        return len(self.crops)

    @torch.no_grad()
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        crop = self.crops[i].to(self.device).float() / 255
        return self.model(crop[None])[0], i % PEOPLE


def embedding_net() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, PEOPLE))


class Trainer:
    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = embedding_net().to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def milliseconds_a_step(self, batches: Iterable[Batch]) -> float:
        steps, loss = 0, torch.zeros(())
        start = time.perf_counter()
        for faces, people in batches:
            faces, people = faces.to(self.device), people.to(self.device)  # does nothing where they are there
            loss = nn.functional.cross_entropy(self.net(faces), people)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            steps += 1
        loss.item()  # waits for the device
        return (time.perf_counter() - start) / steps * 1e3


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--steps", type=positive, default=12, help="of an epoch (12)")
    parser.add_argument("--epochs", type=positive, default=3, help="with each loader (3)")
    parser.add_argument("--quick", action="store_true", help="two epochs of two steps, to see that it runs")
    options = parser.parse_args()
    steps, epochs = (2, 2) if options.quick else (options.steps, options.epochs)
    try:
        device = torch.empty(0, device=options.device).device
    except (RuntimeError, AssertionError) as error:  # torch's own words
        parser.error(f"--device {options.device}: {error}")
    if device.type == "cpu":
        torch.set_num_threads(1)  # else the threads of one operation wait for each other where loading has their core

    torch.manual_seed(0)
    dataset = SharpFaces(steps * options.batch_size, super_resolution(), device)
    loader = DataLoader(dataset, batch_size=options.batch_size)
    faces = torch.stack([dataset[i][0].cpu() for i in range(len(dataset))])
    precomputed = TensorDataset(faces, torch.arange(len(dataset)) % PEOPLE)
    loaders: dict[str, Iterable[Batch]] = {
        "plain loader, num_workers=0": loader,
        "gpuprefetch": PrefetchIterator(loader, device=device),
        "precomputed, plain loader": DataLoader(precomputed, batch_size=options.batch_size),
        "precomputed, gpuprefetch": PrefetchIterator(
            DataLoader(precomputed, batch_size=options.batch_size), device=device
        ),
    }
    print(f"{len(dataset)} faces, {steps} steps an epoch, {device}")
    trainers = {name: Trainer(device) for name in loaders}
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for epoch in range(epochs + 1):
        for name in loaders:  # in turn, so that all meet the same machine
            milliseconds = trainers[name].milliseconds_a_step(loaders[name])
            if epoch > 0:  # the first one warms up
                times[name].append(milliseconds)
    for name, milliseconds_each in times.items():
        print(f"{name}: {statistics.median(milliseconds_each):.1f} ms a step (median of {epochs} epochs)")
    if device.type == "cpu":
        print("On a CPU both nets share the cores, so this says nothing of what a GPU gains: it may even take longer.")


if __name__ == "__main__":
    main()
