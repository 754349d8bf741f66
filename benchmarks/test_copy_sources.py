"""What copies are measured on is what it says, and what does not arrive of it is found."""

import pytest
import torch
from copy_sources import BLOCK_ROWS, PINNED_SAMPLES, ROW_BYTES, SOURCES, Copied, Source, WrongCopy, check, make_source

CPU = torch.device("cpu")


def in_full(source):
    return [tensor.clone() for tensor in source.tensors]


@pytest.mark.parametrize("name", [*SOURCES, PINNED_SAMPLES, *ROW_BYTES, *BLOCK_ROWS])
def test_a_source_has_its_size_and_random_bytes(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    size = 200 * 4096
    source, again, other = (make_source(name, size, seed) for seed in (0, 0, 1))
    assert source.nbytes == size
    assert all(map(torch.equal, source.tensors, again.tensors))
    assert not any(map(torch.equal, source.tensors, other.tensors))
    assert len(source.collated()) == (200 if name == "leaves" else 1)


def test_a_strided_source_is_half_of_each_of_its_rows():
    (strided,) = make_source("strided", 64 * 512, 0).tensors
    assert strided.shape == (64, 64) and strided.stride() == (128, 1) and not strided.is_contiguous()
    (short,) = make_source("short rows", 64 * 512, 0).tensors
    assert short.shape == (512, 8) and short.stride() == (16, 1)
    (smallest,) = make_source("strided", 512, 0).tensors
    assert not smallest.is_contiguous()


def test_rows_and_blocks_are_of_so_many_bytes():
    for name, row_bytes in ROW_BYTES.items():
        (rows,) = make_source(name, 64 * 512, 0).tensors
        assert rows[0].nbytes == row_bytes and rows.stride(0) * rows.itemsize == 2 * row_bytes
        assert rows.itemsize == min(row_bytes, 8)
    (blocks,) = make_source("blocks128", 64 * 512, 0).tensors
    assert blocks.shape == (256, 16, 1) and blocks.stride() == (64, 2, 1)


def spoilt(source):
    batch = in_full(source)
    batch[-1].view(torch.uint8)[5] ^= 1
    return batch


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoilt, "1 bytes of tensor 1 are wrong, the first at 5"),
        (lambda source: [torch.zeros_like(tensor) for tensor in source.tensors], "of tensor 0 are wrong, the first at"),
        (lambda source: in_full(source)[:1], "1 tensors arrived of 2"),
        (lambda source: [tensor.view(2, -1) for tensor in source.tensors], "arrived as [2, 32] torch.int64, not [64]"),
        (lambda source: [tensor.to("meta") for tensor in source.tensors], "tensor 0 arrived on meta, not cpu"),
    ],
    ids=["a bit", "all", "a tensor", "shape", "device"],
)
def test_what_did_not_arrive_is_said(change, said):
    source = Source("leaves", make_source("leaves", 200 * 512, 0).tensors[:2])
    check(source, "sound", Copied(in_full(source)), CPU)
    with pytest.raises(WrongCopy) as caught:
        check(source, "planted", Copied(change(source)), CPU)
    assert str(caught.value).startswith("planted, leaves, 1 KiB: ") and said in str(caught.value)


@pytest.mark.parametrize("kept", [False, True], ids=["dense", "as it was"])
def test_of_a_strided_source_the_bytes_are_compared_that_it_has(kept):
    source = make_source("strided", 64 * 512, 0)
    (sent,) = source.tensors
    arrived = torch.empty_strided(sent.shape, sent.stride() if kept else (64, 1), dtype=sent.dtype).copy_(sent)
    check(source, "sound", Copied(arrived), CPU)
    arrived[1, 0] ^= 0xFF00
    with pytest.raises(WrongCopy, match="strided, 32 KiB: 1 bytes of tensor 0 are wrong, the first at 513$"):
        check(source, "planted", Copied(arrived), CPU)
    source.invert()
    with pytest.raises(WrongCopy, match=f": {64 * 512} bytes of tensor 0 are wrong, the first at 0$"):
        check(source, "stale", Copied(~sent), CPU)


def test_a_batch_may_come_as_one_tensor_or_as_a_mapping():
    source = make_source("leaves", 200 * 512, 0)
    check(source, "packed", Copied(torch.stack(source.tensors)), CPU)
    check(source, "mapping", Copied({str(number): tensor for number, tensor in enumerate(source.tensors)}), CPU)
    check(
        make_source("gathered", 64 * 64, 0), "stack", Copied(torch.stack(make_source("gathered", 4096, 0).tensors)), CPU
    )
