"""A timeline shows the loop that was measured, each lane by the clock of its own."""

import time
from types import SimpleNamespace

import in_process  # noqa: F401  (registers rows)
import ours  # noqa: F401
import pytest
import rows
import timeline
import torch
from steps import Wait
from target import Target
from workloads import make_loader, make_workload


@pytest.fixture
def loader():
    return make_loader(make_workload("memory", 4, 0, None), 2, timeline.BATCHES + 4)


def test_the_plain_loader_takes_turns(loader, target):
    clock_before = time.perf_counter()
    lanes = timeline._trace(rows.ROWS["dataloader"], loader, target, 2, Wait(0.001), False)
    loads, steps = lanes["load"], lanes["compute"]
    assert len(steps) == timeline.BATCHES <= len(loads)
    assert clock_before < loads[0][0]
    for (begun, loaded), (started, _), (_, ended) in zip(loads, steps, [(0.0, 0.0), *steps], strict=False):
        assert ended <= begun < loaded <= started


def test_lanes_begin_together_and_end_together(loader, target):
    names = ["dataloader", "thread", "gpuprefetch"]
    made = timeline.timelines([rows.ROWS[name] for name in names], loader, target, 2, Wait(0.002), False)
    assert [each["name"] for each in made] == names
    assert len({each["shown_ms"] for each in made}) == 1
    for each in made:
        spans = [span for lane in each["lanes"].values() for span in lane]
        assert all(0 <= begin <= end <= each["shown_ms"] for _, begin, end in spans)
        assert each["lanes"]["compute"][0][:2] == [timeline.SKIPPED, 0.0]


def test_staging_is_from_loaded_until_the_last_copy_is_queued():
    loading = [(0.0, 1.0), (2.0, 3.0), (5.0, 6.0)]
    calls = [(1.1, 1.2), (1.4, 1.5), (3.5, 3.6), (7.0, 7.5)]
    assert timeline._staging(loading, calls) == [(1.0, 1.5), (3.0, 3.6), (6.0, 7.5)]
    pieces = [(8.0, 8.1), (8.25, 8.3), (8.5, 8.6)]  # after waiting for room until 7.75
    assert timeline._staging(loading[:1], pieces) == [(7.75, 8.6)]


def test_the_loop_that_is_traced_waits_where_the_measured_one_does(loader, target):
    read = []

    class Loss:
        def item(self):
            read.append(self)

    for sync_every_step in (False, True):
        timeline._trace(rows.ROWS["dataloader"], loader, target, 2, lambda *_: Loss(), sync_every_step)
        assert len(read) == sync_every_step * timeline.BATCHES


def test_the_devices_work_is_read_off_the_profiler():
    def event(name, start, end, device="CUDA", number=0):
        kind = getattr(torch.autograd.DeviceType, device)
        methods = {"name": name, "start_ns": start, "end_ns": end, "device_type": kind, "correlation_id": number}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in methods.items()})

    begin = 1_700_000_000_000_000_000
    events = [
        event("gemm", begin + 3_000_000, begin + 4_000_000, number=3),
        event("cudaMemcpyAsync", begin + 1_000_000, begin + 1_010_000, "CPU", number=1),
        event("cudaMemcpyAsync", begin + 1_200_000, begin + 1_210_000, "CPU", number=2),  # of the step
        event("cudaLaunchKernel", begin + 1_300_000, begin + 1_310_000, "CPU", number=3),
        event("Memcpy HtoD (Pinned -> Device)", begin + 1_020_000, begin + 1_120_000, number=1),
        event("Memcpy DtoD (Device -> Device)", begin + 1_400_000, begin + 1_410_000, number=2),
    ]

    def read(events):
        results = SimpleNamespace(events=lambda: events)
        return timeline._device_activity(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results)), 5.0, begin)

    calls, copies, kernels = read(events)
    assert calls == [pytest.approx((5.001, 5.00101))]
    assert copies == [pytest.approx((5.00102, 5.00112))]
    assert kernels == [pytest.approx((5.0014, 5.00141)), pytest.approx((5.003, 5.004))]
    with pytest.raises(RuntimeError, match="shows no copy"):
        read(events[:4])


def test_how_busy_the_device_was(monkeypatch):
    monkeypatch.setattr(timeline, "SLOTS", 4)
    spans = [(9.0, 10.5), (10.4, 10.6), (11.5, 13.25), (12.0, 12.5), (13.9, 20.0), (20.0, 21.0)]
    assert timeline._busy_shares(spans, 10.0, 1.0) == [0.6, 0.5, 1.0, 0.35]
    assert timeline._busy_shares([], 10.0, 1.0) == [0.0] * 4


def test_the_moment_is_one_that_nothing_came_between(monkeypatch, target):
    """A clock of coarse steps, a try that was interrupted while clocks were read and one by a device that was busy."""
    host = iter([0.0, 0.1, 0.2, 1.2, 10.0, 10.5, 20.0, 20.1, 20.2])
    clock = iter([7, 7, 7, 8, 8, 9, 9, 9, 10])
    monkeypatch.setattr(timeline, "CLOCK_TRIES", 3)
    monkeypatch.setattr(timeline, "time", SimpleNamespace(perf_counter=lambda: next(host), time_ns=lambda: next(clock)))
    monkeypatch.setattr(target, "mark", lambda: "mark")
    assert timeline._one_moment(target) == (20.1, 10, "mark")


@pytest.mark.gpu
@pytest.mark.parametrize("sync_every_step", [False, True])
def test_lanes_of_a_device_are_in_the_order_of_the_work(sync_every_step):
    """The plain loader loads a batch, copies it and computes: each by a clock of its own."""
    target = Target(torch.device("cuda", 0))
    loader = make_loader(make_workload("memory", 16, 0, None), 16, timeline.BATCHES + 4)
    weight = torch.ones(4096, 4096, device=target.device)

    def step(images, labels):
        return (weight @ weight).sum() + images.sum()

    lanes = timeline._trace(rows.ROWS["dataloader"], loader, target, 2, step, sync_every_step)
    tolerance = 200e-6  # of three clocks
    assert len(lanes["compute"]) == timeline.BATCHES
    of_batch = [max(copy for copy in lanes["copy"] if copy[0] < begun + tolerance) for begun, _ in lanes["compute"]]
    for number in range(timeline.SKIPPED, timeline.BATCHES):
        _, loaded = lanes["load"][number]
        copied_from, copied = of_batch[number]
        begun, done = lanes["compute"][number]
        assert loaded - tolerance < copied_from < copied < begun + tolerance
        assert any(begun - tolerance < start < end < done + tolerance for start, end in lanes["kernels"])
        assert lanes["stage"][number][1] > loaded
        if sync_every_step and number + 1 < timeline.BATCHES:
            assert done < lanes["load"][number + 1][0] + tolerance
