"""The threads that copy: as many as fit the machine, idle where there is nothing to copy, and no others."""

import os
import sys

import pytest
import torch
from loaders import script, within

from gpuprefetch import _copier, _copy_lane
from gpuprefetch._record import Record


@pytest.mark.windows
@pytest.mark.parametrize(
    ("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (15, 7), (16, 8), (17, 8), (128, 8)]
)
def test_half_of_the_usable_cpus_and_eight_at_most(monkeypatch, cpus, threads):
    monkeypatch.setattr(_copier, "usable_cpus", lambda: cpus)
    assert _copier._copy_threads() == threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_an_affinity_counts():
    """As `taskset` sets one. What C++ calls hardware_concurrency() does not know of it with glibc."""
    script_of_one_cpu = """
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
        from gpuprefetch import _copier
        print(_copier.usable_cpus(), _copier._copy_threads())
    """
    code, out, err = script(script_of_one_cpu)
    assert (code, out.split()) == (0, ["1", "1"]), err


POOL = """
    from gpuprefetch._extension import extension

    def tasks():
        # of our pool: (state, nanoseconds on a processor)
        found = []
        for task in os.listdir("/proc/self/task"):
            folder = f"/proc/self/task/{task}/"
            try:
                if open(folder + "comm").read() == "gpuprefetch-mem\\n":
                    state = open(folder + "stat").read().rpartition(")")[2].split()[0]
                    found.append((state, int(open(folder + "schedstat").read().split()[0])))
            except (FileNotFoundError, ProcessLookupError):
                pass  # it has ended
        return found

    stream = torch.Stream(stream_id=0, device_index=0, device_type=0)
    copiers = [extension().DeviceCopier(stream, threads) for threads in (3, 5)]
    end = time.monotonic() + 30
    while [state for state, _ in tasks()] != ["S"] * 3 and time.monotonic() < end:
        pass
    before = tasks()
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass
    after = tasks()
    del copiers
    extension().shutdown()
    end = time.monotonic() + 30
    while tasks() and time.monotonic() < end:
        pass  # who joins a thread goes on a moment before the system has let go of it
    print(len(before), sum(t for _, t in after) - sum(t for _, t in before), len(tasks()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_one_pool_a_process_that_sleeps_when_idle():
    code, out, err = script(POOL)
    assert code == 0, err
    threads, busy_ns, left = map(int, out.split())
    assert (threads, busy_ns, left) == (3, 0, 0)


class NativeLane:
    """Notes how many threads torch would use for what it copies."""

    overdue = False

    def __init__(self, error=None):
        self.seen, self.error = [], error

    def put(self, *_):
        self.seen.append((torch.get_num_threads(), within(10, torch.get_num_threads)))
        if self.error is not None:
            raise self.error
        return [], []


@pytest.mark.windows
@pytest.mark.parametrize("error", [None, ValueError("no room")], ids=["copied", "failed"])
def test_torch_takes_one_thread_to_copy_and_the_datasets_number_stays(error):
    """The loader thread has the caller's number, for the dataset; what we have torch make dense is none of it."""
    lane = _copy_lane.CopyLane.__new__(_copy_lane.CopyLane)
    lane._native = NativeLane(error)

    def copy():
        torch.set_num_threads(3)
        for _ in range(2):
            try:
                lane.copy(Record(0))
            except ValueError as raised:
                assert raised is error
        return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        assert within(10, copy) == 3
    finally:
        torch.set_num_threads(before)
    assert lane._native.seen == [(1, 3), (1, 3)]  # here, and what a new thread gets
