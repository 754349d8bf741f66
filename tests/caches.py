"""Datasets behind a ``CachedDataset``, and what they give."""

import torch
from torch.utils.data import Dataset

from gpuprefetch import CachedDataset

N = 12
PLENTY = 1 << 20


class Counted(Dataset):
    """``make(i)``, and the indices that were asked for."""

    def __init__(self, make, n=N):
        self.make, self.n, self.asked = make, n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.asked.append(i)
        return self.make(i)


def ramp(i):
    return torch.full((4,), float(i))  # 16 bytes


def cached(make, max_bytes=PLENTY, **arguments):
    dataset = Counted(make)
    return CachedDataset(dataset, max_bytes, **arguments), dataset


class Holder:
    """Neither a container nor a tensor."""

    def __init__(self, value):
        self.value = value


class WithItsOwnCopy(torch.Tensor):
    def __deepcopy__(self, memo):
        whole = torch.empty(0, device=self.device).set_(self.untyped_storage().clone())
        return whole.as_strided(self.shape, self.stride(), self.storage_offset()).as_subclass(WithItsOwnCopy)
