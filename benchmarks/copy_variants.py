"""Which number of copying threads, size of the ring and of its pieces, and which build, copies fastest on this machine.

    python benchmarks/copy_variants.py [--json FILE] [--plot FILE]
    python benchmarks/copy_variants.py --builds small16=FOLDER     # besides: a source folder that was changed and built

Each variant is a process of its own, since a process has one pool. All of them are open at once and take turns, in an
order that is shuffled for each repeat; only one measures at a time. The same code copies faster in one process than in
another, perhaps by where its memory lies, so each variant gets that anew several times. What is measured is that of
copy_speed.py.

What is compiled in (how runs are cut, which leaves are small) can be varied by a second source folder only: change it
there, and run `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from copy_methods import METHODS
from copy_plot import draw_variants
from copy_sources import BLOCK_ROWS, LEAVES, PINNED_SAMPLES, ROW_BYTES, Source, WrongCopy, batch_label, make_source
from copy_speed import open_checked, parse_size, release
from copy_timing import bring_to_speed, copies_a_repeat, time_repeat
from experiment import figure
from output import check_files, finish, start
from report import columns
from target import Target, Unusable, describe, find_target, headline

THREADS, RINGS, PIECES = "1,2,4,6,8,12", "8M,16M,32M,128M,256M", "512K,1M,2M,8M"
CELLS = (
    "pageable:1M,pageable:4M,pageable:16M,pageable:38.5M,pageable:256M,gathered:38.5M,leaves:4K,leaves:32K,leaves:64K"
)
DEFAULT = "default"
CELL_SOURCES = ("pageable", "gathered", PINNED_SAMPLES, "leaves", *ROW_BYTES, *BLOCK_ROWS)
METHOD_NAMES = ("gpuprefetch", "link")

Cell = tuple[str, int]  # a source and its bytes


@dataclass(frozen=True)
class Variant:
    """What is other than in the package: None is as it is there. `ring_bytes` is `pinned_bytes`."""

    name: str
    copy_threads: int | None = None
    ring_bytes: int | None = None
    piece_bytes: int | None = None
    build: str | None = None  # a source folder

    def apply(self) -> None:
        """To this process, before anything is opened."""
        if self.build is not None:
            sys.path.insert(0, self.build)
        from gpuprefetch import _copier

        if self.build is not None and not Path(_copier.__file__).resolve().is_relative_to(Path(self.build).resolve()):
            raise Unusable(f"--builds {self.name}: {_copier.__file__} was imported in place of the one in {self.build}")
        if self.copy_threads is not None:
            _copier._copy_threads = functools.partial(int, self.copy_threads)
        if self.ring_bytes is not None:
            _copier.DEFAULT_PINNED_BYTES = self.ring_bytes
        if self.piece_bytes is not None:
            _copier._PIECE_BYTES = self.piece_bytes


class Session:
    """One variant's process: opens a cell, measures it whenever it is its turn, and closes it."""

    def __init__(self, variant: Variant, target: Target, seed: int) -> None:
        variant.apply()
        self._target = target
        self._seed = seed
        self._opened = ExitStack()
        self._copies: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def open(self, cell: Cell) -> None:
        """Raises WrongCopy."""
        source: Source = make_source(*cell, self._seed)
        methods = [METHODS[name] for name in METHOD_NAMES]
        self._copies = open_checked(methods, source, self._target, self._opened, {})
        self._counts = {name: copies_a_repeat(copy, self._target) for name, copy in self._copies.items()}

    def measure(self) -> dict[str, float]:
        """Seconds of a copy, by method."""
        bring_to_speed(self._copies["link"], self._target)  # others have had their turn meanwhile
        return {name: time_repeat(copy, self._target, self._counts[name]) for name, copy in self._copies.items()}

    def close(self) -> None:
        self._copies = {}
        self._opened.close()
        release(self._target)


