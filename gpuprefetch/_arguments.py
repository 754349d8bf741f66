"""What the arguments of the public class may be. Errors name the argument, the value and what is allowed."""

from __future__ import annotations

import ctypes
import functools
import numbers
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpuprefetch._environment import driver_library
from gpuprefetch._source import why_one_thread

MOST_THREADS = 256
LARGEST_SEED = (1 << 64) - 1


def callers_level() -> int:
    """The ``stacklevel`` at which a warning of the function that asks points at whoever called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_between(str(frame.f_globals.get("__name__"))):
        level, frame = level + 1, frame.f_back
    return level


def _is_between(module: str) -> bool:
    return module.startswith("gpuprefetch.") or module == "contextlib"


def checked_loader(loader: Iterable[Any]) -> Iterable[Any]:
    kind = type(loader)
    if not hasattr(kind, "__iter__"):
        if isinstance(loader, Dataset):  # iter() would give its samples
            raise TypeError(f"loader must be an iterable of batches; wrap a DataLoader of the dataset {kind.__name__}")
        if not hasattr(kind, "__getitem__"):
            raise TypeError(f"loader must be an iterable of batches, not {kind.__name__}")
    if sys.platform == "win32" and isinstance(loader, DataLoader) and loader.num_workers > 0:
        _warn_of_workers()
    return loader


@functools.cache
def _warn_of_workers() -> None:
    warnings.warn(
        "the loader's num_workers is above 0, and so it starts processes. On Windows each of them runs the script and "
        "imports torch again, and dataset and batches have to pass between them: set num_workers=0, and give that "
        "number to the PrefetchIterator, as num_threads",
        RuntimeWarning,
        stacklevel=callers_level(),
    )


def warn_of_worker_init_fn(function: Callable[[int], None] | None) -> None:
    if function is not None:
        warnings.warn(
            f"worker_init_fn={function!r} is not called: there are no worker processes. To seed augmentation pass "
            "seed= and draw from gpuprefetch.sample_generator() or sample_rng() in dataset[i]; open files in the "
            "dataset, on first use in each thread",
            RuntimeWarning,
            stacklevel=callers_level(),
        )


def checked_int(name: str, value: int, least: int, most: int) -> int:
    allowed = f"an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be {allowed}, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be {allowed}, not {value!r}")
    return int(value)


def checked_bool(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def checked_threads(num_threads: int, loader: Iterable[Any]) -> int:
    num_threads = checked_int("num_threads", num_threads, 0, MOST_THREADS)
    if num_threads < 2:
        return num_threads
    reason = why_one_thread(loader)
    if reason is None:
        if num_workers := getattr(loader, "num_workers", 0):
            raise ValueError(
                f"num_threads={num_threads} and the loader's num_workers={num_workers} exclude each other: "
                "set num_workers to 0"
            )
        _warn_of_sharing()
        return num_threads
    warnings.warn(
        f"num_threads={num_threads}, but one thread iterates this loader: {reason}",
        RuntimeWarning,
        stacklevel=callers_level(),
    )
    return 1


def checked_seed(seed: int | None, num_threads: int, loader: Iterable[Any]) -> int | None:
    if seed is None:
        return None
    seed = checked_int("seed", seed, 0, LARGEST_SEED)
    reason = why_one_thread(loader)
    if num_threads > 0 and reason is not None:
        warnings.warn(
            f"seed={seed}, but with num_threads={num_threads} this loader draws from the global generators at the same "
            f"time as the loop, if it draws from them at all: {reason}. With num_threads=0 they are seeded",
            RuntimeWarning,
            stacklevel=callers_level(),
        )
    return seed


@functools.cache
def _warn_of_sharing() -> None:
    warnings.warn(
        "with several num_threads the dataset is used by several threads at once, and so are files, databases and "
        "models that it holds. What may not be needs a lock, or one for each thread, in a threading.local: see "
        "docs/slow-datasets.md in gpuprefetch's repository. If it holds none, all is well: "
        "warnings.filterwarnings('ignore', 'with several num_threads')",
        RuntimeWarning,
        stacklevel=callers_level(),
    )


def checked_skip_keys(skip_keys: Collection[Any]) -> frozenset[Any]:
    if isinstance(skip_keys, (str, bytes)) or not isinstance(skip_keys, Collection):
        raise TypeError(f"skip_keys must be a collection of mapping keys, such as a list, not {skip_keys!r}")
    try:
        return frozenset(skip_keys)
    except TypeError as error:
        raise TypeError(f"skip_keys must hold mapping keys, which are hashable, not {skip_keys!r}: {error}") from None


def checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, 0 for none, not {timeout!r}")
    if not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout must be at least 0 seconds and at most {threading.TIMEOUT_MAX:.0f}, not {timeout!r}")
    return float(timeout)


def checked_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return _default_device()
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device must be a torch.device, a string, an index or None, not {device!r}")
    try:
        no_accelerator = accelerator() is None  # to which an index would belong
        chosen = torch.device("cuda", device) if isinstance(device, int) and no_accelerator else torch.device(device)
    except (RuntimeError, ValueError) as error:  # the latter of an index that is too large
        raise ValueError(
            f"device must name a torch device, such as 'cuda:0' or 'cpu', not {device!r}: {error}"
        ) from None
    if chosen.type != "cuda":
        return _checked_other_device(chosen)
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no usable CUDA device"
        raise RuntimeError(
            f"device {device!r} was asked for, but {why}: install what it needs (pytorch.org), or leave device out "
            "to run on the CPU"
        )
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {device!r} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def _checked_other_device(device: torch.device) -> torch.device:
    try:
        torch.empty(0, device=device)
    except Exception as error:
        raise RuntimeError(
            f"device {str(device)!r} was asked for, but can't be used here: {str(error).splitlines()[0]}"
        ) from error
    return device


def accelerator() -> torch.device | None:
    """The kind of device that torch was built for, whether it is there or not; to torch 2.6 only those that are."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


def _default_device() -> torch.device:
    built_for = accelerator()
    if built_for is not None and torch.accelerator.is_available():
        return checked_device(built_for.type)
    if torch.version.cuda is None and torch.version.hip is None:
        _warn_if_nvidia_driver()
    return torch.device("cpu")


@functools.cache
def _warn_if_nvidia_driver() -> None:
    load: Callable[[str], object] = ctypes.CDLL
    try:
        load(driver_library())
    except OSError:
        return
    warnings.warn(
        "this machine has an NVIDIA driver, but this torch is built without CUDA, so batches stay on the CPU: install "
        'a CUDA build of torch (see pytorch.org; `python -m gpuprefetch` says more), or pass device="cpu" to say that '
        "the CPU is meant",
        RuntimeWarning,
        stacklevel=callers_level(),
    )
