"""How a page words what a result holds: numbers, names, sentences and tables, as Markdown."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from target import headline


def markdown(lines: list[list[str]]) -> str:
    """A table, the first line its head."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *body])


def paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False)


def one_digit(figure: dict[str, Any]) -> str:
    return f"{figure['median']:.1f}"


def ranged(figure: dict[str, Any], digits: int = 2) -> list[str]:
    """Median, and lowest to highest."""
    return [f"{figure['median']:.{digits}f}", f"{figure['low']:.{digits}f} to {figure['high']:.{digits}f}"]


def labelled(name: str) -> str:
    """A row's name, bold if it is ours."""
    return f"**{name}**" if "gpuprefetch" in name else name


def described(environment: dict[str, Any]) -> str:
    """Device and software, without the kernel's build."""
    device, software = headline(environment)
    return f"{device}; {software.rsplit(', ', 1)[0]}"


def origin(environment: dict[str, Any]) -> str:
    """Device and code. What was measured before commits were noted is older than all that names one."""
    commit = environment.get("commit")
    return f"{environment['device_name']}, " + (f"commit {commit}" if commit else "older code")


def command(environment: dict[str, Any]) -> str:
    """What was typed, without the files it wrote, and before it what gave it fewer processors than there are."""
    usable = environment["cpus_usable"]
    affinity = f"taskset -c 0-{usable - 1} " * (usable < environment["cpu_count"])
    return affinity + re.sub(r""" --(json|plot)[ =]('[^']*'|"[^"]*"|\S+)""", "", environment["command"])


def told(result: dict[str, Any], *more: str, packages: str = "") -> str:
    """How a result came about: command, machine and repeats, and `more` sentences on it."""
    environment = result["environment"]
    where = described(environment) + f"; {packages}" * bool(packages)
    said = paragraph(f"{where}. Median of {result['settings']['repeats']} repeats.", *more)
    return f"    {command(environment)}\n\n{said}"


def parts_alone(result: dict[str, Any]) -> str:
    parts = ", ".join(f"{part.replace('_', ' ')} {one_digit(ms)}" for part, ms in result["parts_ms"].items())
    return f"ms a batch, each part alone: {parts}."


def left_out(result: dict[str, Any]) -> list[str]:
    return [f"Left out: {each['name']} ({each['reason']})." for each in result["left_out"]]
