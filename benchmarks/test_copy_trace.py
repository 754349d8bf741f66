"""copy_trace.py tells what the device did: shown on spans that were made up, and on a device where there is one."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import copy_trace
import pytest
import torch
from target import Unusable


def test_what_ran_during_a_batch():
    spans = [(900, 1_500), (30_000, 50_000), (12_000, 22_000), (24_000, 30_000), (70_000, 80_000)]  # two of others
    assert copy_trace.what_ran((2_000, 61_000), spans) == {
        "copies": 3,
        "us": 59.0,
        "first_us": 10.0,
        "busy_us": 36.0,
        "gaps_us": 2.0,
        "tail_us": 11.0,
    }


def test_a_batch_without_copies_is_no_figure():
    with pytest.raises(Unusable, match="no copy to the device"):
        copy_trace.what_ran((2_000, 61_000), [(1_000, 3_000), (61_000, 62_000)])


def test_memory_is_busy_while_it_is_asked_for():
    load = copy_trace.MemoryLoad()
    for _ in range(2):
        with load:
            pass
    assert len(load.gb_per_s) == 2
    assert min(load.gb_per_s) > 0
    assert torch.equal(load._destination, load._source)


def test_the_table():
    def row(way, size, **more):
        names = ("copies", "us", "first_us", "busy_us", "gb_per_s", "gaps_us", "tail_us")
        return {"way": way, "bytes": size, **{name: copy_trace.figure([7.0, 9.0, 8.0]) for name in names}, **more}

    busy = row("busy", 1 << 20, host_gb_per_s=copy_trace.figure([4.0]))
    environment = {"command": "python copy_trace.py", **copy_trace.describe(copy_trace.Target(torch.device("cpu")))}
    result = {"settings": {"repeats": 3}, "environment": environment, "rows": [row("a", 1 << 20), busy, row("a", 4096)]}
    lines = copy_trace.table(result).splitlines()
    assert [line.split()[0] for line in lines if "[7 .. 9]" in line] == ["a", "busy", "a"]
    assert sum(line.startswith(("1 MiB", "4 KiB")) for line in lines) == 2
    assert [line.split()[-1] for line in lines if "[7 .. 9]" in line] == ["8", "4.0", "8"]


def test_a_row_for_each_way_and_size(monkeypatch):
    """With a stand-in for the device, on which a copy takes 50 us longer each time."""
    turns = []

    def fake(copy, target):
        turns.append(copy())
        return [{"copies": 2, "busy_us": 100.0 + 50 * len(turns)}]

    @contextmanager
    def ours(source, target):
        assert source.name == "pageable"
        yield lambda: ("ours", source.nbytes)

    monkeypatch.setattr(copy_trace, "trace", fake)
    monkeypatch.setattr(copy_trace, "bring_to_speed", lambda copy, target: None)
    monkeypatch.setattr(copy_trace, "in_pieces", lambda size, piece, target: lambda: (piece, size))
    monkeypatch.setitem(copy_trace.METHODS, "gpuprefetch", SimpleNamespace(make=ours))
    options = copy_trace.parse_arguments(["--sizes", "1M,3M", "--repeats", "2"])
    rows = copy_trace.measure(options, copy_trace.Target(torch.device("cpu")))

    mib = 1 << 20
    ways = ["gpuprefetch", "one copy", "copies of 1 MiB", "copies of 2 MiB", "one copy, busy memory"]
    of_small = [ways[0], ways[1], ways[-1]]  # one that is no longer than a piece is not cut
    assert [(row["bytes"] // mib, row["way"]) for row in rows] == [
        *((1, way) for way in of_small),
        *((3, way) for way in ways),
    ]
    assert sorted(turns[:6], key=str) == sorted([("ours", mib), (mib, mib), (mib, mib)] * 2, key=str)
    assert {piece for piece, size in turns[6:] if size == 3 * mib} == {"ours", mib, 2 * mib, 3 * mib}
    for row in rows:
        assert row["gb_per_s"]["raw"] == [row["bytes"] / us / 1e3 for us in row["busy_us"]["raw"]]
    assert sorted(us for row in rows for us in row["busy_us"]["raw"]) == [100.0 + 50 * turn for turn in range(1, 17)]
    assert [len(row["host_gb_per_s"]["raw"]) for row in rows if "host_gb_per_s" in row] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "0"], "--repeats must be at least 1; got 0"),
        (["--sizes", "x"], "--sizes"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        copy_trace.parse_arguments(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_it_needs_a_device(capsys):
    assert copy_trace.main(copy_trace.parse_arguments([])) == 1
    assert capsys.readouterr().err == "copy_trace.py: needs a CUDA device; torch finds none here\n"


@pytest.mark.gpu
def test_the_whole_run(tmp_path, capsys):
    written = tmp_path / "out.json"
    options = copy_trace.parse_arguments(["--sizes", "1M,6M", "--repeats", "2", "--json", str(written)])
    assert copy_trace.main(options) == 0
    rows = json.loads(written.read_text(encoding="utf-8"))["rows"]
    found = {(row["way"], row["bytes"] >> 20): row for row in rows}
    assert [way for way, mib in found if mib == 1] == ["gpuprefetch", "one copy", "one copy, busy memory"]
    for (way, _), row in found.items():
        assert len(row["us"]["raw"]) == 2
        assert 0 < row["busy_us"]["low"] < row["us"]["high"]
        assert row["first_us"]["low"] > 0
        assert ("host_gb_per_s" in row) == (way == "one copy, busy memory")
    copies = {way: row["copies"]["median"] for (way, mib), row in found.items() if mib == 6}
    assert copies["one copy"] == copies["one copy, busy memory"] == 1
    assert [copies[f"copies of {mib} MiB"] for mib in (1, 2, 4)] == [6, 3, 2]
    assert copies["gpuprefetch"] > 1
    assert "6 MiB" in capsys.readouterr().out
