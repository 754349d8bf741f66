"""Small tensors of a batch that share a storage: each is an ordinary tensor all the same.

What ``put`` copies to is allocated by one function for every device, so the CPU shows it. What is only true of a
device is in test_gpu_pack.py.
"""

import copy
import io

import pytest
import torch

from gpuprefetch._extension import extension

ALIGNMENT = 512
SMALL = 128 << 10
PACK = 256 << 10
LEAST = 8  # of a dtype: fewer are left alone

# The quantized ones are no plain bytes.
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and "torch.q" not in str(d)}, key=str)


def allocated(tensors, stacks=()):
    """What the tensors and stacks would be copied to, on the CPU and filled with zeros, in a batch that has as many
    others of their dtypes as it takes to pack them."""
    dtypes = {t.dtype for t in (*tensors, *(samples[0] for samples in stacks))}
    others = [torch.ones(1, dtype=dtype) for dtype in dtypes for _ in range(LEAST)]
    made = extension().allocate([*tensors, *others], list(stacks), torch.device("cpu"))
    for tensor in made:
        tensor.zero_()
    return made[: len(tensors)] + made[len(tensors) + len(others) :]


def storage(tensor):
    return tensor.untyped_storage()._cdata


def place(tensor):
    """(first, last + 1) byte in the storage."""
    begin = tensor.storage_offset() * tensor.element_size()
    return begin, begin + tensor.nbytes


