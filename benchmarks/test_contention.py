"""Each row of contention.py changes what it says, and no batch."""

import json
import os
import sys
import threading
import time

import contention
import pytest
import rows
import torch
from target import Target
from workloads import make_loader

BATCH, STEPS = 8, 6


@pytest.fixture
def opened():
    """`opened(name, make)`: an epoch's batches by that row, closed at the end of the test."""
    target = Target(torch.device("cpu"))
    contexts = []

    def open_row(name, make, prefetch_batches=2):
        row = contention.TRIALS[name]
        if (reason := row.missing(target)) is not None:
            pytest.skip(reason)
        context = row.make(make_loader(make, BATCH, STEPS), target, prefetch_batches)
        contexts.append(context)
        return context.__enter__()

    yield open_row
    for context in contexts:
        context.__exit__(None, None, None)


def eventually(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)  # between two looks
    return condition()


def image(index):
    return torch.full((3, 2, 2), float(index))


@pytest.mark.parametrize("name", contention.TRIALS)
def test_the_batches_are_those_of_the_plain_loader(name, opened):
    batches = opened(name, image)
    for _ in range(2):
        labels = [label for _, labels in batches for label in labels.tolist()]
        assert labels == list(range(BATCH * STEPS))


def test_samples_a_task(opened):
    """Two threads never work on one task, and with one of all samples no two on one batch."""
    threads = {}

    def make(index):
        threads.setdefault(index // 4, set()).add(threading.get_ident())
        return image(index)

    list(opened("gpuprefetch8-4-a-task", make))
    assert len(threads) == BATCH * STEPS // 4 and all(len(each) == 1 for each in threads.values())


def test_half_of_the_threads_share_a_batch_while_the_next_one_is_ready(opened):
    seen, meetings = {}, {0: threading.Barrier(8), 2: threading.Barrier(4)}

    def make(index):
        batch = index // BATCH
        seen.setdefault(batch, set()).add(threading.get_ident())
        if batch in meetings:
            meetings[batch].wait(20)
        return image(index)

    epoch = iter(opened("gpuprefetch8-half-if-ready", make, prefetch_batches=1))
    next(epoch)
    ready = epoch.gi_frame.f_locals["epoch"]._epoch._ready
    assert eventually(lambda: not ready.empty())  # 1, and the loop finds it so
    next(epoch)
    assert eventually(lambda: 2 in seen)  # before the loop waits for it
    list(epoch)
    assert [len(seen[batch]) for batch in meetings] == [8, 4]


def test_samples_a_task_of_rows_that_are_open_at_the_same_time(opened):
    """As they are while they take turns."""
    at = {}

    def make(index):
        at.setdefault(threading.get_ident(), []).append(index)
        return image(index)

    by_four = opened("gpuprefetch8-4-a-task", make)
    by_one, as_it_is = opened("gpuprefetch8-1-a-task", image), opened("gpuprefetch8-2-inside", make)
    for batches, size in ((by_four, 4), (as_it_is, 1), (by_four, 4)):  # 8 threads share a batch of 8
        list(by_one)
        at.clear()
        list(batches)
        slices = [indices[i : i + size] for indices in at.values() for i in range(0, len(indices), size)]
        assert all(each[0] % size == 0 and each == list(range(each[0], each[0] + size)) for each in slices)
        assert sum(map(len, slices)) == BATCH * STEPS


def test_threads_inside(opened):
    lock, inside, most = threading.Lock(), 0, 0
    both = threading.Event()

    def make(index):
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            if inside == 2:
                both.set()
        both.wait(10)  # until there are two, so that a third would be seen
        with lock:
            inside -= 1
        return image(index)

    list(opened("gpuprefetch8-2-inside", make))
    assert most == 2


@pytest.mark.parametrize("milliseconds", [0.02, 0.5, 20])
def test_the_switch_interval_is_set_for_an_epoch(milliseconds, opened):
    before = sys.getswitchinterval()
    epoch = iter(opened(f"gpuprefetch8-{milliseconds}ms-switch", image))
    next(epoch)
    assert sys.getswitchinterval() == pytest.approx(milliseconds * 1e-3)
    epoch.close()
    assert sys.getswitchinterval() == before


def test_no_sample_begins_during_a_step_with_a_batch_ready(opened, monkeypatch):
    monkeypatch.setattr(contention, "LONGEST_PAUSE_SECONDS", 30.0)
    begun, has_first, go_on = [], threading.Event(), threading.Event()

    def make(index):
        begun.append(index)
        if index >= BATCH:  # else 1 might be ready together with 0, and the pause begin there
            assert has_first.wait(30)
        if index >= 3 * BATCH:
            assert go_on.wait(30)
        return image(index)

    epoch = iter(opened("gpuprefetch8-pausing", make, prefetch_batches=6))
    next(epoch)
    has_first.set()
    ready = epoch.gi_frame.f_locals["epoch"]._epoch._ready._items
    assert eventually(lambda: ready.qsize() == 2 and len(begun) == 4 * BATCH)  # 1 and 2 are ready; 3 is being loaded
    next(epoch)  # 1: the step begins, and 2 is ready
    go_on.set()
    assert eventually(lambda: ready.qsize() == 2)  # 3 is
    assert not eventually(lambda: len(begun) > 4 * BATCH, 0.2)
    assert len(list(epoch)) == STEPS - 2 and sorted(begun) == list(range(BATCH * STEPS))


def test_intra_op_threads(opened):
    before = torch.get_num_threads()
    seen = {"gpuprefetch8-1-intra-op": set(), "gpuprefetch8-16-a-task": set()}
    opened_rows = {
        name: opened(name, lambda index, each=each: each.add(torch.get_num_threads()) or image(index))
        for name, each in seen.items()
    }
    torch.set_num_threads(16)
    try:
        for batches in opened_rows.values():
            list(batches)
    finally:
        torch.set_num_threads(before)
    assert seen == {"gpuprefetch8-1-intra-op": {1}, "gpuprefetch8-16-a-task": {16 // contention.THREADS}}


@pytest.mark.skipif(sys.platform != "linux", reason="a niceness for each thread")
def test_sample_threads_are_nice_and_the_loop_is_not(opened):
    niceness = {}

    def make(index):
        niceness[threading.get_ident()] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        return image(index)

    list(opened("gpuprefetch8-nice", make))
    assert set(niceness.values()) == {contention.NICENESS} and threading.get_ident() not in niceness
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) != contention.NICENESS


def test_it_runs_as_a_whole(tmp_path, capsys):
    file = tmp_path / "out.json"
    settings = "--device cpu --workload memory --batch-size 2 --steps 50 --repeats 1 --samples 4 --step none".split()
    chosen = ["--loaders", "gpuprefetch8,gpuprefetch8-1-a-task", "--json", str(file)]
    assert contention.main([*settings, *chosen]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["benchmark"] == "contention"
    assert [row["name"] for row in result["rows"]] == ["gpuprefetch8", "gpuprefetch8-1-a-task"]
    assert "1 samples a task" in capsys.readouterr().out
    assert not contention.TRIALS.keys() & rows.ROWS.keys()
