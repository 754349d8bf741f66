"""The speed of copies is measured as it is told: shown on the CPU, with a stand-in for what needs a CUDA device."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import copy_methods
import copy_speed
import copy_timing
import pytest
import torch
from copy_plot import draw
from copy_report import table
from copy_sources import SOURCES, Copied, WrongCopy, make_source, size_label
from copy_timing import CALLS, MOST_COPIES, copies_a_repeat, time_call, time_copy, time_in_turn
from test_copy_sources import in_full, spoilt

from gpuprefetch._batch import Stack

CPU = torch.device("cpu")
MADE_BY = {
    "pageable": ["gpuprefetch", ".to", "pin_memory()", "kept pinned", "link"],
    "pinned": ["gpuprefetch", ".to", "link"],
    "gathered": ["gpuprefetch", ".to", "pin_memory()", "kept pinned", "stacked pinned", "link"],
    "strided": ["gpuprefetch", ".to", "pin_memory()", "kept pinned", "link"],
    "short rows": ["gpuprefetch", ".to", "pin_memory()", "kept pinned", "link"],
    "leaves": ["gpuprefetch", ".to", "pin_memory()", "kept pinned", "link"],
}
CALL_NAMES = ("copy", "record", "allocate")
STAGES = ("collate", "prepare", "copy", "assemble", "hand over", "device")
LEAF_BATCHES = [200 << 10, 800 << 10, 3200 << 10, 12800 << 10, 25600 << 10]  # of 1, 4, 16, 64 and 128 KiB each
RESULTS = Path(__file__).parent / "results"


class HostLane:
    """A CopyLane that copies to the CPU, and refuses another order of stages than an epoch's."""

    def __init__(self, copier, prefetch_batches, skip_keys, *, on_loader_thread):
        self.asked = 0

    def collate(self, collate):
        return collate

    def ask(self):
        self.asked += 1

    def prepare(self, record):
        assert record.number == self.asked - 1
        record.leaves = record.batch if isinstance(record.batch, list) else [record.batch]

    def copy(self, record):
        record.outputs = [
            torch.stack(leaf.samples) if isinstance(leaf, Stack) else leaf.clone() for leaf in record.leaves
        ]
        assert record.outputs

    def assemble(self, record):
        record.batch = record.outputs if isinstance(record.batch, list) else record.outputs[0]
        record.drop_sources()

    def hand_over(self, record):
        assert not record.leaves
        return record.batch


@pytest.fixture
def on_the_cpu(monkeypatch, target):
    """What copies to a CUDA device copies to the CPU, so that the whole script runs."""
    monkeypatch.setattr("gpuprefetch._copy_lane.CopyLane", HostLane)
    monkeypatch.setattr("gpuprefetch._copier.Copier", SimpleNamespace(of=lambda device: None))
    monkeypatch.setattr("gpuprefetch._copier.Share", lambda *_: SimpleNamespace(copier=None, close=lambda: None))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(copy_speed, "find_target", lambda name: target)
    monkeypatch.setattr(copy_timing, "SPEED_SECONDS", 0.0)


@pytest.fixture
def planted(monkeypatch):
    """`planted(name, copy, **options)` takes the place of all methods but the link; `copy(source)` gives the batch."""
    link = copy_methods.METHODS["link"]
    monkeypatch.setattr(copy_methods, "METHODS", {})
    monkeypatch.setattr(copy_speed, "METHODS", copy_methods.METHODS)

    def plant(name, copy, **options):
        def make(source, target):
            yield lambda: Copied(copy(source))

        copy_methods.METHODS.pop("link", None)
        copy_methods.method(name, "planted", **options)(make)
        copy_methods.METHODS["link"] = link

    return plant


# --- methods


def test_the_link_takes_dense_bytes_of_a_strided_source(target):
    source = make_source("strided", 64 * 512, 0)
    with copy_methods.METHODS["link"].make(source, target) as copy:
        batch = copy().batch
    assert batch.is_contiguous() and torch.equal(batch, source.tensors[0])


def test_memory_that_still_holds_an_earlier_copy_does_not_pass(planted, target):
    memory = {}
    planted("copies", lambda source: memory.setdefault("left", in_full(source)))
    planted("does nothing", lambda source: memory["left"])
    source = make_source("pageable", 4096, 0)
    with pytest.raises(WrongCopy, match="does nothing"):
        copy_speed.measure_source(source, target, 1, 0, random.Random(0), {})


# --- how long it takes


