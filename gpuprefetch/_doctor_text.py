"""The doctor's findings as text of at most 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping

from gpuprefetch._doctor_device_findings import LEAST_HIDDEN, WELL_HIDDEN
from gpuprefetch._doctor_facts import Facts, Finding, gibibytes

WIDTH = 80
_LABEL = 14
_UNKNOWN = "unknown"
_COLOURS = {"error": 31, "slow": 33, "note": 36, "good": 32}


def report(facts: Facts, findings: list[Finding], works: bool, colour: bool) -> str:
    """All that is printed, without a line feed at its end."""

    def paint(text: str, kind: str) -> str:
        return f"\033[{_COLOURS[kind]}m{text}\033[0m" if colour else text

    lines = [line for label, value in _rows(facts) for line in _row(label, value)]
    lines.append("")
    for finding in findings:
        lines += _told(finding, paint)
    if works:
        on_cpu = ", on the CPU: loading overlaps, nothing is copied" if facts.device == "cpu" else ""
        verdict = paint(f"Prefetching works here{on_cpu}.", "good")
    else:
        verdict = paint("Prefetching does not work here: see the errors above.", "error")
    return "\n".join([*lines, verdict])


def _row(label: str, value: str) -> list[str]:
    return textwrap.wrap(f"{label:{_LABEL}} {value}", WIDTH, subsequent_indent=" " * (_LABEL + 1))


def _told(finding: Finding, paint: Callable[[str, str], str]) -> list[str]:
    lines = []
    for label, text in ((finding.severity, finding.what), ("  why", finding.why), ("  do", finding.do)):
        lines += textwrap.wrap(f"{label:8}{text}", WIDTH, subsequent_indent=" " * 8)
    lines[0] = paint(finding.severity, finding.severity) + lines[0][len(finding.severity) :]
    return [*lines, ""]


def _rows(facts: Facts) -> list[tuple[str, str]]:
    threads = facts.threads or {}
    return [
        ("gpuprefetch", facts.gpuprefetch or _UNKNOWN),
        ("torch", f"{facts.torch or _UNKNOWN}, built for {_built_for(facts)}"),
        ("Python", f"{facts.python or _UNKNOWN}, {facts.python_bits or '?'} bits, GIL {_on_or_off(facts.gil)}"),
        ("platform", f"{facts.platform or _UNKNOWN} (sys.platform: {facts.sys_platform or _UNKNOWN})"),
        ("CPU", _cpu(facts)),
        ("memory", _memory(facts)),
        ("driver", _driver(facts)),
        ("device", _device(facts)),
        ("PCIe link", _link(facts)),
        ("pinned memory", _listed(facts.pinned, " ") or "not asked"),
        ("extension", _extension(facts)),
        ("compiler", facts.compiler or "none found"),
        ("OpenMP", ", ".join(re.split(r"[\\/]", file)[-1] for file in facts.openmp or []) or _UNKNOWN),
        ("environment", _listed(facts.environment, "=") or "plain"),
        ("num_threads", f"{facts.recommended_threads or _UNKNOWN} recommended, to begin with"),
        (
            "num_workers",
            f"threads of create_dataloader: {' '.join(threads)} -> {' '.join(map(str, threads.values()))}, no process",
        ),
        ("loading ahead", _loading(facts)),
        ("copying", _copying(facts)),
    ]


def _listed(pairs: Mapping[str, str] | None, sign: str) -> str:
    return ", ".join(f"{name}{sign}{value}" for name, value in (pairs or {}).items())


def _built_for(facts: Facts) -> str:
    if facts.torch_cuda:
        return f"CUDA {facts.torch_cuda}"
    return f"ROCm {facts.torch_hip}" if facts.torch_hip else facts.torch_accelerator or "the CPU"


def _cpu(facts: Facts) -> str:
    granted = "" if facts.container_cpus is None else f", {facts.container_cpus:g} granted to the container"
    return f"{facts.cpus or _UNKNOWN} usable{granted}; torch uses {facts.intra_op_threads or '?'} for an operation"


def _memory(facts: Facts) -> str:
    if facts.commit_free_bytes is not None:
        return f"{gibibytes(facts.commit_free_bytes)} left to allocate"
    if facts.container_free_bytes is not None:
        return f"the container's limit leaves {gibibytes(facts.container_free_bytes)}"
    return "no limit found"


def _driver(facts: Facts) -> str:
    if not facts.nvidia_driver:
        return "no NVIDIA driver" if facts.nvidia_driver is False else _UNKNOWN
    version = facts.card.get("driver") or "version unknown"
    model = f", {facts.card['driver_model']}" if facts.card.get("driver_model") else ""
    return f"NVIDIA {version}, for CUDA {facts.driver_cuda or _UNKNOWN}{model}"


def _device(facts: Facts) -> str:
    if facts.device is None:
        return "not asked, because of an error below"
    if facts.device_name is None:
        return facts.device
    size = "" if facts.device_bytes is None else f", {gibibytes(facts.device_bytes)}"
    return f"{facts.device} of {facts.device_count or '?'}, {facts.device_name}{size}"


def _link(facts: Facts) -> str:
    if facts.link is None:
        return _UNKNOWN
    return facts.link if facts.overlap else f"{facts.link}, idle"


def _extension(facts: Facts) -> str:
    if facts.extension_torch is None:
        return "can't be loaded"
    return f"built for torch {facts.extension_torch} by {facts.extension_compiler or 'an unknown compiler'}"


def _loading(facts: Facts) -> str:
    if facts.loads_ahead is None:
        return "not tested"
    return "good: during a step the next batch is loaded" if facts.loads_ahead else "no batch is loaded during a step"


def _copying(facts: Facts) -> str:
    if facts.overlap is None:
        return "not tested" if (facts.device or "cuda").startswith("cuda") else "not tested: there is no CUDA device"
    overlap = facts.overlap
    verdict = "good" if overlap.hidden >= WELL_HIDDEN else "in part" if overlap.hidden >= LEAST_HIDDEN else "no overlap"
    times = (overlap.copy_seconds, overlap.kernel_seconds, overlap.both_seconds)
    copy, kernel, both = (f"{seconds * 1e3:.2f} ms" for seconds in times)
    return f"{verdict}: copy {copy}, kernel {kernel}, both {both}; {overlap.hidden:.0%} of the copy hidden"


def _on_or_off(state: bool | None) -> str:
    return _UNKNOWN if state is None else "on" if state else "off"
