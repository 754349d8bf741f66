"""Epochs of one loader, repeated from one seed while all else that could be drawn from is different."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Collection, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from gpuprefetch._cached_dataset import emptied_caches
from gpuprefetch._fingerprint import Value, fingerprint
from gpuprefetch._iterator import PrefetchIterator
from gpuprefetch._seeds import Seeds


class SeededRuns:
    """Epochs of one loader, all begun alike but for the global generators."""

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        skip_keys: Collection[Any],
        prefetch_batches: int,
        seed: int,
        max_batches: int,
    ) -> None:
        self.loader = loader
        self._device = device
        self._prefetch_batches = prefetch_batches
        self._skip_keys = skip_keys
        self._seed = seed
        self._max_batches = max_batches
        self._numbers = itertools.count(1)
        self.drawn: list[str] = []  # the global generators that something drew from in the last run

    @contextlib.contextmanager
    def epoch(self, num_threads: int) -> Iterator[Iterator[Any]]:
        """The batches of one more run, which ends with the block."""
        with (
            self._begun(),
            emptied_caches(),  # else later runs would be given what this one has loaded
            PrefetchIterator(
                self.loader,
                self._device,
                # However few samples a batch has, all threads are at work, and meet each other.
                prefetch_batches=max(self._prefetch_batches, num_threads),
                num_threads=num_threads,
                skip_keys=self._skip_keys,
                seed=self._seed,
            ) as batches,
        ):
            yield self._limited(batches)

    def _limited(self, batches: PrefetchIterator) -> Iterator[Any]:
        """An ``iter()`` that fails does so where the first batch is asked for."""
        yield from itertools.islice(batches, self._max_batches)

    def order(self) -> list[list[Value]]:
        """What the sampler gives, by itself, where the order is drawn as in an epoch; at its end an error, if it raises
        one."""
        sampler: Any = self.loader.sampler if self.loader.batch_sampler is None else self.loader.batch_sampler
        given: list[list[Value]] = []
        with self._begun():
            try:
                indices = iter(sampler)
                given += map(
                    fingerprint, Seeds(self._seed, 0).call("order", lambda: list(itertools.islice(indices, 1)))
                )
                given += map(fingerprint, itertools.islice(indices, self._max_batches))
            except Exception as error:
                given.append(fingerprint(f"{type(error).__name__}: {error}"))
        return given

    @contextlib.contextmanager
    def _begun(self) -> Iterator[None]:
        """With states of the global generators that no other run has, and those of the loader's own as they are."""
        number = next(self._numbers)
        random.seed(number)
        numpy.random.seed(number)
        torch.default_generator.manual_seed(number)
        before = _global_states()
        states = [(generator, generator.get_state()) for generator in self.own_generators()]
        try:
            yield
        finally:
            self.drawn = [name for name, state in _global_states().items() if state != before[name]]
            for generator, state in states:
                generator.set_state(state)

    def own_generators(self) -> list[torch.Generator]:
        """Those that the loader and its samplers hold."""
        batch_sampler = self.loader.batch_sampler
        owners = [self.loader, self.loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _global_states() -> dict[str, list[Value]]:
    numpys = numpy.random.get_state(legacy=False)
    states = {"random": random.getstate(), "numpy.random": numpys, "torch": torch.default_generator.get_state()}
    return {name: fingerprint(state) for name, state in states.items()}


@contextlib.contextmanager
def global_generators_kept(device: torch.device) -> Iterator[None]:
    """Puts them back as they were: Python's, NumPy's, the CPU's, and those of CUDA if it is used."""
    python, legacy = random.getstate(), numpy.random.get_state(legacy=False)
    uses_cuda = device.type == "cuda" or torch.cuda.is_initialized()
    with torch.random.fork_rng(range(torch.cuda.device_count()) if uses_cuda else ()):
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(legacy)
