"""Variants of copying take turns, each with what is other in it: shown on the CPU, with stand-ins for what copies."""

import json
import multiprocessing
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import copy_timing
import copy_variants
import pytest
import torch
from copy_methods import METHODS, Method
from copy_sources import Copied
from copy_variants import Session, Variant, measure, parse_arguments
from target import Target, Unusable

from gpuprefetch import _copier

FEW = [
    "--threads",
    "3",
    "--rings",
    "8M",
    "--pieces",
    "1M",
    "--cells",
    "pageable:4K,leaves:4K,leaves:1K",
    "--openings",
    "1",
    "--repeats",
    "2",
]


@pytest.fixture
def restored(monkeypatch):
    """What a variant changes in its own process, and here in this one."""
    for name in ("_copy_threads", "DEFAULT_PINNED_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(_copier, name, getattr(_copier, name))


@pytest.fixture
def copied(monkeypatch, restored):
    """Methods that copy to the CPU; the list is of (method, source, bytes) as they are opened."""
    opened = []

    def planted(name):
        @contextmanager
        def make(source, target):
            opened.append((name, source.name, source.nbytes))
            yield lambda: Copied([tensor.clone() for tensor in source.tensors])

        return Method(name, "planted", ("pageable", "leaves"), make, False, lambda: None)

    monkeypatch.setattr(copy_timing, "SPEED_SECONDS", 0.0)
    for name in ("gpuprefetch", "link"):
        monkeypatch.setitem(METHODS, name, planted(name))
    return opened


def test_a_variant_changes_what_it_says(restored):
    before = _copier._copy_threads(), _copier.DEFAULT_PINNED_BYTES, _copier._PIECE_BYTES
    Variant("as it is").apply()
    assert (_copier._copy_threads(), _copier.DEFAULT_PINNED_BYTES, _copier._PIECE_BYTES) == before
    Variant("other", copy_threads=3, ring_bytes=8 << 20, piece_bytes=1 << 20).apply()
    assert (_copier._copy_threads(), _copier.DEFAULT_PINNED_BYTES, _copier._PIECE_BYTES) == (3, 8 << 20, 1 << 20)


def test_what_a_variant_changes_is_what_copying_goes_by(restored, monkeypatch):
    """The package's names, and when they are looked at, are no interface."""
    seen = []

    class Native:
        def DeviceCopier(self, stream, threads):  # noqa: N802
            seen.append(threads)

    monkeypatch.setattr(_copier, "extension", Native)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    Variant("other", copy_threads=3, piece_bytes=1 << 20).apply()
    copier = _copier.Copier(torch.device("cuda", 0))
    assert seen == [3]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **_: empty(size, dtype=torch.uint8))
    copier.take_events = lambda owner, count: [SimpleNamespace(cuda_event=0)] * count
    copier.native = SimpleNamespace(set_ring=lambda memory, piece, events: seen.append((piece, len(events))))
    copier._make_ring(16 << 20)
    assert seen == [3, (1 << 20, 16)]


def test_another_build_must_be_the_one_that_is_imported(restored, tmp_path):
    with pytest.raises(Unusable, match="was imported in place of the one in"):
        Variant("small16", build=str(tmp_path)).apply()


def test_cells_of_leaves_are_of_several_sizes_by_default():
    leaves = [size for source, size in parse_arguments([]).cells if source == "leaves"]
    assert leaves == [200 * kib << 10 for kib in (4, 32, 64)]


def test_all_variants_measure_all_cells(copied):
    options = parse_arguments(FEW)
    assert [variant.name for variant in options.variants] == ["default", "3 threads", "ring 8M", "pieces 1M"]
    rows = measure(options, "cpu", threading.Thread)
    places = [(row["source"], row["bytes"], row["variant"]) for row in rows]
    cells = [("pageable", 4096), ("leaves", 200 * 4096), ("leaves", 200 * 1024)]
    assert places == [(*cell, variant.name) for cell in cells for variant in options.variants]
    for row in rows:
        for ms, speed in zip(row["ms"]["raw"], row["gb_per_s"]["raw"], strict=True):
            assert ms * speed == pytest.approx(row["bytes"] * 1e-6)
        assert len(row["share_of_link"]["raw"]) == len(row["over_default"]["raw"]) == 2
        assert row["variant"] != "default" or row["over_default"]["raw"] == [1.0, 1.0]
    assert len(copied) == 3 * 4 * 2


