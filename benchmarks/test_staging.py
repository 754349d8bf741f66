"""staging.py compiles, and its figures are those of what it ran."""

import json
import shutil

import pytest
import staging
import torch

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler called c++")


def test_a_run(tmp_path, capsys):
    written = tmp_path / "out.json"
    quick = ["--threads", "1,2", "--sizes", "256K,4M", "--repeats", "2", "--ring-mib", "1", "--bus-gb", "2"]
    assert staging.main([*quick, "--json", str(written)]) == 0
    result = json.loads(written.read_text(encoding="utf-8"))
    assert [(row["threads"], row["bytes"]) for row in result["rows"]] == [
        (threads, size) for threads in (1, 2) for size in (256 << 10, 4 << 20)
    ]
    for row in result["rows"]:
        assert len(row["us"]["raw"]) == len(row["memcpy_us"]["raw"]) == len(row["alone_us"]["raw"]) == 2
        assert row["us"]["low"] >= row["bytes"] / 2e9 * 1e6 + row["first_us"]["low"] > 0  # the bus takes that long
        assert row["copies"] == row["bytes"] // (128 << 10)  # a ring of 1 MiB has eight pieces
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out[-4:]] == [["0.25", "1"], ["4.00", "1"], ["0.25", "2"], ["4.00", "2"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "0"], "must be positive"),
        (["--bus-gb", "0"], "must be positive"),
        (["--link-gb", "-1"], "not negative"),
        (["--ring-mib", "0"], "--ring-mib must be 1 or more; got 0"),
        (["--sizes", "x"], "--sizes"),
        (["--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        staging.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_busy_link_needs_a_device(capsys):
    with pytest.raises(SystemExit):
        staging.main(["--link-gb", "0,20"])
    assert "--link-gb needs a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_beside_a_busy_link(tmp_path, capsys):
    written = tmp_path / "out.json"
    quick = ["--threads", "2", "--sizes", "4M", "--repeats", "5", "--link-gb", "0,4"]
    assert staging.main([*quick, "--json", str(written)]) == 0
    idle, busy = json.loads(written.read_text(encoding="utf-8"))["rows"]
    assert idle["carried_gb_per_s"] == 0
    assert 0 < busy["carried_gb_per_s"] <= 4.1
    assert f"carries {busy['carried_gb_per_s']:.1f} GB/s, 4 asked for" in capsys.readouterr().out


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert staging.main(["--sizes", "256K"]) == 1
    assert "staging.py: can't compile: " in capsys.readouterr().err