def two(dtype, shape=(5,)):
    return [torch.empty(shape, dtype=dtype) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_small_tensors_of_one_dtype_share_a_storage(dtype):
    sources = [torch.empty(5, dtype=dtype) for _ in range(LEAST)]
    assert extension().split(sources)[1] == []
    made = extension().allocate(sources, [], torch.device("cpu"))
    assert all(t.dtype == dtype and t.shape == (5,) and storage(t) == storage(made[0]) for t in made)
    assert [place(t)[0] for t in made] == [ALIGNMENT * i for i in range(LEAST)]
    assert made[0].untyped_storage().nbytes() == place(made[-1])[1]


def test_dtypes_do_not_share_one():
    made = allocated([t for dtype in (torch.float32, torch.int64, torch.bool) for t in two(dtype)])
    assert len({storage(t) for t in made}) == 3
    assert [storage(a) == storage(b) for a, b in zip(made[::2], made[1::2], strict=True)] == [True] * 3


def test_a_few_small_tensors_are_ordinary_ones():
    for sources in (
        [torch.ones(7)],
        [torch.ones(7)] * (LEAST - 1) + [torch.ones(7, dtype=torch.int64)],
        [torch.ones(7)] * (LEAST - 1) + [torch.ones(SMALL), torch.ones(0)],
    ):
        made = extension().allocate(sources, [], torch.device("cpu"))
        for one, source in zip(made, sources, strict=True):
            assert one.storage_offset() == 0 and one.untyped_storage().nbytes() == source.nbytes


def test_large_tensors_and_empty_ones_share_nothing():
    sources = [
        torch.ones(4),
        torch.ones(SMALL // 4 + 1),
        torch.ones(0),
        torch.ones(SMALL // 4),
        torch.ones(3, 0),
        torch.ones(SMALL // 4 + 1),
    ]
    made = allocated(sources)
    assert storage(made[0]) == storage(made[3])
    assert len({storage(t) for t in made}) == 5
    for i in (1, 2, 4, 5):
        assert made[i].untyped_storage().nbytes() == made[i].nbytes and made[i].storage_offset() == 0
    assert [t.stride() for t in made] == [t.stride() for t in sources]


def test_two_hundred_tensors_take_few_storages_none_of_them_large():
    made = allocated([torch.ones(1024) for _ in range(200)])
    storages = {storage(t): t.untyped_storage().nbytes() for t in made}
    assert len(storages) == 4 and max(storages.values()) <= PACK
    places = sorted((storage(t), *place(t)) for t in made)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(places, places[1:], strict=False)), "they overlap"
    assert all(begin % ALIGNMENT == 0 for _, begin, _ in places)
    assert all(place(t)[1] <= t.untyped_storage().nbytes() for t in made)


STRIDED = {
    "scalar": lambda: torch.tensor(1.0),
    "transposed": lambda: torch.ones(3, 4).t(),
    "every second": lambda: torch.ones(6, 8)[:, ::2],
    "every second, transposed": lambda: torch.ones(6, 8)[:, ::2].t(),
    "expanded": lambda: torch.ones(3, 1).expand(3, 5),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last, 3d": lambda: torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "odd strides of size 1": lambda: torch.ones(12).as_strided((1, 4), (99, 1)),
    "overlapping": lambda: torch.ones(12).as_strided((4, 4), (2, 1)),
    "with an offset": lambda: torch.ones(100)[17:40],
}


@pytest.mark.parametrize("kind", STRIDED)
def test_shapes_and_strides_are_those_of_to(kind):
    source = STRIDED[kind]()
    before, made, after = allocated([torch.ones(3), source, torch.ones(3)])
    wanted = torch.empty_like(source, device="meta")
    assert (made.shape, made.stride()) == (wanted.shape, wanted.stride()) == (source.shape, source.to("meta").stride())
    assert storage(before) == storage(made) == storage(after)
    assert place(before)[1] <= place(made)[0] and place(made)[1] <= place(after)[0]


def test_small_stacks_are_packed_too():
    stack = [torch.ones(2, 512) for _ in range(3)]
    one, other, large = allocated([torch.ones(3)], [stack, [torch.ones(SMALL // 8)] * 3])
    assert storage(one) == storage(other) != storage(large)
    assert (other.shape, other.stride()) == ((3, 2, 512), (1024, 512, 1))
    assert large.shape == (3, SMALL // 8) and large.untyped_storage().nbytes() == large.nbytes


def test_a_stack_of_samples_with_odd_strides_is_contiguous():
    samples = [torch.ones(1024).as_strided((1, 1024), (5, 1)) for _ in range(2)]
    assert samples[0].is_contiguous()
    _, made = allocated([torch.ones(3)], [samples])
    assert made.stride() == torch.stack(samples).stride()


def test_each_has_its_own_version():
    made = allocated([torch.ones(5) for _ in range(4)])
    assert len({storage(t) for t in made}) == 1
    versions = [t._version for t in made]
    made[2].add_(1)
    assert [t._version - v for t, v in zip(made, versions, strict=True)] == [0, 0, 1, 0]
    assert [t.sum().item() for t in made] == [0, 0, 5, 0]


def test_autograd_minds_only_what_was_changed():
    a, b, c = allocated([torch.ones(5) for _ in range(3)])
    a.fill_(2), b.fill_(3)
    weight = torch.ones(5, requires_grad=True)
    loss = (weight * a).sum() + (weight * b).sum()
    c.fill_(9)  # with views, this would be an error of autograd's
    loss.backward()
    assert weight.grad.tolist() == [5.0] * 5
    loss = (weight * a).sum()
    a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_they_are_leaves_and_no_views():
    a, b = allocated([torch.ones(5) for _ in range(2)])
    for tensor in (a, b):
        assert not tensor._is_view() and tensor._base is None and tensor.is_leaf and not tensor.requires_grad
        assert str(torch._C._dispatch_keys(tensor)) == str(torch._C._dispatch_keys(torch.ones(5)))
    a.requires_grad_()
    assert not b.requires_grad
    (a * 2).sum().backward()
    assert a.grad.tolist() == [2.0] * 5 and a.grad.untyped_storage().nbytes() == a.nbytes
    with torch.no_grad():
        b.mul_(2)
    b.set_(torch.ones(3))
    assert a.tolist() == [0.0] * 5


def test_in_inference_mode_they_are_inference_tensors():
    with torch.inference_mode():
        a, b = allocated([torch.ones(5) for _ in range(2)])
    assert a.is_inference() and b.is_inference() and storage(a) == storage(b)


def test_a_compiled_function_may_write_to_one_of_them():
    """With several dtypes on one storage torch.compile refuses it."""

    def step(a, b, labels, weights):
        a.add_(1)
        labels.add_(2)
        return a + b, labels * weights

    sources = [t for dtype in (torch.float32, torch.int64) for t in two(dtype)]
    made = allocated(sources)
    total, product = torch.compile(step, backend="aot_eager")(*made)
    assert [t.tolist() for t in made] == [[1.0] * 5, [0.0] * 5, [2] * 5, [0] * 5]
    assert total.tolist() == [1.0] * 5 and product.tolist() == [0] * 5


OUTGROW = {
    "resize_": lambda tensor: tensor.resize_(100_000),
    "out": lambda tensor: torch.add(torch.ones(100_000), 1, out=tensor),
    "its storage": lambda tensor: tensor.untyped_storage().resize_(0),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("way", OUTGROW)
def test_one_that_would_outgrow_the_pack_is_an_error(way):
    """It would lie over the others. torch has changed its sizes by then, so nobody may look at it afterwards."""
    a, b, c = allocated([torch.ones(5) for _ in range(3)])
    with pytest.raises(RuntimeError, match="not resizable"):
        OUTGROW[way](b)
    assert a.add_(1).tolist() == c.add_(1).tolist() == [1.0] * 5


def test_shrinking_and_a_clone_that_grows_disturb_nobody():
    a, b, c = allocated([torch.ones(5) for _ in range(3)])
    b.resize_(3).fill_(4)
    own = b.clone()
    own.resize_(100_000).fill_(7)
    assert a.tolist() == c.tolist() == [0.0] * 5 and b.tolist() == [4.0] * 3


def test_the_pack_goes_with_the_last_of_its_tensors():
    a, b = allocated([torch.ones(5) for _ in range(2)])
    b.fill_(4)
    del a
    assert b.tolist() == [4.0] * 5


def test_copies_and_files_hold_a_pack_at_most():
    made = allocated([torch.ones(1024) for _ in range(200)] + [torch.ones(1 << 20)])
    made[3].copy_(torch.arange(1024.0))
    copied = copy.deepcopy(made[3])
    assert torch.equal(copied, made[3]) and storage(copied) != storage(made[3])
    assert copied.untyped_storage().nbytes() <= PACK
    file = io.BytesIO()
    torch.save(made[3], file)
    assert file.tell() <= PACK + 4096
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), made[3])
    own = io.BytesIO()
    torch.save(made[3].clone(), own)
    assert own.tell() <= 4096 + 4096