def test_time_ends_when_the_device_is_done_and_before_memory_is_freed(target, clock, monkeypatch):
    def passes(seconds):
        clock.now += seconds

    class Held:
        def __del__(self):
            passes(100.0)

    def copy():
        passes(1.0)
        return Copied([], Held())

    waits = iter((2.0, 0.0))
    monkeypatch.setattr(target, "synchronize", lambda: passes(next(waits)))
    assert time_copy(copy, target) == 3.0
    assert clock.now == 103.0


@pytest.mark.parametrize(("seconds", "count"), [(0.0, MOST_COPIES), (1e-6, MOST_COPIES), (1e-3, 5), (0.004, 2), (1, 1)])
def test_copies_in_a_row_take_some_milliseconds(seconds, count, target, clock):
    def copy():
        clock.now += seconds
        return Copied([])

    assert copies_a_repeat(copy, target) == count


def test_methods_take_turns_and_the_order_changes(target, clock):
    calls = []

    def copying(name, seconds):
        times = iter(seconds)

        def copy():
            calls.append(name)
            clock.now += next(times)
            return Copied([])

        return copy

    copies = {"a": copying("a", [1, 9, 2] * 8), "b": copying("b", range(8)), "c": copying("c", [5] * 8)}
    counts = {"a": 3, "b": 1, "c": 1}
    seconds = time_in_turn(copies, counts, target, 8, lambda: calls.append("-"), random.Random(0))
    assert seconds == {"a": [2] * 8, "b": list(range(8)), "c": [5] * 8}
    turns = ["".join(calls[first : first + 8]).replace("aaa", "a") for first in range(0, len(calls), 8)]
    assert len(turns) == 8 and all(sorted(turn) == ["-", "-", "-", "a", "b", "c"] for turn in turns)
    assert all(turn[::2] == "---" for turn in turns)
    assert len(set(turns)) > 2


def test_a_peer_that_fails_is_left_out_and_ours_is_not(planted, target):
    def failing(source):
        raise OSError("no such memory\nand more")

    planted("gpuprefetch", in_full)
    planted("peer", failing, is_peer=True)
    planted("absent", failing, is_peer=True, missing=lambda: "not here")
    source, left_out = make_source("leaves", 200 * 512, 0), {}
    rows = copy_speed.measure_source(source, target, 1, 0, random.Random(0), left_out)
    assert [row["method"] for row in rows] == ["gpuprefetch", "link"]
    assert left_out == {"peer": "OSError: no such memory", "absent": "not here"}
    planted("gpuprefetch", failing)
    with pytest.raises(OSError):
        copy_speed.measure_source(source, target, 1, 0, random.Random(0), {})


def test_a_call_is_timed_by_itself_and_the_queue_never_fills(target, clock, monkeypatch):
    queued, most, calls = 0, 0, 0

    def call():
        nonlocal queued, most, calls
        queued, calls = queued + 1, calls + 1
        most = max(most, queued)
        clock.now += 1.0 if calls % 5 == 0 else 3.0

    def drain():
        nonlocal queued
        queued = 0
        clock.now += 1000.0

    monkeypatch.setattr(target, "synchronize", drain)
    assert time_call(call, target) == 3.0
    assert (queued, most, calls) == (0, 100, CALLS)


def test_what_calls_are_timed(on_the_cpu, target, monkeypatch):
    done, made = [], []
    copy_to = torch.Tensor.copy_

    def copy_(destination, pinned, non_blocking):
        done.append((destination.nbytes, pinned.nbytes, non_blocking))
        return copy_to(destination, pinned)

    def event():
        made.append(SimpleNamespace(record=lambda: done.append("record")))
        return made[-1]

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.cuda, "Event", event)
    seconds = copy_timing.time_calls(target, 3)
    assert {name: len(raw) for name, raw in seconds.items()} == dict.fromkeys(CALL_NAMES, 3)
    assert all(each > 0 for raw in seconds.values() for each in raw)
    assert done == [(4096, 4096, True)] * (3 * CALLS) + ["record"] * (3 * CALLS) and len(made) == 1


