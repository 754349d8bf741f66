"""A small training run that is the same each time, as far as the device's kernels are."""

from __future__ import annotations

import torch


@torch.inference_mode(False)
@torch.enable_grad()
def train(device: torch.device) -> dict[str, torch.Tensor]:
    """Losses and weights of a small network after five steps from a fixed seed."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(0)  # and not the seed that CUDA begins with, once it does
    else:
        torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 14 * 14, 10),
    ).to(device)
    images, labels = torch.rand(8, 3, 16, 16).to(device), torch.randint(10, (8,)).to(device)
    weights = list(network.parameters())
    losses = []
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        losses.append(loss.detach())
        with torch.no_grad():  # by hand, since torch.optim takes seconds to import what it does not need here
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(gradient, alpha=0.05)
    return {"losses": torch.stack(losses), **network.state_dict()}
