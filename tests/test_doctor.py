"""``python -m gpuprefetch``, as a process: what it prints and writes, and its exit status."""

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch
from loaders import script
from test_doctor_findings import FOUND

from gpuprefetch import _doctor_probes
from gpuprefetch.__main__ import main
from gpuprefetch._doctor_facts import Facts, Finding
from gpuprefetch._environment import driver_library

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).resolve().parent.parent


def has_driver():
    try:
        ctypes.CDLL(driver_library())
    except OSError:
        return False
    return True


on_the_cpu = pytest.mark.skipif(torch.accelerator.is_available() or has_driver(), reason="there is a GPU, or a driver")
with_and_without_card = pytest.mark.parametrize(
    "has_card", [pytest.param(False, marks=on_the_cpu), pytest.param(True, marks=pytest.mark.gpu)]
)


def doctor(*arguments, cwd=None, seconds=120, **variables):
    """Its exit status, stdout and stderr."""
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    for name in _doctor_probes._VARIABLES:
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "gpuprefetch", *arguments],
        cwd=cwd or tempfile.gettempdir(),
        env={**environment, **variables},
        capture_output=True,
        encoding="utf-8",
        timeout=seconds,
    )
    return done.returncode, done.stdout, done.stderr


def patched(body, *arguments):
    """The doctor, in a process that runs ``body`` first."""
    run = f"sys.argv = ['doctor', *{arguments!r}]\nrunpy.run_module('gpuprefetch', run_name='__main__')"
    return script(f"import runpy, sys\n{textwrap.dedent(body)}\n{run}", prelude="", seconds=120)


def named(told, name):
    (finding,) = [finding for finding in told["findings"] if finding["name"] == name]
    return finding


@pytest.mark.windows
@on_the_cpu
def test_on_the_cpu_it_works():
    status, out, err = doctor()
    assert status == 0, out + err
    assert err == ""
    lines = out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert "\033" not in out
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    assert f"torch          {torch.__version__}, built for {built_for}" in lines
    assert "device         cpu" in lines
    assert "num_workers    threads of create_dataloader: 0 1 2 4 8 -> 0 1 2 4 8, no process" in lines
    assert "loading ahead  good: during a step the next batch is loaded" in lines
    assert f"(sys.platform: {sys.platform})" in " ".join(out.split())
    assert lines[-1] == "Prefetching works here, on the CPU: loading overlaps, nothing is copied."


@on_the_cpu
def test_json_holds_every_fact_and_finding():
    status, out, err = doctor("--json", CUDA_LAUNCH_BLOCKING="1", CXX="no-such-compiler")
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert list(told) == ["works", "facts", "findings"]
    assert told["works"] is True
    assert list(told["facts"]) == [field.name for field in dataclasses.fields(Facts)]
    facts = told["facts"]
    assert facts["failures"] == {}
    assert facts["torch"] == torch.__version__
    assert facts["python"] == sys.version.split()[0]
    assert facts["sys_platform"] == sys.platform
    assert facts["cpus"] >= facts["recommended_threads"] >= 1
    assert facts["threads"] == {"0": 0, "1": 1, "2": 2, "4": 4, "8": 8}
    assert facts["environment"] == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert facts["extension_torch"] == ".".join(torch.__version__.split(".")[:2])
    assert facts["extension_compiler"].split()[0] in ("GCC", "Clang", "MSVC")
    assert facts["extension_optimized"] is True
    assert facts["compiler"] is None
    for finding in told["findings"]:
        assert list(finding) == [field.name for field in dataclasses.fields(Finding)]
    assert named(told, "launch-blocking")["severity"] == "slow"
    assert named(told, "no-compiler")["severity"] == "note"
    assert facts["gil"] is getattr(sys, "_is_gil_enabled", lambda: True)()
    assert ("gil" in {finding["name"] for finding in told["findings"]}) == facts["gil"]


def test_what_the_environment_sets_is_found():
    many = {"OMP_NUM_THREADS": "512", "MKL_NUM_THREADS": "512", "KMP_DUPLICATE_LIB_OK": "TRUE"}
    told = json.loads(doctor("--json", **many)[1])
    assert told["facts"]["environment"] == many
    assert "512" in named(told, "too-many-threads")["what"]
    assert any("KMP_DUPLICATE_LIB_OK" in finding["what"] for finding in told["findings"] if finding["name"] == "openmp")

    spinning = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "infinity", "KMP_BLOCKTIME": "infinite"}
    others = {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    variables = {"OMP_NUM_THREADS": "1", **spinning, **others}
    told = json.loads(doctor("--json", **variables)[1])
    assert told["facts"]["environment"] == variables
    assert "OMP_WAIT_POLICY" in named(told, "spinning-threads")["what"]

    documented = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in documented for name in _doctor_probes._VARIABLES)


