"""Counting takes of the interpreter's lock, with a gdb that counts by a rule."""

import json
import subprocess
import sys

import gil_takes
import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the script needs gdb on Linux")


@pytest.fixture
def gdb(tmp_path, monkeypatch):
    """Puts a program into gdb's place that runs `body` with the row, the batch size and the batches of its command."""

    def put(body):
        program = tmp_path / "gdb"
        program.write_text(f"#!{sys.executable}\nimport sys\nrow, size, count = sys.argv[-3:]\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


COUNTING = """
takes = 30_000 + int(count) * (int(size) + len(row))
print("[Inferior 1 (process 7) exited normally]")
print(f"breakpoint already hit {takes} times")
"""


def test_takes_of_a_batch(gdb, tmp_path, capsys):
    gdb(COUNTING)
    written = tmp_path / "out.json"
    assert gil_takes.main(["--repeats", "2", "--json", str(written)]) == 0
    rows = json.loads(written.read_text())["rows"]
    assert [row["row"] for row in rows] == ["dataloader", "gpuprefetch0", "gpuprefetch", "gpuprefetch4"]
    for row in rows:
        for size, counts in row["takes_a_batch"].items():
            assert counts["raw"] == [int(size) + len(row["row"])] * 2
    assert capsys.readouterr().out.splitlines()[-1].split() == ["gpuprefetch4", "20.0", "76.0"]


@pytest.mark.parametrize(
    "body, said",
    [
        ("print('No symbol table is loaded.')", "gdb counted nothing"),
        (COUNTING.replace("exited normally", "exited with code 01"), "gdb counted nothing"),
    ],
)
def test_a_process_that_can_not_be_counted_is_no_figure(body, said, gdb, capsys):
    gdb(body)
    assert gil_takes.main([]) == 1
    assert said in capsys.readouterr().err


def test_without_gdb_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gil_takes.main([]) == 1
    assert "gdb is not installed" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the planted device is built for Linux")
@pytest.mark.parametrize("name", ["dataloader", "gpuprefetch4"])
def test_what_is_counted_runs(name, tmp_path):
    """In a process of its own, as gdb starts it: this one may have the sources in place of the installed package."""
    command = [sys.executable, gil_takes.__file__, "--load", name, "2", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
