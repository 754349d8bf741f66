"""A step trains on the images that it is given, in a CUDA graph too."""

import pytest
import torch
from decoders import DEVIATION, MEAN
from steps import CLASSES, OneGraph, make_step
from target import Target, Unusable, find_target


def test_images_in_uint8_are_normalised_by_the_step():
    seen = []
    step = make_step("convnet", Target(torch.device("cpu")))
    step.network.register_forward_pre_hook(lambda network, arguments: seen.append(*arguments))
    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    mean, deviation = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(DEVIATION).view(3, 1, 1)
    expected = (images / 255 - mean) / deviation
    for batch in (images, expected):
        step(batch, torch.arange(4))
    torch.testing.assert_close(seen, [expected, expected], rtol=1e-5, atol=1e-5)


def test_without_a_cuda_device_there_is_no_graph():
    with pytest.raises(Unusable, match="a step in a CUDA graph needs a CUDA device, not CPU"):
        make_step("convnet-graph", Target(torch.device("cpu")))


@pytest.mark.gpu
def test_the_losses_are_those_of_the_step_itself():
    target = find_target("cuda")
    generator = torch.Generator(target.device).manual_seed(1)
    batches = [
        (
            torch.randn(size, 3, 32, 32, device=target.device, generator=generator),
            torch.randint(CLASSES, (size,), device=target.device, generator=generator),
        )
        for size in (16, 16, 16, 16, 8)
    ]
    eager = make_step("convnet", target)
    expected = []
    for number, batch in enumerate(batches):
        if number in (0, 4):  # of a new shape, which a graph is captured for
            for _ in range(OneGraph.WARM_UPS):
                eager(*batch)
        expected.append(float(eager(*batch)))
    graphed = make_step("convnet-graph", target)
    assert [float(graphed(*batch)) for batch in batches] == pytest.approx(expected, rel=0.02)
    assert len(set(expected)) == len(batches)
