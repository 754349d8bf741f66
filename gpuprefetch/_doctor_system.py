"""What the operating system, the NVIDIA driver and the compiler's installation say. Nothing here initialises CUDA."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path, PurePath

from gpuprefetch._control_groups import MOUNT, OWN, control_groups, read
from gpuprefetch._environment import driver_library

_LIMIT_SECONDS = 10.0
_CARD_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "driver_model": "driver_model.current",  # Windows only
    "link_generation": "pcie.link.gen.current",
    "link_generation_max": "pcie.link.gen.max",
    "link_width": "pcie.link.width.current",
    "link_width_max": "pcie.link.width.max",
}
_OPENMP = re.compile(r"(lib(gomp|iomp5|iomp5md|omp|omp140)|vcomp\d+)[-.]")
_NO_LIMIT = 1 << 60  # cgroup v1 says so with a number near 2**63


def output_of(command: list[str]) -> str | None:
    """What a program prints; None if it can't be started, fails, or takes longer than 10 s."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
            errors="replace",
        )  # fmt: skip
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and no wait for it: a process that hangs inside the driver does not even end by that
        if process.stdout is not None:
            process.stdout.close()
        return None
    return output if process.returncode == 0 else None


def nvidia_cards() -> list[dict[str, str | None]] | None:
    """Each card as nvidia-smi tells it; None where it can't be asked. An idle link drops to a lower generation."""
    program = shutil.which("nvidia-smi")
    output = program and output_of([program, f"--query-gpu={','.join(_CARD_FIELDS.values())}", "--format=csv,noheader"])
    return parsed_cards(output) if output else None


def parsed_cards(output: str) -> list[dict[str, str | None]]:
    cards = []
    for line in output.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_CARD_FIELDS):
            known = [None if value.startswith("[") or value == "N/A" else value for value in values]
            cards.append(dict(zip(_CARD_FIELDS, known, strict=True)))
    return cards


def has_nvidia_driver() -> bool:
    return _nvidia_driver() is not None


def driver_cuda() -> str | None:
    """The newest CUDA version that the driver knows, such as "12.8"; asking does not initialise it."""
    driver = _nvidia_driver()
    version = ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _nvidia_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(driver_library())
    except OSError:
        return None


def openmp_runtimes() -> list[str] | None:
    """Files of the OpenMP run-time libraries that this process has loaded; None where that can't be asked."""
    if sys.platform == "win32":
        loaded = _windows_modules()
    elif sys.platform == "linux":
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        loaded = [fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6]
    else:
        return None
    return sorted({file for file in loaded if _OPENMP.match(PurePath(file).name.lower())})


def _windows_modules() -> list[str]:
    if sys.platform != "win32":
        return []
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    modules = (ctypes.c_void_p * 4096)()
    kernel32.K32EnumProcessModules.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p]
    kernel32.GetModuleFileNameW.argtypes = [ctypes.c_void_p, ctypes.c_wchar_p, ctypes.c_uint32]
    needed = ctypes.c_uint32()
    process = kernel32.GetCurrentProcess()
    if not kernel32.K32EnumProcessModules(process, modules, ctypes.sizeof(modules), ctypes.byref(needed)):
        raise ctypes.WinError(ctypes.get_last_error())
    files = []
    for module in modules[: needed.value // ctypes.sizeof(ctypes.c_void_p)]:
        name = ctypes.create_unicode_buffer(32768)
        if kernel32.GetModuleFileNameW(module, name, len(name)):
            files.append(name.value)
    return files


def commit_free_bytes() -> int | None:
    """What Windows lets this process still allocate, used or not: RAM and page file. None elsewhere."""
    if sys.platform != "win32":
        return None

    class MemoryStatus(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
            (name, ctypes.c_uint64)
            for name in ("total", "free", "total_commit", "free_commit", "total_virtual", "free_virtual", "extended")
        ]

    status = MemoryStatus()
    status.length = ctypes.sizeof(status)
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise ctypes.WinError(ctypes.get_last_error())
    return int(status.free_commit)


def container_free_bytes(root: Path = MOUNT, own: Path = OWN) -> int | None:
    """What the memory limits of the process's control groups leave, v1 or v2; None without a limit.

    File pages that were not used lately count as free: the kernel gives them up first.
    """
    free = []
    for folder in control_groups("memory", root, own):
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _NO_LIMIT:
                cached = re.search(rf"^{names[2]} (\d+)$", read(folder / "memory.stat"), re.MULTILINE)
                free.append(max(0, limit - used + (int(cached[1]) if cached else 0)))
    return min(free, default=None)


def _number(file: Path) -> int | None:
    text = read(file).strip()
    return int(text) if text.isdecimal() else None


def compiler(which: Callable[[str], str | None] = shutil.which) -> str | None:
    """Where the C++ compiler is with which gpuprefetch would be built again."""
    if sys.platform == "win32":
        if found := which("cl"):
            return found
        programs = os.environ.get("ProgramFiles(x86)", "C:/Program Files (x86)")
        vswhere = Path(programs, "Microsoft Visual Studio", "Installer", "vswhere.exe")
        tools = "Microsoft.VisualStudio.Component.VC.Tools.x86.x64"
        ask = ["-latest", "-products", "*", "-requires", tools, "-property", "installationPath"]
        return (output_of([str(vswhere), *ask]) or "").strip() or None
    commands = [os.environ.get("CXX", "c++"), sysconfig.get_config_var("CXX") or "g++"]  # compiles, links
    try:
        words = [shlex.split(command) for command in commands]
    except ValueError:  # a quotation without end: the shell would not find it either
        return None
    found = [which(command[0]) for command in words if command]
    return found[0] if found and None not in found else None
