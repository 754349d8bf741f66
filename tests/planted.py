"""A device that is the host, for the copier and all Python above it: see ``planted_device.cpp``."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpuprefetch import PrefetchIterator, _copier, _copy_lane, _unrecorded

HOST = torch.device("cpu")


@contextlib.contextmanager
def planted_device(folder):
    """Builds it in ``folder``, and has it for the CPU's device guard in the block. The value is its library."""
    library = Path(folder) / "planted_device.so"
    torch_folder = Path(torch.__file__).parent
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *("-shared", "-fPIC", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        *(f"-I{torch_folder / 'include'}", str(Path(__file__).with_name("planted_device.cpp"))),
        *(f"-L{torch_folder / 'lib'}", "-lc10", "-o", str(library)),
    ]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip(f"no compiler is called {command[0]}")
    planted = ctypes.CDLL(str(library))
    planted.fail_after.argtypes = [ctypes.c_int64]
    planted.times_recorded.argtypes, planted.times_recorded.restype = [ctypes.c_void_p], ctypes.c_int64
    planted.install()
    try:
        yield planted
    finally:
        planted.remove_again()


def is_recorded(tensor, planted):
    """Invariant 2, as far as it can be seen here."""
    return planted.times_recorded(tensor.untyped_storage().data_ptr()) > 0


def host_stream(*_, **__):
    return torch.Stream(stream_id=0, device_index=0, device_type=0)


class Event:
    """Always done. Its handle is a number, which the planted device does not look at."""

    _handles = itertools.count(1)

    def __init__(self, blocking=False):
        self.cuda_event = next(self._handles)

    def record(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass


class _Torch:
    """torch, with the calls of ``torch.cuda`` that a copy takes."""

    cuda = SimpleNamespace(
        Event=Event,
        Stream=host_stream,
        current_stream=host_stream,
        stream=contextlib.nullcontext,
        device=contextlib.nullcontext,
        is_current_stream_capturing=lambda: False,
        memory=SimpleNamespace(get_allocator_backend=lambda: "native"),
        mem_get_info=lambda device: (1 << 40, 1 << 40),
        memory_reserved=lambda device: 0,
        get_per_process_memory_fraction=lambda device: 1.0,
    )

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*size, pin_memory=False, **options):
        return torch.empty(*size, **options)


@contextlib.contextmanager
def planted_cuda():
    """In the block the way to a CUDA device leads to the planted one, for ``Planted``."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (_copier, _copy_lane, _unrecorded):
            patch.setattr(module, "torch", _Torch())
        yield


class Planted(PrefetchIterator):
    """As for a CUDA device: staged by the compiled copier, and handed over on the host."""

    copier = None  # one of its own

    def _open(self):
        with self._lock:
            if self._share is None:
                self._share = _copier.Share(self.copier or _copier.Copier(HOST), self._pinned_bytes)
            return self._share
