"""Loaders that tests can watch, and waits that fail instead of hanging."""

import ctypes
import gc
import os
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
import time
import traceback

import torch
from torch.utils.data import DataLoader, Dataset

ABOUT_PROCESSES = {
    "pin_memory": True,
    "pin_memory_device": "cuda",
    "prefetch_factor": 4,
    "persistent_workers": True,
    "multiprocessing_context": "spawn",
}
"""Arguments of a DataLoader that have no effect without worker processes."""

NO_GIL = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
THREADS = [0, 1] if sys.platform == "win32" else [0, 1, 3]
"""The values of ``num_threads``. Under wine each test takes its time; test_samples.py has several threads there too."""


class Ramp(Dataset):
    """Sample i is a tensor filled with the value i. ``hook(i)`` runs first."""

    def __init__(self, n, shape=(4,), dtype=torch.float32, hook=None):
        self.n, self.shape, self.dtype, self.hook = n, shape, dtype, hook

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if self.hook is not None:
            self.hook(i)
        return torch.full(self.shape, i, dtype=self.dtype)


class Gate:
    """A hook that holds sample ``at`` until it is opened. Always open it at the end: ``with gate:`` does."""

    def __init__(self, at, seconds=30.0):
        self.at, self.seconds = at, seconds
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, i):
        if i == self.at:
            self.reached.set()
            assert self.opened.wait(self.seconds), "the gate was never opened"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.set()


def passed_on(batches):
    """A loader of these batches, as they are."""
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


def vals(batches):
    """The first value of each batch."""
    return [int(b.flatten()[0]) for b in batches]


def lists(batches):
    return [b.tolist() for b in batches]


def bytes_of(tensor):
    """All elements in order, as bytes: NaNs compare, and so do elements of dtypes that have no operators."""
    plain = tensor.detach()
    if any(getattr(plain, "names", ())):
        plain = plain.rename(None)
    dense = plain.cpu().resolve_conj().resolve_neg()
    if type(dense) is not torch.Tensor:
        dense = dense.as_subclass(torch.Tensor)
    if not dense.is_contiguous():
        dense = dense.contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def eventually(condition, seconds=10.0, collect=True):
    """True as soon as ``condition()`` is, False after ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        if collect:
            gc.collect()
        if condition():
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.005)  # between two looks


def stands_in(name, thread, seconds=20.0):
    """True as soon as the thread is inside a call of a function of that name, False after ``seconds``."""

    def stands():
        frame = sys._current_frames().get(thread.ident)
        return any(each.f_code.co_name == name for each, _ in traceback.walk_stack(frame)) if frame else False

    return eventually(stands, seconds, collect=False)


def within(seconds, function):
    """What ``function()`` returns or raises, on a thread of its own. Fails where it takes longer."""
    box = []

    def run():
        try:
            box.append((function(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run, name="test-within", daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still running after {seconds} s"
    result, error = box.pop()
    if error is not None:
        raise error
    return result


def threads(since=()):
    """The package's own threads that are alive, without those in ``since``."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("gpuprefetch-")]
    return [thread for thread in ours if thread not in since]


def handles():
    """How many files, sockets and, on Windows, other objects of the system this process holds open. Wine says 0."""
    if sys.platform != "win32":
        return len(os.listdir("/dev/fd"))
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    kernel32.GetProcessHandleCount.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32)]
    count = ctypes.c_uint32()
    if not kernel32.GetProcessHandleCount(kernel32.GetCurrentProcess(), ctypes.byref(count)):
        raise ctypes.WinError(ctypes.get_last_error())
    return count.value


PRELUDE = """
import gc, os, sys, threading, time, warnings
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from gpuprefetch import PrefetchIterator

class Ramp(Dataset):
    def __init__(self, n, hook=None):
        self.n, self.hook = n, hook
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if self.hook is not None:
            self.hook(i)
        return torch.full((4,), float(i))
"""


def start(body, prelude=PRELUDE, **options):
    """A Python process that runs ``body``, outside the source folder."""
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(body)],
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **options,
    )


def finish(process, seconds=120):
    """The ended process's (return code, stdout, stderr). One that does not end is killed, and the test fails."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the process did not end within {seconds} s\n{out}\n{err}") from None
    return process.returncode, out, err


def script(body, seconds=120, **options):
    return finish(start(body, **options), seconds)
