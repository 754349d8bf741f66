"""The rows of gpuprefetch."""

from __future__ import annotations

import functools
import warnings

import torch
from rows import GATHERED, GATHERED_BESIDE_COMPUTE, Loader, Opened, family, gathered, row, staged_beside
from target import Target
from workloads import changed


def _nothing_to_copy(target: Target) -> str | None:
    if not target.accelerated:
        return f"on {target.device.type} it is the plain loader: it loads inside next(), and nothing is copied"
    return None


def _takes_another_device(target: Target) -> str | None:
    if not target.accelerated and torch.accelerator.is_available():
        return f"DataLoaderX takes the accelerator, not {target.device.type}"
    return None


def prefetched(count: int, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from gpuprefetch import PrefetchIterator

    # That they share the dataset is what the rows with several are about.
    warnings.filterwarnings("ignore", "with several num_threads", RuntimeWarning)
    with PrefetchIterator(loader, target.device, prefetch_batches=prefetch_batches, num_threads=count) as batches:
        yield batches


row(
    "gpuprefetch",
    "PrefetchIterator(loader), one loader thread and the copying threads",
    bound=GATHERED,
    loads_beside=True,
)(functools.partial(prefetched, 1))
row(
    "gpuprefetch0",
    "PrefetchIterator(loader, num_threads=0), loads inside next(), copies ahead",
    bound=GATHERED,
    bound_in_sync=GATHERED_BESIDE_COMPUTE,
    loads_beside=False,
    missing=_nothing_to_copy,
)(functools.partial(prefetched, 0))


@row(
    "gpuprefetch-x",
    "DataLoaderX(rank, ...), built as FastReID builds its own",
    bound=GATHERED,
    loads_beside=True,
    default=False,
    missing=_takes_another_device,
)
def in_place_of_fastreids(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from gpuprefetch import DataLoaderX

    batches = DataLoaderX(
        target.device.index or 0,
        dataset=loader.dataset,
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        pin_memory=True,
        prefetch_batches=prefetch_batches,
    )
    try:
        yield batches
    finally:
        batches.shutdown()


family(
    "gpuprefetch",
    "PrefetchIterator(loader, num_threads={0}), samples on {0} threads",
    bound=gathered,
)(prefetched)


@family(
    "gpuprefetch-workers",
    "PrefetchIterator(loader), where the loader has num_workers={} (processes)",
    bound=staged_beside,
)
def around_processes(count: int, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from gpuprefetch import PrefetchIterator

    warnings.filterwarnings("ignore", "the loader's num_workers is above 0", RuntimeWarning)  # on Windows
    working = changed(loader, num_workers=count, persistent_workers=True)
    with PrefetchIterator(working, target.device, prefetch_batches=prefetch_batches) as batches:
        yield batches
