"""The cost of ready batches is measured as it is told: shown on the CPU, where a sleep stands for the step."""

import dataclasses
import json
import random
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import ready_batches
import torch
from ready_batches import CALLER, CASES, WAYS, Case, Ready, Spin, Way, WrongBatches, measure_case, run_epoch

SHORT = Case("short", ((4, 8), (4,)), 0.1, 20, True)


@pytest.fixture
def on_the_cpu(monkeypatch, target):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ready_batches, "find_target", lambda name: target)
    short = {name: dataclasses.replace(case, steps=20, step_ms=0.1) for name, case in CASES.items()}
    short["next"] = dataclasses.replace(short["next"], shapes=SHORT.shapes)
    monkeypatch.setattr(ready_batches, "CASES", short)


def test_the_cases_are_those_of_the_targets():
    assert [sum(torch.Size(shape).numel() * 4 for shape in case.shapes) for case in CASES.values()][1:] == [4096, 4096]
    assert [(case.step_ms, case.waits) for case in CASES.values()] == [(5.0, True), (0.2, False), (12.8, False)]


@pytest.mark.parametrize("name", WAYS)
def test_each_way_gives_the_batches(on_the_cpu, target, name):
    with WAYS[name].make(Ready(SHORT.shapes), target) as load:
        for _ in range(2):
            epoch = run_epoch(load, SHORT, Spin(target), target)
    assert epoch["ms_per_step"] >= 0.1 and 0 < epoch["next_us"] < 1e6
    assert all(value is None or value >= 0 for value in epoch.values())


@pytest.mark.parametrize("kind", ["doubled", "late", "spoilt"])
def test_wrong_batches_are_found(target, kind):
    ready = Ready(SHORT.shapes)

    def load(count):
        batches = [[tensor.clone() for tensor in batch] for batch in ready(count)]
        if kind == "doubled":
            batches[5] = batches[4]
        elif kind == "late":
            batches.insert(0, batches[0])
        else:
            batches[7][1][-1] = 0
        return batches

    with pytest.raises(WrongBatches):
        run_epoch(load, SHORT, Spin(target), target)


def test_next_is_what_is_timed(target, monkeypatch):
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])
    ready = Ready(SHORT.shapes)

    def load(count):
        for batch in ready(count):
            now[0] += 7_000
            yield batch

    def spin(milliseconds):
        now[0] += int(milliseconds * 1e6)

    epoch = run_epoch(load, SHORT, spin, target)
    assert epoch["next_us"] == pytest.approx(7.0)
    assert epoch["ms_per_step"] == pytest.approx(0.107)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("name", "busy", "counts"),
    [("gpuprefetch-loader-1", True, True), ("gpuprefetch-loader-1", False, False), ("another", True, False)],
)
def test_processor_time_is_that_of_our_busy_threads(name, busy, counts):
    """The other thread or this one is busy for 0.4 s; the name that the system has for it looks like the fields."""
    begun, done, end = threading.Event(), threading.Event(), threading.Event()

    def work():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("a) R 9 (b")
        begun.set()
        if busy:
            spin_for(0.4)
        done.set()
        assert end.wait(30)

    thread = threading.Thread(target=work, name=name)
    thread.start()
    assert begun.wait(30)
    before = ready_batches.own_threads_ns()
    if not busy:
        spin_for(0.4)
    assert done.wait(30)
    taken = ready_batches.own_threads_ns() - before
    end.set()
    thread.join()
    assert 200_000_000 < taken < 600_000_000 if counts else taken < 100_000_000


def spin_for(seconds):
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_threads_of_the_pool_are_known_by_the_system_s_name():
    done, end = threading.Event(), threading.Event()

    def work():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(ready_batches.POOL_THREAD)
        spin_for(0.4)
        done.set()
        assert end.wait(30)

    before = ready_batches.own_threads_ns()
    thread = threading.Thread(target=work, name="another")
    thread.start()
    assert done.wait(30)
    taken = ready_batches.own_threads_ns() - before
    end.set()
    thread.join()
    assert 200_000_000 < taken < 600_000_000


def test_rows_take_turns_and_are_compared_within_a_repeat(target, monkeypatch):
    order, times = [], iter(range(1, 100))

    def planted(name):
        @contextmanager
        def make(ready, target):
            order.append(name)
            yield name

        return Way("planted", make)

    monkeypatch.setattr(ready_batches, "WAYS", {name: planted(name) for name in (CALLER, *ready_batches.OURS)})
    took = {CALLER: 4.0, "gpuprefetch0": 2.0, "gpuprefetch": 1.0}

    def epoch(load, case, spin, target):
        scale = next(times)
        return {"ms_per_step": took[load] * scale, "next_us": 1.0 * scale, "own_threads_share": None, "caller_share": 0}

    monkeypatch.setattr(ready_batches, "run_epoch", epoch)
    rows = measure_case(SHORT, list(took), Spin(target), target, 5, random.Random(0))
    turns = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(turns) == 6 and len(set(turns)) > 1 and all(len(set(turn)) == 3 for turn in turns)
    by_name = {row["row"]: row for row in rows}
    assert by_name[CALLER]["ms_per_step_over_caller"]["raw"] == [1.0] * 5
    assert len(by_name["gpuprefetch"]["ms_per_step"]["raw"]) == 5
    assert by_name["gpuprefetch"]["own_threads_share"] is None
    assert ready_batches.best_over_caller(rows)["row"] == "gpuprefetch"


def test_the_whole_run(on_the_cpu, capsys, tmp_path):
    file = tmp_path / "x.json"
    assert ready_batches.main(ready_batches.parse_arguments(["--repeats", "2", "--json", str(file)])) == 0
    result = json.loads(file.read_text())
    assert list(result["cases"]) == ["next", "small", "idle"]
    for case in result["cases"].values():
        assert [row["row"] for row in case["rows"]] == list(WAYS)
        for row in case["rows"]:
            assert all(len(row[key]["raw"]) == 2 for key in ("ms_per_step", "next_us", "caller_share"))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("gpuprefetch0 ") for line in lines) == 4
    assert all(len(line) <= 120 or line.strip() == result["environment"]["command"] for line in lines)


def test_a_wrong_row_ends_the_run(on_the_cpu, monkeypatch, capsys):
    @contextmanager
    def stale(ready, target):
        yield lambda count: [ready.batches[3]] * count

    monkeypatch.setitem(WAYS, "gpuprefetch", Way("planted", stale))
    assert ready_batches.main(ready_batches.parse_arguments(["--repeats", "1", "--cases", "small"])) == 1
    assert "wrong batches: gpuprefetch: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "next,none"], "none is called none; there are next, small, idle"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_what_can_t_be_is_said_before_anything_is_measured(arguments, said, capsys):
    with pytest.raises(SystemExit):
        ready_batches.parse_arguments(arguments)
    assert said in capsys.readouterr().err


def test_without_a_cuda_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ready_batches.main(ready_batches.parse_arguments([])) == 1
    assert "needs a CUDA device" in capsys.readouterr().err
