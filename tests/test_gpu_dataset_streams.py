"""A dataset that gives each thread a stream of its own: the code of docs/choosing-threads.md."""

from __future__ import annotations

import inspect
import re
import threading
from pathlib import Path

import pytest
import torch
from loaders import THREADS
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpuprefetch import PrefetchIterator

gpu = pytest.mark.gpu
MIB = 1 << 20


class Photos(Dataset):
    def __init__(self, photos, net):
        self.photos, self.net = photos, net.cuda().eval().requires_grad_(False)

    def __len__(self):
        return len(self.photos)

    @torch.no_grad()  # else each sample brings a graph along
    def __getitem__(self, i):
        return self.net(self.photos[i].cuda()[None])[0]


class PhotosApart(Photos):
    def __init__(self, photos, net):
        super().__init__(photos, net)
        self.own = threading.local()

    def __getitem__(self, i):
        shared = torch.cuda.current_stream()
        if not hasattr(self.own, "stream"):
            self.own.stream = torch.cuda.Stream()
            self.own.stream.wait_stream(shared)  # behind what made the net
        with torch.cuda.stream(self.own.stream):
            picture = super().__getitem__(i)
        shared.wait_stream(self.own.stream)
        picture.record_stream(shared)  # so that its memory is not used again before it was read there
        return picture


def test_the_documentation_shows_this_code():
    root = Path(__file__).parents[1]
    _, section = (root / "docs/choosing-threads.md").read_text(encoding="utf-8").split("## A dataset that computes")
    blocks = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.S)
    shown = [block.partition("\n\n\n")[0].replace("Upscaled", "Photos").strip() for block in blocks]
    assert shown == [inspect.getsource(one).strip() for one in (Photos, PhotosApart)]


class Spread(nn.Module):
    """From [1, 1] to [1, MIB] of the same, by way of tensors that are dropped, behind what ``before`` queues."""

    def __init__(self, before=lambda x: None):
        super().__init__()
        self.before = before
        self.one = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        self.before(x)
        return (x.expand(1, MIB) * self.one + 1) * 2 / 2 - 1


@gpu
@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("num_threads", THREADS)
def test_streams_apart_are_ordered_and_their_memory_is_kept(num_threads, batch_size, spin):
    net = Spread(lambda x: spin(3)).cuda()
    loader = DataLoader(PhotosApart(torch.arange(24.0).view(24, 1), net), batch_size=batch_size)
    low, high = torch.zeros(24, device="cuda"), torch.zeros(24, device="cuda")
    with torch.no_grad():
        spin(100)
        net.one.fill_(1)  # the last change of the net
    for k, flat in enumerate(PrefetchIterator(loader, device="cuda", num_threads=num_threads)):
        low[k] = flat.amin()
        spin(10)
        high[k] = flat.amax()
        del flat
    assert low.tolist() == high.tolist() == list(range(24))


@gpu
def test_samples_of_streams_apart_do_not_wait_for_each_other(spin):
    """Two threads have one sample each of a batch. From its second one on the stream of a thread waits for no other."""
    together, queued, ends, had_ended = threading.Barrier(2), threading.Event(), [], []
    milliseconds = iter((1, 1000))  # first few, since new kernels may wait for the device
    net = Spread(lambda x: spin(next(milliseconds)) if x.item() == 2 else None)
    nn.init.ones_(net.one)

    class Data(PhotosApart):
        def __getitem__(self, i):
            together.wait(20)
            if i == 3:
                assert queued.wait(20)
            picture = super().__getitem__(i)
            with torch.cuda.stream(self.own.stream):
                if i == 2:
                    ends.append(torch.cuda.Event())
                    ends[-1].record()
                    queued.set()
                elif picture.amax().item() == 3:
                    had_ended.append(ends[-1].query())
            return picture

    data = Data(torch.arange(4.0).view(4, 1), net)
    prefetched = PrefetchIterator(DataLoader(data, batch_size=2), device="cuda", num_threads=2)
    for _ in range(2):
        queued.clear()
        assert [flat.amin(1).tolist() for flat in prefetched] == [[0, 1], [2, 3]]
    assert len(had_ended) == 2 and not had_ended[1], "a sample came after that of another thread"
