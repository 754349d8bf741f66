"""How many threads suit this machine."""

from __future__ import annotations

import os

from gpuprefetch._control_groups import granted_cpus


def allowed_cpus() -> int:
    """CPUs that this process may run on: fewer than the machine has where an affinity is set."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cpus() -> int:
    """CPUs that this process may keep busy: those that it may run on, or what a container's limit leaves of them, and
    one at least. Threads beyond that would make all others wait until the next period of the limit."""
    granted = granted_cpus()
    return allowed_cpus() if granted is None else min(allowed_cpus(), max(int(granted), 1))


def recommended_num_threads() -> int:
    """``min(usable CPUs, 8)``, on every platform: a value for ``num_threads`` to begin with. An affinity and a
    container's limit count."""
    return min(usable_cpus(), 8)
