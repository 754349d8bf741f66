"""Batches under an allocator that does not know ``record_stream``."""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Collection
from typing import Any

import torch

from gpuprefetch import _batch
from gpuprefetch._environment import relaxed_capture_mode
from gpuprefetch._record import Record


def needed() -> bool:
    """True if the process uses a pluggable allocator, such as RMM's. Whether it records streams can't be asked."""
    return torch.cuda.memory.get_allocator_backend() == "pluggable"


class ConsumerCopies:
    """Gives the consumer copies that were allocated on its own stream, and keeps the originals until they are made.

    A tensor of the copy stream would be given to the next copy as soon as the consumer drops it, with kernels that
    read it still in the consumer's queue. A copy on the device costs a fiftieth of the one over the bus.
    """

    def __init__(self, skip_keys: Collection[Any]) -> None:
        self._skip_keys = skip_keys
        self._kept: collections.deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = collections.deque()
        _warn()

    def own(self, record: Record, stream: torch.cuda.Stream) -> Any:
        """The record's batch, copied on ``stream``, the current one."""
        leaves = _batch.leaves(record.batch, self._skip_keys)
        copies = {
            id(leaf): leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.device == stream.device else leaf
            for leaf in leaves
        }
        made = torch.cuda.Event(blocking=True)
        made.record(stream)
        self._kept.append((made, record.held))
        with relaxed_capture_mode():
            while self._kept and self._kept[0][0].query():
                self._kept.popleft()
        return _batch.replace(record.batch, copies, self._skip_keys)

    def __del__(self) -> None:
        if self._kept:
            self._kept[-1][0].synchronize()


@functools.cache
def _warn() -> None:
    warnings.warn(
        "this process uses a pluggable CUDA allocator, which may not know record_stream: each batch is copied once "
        "more on the device, on the consumer's stream",
        RuntimeWarning,
        stacklevel=2,
    )
