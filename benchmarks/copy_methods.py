"""The methods that get a batch to the device: gpuprefetch, the usual ways, and the link.

A method is a generator function that takes a source and the target, yields once, and cleans up: what it yields copies
the whole source each time it is called, and may return while the copy is still under way. `@method` registers it, in
the order of the table.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from copy_sources import SOURCES, Copied, Source
from target import Target
from torch.utils.data import default_collate

Copy = Callable[[], Copied]
Opened = Iterator[Copy]


@dataclass(frozen=True)
class Method:
    """`sources`: those it is for. `is_peer`: of another project, so it is left out, with the reason, where it can't
    run; `missing()` gives a reason that is known beforehand, or None."""

    name: str
    description: str
    sources: tuple[str, ...]
    make: Callable[[Source, Target], AbstractContextManager[Copy]]
    is_peer: bool
    missing: Callable[[], str | None]


METHODS: dict[str, Method] = {}


def method(
    name: str,
    description: str,
    sources: tuple[str, ...] = tuple(SOURCES),
    *,
    is_peer: bool = False,
    missing: Callable[[], str | None] = lambda: None,
) -> Callable[[Callable[[Source, Target], Opened]], None]:
    """Register the decorated function as the method `name`."""

    def register(make: Callable[[Source, Target], Opened]) -> None:
        METHODS[name] = Method(name, description, sources, contextmanager(make), is_peer, missing)

    return register


def through_lane(samples: Any, collate: Callable[[Any], Any], target: Target) -> Iterator[Callable[..., Copied]]:
    """Collates the samples and copies the batch by the stages of an epoch. What it yields may be given a function, for
    the name of each stage that has ended."""
    from gpuprefetch._copier import DEFAULT_PINNED_BYTES, Copier, Share
    from gpuprefetch._copy_lane import CopyLane
    from gpuprefetch._record import Record

    share = Share(Copier.of(target.device), DEFAULT_PINNED_BYTES)
    lane = CopyLane(share.copier, 2, (), on_loader_thread=False)
    collate = lane.collate(collate)
    numbers = itertools.count()

    def copy(ended: Callable[[str], object] = lambda stage: None) -> Copied:
        lane.ask()
        record = Record(next(numbers), collate(samples))
        ended("collate")
        lane.prepare(record)
        ended("prepare")
        lane.copy(record)
        ended("copy")
        lane.assemble(record)
        ended("assemble")
        batch = lane.hand_over(record)
        ended("hand over")
        return Copied(batch)

    try:
        yield copy
    finally:
        target.synchronize()
        share.close()


@method("gpuprefetch", "the copying part of PrefetchIterator, driven by one thread, with nothing ahead")
def _gpuprefetch(source: Source, target: Target) -> Opened:
    if source.collates:
        return through_lane(source.tensors, default_collate, target)
    batch = source.tensors[0] if len(source.tensors) == 1 else source.tensors
    return through_lane(batch, lambda batch: batch, target)


@method(".to", "tensor.to(device)")
def _to(source: Source, target: Target) -> Opened:
    def copy() -> Copied:
        hosts = source.collated()
        return Copied([host.to(target.device) for host in hosts], hosts)

    yield copy


@method(
    "pin_memory()",
    "tensor.pin_memory().to(device, non_blocking=True), out of memory that torch has pinned before",
    ("pageable", "gathered", "strided", "short rows", "leaves"),
)
def _pin_memory(source: Source, target: Target) -> Opened:
    def copy() -> Copied:
        hosts = source.collated()
        pinned, batch = [], []
        for host in hosts:
            pinned.append(host.pin_memory())
            batch.append(pinned[-1].to(target.device, non_blocking=True))
        return Copied(batch, (hosts, pinned))

    yield copy


@method(
    "kept pinned",
    "buffer.copy_(tensor), then buffer.to(device, non_blocking=True), with a pinned buffer that is kept",
    ("pageable", "gathered", "strided", "short rows", "leaves"),
)
def _kept_pinned(source: Source, target: Target) -> Opened:
    buffers = [_pinned_like(host, target) for host in source.collated()]

    def copy() -> Copied:
        hosts = source.collated()
        batch = []
        for host, buffer in zip(hosts, buffers, strict=True):
            buffer.copy_(host)
            batch.append(buffer.to(target.device, non_blocking=True))
        return Copied(batch, hosts)

    yield copy


@method("stacked pinned", "torch.stack(samples, out=buffer), then as kept pinned: no default_collate", ("gathered",))
def _stacked_pinned(source: Source, target: Target) -> Opened:
    (collated,) = source.collated()
    buffer = _pinned_like(collated, target)
    del collated

    def copy() -> Copied:
        torch.stack(source.tensors, out=buffer)
        return Copied(buffer.to(target.device, non_blocking=True))

    yield copy


def _no_tensordict() -> str | None:
    return None if importlib.util.find_spec("tensordict") else "tensordict is not installed"


@method(
    "consolidated",
    "tensordict: batch.consolidate(pin_memory=True).to(device, non_blocking=True), batch a TensorDict",
    ("leaves",),
    is_peer=True,
    missing=_no_tensordict,
)
def _consolidated(source: Source, target: Target) -> Opened:
    from tensordict import TensorDict

    batch = TensorDict({str(number): tensor for number, tensor in enumerate(source.tensors)}, batch_size=[])

    def copy() -> Copied:
        packed = batch.consolidate(pin_memory=True)
        return Copied(packed.to(target.device, non_blocking=True), packed)

    yield copy


@method("link", "as many bytes from one tensor that is pinned already, non_blocking: the limit")
def _link(source: Source, target: Target) -> Opened:
    hosts = source.collated()
    host = hosts[0] if len(hosts) == 1 else torch.stack(hosts)
    pinned = _pinned_like(host, target).copy_(host)
    del hosts, host

    def copy() -> Copied:
        return Copied(pinned.to(target.device, non_blocking=True))

    yield copy


def _pinned_like(host: torch.Tensor, target: Target) -> torch.Tensor:
    return torch.empty(host.shape, dtype=host.dtype, pin_memory=target.accelerated)
