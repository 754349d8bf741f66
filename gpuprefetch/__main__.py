"""The doctor, ``python -m gpuprefetch``: says whether prefetching works here, and what stands in its way.

Exit status: 0 if it works, 1 if not, 2 for wrong use. The package imports torch, so where that fails Python's own
ImportError is all there is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from gpuprefetch._doctor_facts import Facts
from gpuprefetch._doctor_findings import find, works
from gpuprefetch._doctor_probes import host_facts, with_device
from gpuprefetch._doctor_text import report

DEVICE_SECONDS = 120
"""After so long without an answer the device hangs: the process ends with status 1 and a stack."""


def examine() -> Facts:
    """CUDA is initialised only where no error is known that it would fail by."""
    facts = host_facts()
    if any(finding.severity == "error" for finding in find(facts)):
        return facts
    with _watched():
        return with_device(facts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpuprefetch",
        description="Says whether loading, copying and computing overlap here, and what stands in the way.",
        epilog="Exit status: 0 if prefetching works here, 1 if not, 2 for wrong use. Takes some seconds.",
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON instead")
    parser.add_argument("--report", metavar="FILE", help="also write text and JSON to FILE, for a bug report")
    options = parser.parse_args(arguments)

    def write(text: str) -> None:
        if options.report is None:
            return
        try:
            Path(options.report).write_text(text, encoding="utf-8", errors="backslashreplace")
        except (OSError, ValueError) as error:
            parser.exit(2, f"{parser.prog}: can't write --report {options.report!r}: {error}\n")

    write("")  # before anything that takes its time
    facts = examine()
    findings = find(facts)
    well = works(facts, findings)
    everything = {
        "works": well,
        "facts": dataclasses.asdict(facts),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
    as_json = json.dumps(everything, indent=2)
    write(f"{report(facts, findings, well, colour=False)}\n\n{as_json}\n")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(as_json if options.json else report(facts, findings, well, _takes_colour(sys.stdout)), flush=True)
    except OSError as error:  # a full disk, or nobody who reads: the status still tells
        sys.stdout = None  # which the interpreter would flush at its end
        try:
            print(f"{parser.prog}: can't write to standard output: {error}", file=sys.stderr, flush=True)
        except OSError:  # the same pipe, as a rule
            sys.stderr = None
    return 0 if well else 1


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    if sys.__stderr__ is not None:  # without it there is nowhere to tell where it hangs
        faulthandler.dump_traceback_later(DEVICE_SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _takes_colour(stream: TextIO | None) -> bool:
    if stream is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return False
    if sys.platform != "win32":
        return True
    kernel32 = ctypes.WinDLL("kernel32")
    kernel32.GetStdHandle.restype = ctypes.c_void_p
    handle, mode = ctypes.c_void_p(kernel32.GetStdHandle(-11)), ctypes.c_uint32()  # STD_OUTPUT_HANDLE
    return bool(  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
        kernel32.GetConsoleMode(handle, ctypes.byref(mode)) and kernel32.SetConsoleMode(handle, mode.value | 4)
    )


if __name__ == "__main__":
    sys.exit(main())
