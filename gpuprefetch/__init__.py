"""Load, copy and compute at the same time, in one process."""

from gpuprefetch._iterator import PrefetchIterator

__all__ = ["PrefetchIterator"]
__version__ = "0.1.0"
