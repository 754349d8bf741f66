"""How every benchmark treats files that can't be written, what reads its output, and Ctrl-C."""

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import copy_speed
import handover
import memory
import output
import pytest
import slow_datasets
import throughput
import torch
from target import Target, describe


@pytest.mark.parametrize(
    "start",
    [
        handover.main,
        memory.main,
        slow_datasets.main,
        copy_speed.parse_arguments,
        throughput.parse_arguments,
    ],
    ids=lambda start: start.__module__,
)
def test_a_folder_that_is_not_there(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", str(tmp_path / "missing" / "x.json")])
    with pytest.raises(SystemExit):
        start()
    assert "there is no folder" in capsys.readouterr().err


def options(json=None, plot=None):
    return argparse.Namespace(json=json, plot=plot)


@pytest.mark.parametrize(
    ("json_file", "plot_file", "said"),
    [
        (".", None, "--json '.' is a folder"),
        (None, "folder", "is a folder"),
        ("a", "a", "--json and --plot are both "),
        (None, "a.pdf", "the picture is a PNG"),
    ],
)
def test_what_can_not_be_written_is_said_before_anything_is_measured(
    json_file, plot_file, said, tmp_path, monkeypatch, capsys
):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    chosen = options(*(None if name is None else Path(name) for name in (json_file, plot_file)))
    with pytest.raises(SystemExit):
        output.check_files(argparse.ArgumentParser(), chosen)
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_asking_leaves_files_as_they_are(tmp_path):
    there, new = tmp_path / "there.json", tmp_path / "new.png"
    there.write_text("old")
    output.check_files(argparse.ArgumentParser(), options(there, new))
    assert there.read_text() == "old"
    assert not new.exists()


def test_a_picture_that_can_not_be_drawn_leaves_the_rest(tmp_path, capsys):
    chosen = options(tmp_path / "x.json", tmp_path / "x.png")
    assert not output.finish("the table", {"a": 1}, chosen, lambda result, file: result["b"])
    told = capsys.readouterr()
    assert told.out == "the table\n" and "can't be written: KeyError: 'b'" in told.err
    assert json.loads(chosen.json.read_text()) == {"a": 1}


def test_a_process_without_a_console(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert output.finish("the table", {"a": 1}, options(tmp_path / "x.json"))


def test_a_matplotlib_that_is_broken_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    with pytest.raises(SystemExit):
        output.check_files(argparse.ArgumentParser(), options(None, tmp_path / "x.png"))
    assert "--plot needs matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_one_file_that_fails_takes_neither_the_other_nor_the_text_along(tmp_path, capsys):
    def draw(result, file):
        file.write_text("picture")

    chosen = options(Path("/dev/full"), tmp_path / "x.png")
    assert not output.finish("the table", {"a": 1}, chosen, draw)
    told = capsys.readouterr()
    assert told.out == "the table\n"
    assert told.err.startswith("--json '/dev/full' can't be written: OSError: ")
    assert chosen.plot.read_text() == "picture"


def test_output_that_has_no_umlauts_loses_no_file(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    assert output.finish("größer", {"a": 1}, options(file))
    assert plain.buffer.getvalue().strip() == rb"gr\xf6\xdfer"
    assert json.loads(file.read_text()) == {"a": 1}


def test_output_that_nobody_reads_is_no_error(tmp_path):
    file = tmp_path / "x.json"
    program = f"""
import argparse, pathlib, sys
sys.path.insert(0, {str(Path(output.__file__).parent)!r})
import output
options = argparse.Namespace(json=pathlib.Path({str(file)!r}), plot=None)
output.start(lambda: 0 if output.finish("x" * 100_000, {{"a": 2}}, options) else 1)
"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    finally:
        os.close(writer)
    assert (ended.stderr, ended.returncode) == (b"", 0)
    assert json.loads(file.read_text()) == {"a": 2}


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["folder/x.py"])
    with pytest.raises(SystemExit) as ended:
        output.start(interrupted)
    assert ended.value.code == output.INTERRUPTED
    assert capsys.readouterr().err == "x.py: interrupted\n"
    with pytest.raises(SystemExit) as ended:
        output.start(lambda: 3)
    assert ended.value.code == 3


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not tell")
def test_a_result_names_the_processor_and_the_start_of_the_machine():
    described = describe(Target(torch.device("cpu")))
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    assert described["cpu"] in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    assert described["boot"] == hashlib.sha256(boot_id).hexdigest()[:12] and described["boot"] not in boot_id.decode()
