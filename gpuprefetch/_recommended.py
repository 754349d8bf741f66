"""How many threads suit this machine."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """CPUs that this process may run on: fewer than the machine has where an affinity is set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def recommended_num_threads() -> int:
    """``min(usable CPUs, 8)``, on every platform: a value for ``num_threads`` to begin with."""
    return min(usable_cpus(), 8)
