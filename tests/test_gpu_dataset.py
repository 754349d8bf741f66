"""Datasets that hold a model: their work on the device runs beside the step and is ordered before what reads it."""

from __future__ import annotations

import threading
import types

import pytest
import torch
from loaders import THREADS, eventually
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpuprefetch import PrefetchIterator

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
MIB = 1 << 20


def upscaler(device):
    """From [N, 1, 8, 8] to [N, 1, 16, 16], with weights that are the same each time."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=generator, std=0.2)
    return net.eval().to(device)


class Upscaled(Dataset):
    """Sample i is (a picture that the model made on its device, i)."""

    def __init__(self, device, n=24, mode=torch.no_grad, before=None):
        self.device, self.n, self.mode, self.before = device, n, mode, before
        self.model = upscaler(device)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.before is not None:
            self.before(i)
        small = torch.linspace(0, i, 64).view(1, 1, 8, 8)
        with self.mode():
            return self.model(small.to(self.device))[0], i


class UpscaledStream(IterableDataset):
    def __init__(self, device, before=None):
        self.samples = Upscaled(device, before=before)

    def __iter__(self):
        return (self.samples[i] for i in range(len(self.samples)))


def upscaled_by_collate(device, before=None):
    model = upscaler(device)

    def collate(indices):
        if before is not None:
            before(indices[0])
        small = torch.stack([torch.linspace(0, i, 64).view(1, 8, 8) for i in indices]).to(device)
        with torch.no_grad():
            return model(small), torch.tensor(indices)

    return DataLoader(range(24), batch_size=4, collate_fn=collate)


LOADERS = {
    "dataset": lambda device, before=None: DataLoader(Upscaled(device, before=before), batch_size=4),
    "dataset without batches": lambda device, before=None: DataLoader(Upscaled(device, before=before), batch_size=None),
    "iterable dataset": lambda device, before=None: DataLoader(UpscaledStream(device, before), batch_size=4),
    "collate_fn": upscaled_by_collate,
    "no DataLoader": lambda device, before=None: UpscaledStream(device, before),
}
CALLS_A_BATCH = {"dataset": 4, "dataset without batches": 1, "iterable dataset": 4, "collate_fn": 1, "no DataLoader": 1}
"""How often `before` is called."""


@pytest.mark.windows
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("form", LOADERS)
def test_batches_are_those_of_the_plain_loader(form, num_threads, device):
    loader = LOADERS[form](device)
    plain = [(picture.clone(), torch.as_tensor(number)) for picture, number in loader]
    for _ in range(2):
        out = list(PrefetchIterator(loader, device=device, num_threads=num_threads))
        assert len(out) == len(plain) >= 6
        for (picture, number), (expected, expected_number) in zip(out, plain, strict=True):
            assert picture.device.type == device and not picture.requires_grad
            # Threads that share torch's intra-op threads may add in another order.
            torch.testing.assert_close(picture, expected, rtol=1e-3, atol=1e-3)
            assert torch.as_tensor(number).tolist() == expected_number.tolist()


@pytest.mark.windows
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_net_that_is_trained_on_them_gets_the_same_weights(mode, num_threads, device):
    def trained(wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(256, 4)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for pictures, numbers in wrap(DataLoader(Upscaled(device, mode=mode), batch_size=4)):
            loss = nn.functional.cross_entropy(net(pictures), numbers.to(device) % 4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])

    plain = trained(lambda loader: loader)
    ours = trained(lambda loader: PrefetchIterator(loader, device=device, num_threads=num_threads))
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)
    torch.manual_seed(0)
    assert not torch.allclose(plain[:1024], nn.Linear(256, 4).weight.detach().flatten().to(device)), "it learnt nothing"


@pytest.mark.windows
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_threads", THREADS)
def test_an_error_of_the_model_comes_at_its_batch(num_threads, device):
    def hook(module, inputs):
        if inputs[0].amax() == 9:
            raise ArithmeticError("nine")

    data = Upscaled(device)
    data.model.register_forward_pre_hook(hook)
    epoch = iter(PrefetchIterator(DataLoader(data, batch_size=4), device=device, num_threads=num_threads))
    assert [next(epoch)[1].tolist(), next(epoch)[1].tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ArithmeticError, match="nine"):
        next(epoch)


# --- on the device


@gpu
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("form", LOADERS)
def test_the_step_reads_after_the_datasets_work(form, num_threads, spin):
    """Nothing here waits for the device before the end."""
    plain = [picture.sum() for picture, _ in LOADERS[form]("cuda")]
    loader = LOADERS[form]("cuda", lambda i: spin(3))
    sums = [picture.sum() for picture, _ in PrefetchIterator(loader, device="cuda", num_threads=num_threads)]
    torch.testing.assert_close(torch.stack(sums), torch.stack(plain), rtol=1e-3, atol=1e-2)


@gpu
@pytest.mark.parametrize("num_threads", THREADS)
def test_a_picture_is_handed_over_without_a_copy(num_threads):
    made = {}

    class Kept(Upscaled):
        def __getitem__(self, i):
            made[i], number = super().__getitem__(i)
            return made[i], number

    loader = DataLoader(Kept("cuda"), batch_size=None)
    out = list(PrefetchIterator(loader, device="cuda", num_threads=num_threads))
    assert [number for _, number in out] == list(range(24))
    assert all(picture is made[number] for picture, number in out)


@gpu
@pytest.mark.parametrize("num_threads", THREADS)
def test_the_stream_of_the_datasets_work(num_threads):
    """The caller's where it runs on the caller's thread, else one of its own for all threads of the epoch."""
    seen = set()
    loader = DataLoader(Upscaled("cuda", before=lambda i: seen.add(torch.cuda.current_stream())), batch_size=4)
    callers = torch.cuda.Stream(priority=-1)  # of another pool, whose streams are never those of an epoch
    with torch.cuda.stream(callers):
        for _ in PrefetchIterator(loader, device="cuda", num_threads=num_threads):
            pass
    (stream,) = seen
    assert stream != torch.cuda.default_stream()
    assert (stream == callers) == (num_threads == 0)


class Flat(Dataset):
    """Sample i is [MIB] of i on the device, made by way of tensors that are dropped."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return (torch.full((MIB,), float(i), device="cuda") + 1) * 2 / 2 - 1


