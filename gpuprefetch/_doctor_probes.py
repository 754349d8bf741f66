"""Gathers the facts. A probe that fails leaves None, and its reason in ``failures``."""

from __future__ import annotations

import dataclasses
import os
import platform
import struct
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from gpuprefetch import _doctor_system as system
from gpuprefetch._arguments import accelerator, checked_device
from gpuprefetch._control_groups import granted_cpus
from gpuprefetch._doctor_facts import Facts
from gpuprefetch._doctor_self_test import loads_ahead, measure_overlap
from gpuprefetch._extension import extension
from gpuprefetch._recommended import allowed_cpus, recommended_num_threads

REQUESTS = (0, 1, 2, 4, 8)
"""Numbers of workers for which the doctor says how many threads run."""

_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HIP_VISIBLE_DEVICES",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_BLOCKTIME",
    "GOMP_SPINCOUNT",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_PINNED = {"4 KiB": 4 << 10, "64 MiB": 64 << 20}


def _version() -> str:
    import gpuprefetch

    return gpuprefetch.__version__


def _accelerator() -> str | None:
    if torch.version.cuda is not None or torch.version.hip is not None:  # older versions of torch would ask the driver
        return "cuda"
    built_for = accelerator()
    return None if built_for is None else built_for.type


def _compiled() -> Any:
    try:
        from gpuprefetch import _C
    except ImportError:
        return None
    return _C


def _extension_torch() -> str | None:
    module = _compiled()
    return None if module is None else f"{module.TORCH_VERSION_MAJOR}.{module.TORCH_VERSION_MINOR}"


def _extension_error() -> str | None:
    try:
        extension()
    except ImportError as error:
        return str(error)
    return None


_HOST: dict[str, Callable[[], Any]] = {
    "gpuprefetch": _version,
    "torch": lambda: str(torch.__version__),
    "torch_cuda": lambda: torch.version.cuda,
    "torch_hip": lambda: torch.version.hip,
    "torch_debug": lambda: torch.version.debug,
    "torch_accelerator": _accelerator,
    "python": platform.python_version,
    "python_bits": lambda: struct.calcsize("P") * 8,
    "python_debug": lambda: hasattr(sys, "gettotalrefcount"),
    "gil": lambda: getattr(sys, "_is_gil_enabled", lambda: True)(),
    "platform": platform.platform,
    "sys_platform": lambda: sys.platform,
    "cpus": allowed_cpus,
    "container_cpus": granted_cpus,
    "recommended_threads": recommended_num_threads,
    "threads": lambda: {str(requested): requested for requested in REQUESTS},
    "intra_op_threads": torch.get_num_threads,
    "environment": lambda: {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    "openmp": system.openmp_runtimes,
    "commit_free_bytes": system.commit_free_bytes,
    "container_free_bytes": system.container_free_bytes,
    "nvidia_driver": system.has_nvidia_driver,
    "driver_cuda": system.driver_cuda,
    "cards": system.nvidia_cards,
    "compiler": system.compiler,
    "extension_torch": _extension_torch,
    "extension_compiler": lambda: (module := _compiled()) and module.COMPILER,
    "extension_optimized": lambda: (module := _compiled()) and module.OPTIMIZED,
    "extension_error": _extension_error,
}


def host_facts() -> Facts:
    """All that is known without asking the device."""
    return _with(Facts(), _HOST)


def with_device(facts: Facts) -> Facts:
    """Adds what the device says, and the self-test. Initialises CUDA, if there is a device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say stands in a finding
        facts = _with(facts, {"device": lambda: str(checked_device(None)), "device_error": _device_error})
        if facts.device is None:
            return facts
        device = torch.device(facts.device)
        if device.type == "cuda":
            facts = _with(facts, _cuda_probes(device))
            if facts.extension_error is not None:
                return facts
            facts = _with(facts, {"overlap": lambda: measure_overlap(device), "cards": system.nvidia_cards})
        return _with(facts, {"loads_ahead": lambda: loads_ahead(device)})


def _cuda_probes(device: torch.device) -> dict[str, Callable[[], Any]]:
    def properties() -> Any:
        return torch.cuda.get_device_properties(device)

    return {
        "device_name": lambda: properties().name,
        "device_uuid": lambda: str(properties().uuid),
        "device_count": torch.cuda.device_count,
        "device_bytes": lambda: properties().total_memory,
        "pinned": _pinned,
    }


def _device_error() -> str | None:
    built_for = _accelerator()
    if built_for is None or torch.accelerator.is_available():
        return None
    if built_for == "cuda":
        try:
            torch.cuda.init()
        except Exception as error:
            return _first_line(error)
    return f"{built_for} is not available"


def _pinned() -> dict[str, str]:
    """The small one first: on Windows one refusal makes later requests fail as well."""
    answers = {}
    for name, size in _PINNED.items():
        try:
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            answers[name] = "ok"
        except RuntimeError as error:
            answers[name] = _first_line(error)
    return answers


def _with(facts: Facts, probes: dict[str, Callable[[], Any]]) -> Facts:
    found: dict[str, Any] = {}
    failures = dict(facts.failures)
    for name, probe in probes.items():
        try:
            found[name] = probe()
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {_first_line(error)}"
    return dataclasses.replace(facts, **found, failures=failures)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
