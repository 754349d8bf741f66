"""What belongs to one batch, from the loader to the consumer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gpuprefetch._batch import Stack


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """One batch, or the error in its place, or the end. Passed on from stage to stage, never shared by two."""

    number: int
    batch: Any = None  # the loader's; the finished one after Lane.assemble()
    error: BaseException | None = None
    ended: bool = False  # there is no batch of this number

    leaves: list[Any] = dataclasses.field(default_factory=list)  # alive, so that an id stands for one of them
    plain: list[torch.Tensor] = dataclasses.field(default_factory=list)  # to be copied as bytes
    stacks: list[Stack] = dataclasses.field(default_factory=list)  # likewise, after them
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)  # the copies of both
    moved: dict[int, Any] = dataclasses.field(default_factory=dict)  # by id(leaf): what moved by its own `to`
    late: dict[int, Any] = dataclasses.field(default_factory=dict)  # by id(leaf): a copy, moved at the hand-over
    held: list[torch.Tensor] = dataclasses.field(default_factory=list)  # one of each device storage the consumer gets
    recorders: list[Any] = dataclasses.field(default_factory=list)  # objects that record streams themselves
    other_bytes: int = 0  # on the device, beside the copies of `plain`
    finish: bool = False  # the copies must have run before the loader is asked again
    loaded: torch.cuda.Event | None = None  # GPU work of the dataset that the consumer has to wait for
    versions: list[tuple[torch.Tensor, int]] = dataclasses.field(default_factory=list)

    def drop_sources(self) -> None:
        """Lets go of the loader's batch, once the finished one has taken its place."""
        self.leaves, self.plain, self.stacks, self.outputs, self.moved = [], [], [], [], {}

    @property
    def final(self) -> bool:
        """True if no batch follows."""
        return self.ended or self.error is not None


class Stopped(Exception):
    """The epoch was closed while a batch was on its way. Never reaches the user."""
