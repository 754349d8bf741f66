"""What the benchmark reports is what happened: shown on the CPU, with a clock of its own where time is judged."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import experiment
import footprint
import pytest
import report
import rows
import scaling
import throughput
import timeline
import torch
from calibration import Plan
from decoders import DECODERS
from epoch import time_epoch
from experiment import _least_host_parts, _parts, run
from in_process import Epochs, in_background
from parts import BatchTimes, ResidentBatches, TransportTimer
from plot import draw
from steps import Nothing, Wait
from target import Target, Unusable
from torch.utils.data import default_collate
from workloads import changed, find_images, make_loader, make_workload

BATCH, STEPS = 4, 50


@pytest.fixture
def loader():
    return make_loader(make_workload("memory", 8, 0, None), BATCH, STEPS)


@pytest.fixture
def plan():
    return Plan(Wait(0.0), BATCH, STEPS, repeats=2)


def a_row(change, name="planted"):
    """A row whose batches are those of the plain loader after `change(batches)`."""

    def make(loader, target, prefetch_batches):
        yield Epochs(lambda: iter(change(list(loader))))

    rows.row(name, "planted", loads_beside=True)(make)
    return rows.ROWS.pop(name)


def result_of(measured, target, **settings):
    """`measured` as a whole result."""
    return {
        "settings": {
            "workload": "memory",
            "workload_description": "",
            "decoder": None,
            "step": "wait",
            "step_description": "",
            "sync_every_step": False,
            "batch_size": BATCH,
            "steps": STEPS,
            "repeats": 2,
            "on_accelerator": False,
            "interval": "",
            **settings,
        },
        "environment": throughput.describe(target),
        "timelines": [],
        "notes": [],
        "multiples_of_one": scaling.multiples_of_one(measured["rows"]),
        "over_processes": scaling.over_processes(measured["rows"]),
        **measured,
    }


@pytest.mark.parametrize("name", [name.replace("N", "4") for name in rows.ROWS])
def test_a_row_gives_the_batches_of_the_plain_loader(name, loader, target, plan):
    (row,) = rows.rows_called(name, [])
    if (reason := row.missing(target)) is not None:
        pytest.skip(reason)
    for sync_every_step in (False, True):
        (measured,) = run(plan, [row], loader, target, 2, sync_every_step)["rows"]
        assert measured["wrong_repeats"] == []
        assert len(measured["ms_per_step"]["raw"]) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda batches: batches[:-1],
        lambda batches: [*batches, batches[-1]],
        lambda batches: [batches[1], batches[0], *batches[2:]],
        lambda batches: [batches[0], *batches[:-1]],
        lambda batches: [*batches[:-1], (batches[0][0], batches[-1][1])],
    ],
    ids=["lost", "doubled", "out of order", "one for another", "overwritten"],
)
@pytest.mark.parametrize("name", ["peer", "gpuprefetch-planted"])
def test_wrong_batches_are_said(change, name, loader, target, plan):
    result = result_of(run(plan, [a_row(change, name)], loader, target, 2, False), target)
    assert result["rows"][0]["wrong_repeats"] == [0, 1]
    assert f"!: {name} gave other batches than the plain loader in 2 of 2 repeats" in report.table(result)
    complaint = throughput.complaint(result)
    assert complaint is None if name == "peer" else f"wrong batches in {name}" in complaint


def test_the_thread_of_a_row_ends_with_its_epoch():
    taken = []

    def endless():
        while True:
            taken.append(len(taken))
            yield taken[-1]

    epoch = in_background(endless(), 2)
    assert [next(epoch), next(epoch)] == [0, 1]
    epoch.close()
    count = len(taken)
    assert count <= 6
    assert list(in_background(iter("abc"), 1)) == ["a", "b", "c"]
    with pytest.raises(ZeroDivisionError):
        list(in_background((1 // n for n in (1, 0)), 2))
    assert len(taken) == count


def test_the_time_waited_for_data(target, clock):
    def batches():
        for _ in range(10):
            clock.now += 0.030
            yield torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64)

    def step(images, labels):
        clock.now += 0.010
        return images.sum()

    def ends_slowly():
        yield from batches()
        clock.now += 5.0

    epoch = time_epoch(ends_slowly(), 10, step, target, sync_every_step=False)
    assert epoch.step_seconds == pytest.approx(0.040)
    assert epoch.steady_step_seconds == pytest.approx(0.037)
    assert epoch.first_batch_seconds == pytest.approx(0.030)
    assert epoch.waited_share == pytest.approx(0.75)


def test_children_count_as_host_memory(target):
    before = footprint.read_released(target)
    code = "x = bytes(range(256)) * (1 << 19); print('made', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "made\n"
        grown = footprint.read(target).above(before)
        child.communicate("\n")
    assert grown.host >= 128 << 20
    assert grown.pinned is None


def test_a_row_that_holds_memory_shows_it(loader, target, plan):
    def holding(batches):
        held = torch.ones(128 << 20, dtype=torch.uint8)
        for batch in batches:
            assert held is not None
            yield batch

    rows_measured = run(plan, [a_row(lambda x: x, "plain"), a_row(holding, "large")], loader, target, 2, False)["rows"]
    plain, large = (row["host_bytes"] for row in rows_measured)
    assert large - plain >= 96 << 20  # the rest is for what else moves meanwhile


def test_a_row_can_t_change_the_threads_of_the_next(loader, plan):
    before = torch.get_num_threads()
    seen = []

    def in_new_thread(call):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def pins(batches):  # as torch's thread does that pins
        in_new_thread(lambda: torch.set_num_threads(1))
        return batches

    def looks(batches):
        in_new_thread(lambda: seen.append(torch.get_num_threads()))
        return batches

    torch.set_num_threads(3)
    try:
        run(plan, [a_row(pins, "pins"), a_row(looks, "looks")], loader, Target(torch.device("cpu")), 2, False)
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 3, 3, 3]  # footprint, untimed, and two repeats


def test_a_peer_that_fails_is_left_out_and_ours_is_not(loader, target, plan):
    def failing(batches):
        raise OSError("too many open files\nand more")

    measured = run(plan, [a_row(list, "sound"), a_row(failing, "peer")], loader, target, 2, False)
    assert [row["name"] for row in measured["rows"]] == ["sound"]
    assert measured["left_out"] == [{"name": "peer", "reason": "OSError: too many open files"}]
    with pytest.raises(OSError):
        run(plan, [a_row(failing, "gpuprefetch-planted")], loader, target, 2, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "nowhere/x.json"], "there is no folder 'nowhere'"),
        (["--plot", "nowhere/x.png"], "there is no folder 'nowhere'"),
        (["--compare", "a", "b", "--json", "x.json"], "--compare measures nothing"),
        (["--steps", "49"], "--steps: must be a number from 50 to 1000000, got '49'"),
        (["--threads", "0,2"], "must be numbers from 1 to 256, as in 1,2,4; got '0,2'"),
        (["--threads", "2,x"], "must be numbers from 1 to 256"),
        (["--threads", "257"], "must be numbers from 1 to 256"),
        (["--threads", "2", "--loaders", "thread,workers4"], "--loaders names none: thread, workers4"),
        (["--decoder", "gd"], "invalid choice: 'gd'"),
        (["--repeats", "x"], "must be a number from 1 to 10000, got 'x'"),
        (["--prefetch-batches", "0"], "must be a number from 1 to 1000, got '0'"),
        (["--batch-size", "9" * 5000], "must be a number from 1 to 100000"),
        (["--seed", "-1"], "must be a number from 0 to"),
        (["--loaders", ""], "--loaders: no row is named; there are dataloader"),
        (["--loaders", "workers" + "9" * 5000], "--loaders: no row is called workers9"),
        (["--decoder", "opencv", "--workload", "memory"], "--decoder is for --workload jpeg, not memory"),
    ],
)
def test_what_can_t_be_is_said_before_anything_is_measured(arguments, said, capsys):
    with pytest.raises(SystemExit):
        throughput.parse_arguments(arguments)
    assert said in capsys.readouterr().err


def test_an_epoch_of_parts_in_portions_is_that_at_once(loader, target):
    whole, portions = TransportTimer(loader, target), TransportTimer(loader, target)
    whole.advance(STEPS)
    for batches in (0, 1, 7, STEPS):  # the last asks for more than are left
        portions.advance(batches)
    assert len(whole.times) == len(portions.times) == STEPS
    assert portions.checksum() == whole.checksum()
    assert whole.checksum() == time_epoch(loader, STEPS, Wait(0.0), target, False).checksum


def test_of_a_long_epoch_the_parts_of_the_first_batches_are_timed_and_all_are_compared(
    loader, target, plan, monkeypatch
):
    timed, least_of = [], experiment._least_host_parts
    monkeypatch.setattr(experiment, "TIMED_BATCHES", 2)
    monkeypatch.setattr(
        experiment, "_least_host_parts", lambda parts, times: timed.append([*map(len, times)]) or least_of(parts, times)
    )
    both = [a_row(lambda batches: batches, "whole"), a_row(lambda batches: batches[:-1], "one short")]
    whole, one_short = run(plan, both, loader, target, 2, False)["rows"]
    assert timed == [[2, 2]]
    assert (whole["wrong_repeats"], one_short["wrong_repeats"]) == ([], [0, 1])


def test_a_machine_that_did_something_else_is_said():
    def ms(low, high):
        return {"low": low, "high": high}

    parts = {"load": ms(0.82, 90.19), "stage": ms(0.4, 0.9), "copy": ms(2.0, 2.9), "compute": ms(8.0, 11.0)}
    measured = {"rows": [{"ms_per_step": {"median": median}} for median in (9.0, 6.5)], "parts_ms": parts}
    (note,) = throughput.disturbed(measured)  # stage makes no difference to a step, the others did not move that far
    assert note.startswith("load took 0.8 to 90.2 ms alone: something else was at work")


def test_the_parts_of_the_bound_are_the_least_of_each_batch():
    """Batches that differ keep their mean, and what a slow second added in some repeat is left out."""
    compute = SimpleNamespace(step_seconds=5.0)
    transports = [
        [BatchTimes(1.0, 0.5, 0.1, 0.2), BatchTimes(9.0, 2.5, 0.3, 0.4)],
        [BatchTimes(4.0, 3.5, 0.2, 0.4), BatchTimes(3.0, 2.6, 0.2, 0.6)],
    ]
    parts = [
        _parts(transport, compute, SimpleNamespace(step_seconds=8.0, waited_share=0.5)) for transport in transports
    ]
    assert [part.rested for part in parts] == [4.0, 4.0]
    assert _parts(transports[0], compute, None).rested == 5.0
    assert [part.load for part in parts] == [5.0, 3.5]
    for part, copy in zip(_least_host_parts(parts, transports), (0.3, 0.5), strict=True):
        assert (part.load, part.fetch, part.compute) == (2.0, 1.5, 5.0)
        assert (part.stage, part.copy) == pytest.approx((0.15, copy))


class HostEvent:
    """As torch.cuda.Event, of a device that does its work at once."""

    def __init__(self, enable_timing):
        self.seconds = 0.0

    def record(self):
        self.seconds = time.perf_counter()

    def elapsed_time(self, later):
        return (later.seconds - self.seconds) * 1e3


def test_the_device_rests_while_the_host_loads(loader, plan, monkeypatch):
    """Between two steps of the part that is called so, and only where a bound asks for it."""
    done = []

    class Recorded(Nothing):
        def __call__(self, images, labels):
            done.append("step")
            return super().__call__(images, labels)

    target = Target(torch.device("cpu"))
    target.accelerated, target._module = True, torch.cpu
    target.streams = SimpleNamespace(Event=HostEvent)
    monkeypatch.setattr("parts._pinned_like", lambda leaf, target: torch.empty_like(leaf))
    recorded = changed(loader, collate_fn=lambda samples: done.append("load") or default_collate(samples))
    resident = ResidentBatches(recorded, target, STEPS)
    done.clear()
    time_epoch(resident.after_loads(recorded), STEPS, Recorded(), target, True)
    assert done == ["load", "step"] * STEPS

    chosen = rows.rows_called("dataloader", [])
    without_events = Target(torch.device("cpu"))
    for own, sync in ((target, False), (target, True), (without_events, True)):
        measured = run(plan, chosen, loader, own, 2, sync)
        timed = sync and own is target
        assert ("rested" in measured["parts_ms"]) == timed
        assert ("compute, where the host has loaded" in report.table(result_of(measured, own))) == timed


def test_a_row_below_its_bound_says_why(loader, target, plan):
    measured = run(plan, rows.rows_called("dataloader", []), loader, target, 2, False)
    measured["rows"][0]["below_bound"] = True
    result = result_of(measured, target, step="kernels", on_accelerator=True)
    assert "not to be trusted: dataloader took" in throughput.complaint(result)
    assert "its bound: its parts took longer alone" in report.table(result)
    for name in ("torchvision", "torchvision-uint8", "torchvision-io"):
        result["settings"]["decoder"] = name
        assert throughput.complaint(result) is None
        assert "its bound: torch splits the operations" in report.table(result)


def test_without_the_package_there_is_no_result(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gpuprefetch", None)  # as if it were not installed
    options = throughput.parse_arguments(["--device", "cpu", "--loaders", "thread,gpuprefetch"])
    assert throughput.main(options) == 1
    said = capsys.readouterr()
    assert "gpuprefetch can't be used" in said.err and "python -m pip install ." in said.err and said.out == ""


def test_where_no_row_can_be_opened_nothing_is_reported(loader, target, plan):
    @contextlib.contextmanager
    def fails(*_):
        raise OSError("no space left in /dev/shm")
        yield

    peer = dataclasses.replace(rows.ROWS["thread"], name="peer", make=fails)
    with pytest.raises(Unusable, match="no row could run: peer: OSError: no space left in /dev/shm"):
        run(plan, [peer], loader, target, 2, False)


def test_a_folder_or_a_dangling_link_is_no_image(tmp_path):
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "image.jpg").write_bytes(b"broken")
    try:
        (tmp_path / "link.jpg").symlink_to(tmp_path / "gone.jpg")
    except OSError:
        pass  # Windows asks for a right that few have
    assert [path.name for path in find_images(tmp_path, DECODERS["pil"])] == ["image.jpg"]
    image = make_workload("jpeg", 1, 0, tmp_path)
    (tmp_path / "image.jpg").unlink()
    with pytest.raises(Unusable, match="failed on .*image.jpg"):
        image(0)


def test_what_a_row_adds_to_the_step(loader, target, plan):
    measured = run(plan, [rows.ROWS["dataloader"], rows.ROWS["gpuprefetch"]], loader, target, 2, False)
    compute = measured["parts_ms"]["compute"]["raw"]
    for row in measured["rows"]:
        took = zip(row["ms_per_step"]["raw"], compute, strict=True)
        assert row["multiple_of_compute"]["raw"] == pytest.approx([own / alone for own, alone in took])
    lines = report.table(result_of(measured, target)).splitlines()
    start = lines.index("x compute: ms a step over that of compute in the same repeat, median")
    assert [line.split()[0] for line in lines[start + 1 : start + 3]] == ["dataloader", "gpuprefetch"]


def test_a_step_that_does_nothing_leaves_nothing_to_wait_for(loader, target):
    chosen = rows.rows_called("dataloader", []) + rows.rows_called("gpuprefetchN", [2])
    measured = run(Plan(Nothing(), BATCH, STEPS, repeats=2), chosen, loader, target, 2, False)
    assert [row["wrong_repeats"] for row in measured["rows"]] == [[], []]
    said = report.table(result_of(measured, target, step="none"))
    assert "waited" not in said
    assert "gpuprefetchN  " in said and "times dataloader" in said
    assert "waited" in report.table(result_of(measured, target))


def test_only_loading_is_a_command(tmp_path, capsys):
    file = tmp_path / "x.json"
    arguments = ["--workload", "memory", "--samples", "8", "--step", "none", "--threads", "1,2"]
    arguments += ["--loaders", "gpuprefetchN", "--batch-size", "2", "--repeats", "1", "--device", "cpu"]
    assert throughput.main(throughput.parse_arguments([*arguments, "--steps", "50", "--json", str(file)])) == 0
    assert "nothing is copied, so the figures are those of loading alone" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert (result["settings"]["step"], result["settings"]["decoder"]) == ("none", None)
    assert [(each["name"], each["of"]) for each in result["multiples_of_one"]] == [("gpuprefetch2", "gpuprefetch")]
    assert result["parts_ms"]["compute"]["median"] < 5


def test_the_picture_is_drawn(loader, target, plan, tmp_path):
    chosen = [rows.ROWS[name] for name in ("dataloader", "gpuprefetch")]
    result = result_of(run(plan, chosen, loader, target, 2, False), target)
    result["timelines"] = timeline.timelines(chosen, loader, target, 2, Wait(0.002), False)
    result["timelines"][1]["busy"] = [share / timeline.SLOTS for share in range(timeline.SLOTS)]
    draw(json.loads(json.dumps(result)), tmp_path / "x.png")
    assert Path(tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
