"""What a batch is before it is copied to the device, and whether it arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

SAMPLES = 64
LEAVES = 200
SHORT_ROW_BYTES = 64
WORD_BYTES = 8  # all is made of integers, of 64 bits or as long as a row: they are equal where their bytes are

SOURCES = {
    "pageable": "one dense tensor in ordinary memory",
    "pinned": "one dense tensor that is in pinned memory already",
    "gathered": f"{SAMPLES} samples in ordinary memory, default_collate included",
    "strided": f"the first halves of {SAMPLES} rows, one tensor in ordinary memory",
    "short rows": f"the first halves of rows of {2 * SHORT_ROW_BYTES} bytes, one tensor in ordinary memory",
    "leaves": f"{LEAVES} tensors of one size in ordinary memory",
}
PINNED_SAMPLES = "pinned-samples"  # as gathered, but in pinned memory. For copy_variants.py
# The first halves of rows, of so many bytes. Those with a number are for copy_variants.py.
ROW_BYTES = {"short rows": SHORT_ROW_BYTES, **{f"rows{row_bytes}": row_bytes for row_bytes in (1, 2, 4, 8, 16, 32)}}
# For copy_variants.py: those of 8 bytes, so many of them in a block. Every other block is left out.
BLOCK_ROWS = {f"blocks{rows * WORD_BYTES}": rows for rows in (4, 8, 16, 32)}


def size_label(size: int) -> str:
    """Bytes in KiB, MiB or GiB."""
    unit = min(max(size.bit_length() - 1, 10) // 10, 3)
    return f"{size / 1024**unit:g} {' KMG'[unit]}iB"


def batch_label(source: str, size: int) -> str:
    """The bytes of a batch; of leaves, those of each."""
    return f"{LEAVES} x {size_label(size // LEAVES)}" if source == "leaves" else size_label(size)


@dataclass(frozen=True)
class Source:
    """What the host has before the copy. `collates`: `tensors` are samples, and the batch is their stack."""

    name: str
    tensors: list[torch.Tensor]
    collates: bool = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def collated(self) -> list[torch.Tensor]:
        """The batch on the host. Made anew by each call where the source collates."""
        return [default_collate(self.tensors)] if self.collates else self.tensors

    def invert(self) -> None:
        """Turns every bit over."""
        for tensor in self.tensors:
            tensor.bitwise_not_()


def make_source(name: str, size: int, seed: int) -> Source:
    """`size` random bytes as the source called `name`, one of SOURCES, PINNED_SAMPLES, ROW_BYTES and BLOCK_ROWS."""
    generator = torch.Generator().manual_seed(seed)

    def random(count: int) -> list[torch.Tensor]:
        words = size // count // WORD_BYTES
        return [torch.empty(words, dtype=torch.int64).random_(generator=generator) for _ in range(count)]

    if name == "gathered":
        return Source(name, random(SAMPLES), collates=True)
    if name == PINNED_SAMPLES:
        return Source(name, [sample.pin_memory() for sample in random(SAMPLES)], collates=True)
    if name == "leaves":
        return Source(name, random(LEAVES))
    if name == "strided":
        return Source(name, [_first_halves((SAMPLES,), size // SAMPLES, generator)])
    if name in ROW_BYTES:
        return Source(name, [_first_halves((size // ROW_BYTES[name],), ROW_BYTES[name], generator)])
    if name in BLOCK_ROWS:
        rows = BLOCK_ROWS[name]
        return Source(name, [_first_halves((size // WORD_BYTES // rows, 2 * rows), WORD_BYTES, generator)[:, :rows]])
    (dense,) = random(1)
    return Source(name, [dense.pin_memory() if name == "pinned" else dense])


def _first_halves(shape: tuple[int, ...], row_bytes: int, generator: torch.Generator) -> torch.Tensor:
    """Those of rows of twice as many bytes."""
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(row_bytes, torch.int64)
    words = row_bytes // word.itemsize
    return torch.empty(*shape, 2 * words, dtype=word).random_(generator=generator)[..., :words]


@dataclass(frozen=True)
class Copied:
    """`batch`: on the device, a tensor, a list of them, or a mapping from "0", "1", and so on. `held`: host memory that
    was taken on the way. To free it takes as long as a copy and is no part of this one, so the caller drops it."""

    batch: Any
    held: object = None

    def tensors(self, count: int) -> list[torch.Tensor]:
        """The batch as `count` tensors; one that holds several is taken apart along its first dimension."""
        if isinstance(self.batch, torch.Tensor):
            return [self.batch] if count == 1 else list(self.batch.unbind())
        if isinstance(self.batch, list):
            return self.batch
        return [self.batch[str(number)] for number in range(count)]


class WrongCopy(Exception):
    """What arrived is not what was sent; the text says where."""


def check(source: Source, name: str, copied: Copied, device: torch.device) -> None:
    """Raises WrongCopy unless every byte is on the device. Waits for nothing but the current stream, as a training step
    does, so a batch that is handed over too early is found as well."""
    expected = source.collated()
    arrived = copied.tensors(len(expected))
    where = f"{name}, {source.name}, {size_label(source.nbytes)}"
    if len(arrived) != len(expected):
        raise WrongCopy(f"{where}: {len(arrived)} tensors arrived of {len(expected)}")
    for number, (one, other) in enumerate(zip(arrived, expected, strict=True)):
        if one.device != device:
            raise WrongCopy(f"{where}: tensor {number} arrived on {one.device}, not {device}")
        host = one.cpu()
        if host.shape != other.shape or host.dtype != other.dtype:
            got, wanted = f"{list(host.shape)} {host.dtype}", f"{list(other.shape)} {other.dtype}"
            raise WrongCopy(f"{where}: tensor {number} arrived as {got}, not {wanted}")
        if not torch.equal(host, other):
            wrong = (host.view(torch.uint8) != other.view(torch.uint8)).flatten().view(torch.uint8)
            count, first = int(wrong.count_nonzero()), int(wrong.argmax())
            raise WrongCopy(f"{where}: {count} bytes of tensor {number} are wrong, the first at {first}")
