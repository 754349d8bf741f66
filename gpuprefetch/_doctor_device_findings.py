"""What keeps torch, the driver and the device from working together, judged from facts alone."""

from __future__ import annotations

from collections.abc import Callable

from gpuprefetch._doctor_facts import Facts, Finding

WELL_HIDDEN = 0.8
LEAST_HIDDEN = 0.5
"""Shares of a copy: from the first one on all is well; below the second one copies do not overlap."""

_FEWEST_LANES = 8
_OLDEST_GENERATION = 3


def _torch_without_cuda(facts: Facts) -> Finding | None:
    if facts.torch_accelerator is not None or not (facts.nvidia_driver or facts.cards):
        return None
    windows = " On Windows the one of PyPI is a CPU build." if facts.sys_platform == "win32" else ""
    return Finding(
        "error",
        "torch-without-cuda",
        f"this machine has an NVIDIA {'driver' if facts.nvidia_driver else 'card'}, but torch {facts.torch} is built "
        "without CUDA",
        f"Batches stay on the CPU, and nothing uses the card.{windows}",
        "Install a CUDA build by the command that pytorch.org gives for this machine, then gpuprefetch again.",
    )


def _old_driver(facts: Facts) -> Finding | None:
    driver, wanted = _numbers(facts.driver_cuda), _numbers(facts.torch_cuda)
    if driver is None or wanted is None or driver >= wanted:
        return None
    does_not_work = driver[0] < wanted[0]
    return Finding(
        "error" if does_not_work else "note",
        "old-driver",
        f"the driver is made for CUDA {facts.driver_cuda}, and torch for CUDA {facts.torch_cuda}",
        "An older major version of the driver can't run it."
        if does_not_work
        else "Within a major version that works, but for code which is compiled when it is first used.",
        f"Update the NVIDIA driver, or install a torch for CUDA {facts.driver_cuda} or older (pytorch.org).",
    )


def _no_device(facts: Facts) -> Finding | None:
    if facts.device_error is None:
        return None
    there = facts.nvidia_driver or facts.cards or facts.torch_hip is not None  # that build nobody gets unasked
    hidden = [
        f"{name}={facts.environment[name]!r}"
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        if facts.environment and name in facts.environment
    ]
    do = f"Unset {' and '.join(hidden)}, which may hide it. " if hidden else ""
    return Finding(
        "error" if there else "note",
        "no-device",
        f"torch finds no usable device: {facts.device_error}",
        "Batches stay on the CPU.",
        f"{do}See whether nvidia-smi (rocm-smi for AMD) shows the card." if there else f"{do}Nothing, without a GPU.",
    )


def _no_extension(facts: Facts) -> Finding | None:
    if facts.extension_error is None:
        return None
    on_cuda = (facts.device or "").startswith("cuda")
    what, _, remedy = facts.extension_error.rpartition(": ")  # the sentence of ImportError ends so
    return Finding(
        "error" if on_cuda else "note",
        "extension",
        what,
        "Copies to a CUDA device go through the compiled module." + ("" if on_cuda else " The CPU does not need it."),
        remedy[:1].upper() + remedy[1:] + ".",
    )


def _no_loading_ahead(facts: Facts) -> Finding | None:
    reason = next((facts.failures[name] for name in ("device", "loads_ahead") if name in facts.failures), None)
    if facts.loads_ahead is not False and reason is None:
        return None
    return Finding(
        "error",
        "loading-ahead",
        f"the self-test of loading ahead failed: {reason or 'no batch was asked for while a step ran'}",
        "Nothing overlaps then.",
        "Please report it, with the file that --report writes.",
    )


def _no_overlap(facts: Facts) -> Finding | None:
    if "overlap" in facts.failures:
        return Finding(
            "error",
            "overlap",
            f"the self-test of copying failed: {facts.failures['overlap']}",
            "The device can't be used as it is.",
            "Free memory on it, and look whether torch alone can use it; else report it, with the file of --report.",
        )
    if facts.overlap is None or facts.overlap.hidden >= WELL_HIDDEN:
        return None
    return Finding(
        "error" if facts.overlap.hidden < LEAST_HIDDEN else "slow",
        "overlap",
        f"only {facts.overlap.hidden:.0%} of a copy was hidden behind a kernel",
        "Copies and steps take turns on the device, in so far.",
        "Follow what else is found here. If nothing is: end other programs that use the card, and repeat.",
    )


def _launch_blocking(facts: Facts) -> Finding | None:
    if not facts.is_on("CUDA_LAUNCH_BLOCKING"):
        return None
    return Finding(
        "slow",
        "launch-blocking",
        "CUDA_LAUNCH_BLOCKING is set",
        "Each launch then waits until the device is done, so no copy overlaps a step. It is for finding a faulty "
        "kernel.",
        "Unset it: in PowerShell `Remove-Item Env:CUDA_LAUNCH_BLOCKING`, in a shell `unset CUDA_LAUNCH_BLOCKING`.",
    )


def _refused_pinned(facts: Facts) -> Finding | None:
    refused = [f"{size} ({answer})" for size, answer in (facts.pinned or {}).items() if answer != "ok"]
    if not refused:
        return None
    return Finding(
        "slow",
        "pinned",
        f"pinned memory is refused: {', '.join(refused)}",
        "Copies then leave from pageable memory, which is slower and overlaps less.",
        "End programs that pin memory, raise the memory limit (in a container also `ulimit -l`), or pass a smaller "
        "pinned_bytes.",
    )


def _wddm(facts: Facts) -> Finding | None:
    if facts.card.get("driver_model") != "WDDM":
        return None
    return Finding(
        "note",
        "wddm",
        "the card runs under WDDM, Windows' driver model for displays",
        "The driver collects commands before it hands them to the device. gpuprefetch asks for each batch's copies to "
        "be handed on.",
        "Nothing, if the self-test is well. Else try hardware-accelerated GPU scheduling the other way (Settings, "
        "Display, Graphics).",
    )


def _slow_link(facts: Facts) -> Finding | None:
    if facts.overlap is None:  # an idle link is a slow one
        return None
    width, generation = _number(facts.card.get("link_width")), _number(facts.card.get("link_generation"))
    if (width or _FEWEST_LANES) >= _FEWEST_LANES and (generation or _OLDEST_GENERATION) >= _OLDEST_GENERATION:
        return None
    return Finding(
        "note",
        "slow-link",
        f"the card's PCIe link runs at {facts.link}",
        "Copies take long; where one takes longer than a step, the step waits for it.",
        "Look whether the card sits in the right slot; keep samples small (uint8 in place of float32).",
    )


def _numbers(version: str | None) -> tuple[int, ...] | None:
    parts = (version or "").split(".")
    return tuple(map(int, parts)) if len(parts) > 1 and all(part.isdecimal() for part in parts) else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


CHECKS: tuple[Callable[[Facts], Finding | None], ...] = (
    _torch_without_cuda,
    _old_driver,
    _no_device,
    _no_extension,
    _no_loading_ahead,
    _no_overlap,
    _launch_blocking,
    _refused_pinned,
    _wddm,
    _slow_link,
)
