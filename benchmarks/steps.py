"""The training steps: what the device does with a batch.

A step is called with an image batch [N, C, H, W] and its labels [N] on the device, and returns a 0-dim tensor there,
whose `item()` waits until the step is done.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from decoders import DEVIATION, MEAN
from target import Target, Unusable
from torch import nn

CLASSES = 1000
IN_ONE_GRAPH = "-graph"  # behind a step's name


class Step(ABC):
    description: str

    @abstractmethod
    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor: ...


class Kernels(Step):
    """Eight matrix products of a fixed size and a sum over the batch: few launches, so the GPU is the bottleneck and
    its time hardly varies. That is what makes a 2 % loss of overlap visible."""

    PRODUCTS = 8
    SIZE = 8192

    def __init__(self, target: Target, size: int = SIZE) -> None:
        self.size = size
        generator = torch.Generator(target.device).manual_seed(0)

        def matrix() -> torch.Tensor:
            values = torch.empty(size, size, device=target.device, dtype=torch.bfloat16)
            return values.normal_(generator=generator)

        self.start = matrix()
        self.weight = matrix().mul_(size**-0.5)  # keeps the size of the products near 1, however long the chain
        self.buffers = [torch.empty_like(self.start) for _ in range(2)]
        self.description = f"{self.PRODUCTS} products of {size} x {size} bf16 matrices and a sum over the batch"

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        source = self.start
        for number in range(self.PRODUCTS):
            result = self.buffers[number % 2]
            torch.mm(source, self.weight, out=result)
            source = result
        # Last, so that the batch is in use until the step ends, as it is in training.
        return images.sum()


class KernelsThenPython(Kernels):
    """The same, and after the launches a loop that holds the GIL, as metrics and logging do."""

    LOOPS = 80_000

    def __init__(self, target: Target, size: int = Kernels.SIZE) -> None:
        super().__init__(target, size)
        self.description += f", then {self.LOOPS} turns of a Python loop that holds the GIL"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        result = super().__call__(images, labels)
        value = 0
        for number in range(self.LOOPS):
            value = (value + number) & 0x7FFF_FFFF
        return result


class Training(Step):
    """Forward, backward and SGD of a network, in bf16 autocast and channels_last. Images in uint8 are normalised."""

    def __init__(self, target: Target, name: str, network: nn.Module) -> None:
        self.device_type = target.device.type
        self.network = network.to(memory_format=torch.channels_last).to(target.device).train()  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3, momentum=0.9)
        self.loss = nn.CrossEntropyLoss()
        self.mean, self.deviation = (
            torch.tensor(values, device=target.device).mul_(255).view(3, 1, 1) for values in (MEAN, DEVIATION)
        )
        self.description = f"{name}: forward, backward and SGD, bf16 autocast, channels_last"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if images.dtype == torch.uint8:
            images = (images - self.mean) / self.deviation
        images = images.to(memory_format=torch.channels_last)
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            loss = self.loss(self.network(images), labels.remainder(CLASSES))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        detached: torch.Tensor = loss.detach()
        return detached


class OneGraph(Step):
    """Another step as one CUDA graph for each shape of batch: a copy to where the graph reads it, and one launch."""

    WARM_UPS = 3  # libraries choose their kernels and take their memory, as they can't in a capture

    def __init__(self, target: Target, step: Step) -> None:
        if target.device.type != "cuda":
            raise Unusable(f"a step in a CUDA graph needs a CUDA device, not {target.name}")
        self.step = step
        self.graphs: dict[torch.Size, tuple[Callable[[], None], torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.description = f"{step.description}, all of it one CUDA graph"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if images.shape not in self.graphs:
            self.graphs[images.shape] = self._capture(images.clone(), labels.clone())
        replay, static_images, static_labels, result = self.graphs[images.shape]
        static_images.copy_(images)
        static_labels.copy_(labels)
        replay()
        return result

    def _capture(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor, torch.Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UPS):
                self.step(images, labels)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # before any row runs: their threads could break it
            result = self.step(images, labels)
        return graph.replay, images, labels, result


class Nothing(Step):
    """Leaves a batch as it is, so that a step takes what it takes to load and copy one."""

    description = "nothing but the checksum of the batch: a step takes what loading and copying take"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return images.view(-1)[0]


class Wait(Step):
    """Stands for a step where there is no accelerator: the calling thread sleeps, so the CPU is free for loading."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.description = f"a timed wait of {seconds * 1e3:.1f} ms stands for the step: no claim rests on it"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return images.view(-1)[0]


def _convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES))


def make_step(name: str, target: Target) -> Step:
    """The step called `name` on an accelerator; on the CPU a `Wait` takes the place of all but none (see
    `calibration`)."""
    torch.manual_seed(0)
    if name == "none":
        return Nothing()
    if name == "kernels":
        return Kernels(target)
    if name == "python":
        return KernelsThenPython(target)
    if name.endswith(IN_ONE_GRAPH):
        return OneGraph(target, make_step(name.removesuffix(IN_ONE_GRAPH), target))
    if name == "convnet":
        return Training(target, "a net of 4 convolutions", _convnet())
    try:
        from torchvision import models
    except ModuleNotFoundError:
        raise SystemExit(
            f"--step {name} needs torchvision, built for the torch installed here; --step convnet needs nothing"
        ) from None
    return Training(target, name.replace("resnet", "ResNet-"), getattr(models, name)())
