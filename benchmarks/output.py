"""The files that a benchmark's `--json` and `--plot` name."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with one sentence where a file can't be written, before anything is measured."""
    plot: Path | None = getattr(options, "plot", None)
    for name, file in (("json", options.json), ("plot", plot)):
        if file is not None and not file.parent.is_dir():
            parser.error(f"--{name} {str(file)!r}: there is no folder {str(file.parent)!r}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: python -m pip install ".[bench]"')


def write_files(
    result: dict[str, Any], options: argparse.Namespace, draw: Callable[[dict[str, Any], Path], None] | None = None
) -> None:
    """Writes those that were asked for."""
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if draw is not None and options.plot is not None:
        draw(result, options.plot)
