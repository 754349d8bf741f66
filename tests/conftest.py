"""What a machine must have for a test, and how two tensors are compared."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from gpu_marker import pytest_runtest_setup as pytest_runtest_setup
from loaders import bytes_of, eventually, threads
from planted import planted_cuda, planted_device

import gpuprefetch
from gpuprefetch._record import Record
from gpuprefetch._threads import Mailbox

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """A test module that makes one at its import, as the value of a parameter, say, pins memory for all other tests."""
    made = [each for each in gc.get_objects() if type(each) in (gpuprefetch.PrefetchIterator, gpuprefetch.DataLoaderX)]
    if made:
        raise pytest.UsageError(f"made while tests were collected: {made}")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """What torch and earlier tests have left is looked at here once: else each collection takes a tenth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The host, in place of a CUDA device, for all tests of a module."""
    with planted_device(tmp_path_factory.mktemp("planted")) as planted, planted_cuda():
        yield planted


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No thread of ours, before the test and after it, and no child process."""
    gc.collect()
    assert eventually(lambda: not threads())
    yield
    assert eventually(lambda: not threads())
    assert multiprocessing.active_children() == []


@pytest.fixture
def as_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Record], bool], Callable[[], object]], None]:
    """``arrange(which, handler)`` has the handler run once, right after the first record that is ``which`` was taken
    off its epoch's queue: as a signal handler may."""

    def arrange(which: Callable[[Record], bool], handler: Callable[[], object]) -> None:
        get, waiting = Mailbox.get, [handler]

        def interrupted(mailbox: Mailbox[Record], timeout: float = 0) -> Record:
            record = get(mailbox, timeout)
            if waiting and which(record):
                waiting.pop()()
            return record

        monkeypatch.setattr(Mailbox, "get", interrupted)

    return arrange


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def interrupted_finalizer(monkeypatch: pytest.MonkeyPatch) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """In the block Ctrl-C arrives before the first line of an epoch's finalizer, where nothing can catch it: Python
    says that it was ignored."""
    from gpuprefetch._iterator import EpochIterator

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is EpochIterator.__del__.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        ignored = []
        with monkeypatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_type))
            sys.setprofile(interrupt)
            try:
                yield
            finally:
                sys.setprofile(None)
        assert ignored == [KeyboardInterrupt]

    return block


@pytest.fixture
def finalizers() -> Callable[[], contextlib.AbstractContextManager[set[str]]]:
    """Of which classes of the package a finalizer runs in the block. Ctrl-C before the first line of one is lost."""
    folder = os.path.dirname(gpuprefetch.__file__)

    @contextlib.contextmanager
    def block() -> Iterator[set[str]]:
        called: set[str] = set()

        def watch(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_name == "__del__" and frame.f_code.co_filename.startswith(folder):
                called.add(type(frame.f_locals["self"]).__name__)

        gc.collect()  # what other tests have left
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            yield called
            gc.collect()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    return block


@pytest.fixture(scope="session")
def same() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Asserts that a tensor is what ``tensor.to(device)`` gave: type, metadata, strides and bytes.

    Not where in its storage it lies: on a device small tensors share one.
    """
    return _assert_same


@pytest.fixture(scope="session")
def spin() -> Callable[[float], None]:
    """``spin(milliseconds)`` queues that much work on the current CUDA stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    torch.cuda._sleep(cycles)  # the first one loads the kernel, and wakes the clock
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    per_millisecond = cycles / start.elapsed_time(end)
    return lambda milliseconds: torch.cuda._sleep(int(milliseconds * per_millisecond))


def _assert_same(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(out) is type(expected)
    for name in ("device", "dtype", "layout", "requires_grad", "is_quantized", "is_nested"):
        assert getattr(out, name) == getattr(expected, name), name
    for name in ("is_conj", "is_neg", "is_inference", "_is_zerotensor"):
        assert getattr(out, name)() == getattr(expected, name)(), name
    assert (out.grad_fn is None) == (expected.grad_fn is None)
    if hasattr(expected, "__tensor_flatten__"):
        _assert_same_parts(out, expected)
    elif expected.is_nested:
        assert len(out.unbind()) == len(expected.unbind())
        for a, b in zip(out.unbind(), expected.unbind(), strict=True):
            _assert_same_strided(a, b)
    elif expected.layout is torch.strided:
        _assert_same_strided(out, expected)
    elif expected.layout is torch._mkldnn:
        _assert_same_strided(out.to_dense(), expected.to_dense())
    else:
        assert out.shape == expected.shape
        if expected.layout is torch.sparse_coo:
            assert out.is_coalesced() == expected.is_coalesced()
        for a, b in zip(_sparse_parts(out), _sparse_parts(expected), strict=True):
            _assert_same_strided(a, b)


def _assert_same_parts(out: torch.Tensor, expected: torch.Tensor) -> None:
    names, _ = expected.__tensor_flatten__()
    assert out.__tensor_flatten__()[0] == names and names
    for name in names:
        _assert_same(getattr(out, name), getattr(expected, name))


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _assert_same_strided(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)
    if out.storage_offset() != expected.storage_offset():
        assert out.is_cuda and out.storage_offset() * out.element_size() % 512 == 0, "not aligned as torch's own are"
    assert getattr(out, "names", None) == getattr(expected, "names", None)  # gone in newer versions of torch
    if expected.is_quantized:
        assert out.qscheme() == expected.qscheme()
        if expected.qscheme() == torch.per_tensor_affine:
            assert (out.q_scale(), out.q_zero_point()) == (expected.q_scale(), expected.q_zero_point())
        else:
            assert torch.equal(out.q_per_channel_scales(), expected.q_per_channel_scales())
            assert torch.equal(out.q_per_channel_zero_points(), expected.q_per_channel_zero_points())
            assert out.q_per_channel_axis() == expected.q_per_channel_axis()
        out, expected = out.int_repr(), expected.int_repr()
    if expected.device.type != "meta":
        assert torch.equal(bytes_of(out), bytes_of(expected))
