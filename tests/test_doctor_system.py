"""What the doctor asks the operating system, and its self-test of loading ahead."""

import contextlib
import os
import statistics
import sys
import time

import pytest
import torch

from gpuprefetch import _control_groups, _doctor_probes, _doctor_self_test, _doctor_system
from gpuprefetch._doctor_facts import Facts

pytestmark = pytest.mark.windows

MIB = 1 << 20
posix = pytest.mark.skipif(sys.platform == "win32", reason="files of Linux, and scripts")


@pytest.fixture
def groups(tmp_path):
    """Writes files below a folder that stands for /sys/fs/cgroup, and the process's own list of groups."""

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path / "cgroup", tmp_path / "own"

    return write


STAT = f"anon 5\ninactive_file {50 * MIB}\ntotal_inactive_file {70 * MIB}\n"


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "5"}, None),
        ("0::/a/b\n", {"a/b/memory.max": f"{300 * MIB}\n", "a/b/memory.current": f"{200 * MIB}\n"}, 100 * MIB),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": str(900 * MIB),
                "a/b/memory.current": "0",
                "a/memory.max": str(300 * MIB),
                "a/memory.current": str(200 * MIB),
                "a/memory.stat": STAT,
            },
            150 * MIB,
        ),
        ("0::/not/here\n", {"memory.max": str(300 * MIB), "memory.current": str(400 * MIB)}, 0),
        (
            "4:cpu,cpuacct:/d\n3:memory:/d\n",
            {
                "memory/d/memory.limit_in_bytes": str(300 * MIB),
                "memory/d/memory.usage_in_bytes": str(200 * MIB),
                "memory/d/memory.stat": STAT,
            },
            170 * MIB,
        ),
        (
            "3:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"},
            None,
        ),
        ("0::/\n", {"memory.max": "300"}, None),
        ("", {}, None),
    ],
    ids=["v2 max", "v2", "v2 parent", "v2 in a container", "v1", "v1 unlimited", "no use known", "none"],
)
def test_the_memory_that_a_container_is_left(groups, own, files, free):
    assert _doctor_system.container_free_bytes(*groups(own, files)) == free


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/a\n", {"a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a\n", {"a/cpu.max": "max 100000\n", "cpu.max": "400000 100000"}, 4.0),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, None),
        ("4:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "50000\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("4:cpu,cpuacct:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, None),
        ("4:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "5\n", "cpu/d/cpu.cfs_period_us": "0\n"}, None),
        ("", {}, None),
    ],
)
def test_the_cpus_that_a_container_is_granted(groups, own, files, cpus):
    assert _control_groups.granted_cpus(*groups(own, files)) == cpus


def test_cards():
    output = (
        "NVIDIA H100 80GB HBM3, GPU-1b, 580.159.04, [N/A], 5, 5, 16, 16\n"
        "NVIDIA T1000, GPU-2c, 581.29, WDDM, 1, N/A, [Not Supported], 16\n"
        "No devices were found\n"
    )
    first, second = _doctor_system.parsed_cards(output)
    assert first["name"] == "NVIDIA H100 80GB HBM3"
    assert (first["driver"], first["driver_model"], first["link_generation"]) == ("580.159.04", None, "5")
    assert (second["driver_model"], second["link_generation_max"], second["link_width"]) == ("WDDM", None, None)
    assert Facts(cards=[first, second], device_uuid="2c").card is second
    assert Facts(cards=[first, second], device_uuid="9f").card == {}
    assert Facts(cards=[first]).card is first


@posix
@pytest.mark.parametrize(
    ("script", "cards"),
    [
        ("echo A card, GPU-1, 580.1, [N/A], 4, 5, 16, 16", 1),
        ("echo No devices were found; exit 6", None),
        ("exit 0", None),
        (None, None),
    ],
    ids=["a card", "no device", "silent", "no nvidia-smi"],
)
def test_nvidia_smi(monkeypatch, tmp_path, script, cards):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    found = _doctor_system.nvidia_cards()
    assert (found and len(found)) == cards


@pytest.mark.process
def test_a_program_that_hangs(monkeypatch):
    monkeypatch.setattr(_doctor_system, "_LIMIT_SECONDS", 0.5)
    stuck = "import time; print(5, flush=True); time.sleep(60)"
    started = time.monotonic()
    assert _doctor_system.output_of([sys.executable, "-c", stuck]) is None
    assert time.monotonic() - started < 30


@pytest.mark.process
def test_what_a_program_prints():
    assert _doctor_system.output_of([sys.executable, "-c", "print(5)"]).strip() == "5"
    assert _doctor_system.output_of([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert _doctor_system.output_of(["no-such-program"]) is None


@posix
def test_the_compiler(monkeypatch):
    monkeypatch.setattr(_doctor_system.sysconfig, "get_config_var", lambda name: {"CXX": "g++ -pthread"}[name])
    monkeypatch.delenv("CXX", raising=False)
    there = {"c++": "/usr/bin/c++", "g++": "/usr/bin/g++"}
    assert _doctor_system.compiler(there.get) == "/usr/bin/c++"
    assert _doctor_system.compiler({"c++": "/usr/bin/c++"}.get) is None  # what links is missing
    assert _doctor_system.compiler({}.get) is None
    with monkeypatch.context() as unfinished:
        unfinished.setenv("CXX", "'c++ -O2")
        assert _doctor_system.compiler(there.get) is None
    monkeypatch.setenv("CXX", "ccache clang++")
    assert _doctor_system.compiler({**there, "ccache": "/usr/bin/ccache"}.get) == "/usr/bin/ccache"
    assert _doctor_system.compiler(there.get) is None


@pytest.mark.parametrize(
    "name", ["libgomp.so.1", "libgomp-a34b3233.so.1", "libiomp5md.dll", "libomp140.x86_64.dll", "vcomp140.dll"]
)
def test_what_is_an_openmp_library(name):
    assert _doctor_system._OPENMP.match(name)
    assert not _doctor_system._OPENMP.match(f"not{name}")


@pytest.mark.skipif(sys.platform == "darwin", reason="not asked there")
def test_the_openmp_library_of_torch_is_seen():
    found = _doctor_system.openmp_runtimes()
    assert len(found) >= 1
    for file in found:
        assert os.path.isfile(file) and "omp" in os.path.basename(file)


@pytest.mark.parametrize(("answer", "told"), [(0, "12.8"), (3, None)], ids=["known", "an error"])
def test_the_drivers_newest_cuda(monkeypatch, answer, told):
    class Driver:
        @staticmethod
        def cuDriverGetVersion(reference):
            reference._obj.value = 12080
            return answer

    monkeypatch.setattr(_doctor_system.ctypes, "CDLL", lambda name: Driver)
    assert _doctor_system.driver_cuda() == told


def test_what_can_be_pinned():
    answers = _doctor_probes._pinned()
    assert list(answers) == ["4 KiB", "64 MiB"]
    for answer in answers.values():
        assert answer == "ok" if torch.cuda.is_available() else answer
    if not torch.accelerator.is_available():
        assert "ok" not in answers.values()


def test_the_commit_limit_is_windows_own():
    left = _doctor_system.commit_free_bytes()
    assert (left > MIB) if sys.platform == "win32" else left is None


def test_a_probe_that_fails_leaves_its_reason(monkeypatch):
    def broken():
        raise ValueError("out of order\nand more")

    monkeypatch.setitem(_doctor_probes._HOST, "cpus", broken)
    facts = _doctor_probes.host_facts()
    assert facts.cpus is None
    assert facts.failures == {"cpus": "ValueError: out of order"}
    assert facts.torch == torch.__version__


def test_the_cpu_loads_ahead():
    assert _doctor_self_test.loads_ahead(torch.device("cpu")) is True


def test_a_loader_that_does_not_run_ahead_is_told(monkeypatch):
    monkeypatch.setattr(_doctor_self_test, "PrefetchIterator", lambda loader, *_, **__: contextlib.nullcontext(loader))
    monkeypatch.setattr(_doctor_self_test, "_WAIT_SECONDS", 0.1)
    assert _doctor_self_test.loads_ahead(torch.device("cpu")) is False


def test_wrong_batches_are_told(monkeypatch):
    def wrong(loader, *_, **__):
        return contextlib.nullcontext([batch + 1 for batch in loader])

    monkeypatch.setattr(_doctor_self_test, "PrefetchIterator", wrong)
    with pytest.raises(RuntimeError, match="arrived as"):
        _doctor_self_test.loads_ahead(torch.device("cpu"))


@pytest.mark.gpu
def test_the_self_test_measures_and_gives_its_memory_back():
    from gpuprefetch._copier import Copier

    device = torch.device("cuda", torch.cuda.current_device())
    before = dict(Copier.of(device)._shares)
    measured = []
    for _ in range(3):  # medians: other tests may keep the device and the copying threads busy
        overlap = _doctor_self_test.measure_overlap(device)
        assert Copier.of(device)._shares == before
        times = (overlap.copy_seconds, overlap.kernel_seconds, overlap.both_seconds)
        assert overlap.hidden == _doctor_self_test.hidden_share(*times)
        measured.append((*times, overlap.hidden))
    alone, beside, both, hidden = map(statistics.median, zip(*measured, strict=True))
    assert 0 < alone < beside <= both * 1.1
    assert hidden >= 0.5
