"""What gpu_dataset.py compares gives the same batches, and its parts and bounds are what they say."""

import json

import gpu_dataset
import pytest
import torch
from gpu_dataset import Row, row_result
from gpu_dataset_parts import Parts, Resident, Shrunk, Upscaled, busy_seconds, host_seconds
from target import Target
from torch.utils.data import DataLoader

QUICK = ["--device", "cpu", "--batch-size", "2", "--steps", "3", "--repeats", "2", "--channels", "2", "--layers", "1"]
QUICK += ["--photo-pixels", "40"]
ROWS = ["plain", "gpuprefetch0", "gpuprefetch1", "gpuprefetch3", "precomputed", "precomputed-gpuprefetch"]


@pytest.fixture(params=[0, 40], ids=["crops", "photos"])
def dataset(target, request):
    return Upscaled(6, request.param, 2, 1, target)


def test_a_sample_is_the_nets_picture_of_its_crop(dataset):
    picture, number = dataset[4]
    assert picture.shape == (3, 128, 128) and picture.dtype == torch.float32 and not picture.requires_grad
    assert number == 4 and torch.equal(picture, dataset[4][0]) and not torch.equal(picture, dataset[3][0])


def test_a_batch_made_at_once_is_that_of_its_samples(target):
    shrunk = Shrunk(6, 40, 2, 1, target)
    small, number = shrunk[4]
    assert torch.equal(small, shrunk.small(4)) and number == 4
    one_by_one = DataLoader(Upscaled(6, 40, 2, 1, target), 3)
    at_once = DataLoader(shrunk, 3, collate_fn=shrunk.collate)
    for (pictures, numbers), (others, same) in zip(one_by_one, at_once, strict=True):
        torch.testing.assert_close(pictures, others)
        assert torch.equal(numbers, same) and not others.requires_grad


@pytest.mark.parametrize("net_in", ["__getitem__", "__getitem__-apart", "collate_fn"])
def test_a_run(tmp_path, capsys, net_in):
    written = tmp_path / "out.json"
    assert gpu_dataset.main([*QUICK, "--threads", "3", "--net-in", net_in, "--json", str(written)]) == 0
    result = json.loads(written.read_text(encoding="utf-8"))
    assert result["notes"] == [gpu_dataset.ON_THE_CPU]
    assert [row["name"] for row in result["rows"]] == ROWS
    for values in result["parts_ms"].values():
        assert len(values["raw"]) == 2 and min(values["raw"]) > 0
    for row in result["rows"]:
        assert row["wrong_repeats"] == []
        assert len(row["ms_per_step"]["raw"]) == 2 and min(row["ms_per_step"]["raw"]) >= 5  # the wait
    out = capsys.readouterr().out
    assert gpu_dataset.ON_THE_CPU in out and [line.split()[1] for line in out.splitlines() if line[:1] == "|"] == [
        "row",
        "---",
        *ROWS,
    ]


def test_other_batches_than_the_plain_loaders_are_an_error(monkeypatch, capsys):
    make_rows = gpu_dataset.make_rows

    def with_a_fault(loader, precomputed, target, threads):
        *rows, last = make_rows(loader, precomputed, target, threads)
        swapped = list(loader)[::-1]
        return [*rows, Row(last.name, last.description, swapped, computes=False)]

    monkeypatch.setattr(gpu_dataset, "make_rows", with_a_fault)
    assert gpu_dataset.main([*QUICK, "--threads", "2"]) == 1
    captured = capsys.readouterr()
    assert "precomputed-gpuprefetch!" in captured.out
    assert captured.err == "gpu_dataset.py: other batches than the plain loader's: precomputed-gpuprefetch\n"


@pytest.mark.parametrize(
    ("parts", "bound"),
    [
        (Parts(loading=9, host=8, made=2, step=5, stepped=4), 9),
        (Parts(loading=3, host=2, made=2, step=7, stepped=4), 7),
        (Parts(loading=6, host=2, made=6, step=7, stepped=4), 10),
    ],
)
def test_the_bound_is_the_longest_of_what_can_not_overlap(parts, bound):
    assert Row("", "", []).bound(parts) == bound
    assert Row("", "", [], computes=False).bound(parts) == parts.step


def test_what_is_compared_is_of_one_repeat(target):
    class Epoch:
        checksum = None

        def __init__(self, seconds):
            self.step_seconds = seconds

    parts = [Parts(1, 1, 1, 3, 1), Parts(1, 1, 1, 5, 1)]
    result = row_result(Row("", "", []), [Epoch(6), Epoch(8)], [Epoch(9), Epoch(16)], parts, None)
    assert result["multiple_of_bound"]["raw"] == [2.0, 1.6]
    assert result["times_as_fast_as_plain"]["raw"] == [1.5, 2.0]


def test_parts_are_timed_over_all_batches(target, dataset, monkeypatch):
    clock = iter(
        [0, 1, 10, 13, 20, 25, 30]
    )  # begin and end of three batches, and the begin of the one that isn't there
    monkeypatch.setattr("gpu_dataset_parts.time.perf_counter", lambda: next(clock))
    assert host_seconds(DataLoader(dataset, batch_size=2), target) == 3


def test_without_a_device_the_host_is_timed(target, monkeypatch):
    clock = iter([2.0, 5.0])
    monkeypatch.setattr("gpu_dataset_parts.time.perf_counter", lambda: next(clock))
    done = []
    assert busy_seconds(target, lambda: done.append(1)) == 3
    assert done == [1]


def test_resident_batches_repeat(target, dataset):
    resident = Resident(DataLoader(dataset, batch_size=1), 9, target)
    assert [int(numbers) for _, numbers in resident] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.gpu
def test_the_devices_time_has_no_gaps():
    """Launching costs time in which the device is done with what it has: that must not count."""
    target = Target(torch.device("cuda", 0))
    x = torch.ones(1, device="cuda")

    def slowly_launched():
        for _ in range(20):
            x.add_(1)
            sum(range(20_000))

    slowly_launched()
    assert busy_seconds(target, slowly_launched) < 0.001


@pytest.mark.gpu
def test_work_is_timed_beside_other_work():
    """Neither waits for the other: a sleep takes as long beside sleeps as alone, and those have begun."""
    target = Target(torch.device("cuda", 0))
    begun = torch.zeros(1, device="cuda")
    stream = torch.cuda.current_stream()

    def sleep():
        torch.cuda._sleep(10_000_000)

    def sleep_on_the_callers_stream():
        assert torch.cuda.current_stream() == stream
        begun.add_(1)
        sleep()

    alone = busy_seconds(target, sleep)
    assert alone / 2 < busy_seconds(target, sleep, sleep_on_the_callers_stream) < 2 * alone
    assert int(begun) > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "1"], "--threads must be 2 or more; got 1"),
        (["--batch-size", "0"], "--batch-size must be 1 or more; got 0"),
        (["--layers", "-1"], "--layers must be 0 or more; got -1"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        gpu_dataset.main(arguments)
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys):
    assert gpu_dataset.main(["--device", "xpu"]) == 1
    assert "gpu_dataset.py: --device 'xpu' can't be used" in capsys.readouterr().err
