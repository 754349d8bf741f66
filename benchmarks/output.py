"""How a benchmark begins and ends: the files that `--json` and `--plot` name, what it prints, and Ctrl-C."""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

INTERRUPTED = 130  # exit status, as a shell gives it for SIGINT


def start(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the status that `main` returns, or after one line for Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too: a run takes minutes
    try:
        status = main()
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


def check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with one sentence where a file can't be written, before anything is measured."""
    plot: Path | None = getattr(options, "plot", None)
    for name, file in (("json", options.json), ("plot", plot)):
        if file is None:
            continue
        if not file.parent.is_dir():
            parser.error(f"--{name} {str(file)!r}: there is no folder {str(file.parent)!r}")
        if file.is_dir():
            parser.error(f"--{name} {str(file)!r} is a folder")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            parser.error(f"--{name} {str(file)!r} can't be written")
    if plot is None:
        return
    if plot == options.json:
        parser.error(f"--json and --plot are both {str(plot)!r}")
    if plot.suffix.lower() not in ("", ".png"):
        parser.error(f"--plot {str(plot)!r}: the picture is a PNG")
    try:
        importlib.import_module("matplotlib.pyplot")
    except Exception as error:  # one that is broken fails in any way
        parser.error(f'--plot needs matplotlib (python -m pip install ".[bench]"): {error}')


def finish(
    text: str,
    result: dict[str, Any],
    options: argparse.Namespace,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
) -> bool:
    """Writes the files that were asked for, and prints `text`. Each as far as it can: what took minutes to measure is
    not lost with one of them. True if all files were written."""
    files: list[tuple[str, Path | None, Callable[[Path], object]]] = [
        ("json", options.json, lambda file: file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8"))
    ]
    if draw is not None:
        files.append(("plot", options.plot, functools.partial(draw, result)))
    written = [_is_written(name, file, write) for name, file, write in files if file is not None]
    say(text)
    return all(written)


def _is_written(name: str, file: Path, write: Callable[[Path], object]) -> bool:
    try:
        write(file)
    except Exception as error:  # whatever a picture fails with
        print(f"--{name} {str(file)!r} can't be written: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True


def say(text: str) -> None:
    """Prints, whatever the encoding is, and though nobody reads on."""
    if sys.stdout is None:  # without a console
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # else the interpreter complains at its end
