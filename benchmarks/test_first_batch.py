"""The first batch's time is that of the first batch, and loading is taken off as it was in the same repeat."""

import argparse
import json
import time

import first_batch
import pytest
import rows
import torch
from in_process import Epochs
from target import Target, Unusable
from workloads import make_loader

TARGET = Target(torch.device("cpu"))
OPTIONS = argparse.Namespace(steps=4, repeats=3, prefetch_batches=2, seed=0)


@pytest.fixture
def loader():
    return make_loader(lambda index: torch.full((3, 32, 32), float(index)), 2, OPTIONS.steps)


@pytest.fixture
def planted():
    """`planted(start)`: a row, each epoch of which is what `start(batches)` gives of the plain loader's."""
    made = []

    def make(start):
        def opened(loader, target, prefetch_batches):
            yield Epochs(lambda: start(list(loader)))

        rows.row("gpuprefetch-planted", "planted", loads_beside=True)(opened)
        made.append(rows.ROWS.pop("gpuprefetch-planted"))
        return made[-1]

    return make


def test_it_is_the_first_batch_that_counts(planted, monkeypatch):
    now = [0.0]  # passes only where something says so
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def image(index):
        now[0] += 0.001
        return torch.full((3, 32, 32), float(index))

    loader = make_loader(image, 2, OPTIONS.steps)
    loading = 2 * OPTIONS.steps * 0.001  # of all batches, since a planted row begins with that

    def slow_begin(batches):
        now[0] += 0.05
        yield from batches

    def slow_end(batches):
        yield batches[0]
        now[0] += 0.2
        yield from batches[1:]

    for start, expected in ((slow_begin, loading + 0.05), (slow_end, loading)):
        seconds = first_batch.measure([planted(start)], loader, TARGET, OPTIONS)
        assert set(map(len, seconds.values())) == {OPTIONS.repeats}
        assert seconds["gpuprefetch-planted"] == pytest.approx([expected] * OPTIONS.repeats)


def test_wrong_batches_are_an_error(loader, planted):
    with pytest.raises(Unusable, match="gpuprefetch-planted gave other batches than the plain loader"):
        first_batch.measure([planted(lambda batches: iter(batches[::-1]))], loader, TARGET, OPTIONS)


@pytest.mark.parametrize(
    ("name", "shared"),
    [("gpuprefetch", [2.0, 3.0, 2.0]), ("gpuprefetch4", [8.0, 6.0, 5.0]), ("workers4", [2.0, 3.0, 2.0])],
)
def test_loading_is_taken_off_in_the_same_repeat(name, shared):
    (row,) = rows.rows_called(name, [])
    result = first_batch.over_load(row, [0.010, 0.007, 0.006], [0.008, 0.004, 0.004])
    assert result["first_ms"]["raw"] == pytest.approx([10, 7, 6])
    assert result["over_load_ms"]["raw"] == pytest.approx([2, 3, 2])
    assert result["over_shared_load_ms"]["raw"] == pytest.approx(shared)


def test_it_is_a_command(tmp_path, capsys):
    file = tmp_path / "x.json"
    arguments = ["--workload", "python", "--device", "cpu", "--batch-size", "2", "--steps", "5", "--repeats", "2"]
    arguments += ["--loaders", "gpuprefetch,gpuprefetchN,gpuprefetch0", "--threads", "1,3", "--json", str(file)]
    assert first_batch.main(arguments) == 0
    result = json.loads(file.read_text())
    assert [row["name"] for row in result["rows"]] == ["gpuprefetch", "gpuprefetch3"]
    assert [row["name"] for row in result["left_out"]] == ["gpuprefetch0"]  # nothing is loaded ahead on the CPU
    assert all(len(row["first_ms"]["raw"]) == 2 for row in result["rows"])
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[4:]] == [
        "row",
        "load",
        "gpuprefetch",
        "gpuprefetch3",
        "gpuprefetch0",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "0"], "--repeats must be 1 or more; got 0"),
        (["--threads", "1,x"], "--threads must be numbers from 1 to 256, as in 1,8; got '1,x'"),
        (["--loaders", "gpuprefetch,worker"], "no row is called worker; there are"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        first_batch.main(arguments)
    assert said in capsys.readouterr().err
