"""How a batch gets to a CUDA device: ahead of time, on the copy stream."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from gpuprefetch import _batch, _unrecorded
from gpuprefetch._copier import Copier
from gpuprefetch._environment import one_intra_op_thread, relaxed_capture_mode
from gpuprefetch._extension import extension
from gpuprefetch._gather import gathering
from gpuprefetch._record import Record, Stopped

if TYPE_CHECKING:
    from gpuprefetch import _C

OVERDUE_SECONDS = 30.0


class CopyLane:
    """Plain tensors go as bytes through the pinned ring, all in one call; everything else by its own ``to``."""

    copies_beside = True

    def __init__(
        self, copier: Copier, prefetch_batches: int, skip_keys: Collection[Any], *, on_loader_thread: bool
    ) -> None:
        _refuse_capture()
        native = extension()
        self._copier = copier
        self._skip_keys = skip_keys
        self._on_loader_thread = on_loader_thread
        self._split = native.split
        self._warned_overdue = False
        self._consumer_copies = _unrecorded.ConsumerCopies(skip_keys) if _unrecorded.needed() else None
        with relaxed_capture_mode():
            events = copier.take_events(self, native.Lane.events_needed(prefetch_batches))
        self._native: _C.Lane = native.Lane(
            copier.native,
            prefetch_batches,
            [event.cuda_event for event in events],
            int(OVERDUE_SECONDS * 1000),
            functools.partial(_free_bytes, copier.device),
        )

    def collate(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self._skip_keys:  # what stays on the host is stacked there
            return collate
        return gathering(collate, extension().can_gather)

    def prepare(self, record: Record) -> None:
        record.leaves, kept = _batch.sort_out(record.batch, self._skip_keys)
        record.plain, rest = self._split(record.leaves)
        record.stacks = [leaf for leaf in rest if isinstance(leaf, _batch.Stack)]
        others = [leaf for leaf in rest if not isinstance(leaf, _batch.Stack)]
        # What stays as it is may come from the dataset's own GPU work all the same.
        self._wait_for_loading(record, _batch.within_reach(*kept))
        if others:
            self._move(record, others)

    def copy(self, record: Record) -> None:
        stacks = [stack.samples for stack in record.stacks]
        with one_intra_op_thread():  # torch makes dense what isn't
            copied = self._native.put(record.number, record.plain, stacks, record.other_bytes, record.finish)
        if copied is None:
            raise Stopped
        record.outputs, storages = copied
        record.held += storages
        if self._native.overdue and not self._warned_overdue:
            self._warned_overdue = True
            warnings.warn(
                f"the device has not finished the steps that batch {record.number} was held back for within "
                f"{OVERDUE_SECONDS:.0f} s; it was copied all the same, and more batches than usual are in memory",
                RuntimeWarning,
                stacklevel=2,
            )

    def assemble(self, record: Record) -> None:
        if record.late:
            return  # by hand_over(), once they have moved
        record.moved.update(zip(map(id, [*record.plain, *record.stacks]), record.outputs, strict=True))
        record.batch = _batch.replace(record.batch, record.moved, self._skip_keys)
        record.drop_sources()

    def ask(self) -> None:
        _refuse_capture()
        self._native.ask()

    def hand_over(self, record: Record) -> Any:
        self._native.hand_over(record.number, record.held)
        if record.loaded is None and not record.recorders and not record.late and self._consumer_copies is None:
            return record.batch
        stream = torch.cuda.current_stream(self._copier.device)
        if record.loaded is not None:
            stream.wait_event(record.loaded)
        if record.recorders:
            with _batch.foreign:
                for recorder in record.recorders:
                    recorder.record_stream(stream)
        if record.late:
            for key, leaf in record.late.items():
                record.moved[key] = _batch.move(leaf, self._copier.device)
            record.late = {}
            self.assemble(record)
        return record.batch if self._consumer_copies is None else self._consumer_copies.own(record, stream)

    def wait_until_due(self, number: int) -> None:
        if not self._native.wait_until_due(number):
            raise Stopped

    def stop(self) -> None:
        self._native.stop()

    def end_with(self, consumer: object) -> None:
        self._gone = weakref.ref(consumer, self._native.stop)

    def _move(self, record: Record, leaves: list[Any]) -> None:
        """Moves leaves by their own ``to`` on the copy stream; the copies may still be under way at return."""
        device = self._copier.device
        memory = {id(leaf): _batch.tensors_in(leaf) for leaf in leaves}
        tensors = [tensor for leaf in leaves for tensor in memory[id(leaf)]]
        within_reach = {id(leaf): [*memory[id(leaf)], *_batch.within_reach(leaf)] for leaf in leaves}
        self._wait_for_loading(record, [tensor for leaf in leaves for tensor in within_reach[id(leaf)]])
        adopted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device == device]
        record.moved.update((id(leaf), leaf) for leaf in adopted)
        moving = [leaf for leaf in leaves if id(leaf) not in record.moved]
        if not moving:
            return
        record.other_bytes = sum(t.numel() * t.element_size() for t in tensors if t.device != device)
        # A thread of ours waits for room first. The consumer's goes on with one batch more than usual: it must not be
        # kept from its own next step.
        if self._on_loader_thread and not self._native.wait_for_room(record.number, record.other_bytes):
            raise Stopped
        for leaf in moving:
            is_made_there = any(tensor.is_cuda for tensor in within_reach[id(leaf)])
            self._move_one(record, leaf, memory[id(leaf)], is_made_there)

    def _wait_for_loading(self, record: Record, tensors: list[torch.Tensor]) -> None:
        """Makes the consumer wait for the dataset's own GPU work, and keeps the memory that it made."""
        with torch._C.DisableTorchFunctionSubclass():
            made = [tensor for tensor in tensors if tensor.is_cuda]
        if not made:
            return
        if record.loaded is None:
            record.loaded = torch.cuda.Event()
        # Each time: to look for tensors may call code of the user's types, which launches work.
        record.loaded.record(torch.cuda.current_stream(self._copier.device))
        record.held += made  # those of other devices are not recorded

    def _move_one(self, record: Record, leaf: Any, memory: list[torch.Tensor], is_made_there: bool) -> None:
        if self._consumer_copies is not None and not isinstance(leaf, torch.Tensor):
            record.late[id(leaf)] = _own_copy(leaf)
            return
        record.finish = True  # a pinned tensor's own `to` does not wait for its bytes to be read
        stream = self._copier.stream
        if record.loaded is not None and is_made_there:
            stream.wait_event(record.loaded)
        with _batch.foreign, torch.cuda.stream(stream):
            moved = _batch.move(_pinned(leaf, memory), self._copier.device, non_blocking=True)
        own, parts = _batch.tensors_in(moved), _batch.within_reach(moved)
        if not isinstance(leaf, torch.Tensor) and hasattr(moved, "record_stream"):
            record.recorders.append(moved)
        elif own or any(part.device == self._copier.device for part in parts):
            record.held += [*own, *parts]
        else:
            # Nothing in sight to record a stream on, so its memory would not be safe on the consumer's. It moves there,
            # at the hand-over; a copy of it, since the loader may write to its own meanwhile.
            if moved is leaf:  # it moved in place
                torch.cuda.current_stream(self._copier.device).wait_stream(stream)
            record.late[id(leaf)] = _own_copy(leaf)
            return
        record.moved[id(leaf)] = moved


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a batch was asked for while the current stream captures a CUDA graph: call iter() and next() outside the "
            "capture and copy the batch into the graph's static input"
        )


def _free_bytes(device: torch.device) -> int:
    """Device memory that is free for the taking: neither in use nor in the allocator's cache, which is the loop's."""
    free, total = torch.cuda.mem_get_info(device)
    if _unrecorded.needed() or not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return free  # a pluggable allocator keeps no count
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free, allowed - torch.cuda.memory_reserved(device))


def _own_copy(leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception:  # it holds a lock or a handle, say; then it is read when it moves
        return leaf


def _pinned(leaf: Any, memory: list[torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor) or not callable(getattr(leaf, "pin_memory", None)):
        return leaf
    if any(tensor.device.type != "cpu" for tensor in memory):
        return leaf
    pinned = leaf.pin_memory()
    return leaf if pinned is None else pinned  # in place
