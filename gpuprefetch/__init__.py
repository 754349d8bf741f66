"""Load, copy and compute at the same time, in one process."""

from gpuprefetch._cached_dataset import CachedDataset
from gpuprefetch._create_dataloader import (
    create_dataloader,
    get_recommended_num_workers,
    is_windows,
    print_dataloader_config,
)
from gpuprefetch._dataloader_x import DataLoaderX
from gpuprefetch._iterator import PrefetchIterator
from gpuprefetch._recommended import recommended_num_threads
from gpuprefetch._reproducibility import verify_reproducibility
from gpuprefetch._seeds import sample_generator, sample_rng
from gpuprefetch._set_seed import set_seed

__all__ = [
    "CachedDataset",
    "DataLoaderX",
    "PrefetchIterator",
    "create_dataloader",
    "get_recommended_num_workers",
    "is_windows",
    "print_dataloader_config",
    "recommended_num_threads",
    "sample_generator",
    "sample_rng",
    "set_seed",
    "verify_reproducibility",
]
__version__ = "0.1.0"
