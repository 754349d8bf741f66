"""Load, copy and compute at the same time, in one process."""

from gpuprefetch._dataloader_x import DataLoaderX
from gpuprefetch._iterator import PrefetchIterator
from gpuprefetch._seeds import sample_generator, sample_rng

__all__ = ["DataLoaderX", "PrefetchIterator", "sample_generator", "sample_rng"]
__version__ = "0.1.0"