def serve(connection: Connection, variant: Variant, device: str, seed: int) -> None:
    """Does what it is told, (name of a method of Session, arguments), until it is told None. An error is the answer."""
    session: Session | None = None
    while (told := connection.recv()) is not None:
        name, arguments = told
        try:
            session = session or Session(variant, find_target(device), seed)
            answer = getattr(session, name)(*arguments)
        except Exception as error:
            answer = Unusable(f"{variant.name}: {type(error).__name__}: {error}".splitlines()[0])
        connection.send(answer)


class Remote:
    """A Session in another process."""

    def __init__(self, variant: Variant, device: str, seed: int, make: Callable[..., Any]) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = make(target=serve, args=(theirs, variant, device, seed), daemon=True)
        self._process.start()

    def tell(self, name: str, *arguments: Any) -> None:
        self._connection.send((name, arguments))

    def answer(self) -> Any:
        """Raises Unusable, the session's error."""
        try:
            answer = self._connection.recv()
        except EOFError:
            raise Unusable("a process ended before its time: see above") from None
        if isinstance(answer, Unusable):
            raise answer
        return answer

    def end(self) -> None:
        try:
            self._connection.send(None)
        except OSError:
            return  # it has ended
        self._process.join(30)


def measure(options: argparse.Namespace, device: str, make: Callable[..., Any]) -> list[dict[str, Any]]:
    """Rows of all variants and cells. Raises Unusable."""
    chance = random.Random(options.seed)
    sessions = {variant.name: Remote(variant, device, options.seed, make) for variant in options.variants}
    rows = []
    try:
        for cell in options.cells:
            seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sessions}
            order = list(sessions)
            for _ in range(options.openings):
                everywhere(sessions, "open", cell)
                for _ in range(options.repeats):
                    chance.shuffle(order)
                    for name in order:
                        sessions[name].tell("measure")
                        seconds[name].append(sessions[name].answer())
                everywhere(sessions, "close")
            rows += [_row(name, cell, own, seconds[DEFAULT]) for name, own in seconds.items()]
    finally:
        for session in sessions.values():
            session.end()
    return rows


def everywhere(sessions: dict[str, Remote], name: str, *arguments: Any) -> None:
    """One after another: what is tried out on opening is timed too."""
    for session in sessions.values():
        session.tell(name, *arguments)
        session.answer()


def _row(name: str, cell: Cell, own: list[dict[str, float]], default: list[dict[str, float]]) -> dict[str, Any]:
    seconds = [repeat["gpuprefetch"] for repeat in own]
    return {
        "variant": name,
        "source": cell[0],
        "bytes": cell[1],
        "ms": figure([value * 1e3 for value in seconds]),
        "gb_per_s": figure([cell[1] / value * 1e-9 for value in seconds]),
        "share_of_link": figure([repeat["link"] / repeat["gpuprefetch"] for repeat in own]),
        # Compared within a repeat.
        "over_default": figure([one / other["gpuprefetch"] for one, other in zip(seconds, default, strict=True)]),
    }


def table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    cells = list(dict.fromkeys((row["source"], row["bytes"]) for row in rows))
    by_place = {(row["variant"], row["source"], row["bytes"]): row for row in rows}
    settings = result["settings"]
    lines = ["", f"openings {settings['openings']}, with {settings['repeats']} repeats each"]
    lines += [f"  {line}" for line in headline(result["environment"])]
    lines.append(f"  {result['environment']['command']}")
    for source, size in cells:
        grid = [[f"{source} {batch_label(source, size)}", "ms", "[min .. max]", "GB/s", "of link", "x default"]]
        for variant in settings["variants"]:
            row = by_place[variant["name"], source, size]
            ms = row["ms"]
            grid.append(
                [
                    variant["name"],
                    *(f"{ms['median']:.3f}", f"[{ms['low']:.3f} .. {ms['high']:.3f}]"),
                    f"{row['gb_per_s']['median']:.1f}",
                    f"{row['share_of_link']['median']:.0%}",
                    f"{row['over_default']['median']:.2f}",
                ]
            )
        lines += ["", *columns(grid)]
    return "\n".join(
        [
            *lines,
            "",
            "x default: time over that of the variant `default` in the same repeat, median. Else as in copy_speed.py.",
        ]
    )