def test_what_the_system_says_arrives():
    """Each source by an answer that no machine gives, through the facts to its finding."""
    said = {
        "container_cpus": 0.25,
        "container_free_bytes": 123 << 20,
        "commit_free_bytes": 45 << 20,
        "openmp": ["/one/libgomp.so.1", "/other/libiomp5.so"],
        "nvidia_driver": True,
        "driver_cuda": "1.2",
        "cards": [{"name": "a card", "uuid": "GPU-0", "driver": "1.2"}],
        "torch_debug": True,
        "python_bits": 32,
        "intra_op_threads": 4096,
    }
    status, out, err = patched(
        f"""
        import struct, torch
        from gpuprefetch import _control_groups, _doctor_system, _environment
        said = {said!r}
        _control_groups.granted_cpus = lambda: said["container_cpus"]
        _doctor_system.container_free_bytes = lambda: said["container_free_bytes"]
        _doctor_system.commit_free_bytes = lambda: said["commit_free_bytes"]
        _doctor_system.openmp_runtimes = lambda: said["openmp"]
        _doctor_system.has_nvidia_driver = lambda: said["nvidia_driver"]
        _doctor_system.driver_cuda = lambda: said["driver_cuda"]
        _doctor_system.nvidia_cards = lambda: said["cards"]
        torch.version.debug = said["torch_debug"]
        size_of = struct.calcsize
        struct.calcsize = lambda format: said["python_bits"] // 8 if format == "P" else size_of(format)
        _environment._omp_set_num_threads = lambda: lambda number: None
        torch.get_num_threads = lambda: said["intra_op_threads"]
        """,
        "--json",
    )
    told = json.loads(out)
    assert {name: told["facts"][name] for name in said} == said, err
    found = {finding["name"] for finding in told["findings"]}
    expected = {"32-bit", "debug-build", "openmp", "too-many-threads", "one-core", "memory-limit"}
    assert expected <= found, found
    assert ("old-driver" in found) == (told["facts"]["torch_cuda"] is not None)
    assert ("torch-without-cuda" in found) == (told["facts"]["torch_cuda"] is None)


def test_the_docs_tell_each_finding():
    table = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    for name, severity, _, _ in FOUND:
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}` |")]
        assert severity in row.split("|")[2], row


def test_each_finding_is_printed():
    _, out, _ = doctor(CUDA_LAUNCH_BLOCKING="1")
    assert "\nslow    CUDA_LAUNCH_BLOCKING is set\n  why   Each launch" in out
    assert "Remove-Item Env:CUDA_LAUNCH_BLOCKING" in out


@with_and_without_card
def test_in_the_clone_it_says_why_there_is_no_module(has_card, tmp_path):
    for folder in ("gpuprefetch", "csrc"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("_C.*.so", "*.pyd", "__pycache__")
        )
    shutil.copy(ROOT / "setup.py", tmp_path)
    status, out, _ = doctor("--json", cwd=tmp_path, PYTHONPATH="")
    told = json.loads(out)
    finding = named(told, "extension")
    assert finding["what"].startswith(f"gpuprefetch was imported from its source folder {tmp_path.resolve()}")
    assert finding["do"].startswith("Install it (`python -m pip install .`) and start Python in another folder")
    # The CPU does not need the module.
    assert (finding["severity"], told["works"], status) == (("error", False, 1) if has_card else ("note", True, 0))
    assert told["facts"]["extension_torch"] is None


@with_and_without_card
def test_a_module_built_for_another_torch(has_card):
    status, out, err = patched("import torch\ntorch.__version__ = '2.99.0'", "--json")
    told = json.loads(out)
    finding = named(told, "extension")
    assert "but torch 2.99.0 is running" in finding["what"]
    assert finding["do"].startswith("Rebuild it with `python -m pip install")
    verdict = (finding["severity"], told["works"], status)
    assert verdict == (("error", False, 1) if has_card else ("note", True, 0)), err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_cpu_build_of_torch_beside_a_driver_does_not_work():
    there = "kernel32.dll" if sys.platform == "win32" else None
    fake = f"""
        import torch
        from gpuprefetch import _doctor_probes, _doctor_system
        _doctor_system.driver_library = lambda: {there!r}
        _doctor_probes.accelerator = lambda: None
        torch.version.cuda = torch.version.hip = None
        """
    status, out, _ = patched(fake, "--json")
    told = json.loads(out)
    assert (status, told["works"]) == (1, False)
    assert named(told, "torch-without-cuda")["severity"] == "error"
    assert told["facts"]["nvidia_driver"] is True
    assert told["facts"]["device"] is None  # it is not even asked
    assert "cuDriverGetVersion" in told["facts"]["failures"]["driver_cuda"]
    status, out, _ = patched(fake)
    assert status == 1
    assert out.splitlines()[-1] == "Prefetching does not work here: see the errors above."


def test_a_device_that_does_not_answer():
    status, out, err = patched(
        """
        import faulthandler, threading
        from gpuprefetch import _doctor_probes, _doctor_system
        def hang(facts):
            threading.Event().wait(100)
        _doctor_probes.with_device = hang
        _doctor_system.driver_library = lambda: "none"
        later = faulthandler.dump_traceback_later
        def sooner(seconds, **options):
            assert 30 <= seconds <= 300
            later(1, **options)
        faulthandler.dump_traceback_later = sooner
        """
    )
    assert status == 1, out
    assert "Timeout" in err and "hang" in err


