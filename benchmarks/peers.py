"""Rows of worker processes and of other packages, each set up as its own documentation says.

torchdata.nodes: https://docs.pytorch.org/data/0.11/migrate_to_nodes_from_utils.html
SPDL: https://facebookresearch.github.io/spdl/main/performance_analysis/setup.html
timm: around a DataLoader, as its ``create_loader`` puts it
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epoch import Batch
from in_process import Epochs, nothing_to_pin, on_device
from rows import Loader, Opened, family, row, staged_beside
from target import Target
from torch.utils.data import Dataset, default_collate
from workloads import changed


def _needs(*modules: str) -> Callable[[Target], str | None]:
    def missing(target: Target) -> str | None:
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # an extension built for another torch raises whatever its loader does
                return f"{name} can't be imported: {str(error).splitlines()[0]}"
        return None

    return missing


@family(
    "workers",
    "DataLoader, num_workers={} (processes), pin_memory=True, .to(device, non_blocking=True)",
    bound=staged_beside,
)
def workers(count: int, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    pins = target.streams is not None
    working = changed(loader, num_workers=count, pin_memory=pins, persistent_workers=True)
    epochs = Epochs(lambda: on_device(working, target, non_blocking=True))
    try:
        yield epochs
    finally:
        del epochs.start  # the loader with it, which ends its processes: those left at exit torch waits for, 5 s each


def _timm_is_missing(target: Target) -> str | None:
    return nothing_to_pin(target) or _needs("timm.data.loader")(target)


@row(
    "timm",
    "timm's PrefetchLoader, 0 workers, pin_memory=True, on float32 (its own loaders give uint8), mean 0, deviation 1",
    loads_beside=False,
    default=False,
    missing=_timm_is_missing,
)
def timm(loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from timm.data.loader import PrefetchLoader

    # It takes both as fractions of 255, and changes nothing with these.
    yield PrefetchLoader(
        changed(loader, pin_memory=True), mean=(0.0,) * 3, std=(1 / 255,) * 3, channels=3, device=target.device
    )


class LoadBatch:
    """From the indices of a batch to the batch."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


@family(
    "nodes",
    "torchdata.nodes: Batcher, ParallelMapper(num_workers={}, threads), PinMemory, Prefetcher; .to in the loop",
    bound=staged_beside,
    missing=_needs("torchdata.nodes"),
)
def nodes(count: int, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    from torchdata import nodes as tn

    node: Any = tn.Batcher(tn.SamplerWrapper(loader.sampler), batch_size=loader.batch_size)
    node = tn.ParallelMapper(node, map_fn=LoadBatch(loader.dataset), num_workers=count, method="thread")
    if target.streams is not None:
        node = tn.PinMemory(node)
    batches: Any = tn.Loader(tn.Prefetcher(node, prefetch_factor=2 * count))
    yield Epochs(lambda: on_device(batches, target, non_blocking=True))


def _spdl_is_missing(target: Target) -> str | None:
    if target.accelerated and str(target.device) != "cuda:0":
        return f"its copy goes to the CUDA device of LOCAL_RANK, not to {target.device}"
    return _needs("spdl.pipeline", "spdl.io")(target)


@family(
    "spdl",
    "SPDL: a pipeline that loads batches, build(num_threads={}), then transfer_tensor_h2d",
    bound=staged_beside,
    missing=_spdl_is_missing,
)
def spdl(count: int, loader: Loader, target: Target, prefetch_batches: int) -> Opened:
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    # Newer versions have it under the longer name.
    transfer = getattr(spdl.io, "transfer_tensor_h2d", None) or spdl.io.transfer_tensor
    with ThreadPoolExecutor(max_workers=1) as copier:  # it keeps a stream for each thread

        def start() -> Iterator[Batch]:
            load = LoadBatch(loader.dataset)
            builder = PipelineBuilder().add_source(iter(loader.batch_sampler))
            builder = builder.pipe(load, concurrency=count, output_order="input")
            if target.accelerated:
                builder = builder.pipe(transfer, executor=copier)
            pipeline = builder.add_sink(prefetch_batches).build(num_threads=count)
            with pipeline.auto_stop():
                yield from pipeline.get_iterator()

        yield Epochs(start)
