"""A step in one CUDA graph trains on each batch that it is given, as the step itself does."""

import pytest
import torch
from steps import CLASSES, OneGraph, make_step
from target import Target, Unusable, find_target


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