class FlatStream(IterableDataset):
    def __iter__(self):
        return map(Flat().__getitem__, range(24))


@gpu
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Flat(), batch_size=1),
        lambda: DataLoader(Flat(), batch_size=None),
        lambda: DataLoader(FlatStream(), batch_size=1),
        lambda: FlatStream(),
    ],
    ids=["dataset", "dataset without batches", "iterable dataset", "no DataLoader"],
)
def test_memory_is_not_used_again_while_the_step_reads_it(make, num_threads, spin):
    low, high = torch.zeros(24, device="cuda"), torch.zeros(24, device="cuda")
    for k, flat in enumerate(PrefetchIterator(make(), device="cuda", num_threads=num_threads)):
        spin(10)
        low[k], high[k] = flat.amin(), flat.amax()
        del flat
    assert low.tolist() == high.tolist() == list(range(24))


@gpu
@pytest.mark.parametrize("num_threads", THREADS)
def test_what_an_object_that_does_not_move_holds_is_ordered_and_kept(num_threads, spin):
    def collate(samples):
        spin(3)
        return types.SimpleNamespace(flat=samples[0] * 1, by_name={"index": samples[0][:1] * 1})

    low, high, index = (torch.zeros(24, device="cuda") for _ in range(3))
    loader = DataLoader(Flat(), batch_size=1, collate_fn=collate)
    for k, batch in enumerate(PrefetchIterator(loader, device="cuda", num_threads=num_threads)):
        low[k] = batch.flat.amin()
        spin(10)
        high[k], index[k] = batch.flat.amax(), batch.by_name["index"][0]
        del batch
    assert low.tolist() == high.tolist() == index.tolist() == list(range(24))


@gpu
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("form", LOADERS)
def test_the_datasets_work_does_not_wait_for_the_step(form, num_threads, spin):
    calls, size = [], CALLS_A_BATCH[form]

    def before(i):
        torch.ones(8).cuda().sum().item()  # waits for what its own stream has to do
        calls.append(i)

    prefetched = PrefetchIterator(LOADERS[form]("cuda", before), device="cuda", num_threads=num_threads)
    batches = len(list(prefetched))  # first, since new kernels may wait for the device
    assert len(calls) == batches * size
    calls.clear()
    epoch = iter(prefetched)
    next(epoch)
    assert eventually(lambda: len(calls) == 3 * size, collect=False)  # two batches ahead
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    spin(1500)
    end.record()
    next(epoch)
    assert eventually(lambda: len(calls) == 4 * size, 1.0, collect=False)
    assert not end.query(), "the dataset's work came after the step"
    assert len(list(epoch)) == batches - 2


@gpu
def test_the_step_does_not_wait_for_the_work_of_a_later_batch(spin):
    armed, queued, ends = [], threading.Event(), []

    def before(i):
        if armed and i == 8:  # the first sample of batch 2
            spin(1500)
            ends.append(torch.cuda.Event())
            ends[0].record()
            queued.set()

    prefetched = PrefetchIterator(DataLoader(Upscaled("cuda", before=before), batch_size=4), device="cuda")
    expected = [picture.sum().item() for picture, _ in prefetched]
    armed.append(True)
    epoch = iter(prefetched)
    next(epoch)
    assert queued.wait(20)
    assert next(epoch)[0].sum().item() == pytest.approx(expected[1], rel=1e-3)
    assert not ends[0].query(), "the step came after the dataset's work"
    assert [picture.sum().item() for picture, _ in epoch] == pytest.approx(expected[2:], rel=1e-3)


@gpu
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_capture_goes_on_beside_the_datasets_work(num_threads):
    """In the default mode, in which calls of other threads can end a capture, while the dataset wants more memory."""
    n = 20
    made = [threading.Event() for _ in range(n)]

    class Growing(Dataset):
        def __len__(self):
            return n

        def __getitem__(self, i):
            x = torch.full(((i + 1) << 18,), float(i), device="cuda")
            assert x[0].item() == i
            made[i].set()
            return x

    x = torch.ones(8, device="cuda")
    torch.cuda.empty_cache()
    loader = DataLoader(Growing(), batch_size=None)
    for i, batch in enumerate(PrefetchIterator(loader, device="cuda", num_threads=num_threads)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            assert made[min(i + 2, n - 1)].wait(30)
            y = y + 1
        graph.replay()
        assert y.tolist() == [3.0] * 8
        assert (batch.numel(), int(batch.amin()), int(batch.amax())) == ((i + 1) << 18, i, i)
    assert i == n - 1