def parse_cells(text: str) -> list[Cell]:
    cells = []
    for part in text.split(","):
        source, _, size = part.partition(":")
        if source not in CELL_SOURCES or not size:
            known = ", ".join(f"{name}:SIZE" for name in CELL_SOURCES)
            raise argparse.ArgumentTypeError(f"{part!r} is none of {known}")
        cells.append((source, parse_size(size) * (LEAVES if source == "leaves" else 1)))
    return cells


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--threads", default=THREADS, metavar="LIST", help=f"numbers of copying threads ({THREADS}); empty: none")
    add("--rings", default=RINGS, metavar="LIST", help=f"values of pinned_bytes ({RINGS}); empty: none")
    add("--pieces", default=PIECES, metavar="LIST", help=f"sizes of a piece of the ring ({PIECES}); empty: none")
    add("--builds", default="", metavar="NAME=FOLDER,..", help="source folders with a module that was built in place")
    add(
        "--cells",
        type=parse_cells,
        default=CELLS,
        metavar="LIST",
        help=f"what is copied, of {','.join(CELL_SOURCES)}; of leaves, the size of one; rows4: the first halves, "
        f"of 4 bytes, of rows; blocks64: those of 8, in blocks of 64, of which every other one is left out ({CELLS})",
    )
    add("--openings", type=int, default=3, help="times that each variant gets its memory anew, pinned and not (3)")
    add("--repeats", type=int, default=4, help="turns of each variant, in each opening (4)")
    add("--seed", type=int, default=0, help="of the data, and of the order of turns (0)")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG): GB/s over size, a line for each variant")
    options = parser.parse_args(arguments)
    if min(options.openings, options.repeats) < 1:
        parser.error(f"--openings and --repeats must be at least 1; got {options.openings}, {options.repeats}")
    try:
        options.variants = variants(options)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    check_files(parser, options)
    return options


def variants(options: argparse.Namespace) -> list[Variant]:
    """Each differs in one thing from the first, which is the package as it is. Raises ValueError."""
    made = [Variant(DEFAULT)]
    for text in filter(None, options.threads.split(",")):
        made.append(Variant(f"{int(text)} threads", copy_threads=int(text)))
    for text in filter(None, options.rings.split(",")):
        made.append(Variant(f"ring {text}", ring_bytes=parse_size(text)))
    for text in filter(None, options.pieces.split(",")):
        made.append(Variant(f"pieces {text}", piece_bytes=parse_size(text)))
    for text in filter(None, options.builds.split(",")):
        name, _, folder = text.partition("=")
        if not list(Path(folder).glob("gpuprefetch/_C*")) or not folder:
            raise ValueError(f"--builds {text!r}: no NAME=FOLDER with a gpuprefetch/_C that was built in place")
        made.append(Variant(name, build=str(Path(folder).resolve())))
    if len({variant.name for variant in made}) < len(made):
        raise ValueError("two variants have one name")
    return made


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("copy_variants.py: needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1
    try:
        rows = measure(options, "cuda", multiprocessing.get_context("spawn").Process)
    except (Unusable, WrongCopy) as error:
        print(f"copy_variants.py: {error}", file=sys.stderr)
        return 1
    result = {
        "benchmark": "copy_variants",
        "format": 1,
        "environment": describe(find_target("cuda")),
        "settings": {
            "openings": options.openings,
            "repeats": options.repeats,
            "seed": options.seed,
            "variants": [asdict(variant) for variant in options.variants],
        },
        "rows": rows,
    }
    return 0 if finish(table(result), result, options, draw_variants) else 1


if __name__ == "__main__":
    start(lambda: main(parse_arguments()))
