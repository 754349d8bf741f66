"""How a batch gets to the CPU, and to devices that a plain ``.to`` serves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from gpuprefetch import _batch
from gpuprefetch._record import Record


class Lane(Protocol):
    """One epoch's way to the device. A record goes through prepare, copy, assemble and hand_over, in this order."""

    copies_beside: bool
    """Whether copy() is worth a thread of its own when batches are loaded on the consumer's."""

    def collate(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """What to make batches of samples with, in place of the loader's ``collate``."""

    def prepare(self, record: Record) -> None:
        """Finds what has to move. May run code of the batch's own types."""

    def copy(self, record: Record) -> None:
        """Starts the copies; afterwards the sources have been read. Runs no code of the user's."""

    def assemble(self, record: Record) -> None:
        """Builds the batch to hand over. May run code of the batch's own types."""

    def ask(self) -> None:
        """Consumer: about to wait for a batch."""

    def hand_over(self, record: Record) -> Any:
        """Consumer: the batch, safe to use on the current stream."""

    def wait_until_due(self, number: int) -> None:
        """Sleeps until the consumer waits for this batch and nothing else of ours takes memory on the device."""

    def stop(self) -> None:
        """Ends all waits with Stopped."""

    def end_with(self, consumer: object) -> None:
        """stop() once ``consumer`` is gone, by compiled code: see ``Epoch.end_with``."""


class _DirectLane:
    """Everything happens in prepare()."""

    copies_beside = False

    def collate(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return collate

    def copy(self, record: Record) -> None:
        pass

    def assemble(self, record: Record) -> None:
        pass

    def ask(self) -> None:
        pass

    def hand_over(self, record: Record) -> Any:
        return record.batch

    def wait_until_due(self, number: int) -> None:
        pass

    def stop(self) -> None:
        pass

    def end_with(self, consumer: object) -> None:
        pass


class ToLane(_DirectLane):
    """A plain, blocking ``.to``: for devices on which a non-blocking one is unsafe or nothing is known of it."""

    def __init__(self, device: torch.device, skip_keys: Collection[Any]) -> None:
        self._device = device
        self._skip_keys = skip_keys

    def prepare(self, record: Record) -> None:
        leaves = _batch.leaves(record.batch, self._skip_keys)
        moved = {id(leaf): _batch.move(leaf, self._device) for leaf in leaves}
        record.batch = _batch.replace(record.batch, moved, self._skip_keys)


class HostLane(_DirectLane):
    """The loader's own batches, uncopied. What lies on another device is brought to the CPU."""

    def __init__(self, skip_keys: Collection[Any]) -> None:
        self._skip_keys = skip_keys

    def prepare(self, record: Record) -> None:
        leaves, kept = _batch.sort_out(record.batch, self._skip_keys)
        moved = {id(leaf): leaf for leaf in leaves}
        for leaf in leaves:
            memory = _batch.tensors_in(leaf)
            if any(tensor.device.type not in ("cpu", "meta") for tensor in memory):
                moved[id(leaf)] = _batch.move(leaf, torch.device("cpu"))
            else:
                record.versions += [(tensor, tensor._version) for tensor in memory if not tensor.is_inference()]
        others = [thing for thing in kept if isinstance(thing, torch.Tensor)]
        others += _batch.within_reach(*kept) if torch.cuda.is_initialized() else []
        if any(tensor.is_cuda for tensor in others):
            torch.cuda.current_stream().synchronize()  # what stays there is the consumer's, on whatever stream
        record.batch = _batch.replace(record.batch, moved, self._skip_keys)

    def hand_over(self, record: Record) -> Any:
        if any(tensor._version != version for tensor, version in record.versions):
            raise RuntimeError(
                f"batch {record.number} was written to while it waited to be handed over: the dataset, the collate_fn "
                "or the training loop changes in place memory that it shares with a later batch. On the CPU batches "
                "are not copied: use num_threads=0, which loads each batch only when it is asked for, or clone"
            )
        return record.batch
