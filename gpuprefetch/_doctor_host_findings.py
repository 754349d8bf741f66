"""What slows the host down, or will be missing on it, judged from facts alone."""

from __future__ import annotations

from collections.abc import Callable

from gpuprefetch._doctor_facts import Facts, Finding, gibibytes

_LITTLE_COMMIT = 4 << 30
_LITTLE_MEMORY = 2 << 30


def _narrow_python(facts: Facts) -> Finding | None:
    if facts.python_bits is None or facts.python_bits >= 64:
        return None
    return Finding(
        "error",
        "32-bit",
        f"this Python is a {facts.python_bits}-bit program",
        "There is no PyTorch for it.",
        "Install a 64-bit Python, PyTorch and gpuprefetch in it.",
    )


def _openmp(facts: Facts) -> Finding | None:
    several = len(facts.openmp or []) > 1
    allowed = facts.is_on("KMP_DUPLICATE_LIB_OK")
    if not several and not allowed:
        return None
    loaded = f"several OpenMP run-time libraries are loaded: {', '.join(facts.openmp or [])}"
    return Finding(
        "slow" if several else "note",
        "openmp",
        (loaded if several else "KMP_DUPLICATE_LIB_OK is set")
        + (", and KMP_DUPLICATE_LIB_OK hides it" if several and allowed else ""),
        "Each library keeps its own threads, which compete for the cores, and the loader threads' share may be set in "
        "the wrong one. Intel warns of crashes and wrong results where such a conflict is only hidden.",
        "Install torch and NumPy from one source (all by pip, or all by conda) in a fresh environment, and unset "
        "KMP_DUPLICATE_LIB_OK.",
    )


def _named(cores: float | None) -> str:
    return "1 CPU core" if cores == 1 else f"{cores:g} CPU cores"


def _one_core(facts: Facts) -> Finding | None:
    cores = facts.cores
    if cores is None or cores >= 2:
        return None
    return Finding(
        "slow",
        "one-core",
        f"this process may use {_named(cores)}",
        "A loader thread and the training loop take turns on it; only the copy overlaps.",
        "Give the process more cores (affinity, or the container's CPU limit), or pass num_threads=0.",
    )


def _too_many_threads(facts: Facts) -> Finding | None:
    """Threads of one operation meet at its end. Where they outnumber the cores, those that wait spin on a core that the
    last one, or a loader thread, would need."""
    cores = facts.cores
    numbers = {"torch.get_num_threads()": facts.intra_op_threads or 0}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = (facts.environment or {}).get(name, "").split(",")[0].strip()
        numbers[name] = int(first) if first.isdecimal() and len(first) < 10 else 0  # int() refuses thousands
    above = [f"{name} is {number}" for name, number in numbers.items() if cores is not None and number > max(cores, 1)]
    if not above:
        return None
    return Finding(
        "slow",
        "too-many-threads",
        f"{' and '.join(above)}, but this process may use {_named(cores)}",
        "Threads of one operation that outnumber the cores wait for each other, spinning, on cores that loading needs.",
        f"Set OMP_NUM_THREADS to {max(1, int(cores or 1))} or less, or call torch.set_num_threads().",
    )


def _spinning_threads(facts: Facts) -> Finding | None:
    environment = facts.environment or {}
    spinning = [
        f"{name}={environment[name]}"
        for name, values in (
            ("OMP_WAIT_POLICY", ("active",)),
            ("GOMP_SPINCOUNT", ("infinite", "infinity")),
            ("KMP_BLOCKTIME", ("infinite",)),
        )
        if environment.get(name, "").strip().lower() in values
    ]
    if not spinning:
        return None
    return Finding(
        "slow",
        "spinning-threads",
        f"{' and '.join(spinning)} lets OpenMP's threads spin between operations",
        "They take the cores that the loader threads need.",
        "Unset it.",
    )


def _no_free_threading(facts: Facts) -> Finding | None:
    if not facts.gil:
        return None
    return Finding(
        "note",
        "gil",
        "no free threading: Python code runs on one thread at a time (GIL on)",
        "Loop and loader threads take turns wherever they run Python code, so more threads do not speed up a dataset "
        "in pure Python. Decoders and copies let go of the lock.",
        "Nothing, if the loop does not wait for data. Else make samples cheaper, or use a free-threaded build of "
        "Python 3.13 or newer (with PYTHON_GIL=0, where a module turned the lock on).",
    )


def _debug_build(facts: Facts) -> Finding | None:
    builds = {
        "Python": facts.python_debug,
        "torch": facts.torch_debug,
        "gpuprefetch's compiled module": facts.extension_optimized is False,
    }
    slow = [name for name, is_debug in builds.items() if is_debug]
    if not slow:
        return None
    return Finding(
        "slow",
        "debug-build",
        f"built for debugging, without optimisation: {', '.join(slow)}",
        "Its code takes several times as long.",
        "Use a release build.",
    )


def _little_commit(facts: Facts) -> Finding | None:
    if facts.commit_free_bytes is None or facts.commit_free_bytes >= _LITTLE_COMMIT:
        return None
    return Finding(
        "note",
        "commit-limit",
        f"Windows lets programs allocate only {gibibytes(facts.commit_free_bytes)} more",
        "Memory counts as soon as it is allocated, pinned memory too; beyond the limit come errors such as 1455.",
        "End other programs, or let Windows manage a larger page file.",
    )


def _little_memory(facts: Facts) -> Finding | None:
    if facts.container_free_bytes is None or facts.container_free_bytes >= _LITTLE_MEMORY:
        return None
    return Finding(
        "note",
        "memory-limit",
        f"the container's memory limit leaves {gibibytes(facts.container_free_bytes)}",
        "Beyond it the kernel ends the process.",
        "Raise the limit, or use smaller batches and fewer prefetch_batches.",
    )


def _no_compiler(facts: Facts) -> Finding | None:
    if facts.compiler is not None or "compiler" in facts.failures:
        return None
    looked = "cl on the path, and Visual Studio's vswhere" if facts.sys_platform == "win32" else "CXX, c++ and g++"
    return Finding(
        "note",
        "no-compiler",
        f"no C++ compiler is found (looked for: {looked})",
        "It is needed only to install gpuprefetch again, as after an update of torch.",
        'Install Visual Studio\'s Build Tools with "Desktop development with C++".'
        if facts.sys_platform == "win32"
        else "Install g++ or clang++ (Debian and Ubuntu: apt install g++).",
    )


CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    _narrow_python,
    _openmp,
    _one_core,
    _too_many_threads,
    _spinning_threads,
    _debug_build,
    _little_commit,
    _little_memory,
    _no_compiler,
    _no_free_threading,
)