def test_memory_is_taken_anew_several_times(copied, monkeypatch):
    done = []
    for name, method in [("open", Session.open), ("measure", Session.measure), ("close", Session.close)]:

        def record(session, *arguments, name=name, method=method):
            done.append(name)
            return method(session, *arguments)

        monkeypatch.setattr(Session, name, record)
    one = ["--threads", "", "--rings", "", "--pieces", "", "--cells", "leaves:4K"]
    (row,) = measure(parse_arguments([*one, "--openings", "3", "--repeats", "2"]), "cpu", threading.Thread)
    assert done == ["open", "measure", "measure", "close"] * 3
    assert len(row["ms"]["raw"]) == len(row["over_default"]["raw"]) == 6


def test_variants_take_turns_and_the_order_changes(copied, monkeypatch):
    turns = []

    def turn(session):
        turns.append(threading.current_thread().name)
        return {"gpuprefetch": len(turns), "link": 1.0}

    monkeypatch.setattr(Session, "measure", turn)
    options = parse_arguments([*FEW[:-1], "6", "--cells", "leaves:4K"])
    rows = measure(options, "cpu", threading.Thread)
    rounds = [tuple(turns[i : i + 4]) for i in range(0, 24, 4)]
    assert len(turns) == 24 and all(len(set(each)) == 4 for each in rounds) and len(set(rounds)) > 1
    default = rows[0]["ms"]["raw"]
    for row in rows:
        assert row["over_default"]["raw"] == [own / other for own, other in zip(row["ms"]["raw"], default, strict=True)]


def test_an_error_of_a_process_ends_the_run():
    """A real one. It finds no CUDA device where it is told to copy to the CPU."""
    options = parse_arguments(["--threads", "", "--rings", "", "--pieces", "", "--cells", "pageable:4K"])
    with pytest.raises(Unusable, match="^default: "):
        measure(options, "cpu", multiprocessing.get_context("spawn").Process)


def test_the_whole_run(copied, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(copy_variants, "find_target", lambda name: Target(torch.device("cpu")))
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: SimpleNamespace(Process=threading.Thread))
    json_file, picture = tmp_path / "x.json", tmp_path / "x.png"
    assert copy_variants.main(parse_arguments([*FEW, "--json", str(json_file), "--plot", str(picture)])) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads(json_file.read_text())
    assert [variant["copy_threads"] for variant in result["settings"]["variants"]] == [None, 3, None, None]
    out = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 120 or line.strip() == result["environment"]["command"] for line in out)
    assert sum(line.startswith("pieces 1M") for line in out) == 3
    labels = ["pageable 4 KiB", "leaves 200 x 4 KiB", "leaves 200 x 1 KiB"]
    assert [line.split("  ")[0] for line in out if " ms " in line] == labels


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cells", "pinned:4K"], "none of pageable:SIZE, gathered:SIZE, pinned-samples:SIZE"),
        (["--cells", "leaves"], "none of pageable:SIZE"),
        (["--cells", "leaves:1000"], "'1000' is no multiple of 512 bytes"),
        (["--cells", "pageable"], "none of pageable:SIZE"),
        (["--rings", "many"], "'many' is no size"),
        (["--threads", "x"], "invalid literal"),
        (["--threads", "2,2"], "two variants have one name"),
        (["--builds", "small16=/nowhere"], "no NAME=FOLDER with a gpuprefetch/_C that was built in place"),
        (["--repeats", "0"], "at least 1"),
        (["--openings", "0"], "at least 1"),
    ],
)
def test_what_can_t_be_is_said_before_anything_is_measured(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert said in capsys.readouterr().err


def test_a_build_is_imported_from_its_folder(tmp_path):
    package = tmp_path / "gpuprefetch"
    package.mkdir()
    for name in ("__init__", "_copier"):
        (package / f"{name}.py").touch()
    code = "import sys, copy_variants; copy_variants.Variant('other', build=sys.argv[1]).apply()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=Path(copy_variants.__file__).parent, check=True, timeout=60)


def test_without_a_cuda_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert copy_variants.main(parse_arguments([])) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
