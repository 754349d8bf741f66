"""Loaders by the arguments of a DataLoader, with threads where that has worker processes."""

from __future__ import annotations

import functools
import platform
import sys
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpuprefetch._arguments import LARGEST_SEED, MOST_THREADS, callers_level, checked_int, warn_of_worker_init_fn
from gpuprefetch._iterator import PrefetchIterator
from gpuprefetch._recommended import recommended_num_threads

# Of a DataLoader with worker processes or a pinned copy of each batch, and without meaning here.
_WITHOUT_MEANING = (
    "in_order",
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "worker_init_fn",
)


def create_dataloader(
    dataset: Any,
    batch_size: int | None = 1,
    shuffle: bool | None = False,
    num_workers: int = 0,
    seed: int | None = None,
    *,
    device: torch.device | str | int | None = None,
    force_zero_workers_on_windows: bool | None = None,
    prefetch_batches: int = 2,
    skip_keys: Collection[Any] = (),
    pinned_bytes: int | None = None,
    timeout: float = 0,
    **dataloader_kwargs: Any,
) -> PrefetchIterator:
    """A ``PrefetchIterator`` around a plain ``DataLoader(dataset, ...)``, whose workers are threads of this process::

        batches = create_dataloader(dataset, batch_size=64, shuffle=True, num_workers=4, seed=7)
        for images, labels in batches:
            ...

    Make it once, outside the epoch loop: a new one begins with epoch 0 again. It is alike on every platform. The first
    call in a process with ``num_workers`` above 0 says so in a warning.

    Args:
        dataset, batch_size, shuffle: as for a DataLoader.
        num_workers: threads that load, 0 to 256: ``num_threads`` of the PrefetchIterator. No process is started. 0
            loads on the calling thread, inside ``next()``, so that only staging and copying overlap: ask for 1 or more.
        seed: fixes order and ``sample_generator()`` for any ``num_workers``; see ``PrefetchIterator``.
        device: where batches go. None takes the current accelerator, or the CPU where there is none.
        force_zero_workers_on_windows: accepted, and without effect. It is for loaders that give up their worker
            processes on Windows, where those fail; threads work there as anywhere else.
        prefetch_batches, skip_keys, pinned_bytes, timeout: of the PrefetchIterator. So ``timeout``, in seconds, is how
            long ``next()`` waits for a batch.
        dataloader_kwargs: all others of a DataLoader: sampler, batch_sampler, collate_fn, drop_last, generator. Those
            that are about worker processes or pinned copies are accepted, and without effect: pin_memory (copies go
            through a pinned buffer anyway), pin_memory_device, prefetch_factor, persistent_workers,
            multiprocessing_context, in_order. So is worker_init_fn, with a warning, since what it would have set up in
            each worker is missing.

    Raises:
        TypeError, ValueError: as DataLoader and PrefetchIterator raise them.
        RuntimeError: the device can't be used.
    """
    num_threads = checked_int("num_workers", num_workers, 0, MOST_THREADS)
    warn_of_worker_init_fn(dataloader_kwargs.get("worker_init_fn"))
    for name in _WITHOUT_MEANING:
        dataloader_kwargs.pop(name, None)
    batches = PrefetchIterator(
        DataLoader(dataset, batch_size, shuffle, **dataloader_kwargs),
        device,
        prefetch_batches=prefetch_batches,
        num_threads=num_threads,
        skip_keys=skip_keys,
        seed=seed,
        pinned_bytes=pinned_bytes,
        timeout=timeout,
    )
    if num_threads > 0:
        _say_that_workers_are_threads()
    return batches


def print_dataloader_config(
    num_workers: int, batch_size: int | None, seed: int | None = None, shuffle: bool | None = False
) -> None:
    """Prints what ``create_dataloader`` makes of these arguments, and the platform::

    print_dataloader_config(num_workers=2, batch_size=64, seed=7, shuffle=True)
    """
    num_threads = checked_int("num_workers", num_workers, 0, MOST_THREADS)
    seed = None if seed is None else checked_int("seed", seed, 0, LARGEST_SEED)
    threads = f"{num_threads}, no processes" if num_threads else "0, samples are loaded on the calling one"
    print(f"platform:   {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"threads:    {threads}; recommended: {recommended_num_threads()}")
    print(f"batch size: {batch_size}")
    print(f"seed:       {'none' if seed is None else seed}")
    print(f"shuffle:    {bool(shuffle)}")


def get_recommended_num_workers() -> int:
    """``recommended_num_threads()``, by the name that loader factories with worker processes use."""
    return recommended_num_threads()


def is_windows() -> bool:
    """True if this Python runs on Windows."""
    return sys.platform == "win32"


@functools.cache
def _say_that_workers_are_threads() -> None:
    warnings.warn(
        "num_workers of create_dataloader is a number of threads in this process, on every platform: no worker process "
        "is started, and nothing is pickled",
        UserWarning,
        stacklevel=callers_level(),
    )
