"""The hash of an epoch's batches tells a batch that is lost, doubled, out of place or overwritten, wherever it is."""

import pytest
import torch
from epoch import Tally
from target import Target

BATCHES, SAMPLES = 50, 8


@pytest.fixture(scope="module")
def epoch():
    """Images of random pixels, whose sums hardly differ, and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(BATCHES * SAMPLES).view(BATCHES, SAMPLES)
    return list(zip(torch.rand(BATCHES, SAMPLES, 3, 32, 32, generator=generator), labels, strict=True))


def checksum(batches):
    tally = Tally(Target(torch.device("cpu")))
    tally.stride = 1  # as on an accelerator
    for images, labels in batches:
        tally.add(images, labels)
    return tally.result()


def with_images(change):
    def changed(epoch, place):
        images, labels = epoch[place]
        images = images.clone()
        change(images, epoch[(place + 1) % BATCHES][0])
        return [*epoch[:place], (images, labels), *epoch[place + 1 :]]

    return changed


def lowest_bit(images, _):
    images.view(torch.int32)[0, 0, 0, 0] ^= 1


FAULTS = {
    "the next batch over it": with_images(lambda images, following: images.copy_(following)),
    "a sample of the next over its own": with_images(lambda images, following: images[3].copy_(following[3])),
    "two samples exchanged": with_images(lambda images, _: images.copy_(images[[1, 0, *range(2, SAMPLES)]])),
    "one bit": with_images(lowest_bit),
    "lost": lambda epoch, place: [*epoch[:place], *epoch[place + 1 :]],
    "doubled": lambda epoch, place: [*epoch[: place + 1], *epoch[place:]],
    "labels exchanged": lambda epoch, place: [
        *epoch[:place],
        (epoch[place][0], epoch[place][1].flip(0)),
        *epoch[place + 1 :],
    ],
    "exchanged with the next": lambda epoch, place: [
        *epoch[:place],
        epoch[(place + 1) % BATCHES],
        epoch[place],
        *epoch[place + 2 :],
    ],
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_told_at_every_place(fault, epoch):
    whole = checksum(epoch)
    assert [place for place in range(BATCHES) if checksum(fault(epoch, place)) == whole] == []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 8])
def test_one_bit_of_any_dtype_and_width_is_told(dtype, width):
    images = torch.ones(2, 3, 4, width, dtype=dtype)
    other = images.clone()
    other.view(torch.uint8)[1, 2, 3, -1] ^= 1
    labels = torch.arange(2)
    assert checksum([(images, labels)]) != checksum([(other, labels)])


def test_the_same_batches_in_other_memory_have_the_same_hash(epoch):
    copied = [(images.to(memory_format=torch.channels_last), labels.clone()) for images, labels in epoch]
    assert checksum(copied) == checksum(epoch)
