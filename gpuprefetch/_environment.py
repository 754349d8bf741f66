"""What torch keeps for each thread, carried from the thread that starts an epoch into the threads that serve it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator

import torch

from gpuprefetch._reused import Reused

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed


class Environment:
    """Grad mode, inference mode, autocast, default device, intra-op threads and CUDA device of the calling thread.

    Args:
        device: where the epoch's batches go.
    """

    def __init__(self, device: torch.device) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", "cuda", device.type})
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._default_device = torch.empty(0).device  # torch 2.6 itself does not see `with torch.device()`
        self._intra_op_threads = torch.get_num_threads()
        self._cuda = _cuda_device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._cuda is not None:
            with relaxed_capture_mode():
                (self._stream,) = _streams(self._cuda).take(self, 1)
                self._stream.wait_stream(torch.cuda.current_stream(self._cuda))

    @contextlib.contextmanager
    def entered(self, sharing: int = 1) -> Iterator[None]:
        """Gives the current thread, one of ours and new, this environment; its part of the intra-op threads, if so many
        threads are ``sharing`` them.

        Work on a CUDA device runs on one stream for all threads of the epoch, behind what the caller's stream had when
        it began: on the default stream it would wait for the training step, and the step for it. One, since memory that
        a sample was made in may be used again as soon as another thread has collated it.
        """
        with contextlib.ExitStack() as stack:
            if self._cuda is not None and self._stream is not None:
                relax_capture_mode()
                torch.cuda.set_device(self._cuda)
                torch.cuda.set_stream(self._stream)
            _set_intra_op_threads(max(1, self._intra_op_threads // sharing))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))  # second: inference_mode() sets it too
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._autocast_cache))
            if self._default_device.type != "cpu":
                stack.enter_context(self._default_device)
            yield


def _set_intra_op_threads(number: int) -> None:
    """For the current thread alone. What torch.set_num_threads() sets is also taken by each new thread, the user's and
    autograd's among them."""
    if torch.get_num_threads() != number:  # asking makes torch set this thread's first value, if it has none yet
        (_omp_set_num_threads() or torch.set_num_threads)(number)


@contextlib.contextmanager
def one_intra_op_thread() -> Iterator[None]:
    """For what the current thread, one of ours, copies: the other cores are the training loop's."""
    before = torch.get_num_threads()
    if before == 1 or _omp_set_num_threads() is None:  # torch's own call would change other threads, for each batch
        yield
        return
    _set_intra_op_threads(1)
    try:
        yield
    finally:
        _set_intra_op_threads(before)


@functools.cache
def _omp_set_num_threads() -> Callable[[int], object] | None:
    """OpenMP's own, of the library that torch has loaded; None of a torch that is built without."""
    try:
        # It takes less time than to give the GIL away and get it back.
        library = ctypes.PyDLL("libiomp5md" if sys.platform == "win32" else None)
        function: Callable[[int], object] = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    return function


def relax_capture_mode() -> int:
    """Keeps the calls of this thread from invalidating a graph capture in another one. Returns the mode before.

    While a thread captures in the default mode, an event query, an allocation or a free in any other thread ends the
    capture with an error, unless that other thread is in relaxed mode (CUDA driver API,
    cuThreadExchangeStreamCaptureMode).
    """
    return exchange_capture_mode(_RELAXED)


def exchange_capture_mode(mode: int) -> int:
    exchange = _capture_mode_exchange()
    if exchange is None:
        return mode
    value = ctypes.c_int(mode)
    exchange(ctypes.byref(value))
    return value.value


@contextlib.contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Relaxed capture mode in a thread of the user's, for as long as our own calls there take."""
    before = relax_capture_mode()
    try:
        yield
    finally:
        exchange_capture_mode(before)


@functools.cache
def _capture_mode_exchange() -> Callable[..., int] | None:
    if torch.version.hip is not None:
        name, function = ("amdhip64.dll" if sys.platform == "win32" else "libamdhip64.so"), "hip"
    else:
        name, function = driver_library(), "cu"
    try:
        exchange: Callable[..., int] = getattr(ctypes.CDLL(name), function + "ThreadExchangeStreamCaptureMode")
    except (OSError, AttributeError):
        return None
    return exchange


def driver_library() -> str:
    """The file name of NVIDIA's driver library on this platform."""
    return "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def _cuda_device(device: torch.device) -> torch.device | None:
    """The CUDA device that user code in the epoch's threads sees: the caller's, unless that has never been used."""
    if device.type != "cuda" and not torch.cuda.is_initialized():
        return None
    current = torch.cuda.current_device()
    if torch._C._cuda_hasPrimaryContext(current):  # type: ignore[attr-defined]
        return torch.device("cuda", current)
    return device if device.type == "cuda" else None


@functools.cache
def _streams(device: torch.device) -> Reused[torch.cuda.Stream]:
    """Used again, since the allocator keeps free memory for each stream apart."""
    return Reused(functools.partial(torch.cuda.Stream, device))