def test_the_report(tmp_path):
    file = tmp_path / "report.txt"
    status, out, _ = doctor("--report", str(file), "--json")
    text = file.read_text(encoding="utf-8")
    assert text.startswith("gpuprefetch ")
    lines, _, told = text.partition("\n{")
    assert json.loads("{" + told) == json.loads(out)
    assert f"torch          {torch.__version__}" in lines
    assert json.loads(out)["works"] == (status == 0)


def refused(capsys, *arguments):
    """Its status, stdout and stderr, where it examines nothing."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return (ended.value.code, *capsys.readouterr())


@pytest.mark.parametrize("name", ["missing/report.txt", "", "."])
def test_a_report_that_can_not_be_written(tmp_path, name, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, err = refused(capsys, "--report", name)
    assert (status, out) == (2, "")
    assert err.startswith(f"python -m gpuprefetch: can't write --report {name!r}: ")
    assert err.count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk(tmp_path):
    status, _, err = doctor("--report", "/dev/full")
    assert status == 2
    assert err == "python -m gpuprefetch: can't write --report '/dev/full': [Errno 28] No space left on device\n"


@on_the_cpu
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_output_that_nobody_takes_leaves_status_and_report(tmp_path):
    command = [sys.executable, "-m", "gpuprefetch", "--report", "report.txt"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr == "python -m gpuprefetch: can't write to standard output: [Errno 28] No space left on device\n"
    assert "Prefetching works here" in (tmp_path / "report.txt").read_text(encoding="utf-8")


@on_the_cpu
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_status_tells_where_nobody_reads_a_word(arguments, tmp_path):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "gpuprefetch", *arguments], cwd=tmp_path, stdout=write, stderr=write, timeout=120
    )
    os.close(write)
    assert done.returncode == 0


@pytest.mark.parametrize("arguments", [["--jsn"], ["--report"], ["more"]])
def test_wrong_use(arguments, capsys):
    status, out, err = refused(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "usage: python -m gpuprefetch" in err and arguments[0] in err


def test_help_names_the_exit_status(capsys):
    status, out, _ = refused(capsys, "--help")
    assert status == 0
    assert "0 if prefetching works here, 1 if not, 2 for wrong use" in " ".join(out.split())


@pytest.mark.parametrize(
    ("variables", "is_terminal", "colour"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm"}, False, False),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="there the console is asked")
def test_colour_where_the_terminal_has_it(monkeypatch, variables, is_terminal, colour):
    import gpuprefetch.__main__ as command

    class Stream:
        def isatty(self):
            return is_terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert command._takes_colour(Stream()) is colour


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_colour():
    ours, its = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [sys.executable, "-m", "gpuprefetch"]
    with subprocess.Popen(command, stdout=its, cwd=tempfile.gettempdir(), env={**environment, "TERM": "xterm"}) as run:
        os.close(its)
        printed = b""
        with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # EIO: nobody writes any more
            while read := terminal.read(4096):
                printed += read
        assert run.wait(60) in (0, 1)
    assert b"\033[32mPrefetching works here" in printed or b"\033[31mPrefetching does not work here" in printed


@pytest.mark.gpu
def test_on_a_card_it_works(tmp_path):
    file = tmp_path / "report.txt"
    status, out, err = doctor("--report", str(file))
    assert status == 0, out + err
    lines = out.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "Prefetching works here."
    told = json.loads("{" + file.read_text(encoding="utf-8").partition("\n{")[2])
    facts = told["facts"]
    assert facts["overlap"]["hidden"] >= 0.5
    assert facts["device"] == "cuda:0"
    assert facts["device_name"] == torch.cuda.get_device_name(0)
    assert facts["device_count"] == torch.cuda.device_count()
    assert facts["pinned"] == {"4 KiB": "ok", "64 MiB": "ok"}
    assert facts["loads_ahead"] is True
    assert facts["failures"] == {}


@pytest.mark.gpu
def test_on_a_card_launches_that_wait_are_found():
    status, out, err = doctor("--json", CUDA_LAUNCH_BLOCKING="1")
    told = json.loads(out)
    assert (status, told["works"]) == (1, False), err
    assert named(told, "launch-blocking")["severity"] == "slow"
    assert named(told, "overlap")["severity"] == "error"
    assert told["facts"]["overlap"]["hidden"] < 0.5


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is not None, reason="ROCm has a variable of its own")
def test_a_hidden_card_is_found():
    status, out, err = doctor("--json", CUDA_VISIBLE_DEVICES="")
    told = json.loads(out)
    assert status == 1, err
    finding = named(told, "no-device")
    assert finding["severity"] == "error"
    assert "CUDA_VISIBLE_DEVICES=''" in finding["do"]
