"""What Linux' control groups grant this process. Elsewhere there are none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def granted_cpus(root: Path = MOUNT, own: Path = OWN) -> float | None:
    """CPUs' worth of time that the process's control groups are granted, v1 or v2; None without a limit."""
    granted = []
    for folder in control_groups("cpu", root, own):
        old = f"{read(folder / 'cpu.cfs_quota_us')} {read(folder / 'cpu.cfs_period_us')}"
        both = read(folder / "cpu.max") or old
        if match := re.fullmatch(r"(\d+)\s+([1-9]\d*)", both.strip()):  # "max", or -1, is no limit
            granted.append(int(match[1]) / int(match[2]))
    return min(granted, default=None)


def control_groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Folders of the process's group and those above it. In a container its path may be seen from outside: then only
    the root of the mount is there, which is the container's."""
    for _, controllers, path in re.findall(r"^(\d+):([^:\n]*):(.*)$", read(own), re.MULTILINE):
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        folder = base / path.lstrip("/")
        yield folder
        while folder != base:
            folder = folder.parent
            yield folder


def read(file: Path) -> str:
    """Empty where it can't be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
