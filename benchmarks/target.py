"""The device that is measured on, and what is known about it and about this run."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGES = (  # that benchmarks may use
    "pillow",
    "torchvision",
    "opencv-python-headless",
    "opencv-python",
    "timm",
    "torchdata",
    "spdl",
    "tensordict",
)


class Unusable(Exception):
    """What was asked for can't be had here; the text says why."""


class Target:
    """A device, and how to wait for it.

    `streams` is torch's module for the device (`torch.cuda`, `torch.xpu`) where that has streams and events, else None:
    without them copies are timed by the host's clock and the rows copy on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.accelerated = device.type != "cpu"
        self.streams: ModuleType | None = None
        self._intra_op_threads = torch.get_num_threads()
        if self.accelerated:
            module = torch.get_device_module(device)
            if device.type in ("cuda", "xpu"):
                self.streams = module
                module.set_device(device)
            self._module = module

    def synchronize(self) -> None:
        """Wait until the device has done all it was given; nothing to wait for on the CPU."""
        if self.accelerated:
            self._module.synchronize()

    def mark(self) -> Any:
        """A point in the work of the current stream, for `seconds_between`. Without events it is the host's time."""
        if self.streams is None:
            return time.perf_counter()
        event = self.streams.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """By the device's clock where it has events. Call it after a `synchronize`."""
        return later - earlier if self.streams is None else float(earlier.elapsed_time(later)) * 1e-3

    def restore_intra_op_threads(self) -> None:
        """Give threads that start from now on torch's number of threads for one operation again. Who sets another one
        for a single thread, as a DataLoader with workers and torchdata do where they pin, sets it for later threads
        too: a row that starts some after them would copy at a fraction of its speed."""
        torch.set_num_threads(self._intra_op_threads)

    def memory_stat(self, name: str) -> int | None:
        """One figure of CUDA's caching allocator, in bytes; None on other devices."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats(self.device).get(name, 0))

    def reset_peak_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def name(self) -> str:
        if self.device.type == "cpu":
            return f"CPU ({platform.processor() or platform.machine()})"
        if self.streams is not None:
            return str(self.streams.get_device_name(self.device))
        return self.device.type


def find_target(wanted: str | None) -> Target:
    """The device named by `wanted`, or the current accelerator, or the CPU. Raises Unusable if it is not there."""
    if wanted is None:
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = torch.device("cpu") if current is None else torch.device(current.type)
    else:
        try:
            device = torch.device(wanted)
        except RuntimeError as error:
            raise Unusable(f"--device {wanted!r} is no torch device: {error}") from None
    if device.type == "cpu":
        return Target(torch.device("cpu"))

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        found = "no accelerator" if accelerator is None else f"{accelerator.type} as the accelerator"
        raise Unusable(f"--device {wanted!r} can't be used: torch finds {found} here")
    if device.index is None and device.type in ("cuda", "xpu"):
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise Unusable(f"--device {wanted!r} does not exist: there are {torch.accelerator.device_count()} devices")
    return Target(device)


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi(device: torch.device) -> dict[str, str]:
    """Driver and link as nvidia-smi reports them; {} where it can't be asked. Ask right after work: an idle link
    drops to a lower generation."""
    program = shutil.which("nvidia-smi")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    if program is None or uuid is None:
        return {}
    fields = ["driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current"]
    query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", f"GPU-{uuid}"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def describe(target: Target) -> dict[str, Any]:
    """Device, driver, link, versions, platform and command, as they go into the JSON file."""
    smi = _nvidia_smi(target.device)
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "device": str(target.device),
        "device_name": target.name,
        "driver": smi.get("driver_version"),
        "link_generation": smi.get("pcie.link.gen.current"),
        "link_generation_max": smi.get("pcie.link.gen.max"),
        "link_width": smi.get("pcie.link.width.current"),
        "python": platform.python_version(),
        "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpuprefetch": _distribution_version("torch-gpuprefetch"),
        "packages": {name: _distribution_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "boot": _boot(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(affinity(0)) if affinity else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda_launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        "command": command_line(),
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _cpu_model() -> str:
    """As the system names it; where that is Linux `platform` knows the architecture only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _boot() -> str | None:
    """Equal in two results if they come from one machine that was not started again in between. On Linux."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(boot_id).hexdigest()[:12]


def _commit() -> str | None:
    """Of the repository that this file is in, with -dirty where sources were changed; None where git does not know."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    sources = ["csrc", "gpuprefetch", "benchmarks/*.py"]
    asked = ["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", *sources]
    try:
        commit, changed = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + "-dirty" * bool(changed)


def command_line() -> str:
    """The command that started this run, as one would type it."""
    arguments = ["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]]
    return subprocess.list2cmdline(arguments) if sys.platform == "win32" else shlex.join(arguments)


def headline(environment: dict[str, Any]) -> list[str]:
    """Two lines for tables and pictures: the device, and the software."""
    device = environment["device_name"]
    if environment["driver"]:
        device += f", driver {environment['driver']}"
    if environment["link_generation"]:
        device += f", PCIe gen {environment['link_generation']} x{environment['link_width']}"
    torch_version = environment["torch"]
    if environment["cuda"] and "+" not in torch_version:
        torch_version += f" (CUDA {environment['cuda']})"
    software = f"torch {torch_version}, Python {environment['python']}"
    if environment["gpuprefetch"]:
        software = f"gpuprefetch {environment['gpuprefetch']}, {software}"
    return [f"{device}, {environment['cpus_usable']} CPU cores", f"{software}, {environment['platform']}"]
