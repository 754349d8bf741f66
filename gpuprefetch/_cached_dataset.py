"""Samples that are loaded once and then kept in memory, on the host or on a device."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import threading
import types
import warnings
from collections.abc import Hashable, Iterator
from typing import Any, NoReturn

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from gpuprefetch import _batch
from gpuprefetch._arguments import checked_device, checked_int

_MOST_BYTES = 1 << 50


class CachedDataset(Dataset[Any]):
    """A map-style dataset that keeps each sample of another one after its first load, as long as they fit::

        dataset = CachedDataset(Photos("train"), max_bytes=8 << 30)
        batches = PrefetchIterator(DataLoader(dataset, batch_size=64, shuffle=True), num_threads=4)

    Random augmentation inside the wrapped dataset is frozen: what the first load gave comes again in each epoch. Put it
    on top, into a dataset that wraps this one. Nor may what the wrapped dataset gives depend on the epoch.

    May be used by several threads. One index is loaded by one thread at a time, and by none once it is kept. An error
    is not kept: it is raised where the sample was asked for, and whoever asks next, or waits for it, loads it again.
    Where not all fit, which ones are kept is for the threads' timing to decide.

    What is given is a copy of what is kept: a transform on top, or a loop without a ``collate_fn`` that copies, may
    change it in place, and no later epoch would be right. It costs one copy within the memory where samples are kept.

    Args:
        dataset: has ``dataset[index]``, and ``len(dataset)`` if the sampler needs it. It may not ask this object for
            samples. They must stand ``copy.deepcopy``; tensors in them may not be part of an autograd graph.
        max_bytes: 1 to 2**50. A sample that no longer fits is not kept but loaded each time, and the first of them
            warns. Tensors count with the bytes of their elements (what an allocator rounds up is not counted), NumPy
            arrays, strings and bytes with theirs, PIL images with 1 or 4 bytes a pixel by their mode, containers and
            other objects with what ``sys.getsizeof`` says and what they hold.
        device: keeps tensors of a sample, in any nesting that ``PrefetchIterator`` knows, on this device, and gives
            those of all samples there, of kept and other ones. None leaves them where the dataset put them.

    Raises:
        TypeError, ValueError: an argument is not what is said above.
        RuntimeError: the device can't be used.
    """

    def __init__(self, dataset: Any, max_bytes: int, device: torch.device | str | int | None = None) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__"):
            raise TypeError(f"dataset must be map-style, with dataset[index], not {type(dataset).__name__}")
        self.dataset = dataset
        self._max_bytes = checked_int("max_bytes", max_bytes, 1, _MOST_BYTES)
        self._device = None if device is None else checked_device(device)
        self._kept = _Kept()  # grows by single operations
        self._lock = threading.RLock()  # of its counts and of what follows; not held while the dataset runs
        self._turns: dict[Hashable, _Turn] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        key, kept = _key(index), self._kept
        if key not in kept:
            with self._turn(key):
                if key not in kept:
                    sample = self.dataset[index]
                    if not self._keep(kept, key, sample):
                        return sample if self._device is None else _copied(sample, self._device)
        return _copied(kept[key])

    def __repr__(self) -> str:
        where = "" if self._device is None else f" on {self._device}"
        kept = f"{len(self._kept)} samples kept{where}, {self._kept.bytes} of {self._max_bytes} bytes"
        return f"CachedDataset({self.dataset!r}, {kept})"

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            "a CachedDataset can't be copied or pickled: each worker process would fill a cache of its own. Use "
            "num_threads of PrefetchIterator, and num_workers=0 in the loader"
        )

    @contextlib.contextmanager
    def _turn(self, key: Hashable) -> Iterator[None]:
        """Until the others who asked for this sample have it or have failed."""
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
            turn.askers += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.askers -= 1
                if turn.askers == 0:
                    del self._turns[key]

    def _keep(self, kept: _Kept, key: Hashable, sample: Any) -> bool:
        """Keeps a copy of the sample, if it fits."""
        size = _bytes_in(sample, {})
        with self._lock:
            fits = kept.bytes + size <= self._max_bytes
            warns = not fits and not kept.warned
            if fits:
                kept.bytes += size
            kept.warned |= warns
        if warns:
            self._warn(kept, key, size)
        if not fits:
            return False
        try:
            made = _copied(sample, self._device)
            _wait_for_copies(made)
        except BaseException:
            with self._lock:
                kept.bytes -= size
            raise
        kept[key] = made
        return True

    def _warn(self, kept: _Kept, key: Hashable, size: int) -> None:
        total = ""
        with contextlib.suppress(TypeError):  # a dataset without a length
            total = f" of {len(self)}"
        warnings.warn(
            f"the sample at index {key!r} takes {size} bytes and does not fit into max_bytes={self._max_bytes} of a "
            f"CachedDataset: {len(kept)}{total} samples are kept so far, {kept.bytes} bytes; what does not fit "
            "is loaded each time",
            RuntimeWarning,
            stacklevel=4,  # whoever asks for the sample
        )


class _Kept(dict[Hashable, Any]):
    """Samples, and what they come to."""

    __slots__ = ("bytes", "warned")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.warned = False  # that one does not fit


class _Turn:
    """Of those who ask for one sample."""

    __slots__ = ("askers", "lock")

    def __init__(self) -> None:
        self.askers = 0
        self.lock = threading.RLock()  # a dataset that asks the cache for its own sample recurses, and does not hang


def _key(index: Any) -> Hashable:
    is_several = getattr(index, "ndim", 0) > 0  # one index in an array is an integer too, but another sample
    if not is_several:
        with contextlib.suppress(TypeError):
            return operator.index(index)
        with contextlib.suppress(TypeError):
            key = type(index), index  # 1.0 is not 1
            hash(key)
            if not isinstance(index, torch.Tensor):  # whose hash is its address
                return key
    raise TypeError(f"the index of a CachedDataset must be an integer or a hashable key, not {index!r}")


def _copied(value: Any, device: torch.device | None = None) -> Any:
    """A copy that shares nothing that can be changed, with its tensors on the device.

    Views become tensors of their own: the cache would keep all of the storage that they are a part of.
    """
    leaves = _batch.leaves(value)  # alive until the end, since the memo knows them by their ids
    memo: dict[int, Any] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            memo[id(leaf)] = _copied_tensor(leaf, device)
        elif device is not None:
            memo[id(leaf)] = _batch.move(copy.deepcopy(leaf), device)
    return copy.deepcopy(value, memo)


def _copied_tensor(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if tensor.grad_fn is not None:
        raise RuntimeError("a CachedDataset can't keep a tensor that is part of an autograd graph: detach() it first")
    plain = tensor.detach()
    made = plain.clone() if device is None or device == plain.device else plain.to(device, copy=True)
    if plain.is_cuda:
        for part in _batch.tensors_in(plain):
            # The cache may be dropped before this copy is done, and its memory belongs to another epoch's stream.
            part.record_stream(torch.cuda.current_stream(part.device))
    return made.requires_grad_() if tensor.requires_grad else made


def _wait_for_copies(sample: Any) -> None:
    """Until what is kept on CUDA devices is there.

    It is made on the stream of this epoch and read on those of later ones, and of other loaders, which then need not
    wait for an event of each sample. The host waits once for each sample, on its first load; with num_threads=0 for
    what the loop has queued, too.
    """
    parts = [part for leaf in _batch.leaves(sample) for part in _batch.tensors_in(leaf) if part.is_cuda]
    for device in {part.device for part in parts}:
        torch.cuda.current_stream(device).synchronize()


def _bytes_in(value: Any, seen: dict[int, Any]) -> int:
    """Of memory that a copy of the value takes, each object once; ``seen`` keeps them, so that no id comes twice."""
    if id(value) in seen or isinstance(value, _SHARED_BY_COPIES):
        return 0
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return sum(part.nbytes for part in _batch.tensors_in(value)) or value.numel() * value.element_size()
    if isinstance(value, numpy.ndarray):
        held = value.ravel().tolist() if value.dtype.hasobject else ()
        return value.nbytes + sum(_bytes_in(each, seen) for each in held)
    if type(value).__module__.startswith("PIL.") and hasattr(value, "mode"):
        width, height = value.size
        return int(width * height * (1 if value.mode in ("1", "L", "P") else 4))  # as Pillow stores them
    held = [child for _, child in _batch.children(value)]
    held += value if isinstance(value, (set, frozenset)) else ()
    held += getattr(value, "__dict__", {}).values()
    return sys.getsizeof(value, 0) + sum(_bytes_in(each, seen) for each in held)


_SHARED_BY_COPIES = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