# --- the script


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "64K,huge"], "'huge' is no size; write 4096, 64K, 38.5M or 1G"),
        (["--sizes", ""], "'' is no size"),
        (["--sizes", "1000"], "'1000' is no multiple of 512 bytes"),
        (["--sizes", "0"], "'0' is no multiple of 512 bytes"),
        (["--repeats", "0"], "--repeats must be at least 1; got 0"),
        (["--pause", "-1"], "--pause must be a number from 0 up; got -1.0"),
        (["--pause", "nan"], "--pause must be a number from 0 up; got nan"),
        (["--json", "nowhere/x.json"], "there is no folder 'nowhere'"),
        (["--plot", "nowhere/x.png"], "there is no folder 'nowhere'"),
    ],
)
def test_what_can_t_be_is_said_before_anything_is_measured(arguments, said, capsys):
    with pytest.raises(SystemExit):
        copy_speed.parse_arguments(arguments)
    assert said in capsys.readouterr().err


def test_sizes():
    assert copy_speed.parse_arguments(["--sizes", "1M,512,64K, 64K"]).sizes == [512, 1 << 16, 1 << 20]
    sizes = copy_speed.parse_arguments([]).sizes
    labels = "64 KiB,256 KiB,1 MiB,4 MiB,16 MiB,38.5 MiB,64 MiB,256 MiB,1 GiB"
    assert ",".join(map(size_label, sizes)) == labels
    assert size_label(512) == "0.5 KiB"


def test_without_a_cuda_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert copy_speed.main(copy_speed.parse_arguments([])) == 1
    assert capsys.readouterr().err == "copy_speed.py: needs a CUDA device; torch finds none here\n"


def test_a_wrong_byte_ends_the_run(on_the_cpu, planted, capsys, tmp_path):
    planted("gpuprefetch", spoilt)
    file = tmp_path / "x.json"
    assert copy_speed.main(copy_speed.parse_arguments(["--sizes", "4K", "--json", str(file)])) == 1
    assert "copy_speed.py: wrong bytes: gpuprefetch, pageable, 4 KiB: 1 bytes of tensor 0" in capsys.readouterr().err
    assert not file.exists()


def assert_complete(result, sizes, repeats):
    """Every method is there for every source and size, with all repeats."""
    for source, methods in MADE_BY.items():
        for size in LEAF_BATCHES if source == "leaves" else sizes:
            rows = [row for row in result["rows"] if (row["source"], row["bytes"]) == (source, size)]
            assert [row["method"] for row in rows if row["method"] != "consolidated"] == methods
            assert all(len(row["gb_per_s"]["raw"]) == repeats for row in rows)
            assert all(row["share_of_link"]["raw"] == [1.0] * repeats for row in rows if row["method"] == "link")
            for row in rows:
                for ms, speed in zip(row["ms"]["raw"], row["gb_per_s"]["raw"], strict=True):
                    assert ms * speed == pytest.approx(size * 1e-6)
    assert result["format"] == 3 and result["settings"]["pause_ms"] == 30
    assert [200 * size for size in result["settings"]["leaf_sizes"]] == LEAF_BATCHES
    staged = dict.fromkeys(copy_speed.STAGED, STAGES)
    for key, names in {"calls_us": CALL_NAMES, **staged}.items():
        assert {name: len(us["raw"]) for name, us in result[key].items()} == dict.fromkeys(names, repeats)
    measured = [(peak["source"], peak["method"]) for peak in result["peaks"]]
    wanted = [
        (name, method)
        for name, methods in MADE_BY.items()
        if name in ("pageable", "pinned", "gathered")
        for method in methods
    ]
    assert measured == [pair for pair in wanted if pair[1] != "link"]


def test_the_whole_run(on_the_cpu, capsys, tmp_path):
    arguments = ["--sizes", "4K,38.5K", "--repeats", "2", "--json", str(tmp_path / "x.json")]
    assert copy_speed.main(copy_speed.parse_arguments(arguments)) == 0
    result = json.loads((tmp_path / "x.json").read_text())
    assert_complete(result, [4096, 39424], 2)
    (left_out,) = result["left_out"]
    assert left_out["name"] == "consolidated"  # not installed, or refuses to pin for a CPU
    assert f"consolidated    left out: {left_out['reason']}\n" in capsys.readouterr().out


# --- table and picture


