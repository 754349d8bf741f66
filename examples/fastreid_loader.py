"""A training loader as FastReID builds it, with torch's DataLoader and with gpuprefetch's DataLoaderX: ms a batch.

    python examples/fastreid_loader.py

Without a GPU nothing is copied, and what can overlap is the loading and the step, which here only wait.
"""

import argparse
import itertools
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from gpuprefetch import DataLoaderX

BATCH_SIZE, BATCHES = 16, 40
LOAD_SECONDS, STEP_SECONDS = 0.001, 0.012  # of a sample, of a batch
LOCAL_RANK = 0


class Images(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        time.sleep(LOAD_SECONDS)  # in place of reading and decoding, which let go of the interpreter's lock too
        return {"images": torch.full((3, 256, 128), i % 256, dtype=torch.uint8), "targets": i, "img_paths": f"{i}.jpg"}


class TrainingSampler(Sampler):
    """Permutations of ``range(size)`` without end."""

    def __init__(self, size, seed=0):
        self.size, self.seed = size, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=generator).tolist()


def collate(samples):
    return {
        "images": torch.stack([sample["images"] for sample in samples]),
        "targets": torch.tensor([sample["targets"] for sample in samples]),
        "img_paths": [sample["img_paths"] for sample in samples],
    }


def arguments():
    """What both loaders are made of."""
    dataset = Images()
    batch_sampler = BatchSampler(TrainingSampler(len(dataset)), BATCH_SIZE, drop_last=True)
    return {"dataset": dataset, "batch_sampler": batch_sampler, "collate_fn": collate, "pin_memory": True}


def step(batch):
    """In place of forward and backward: waits, and says which samples it saw."""
    time.sleep(STEP_SECONDS)
    return batch["targets"].tolist()


def train(loader, device, count):
    batches = iter(loader)
    seen = []
    start = time.perf_counter()
    for batch in itertools.islice(batches, count):
        moved = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
        seen.append(step(moved))
    return seen, (time.perf_counter() - start) / count * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few batches, to see that it runs")
    count = 5 if parser.parse_args().quick else BATCHES
    torch.set_num_threads(1)  # stacking on several threads would mostly wait for busy cores
    plain = arguments() | {"pin_memory": torch.cuda.is_available()}
    loaders = {workers: DataLoaderX(LOCAL_RANK, num_workers=workers, **arguments()) for workers in (0, 4)}
    device = loaders[0].device
    expected, milliseconds = train(DataLoader(**plain), device, count)
    print(f"on {device}, {count} batches of {BATCH_SIZE}")
    print(f"DataLoader, num_workers=0     {milliseconds:6.1f} ms a batch")
    for workers, loader in loaders.items():
        seen, milliseconds = train(loader, device, count)
        assert seen == expected, "DataLoaderX gave other batches"
        loader.shutdown()  # what was loaded ahead of the last batch is dropped
        print(f"DataLoaderX, num_workers={workers}    {milliseconds:6.1f} ms a batch")


if __name__ == "__main__":
    main()