def made_up(environment):
    """A result in which every method copies half as fast as the link, which does 50 GB/s. A peer copies few leaves."""

    def figure(value):
        return {"median": value, "low": 0.9 * value, "high": 1.1 * value, "raw": [0.9 * value, value, 1.1 * value]}

    rows = []
    for source, methods in MADE_BY.items():
        for size in LEAF_BATCHES if source == "leaves" else [1 << 16, 40370176, 1 << 30]:
            for name in [*methods, *["consolidated"] * (source == "leaves" and size < 1 << 20)]:
                speed = 50.0 if name == "link" else 25.0
                row = {"source": source, "bytes": size, "method": name, "copies_a_repeat": 1}
                figures = {"ms": size / speed * 1e-6, "gb_per_s": speed, "share_of_link": speed / 50}
                rows.append({**row, **{key: figure(value) for key, value in figures.items()}})
    methods = {name: method.description for name, method in copy_methods.METHODS.items()}
    peak = {"source": "pageable", "method": ".to", "bytes": 1 << 28, "pinned_bytes": None}
    return {
        "environment": environment,
        "settings": {"repeats": 3, "least_ms_a_repeat": 5.0, "pause_ms": 30.0, "methods": methods},
        "rows": rows,
        "calls_us": {name: figure(us) for us, name in enumerate(CALL_NAMES, 1)},
        "stages_us": {name: figure(us) for us, name in enumerate(STAGES, 4)},
        "gathered_stages_us": {name: figure(us) for us, name in enumerate(STAGES, 10)},
        "peak_bytes": 1 << 28,
        "peaks": [{**peak, "device_bytes_above_batch": 0, "host_bytes": 3 << 20}],
        "left_out": [],
        "notes": ["a note"],
    }


def test_the_table(target):
    result = made_up(copy_speed.describe(target))
    lines = table(result).splitlines()
    assert "repeats 3, copies in a row for at least 5 ms each, 30 ms between turns" in lines
    assert all(len(line) <= 120 or line.strip() == result["environment"]["command"] for line in lines)
    start = lines.index(f"gathered: {SOURCES['gathered']}")
    assert lines[start + 1].split("  ")[0] == "GB/s"
    cells = [line.split() for line in lines[start + 2 : start + 5]]
    assert [row[:2] for row in cells] == [["64", "KiB"], ["38.5", "MiB"], ["1", "GiB"]]
    assert {tuple(row[2:]) for row in cells} == {(*["25.0"] * 5, "50.0", "50%", "20%")}
    leaves = [line.split() for line in lines if line.startswith("200 x ")]
    assert [row[2] for row in leaves] == ["1", "4", "16", "64", "128"]
    assert leaves[1][4:] == [*["0.033"] * 4, "0.016", "0.033", "50%", "20%"]
    assert leaves[2][4:] == [*["0.131"] * 4, "0.066", "-", "50%", "20%"]
    assert "host us a call, timed from Python, so C++ pays less: copy 1.0, record 2.0, allocate 3.0" in lines
    stages = "collate 4.0, prepare 5.0, copy 6.0, assemble 7.0, hand over 8.0, device 9.0"
    assert f"host us, the stages of 200 x 4 KiB: {stages}" in lines
    assert any(line.startswith("host us, 64 samples of 600 KB: collate 10.0, ") for line in lines)
    (peak,) = (line for line in lines if line.startswith("pageable: .to"))
    assert peak.split()[2:] == ["-", "0", "3"]
    assert "note: a note" in lines


def test_the_picture_is_drawn(target, tmp_path):
    result = made_up(copy_speed.describe(target))
    draw(json.loads(json.dumps(result)), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert {name for methods in MADE_BY.values() for name in methods} < set(copy_methods.METHODS)


@pytest.mark.filterwarnings("error::UserWarning")  # of an empty panel, say: format 1 has fewer sources
@pytest.mark.parametrize("file", sorted(RESULTS.glob("copy-speed*.json")), ids=lambda file: file.stem)
def test_results_that_are_kept_can_be_read(file, tmp_path):
    result = json.loads(file.read_text(encoding="utf-8"))
    assert sum(line.startswith("200 x 4 KiB ") for line in table(result).splitlines()) == 1
    draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_on_a_cuda_device(tmp_path):
    files = [tmp_path / "x.json", tmp_path / "x.png"]
    arguments = ["--sizes", "64K,70M", "--repeats", "2", "--json", str(files[0]), "--plot", str(files[1])]
    assert copy_speed.main(copy_speed.parse_arguments(arguments)) == 0
    result = json.loads(files[0].read_text())
    assert_complete(result, [1 << 16, 70 << 20], 2)
    assert files[1].read_bytes().startswith(b"\x89PNG")
    for peak in result["peaks"]:
        assert peak["device_bytes_above_batch"] < 4 << 20
        if peak["method"] == "gpuprefetch" and peak["pinned_bytes"] is not None:
            assert peak["pinned_bytes"] <= 65 << 20
