"""What the doctor makes of facts: each finding from facts that were made up, Windows' among them."""

import dataclasses

import pytest

from gpuprefetch._doctor_facts import SEVERITIES, Facts
from gpuprefetch._doctor_findings import CHECKS, find, works
from gpuprefetch._doctor_self_test import Overlap, hidden_share
from gpuprefetch._doctor_text import report

pytestmark = pytest.mark.windows

GIB = 1 << 30
CARD = {
    "name": "NVIDIA GeForce RTX 4070",
    "uuid": "GPU-11",
    "driver": "581.29",
    "driver_model": "TCC",
    "link_generation": "4",
    "link_generation_max": "4",
    "link_width": "16",
    "link_width_max": "16",
}
WELL = Facts(
    gpuprefetch="0.1.0",
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    torch_debug=False,
    torch_accelerator="cuda",
    python="3.12.3",
    python_bits=64,
    python_debug=False,
    gil=False,
    platform="Windows-11-10.0.22631-SP0",
    sys_platform="win32",
    cpus=8,
    recommended_threads=8,
    threads={"0": 0, "1": 1, "2": 2, "4": 4, "8": 8},
    intra_op_threads=8,
    environment={},
    openmp=["C:\\train\\Lib\\site-packages\\torch\\lib\\libiomp5md.dll"],
    commit_free_bytes=20 * GIB,
    nvidia_driver=True,
    driver_cuda="13.0",
    cards=[{**CARD, "uuid": "GPU-00", "driver_model": "WDDM", "link_width": "1"}, CARD],
    compiler="C:\\BuildTools",
    extension_torch="2.11",
    extension_compiler="MSVC 194435207",
    extension_optimized=True,
    device="cuda:1",
    device_name="NVIDIA GeForce RTX 4070",
    device_uuid="11",
    device_count=2,
    device_bytes=12 * GIB,
    pinned={"4 KiB": "ok", "64 MiB": "ok"},
    loads_ahead=True,
    overlap=Overlap(0.004, 0.006, 0.0062, 0.95),
)
ON_THE_CPU = {
    "torch_cuda": None,
    "torch_accelerator": None,
    "nvidia_driver": False,
    "driver_cuda": None,
    "cards": None,
    "device": "cpu",
    "device_name": None,
    "device_uuid": None,
    "overlap": None,
    "pinned": None,
}
REBUILD = "gpuprefetch's compiled module was built for torch 2.10, but torch 2.11.0 is running: rebuild it with `pip`"
UNTESTED = {"overlap": None, "loads_ahead": None}

# name, severity, what differs from WELL, what the finding must hold
FOUND = [
    ("32-bit", "error", {"python_bits": 32}, ["32-bit program"]),
    (
        "torch-without-cuda",
        "error",
        {**ON_THE_CPU, "torch": "2.11.0+cpu", "nvidia_driver": True},
        ["NVIDIA driver", "torch 2.11.0+cpu is built without CUDA", "On Windows", "pytorch.org"],
    ),
    (
        "torch-without-cuda",
        "error",
        {**ON_THE_CPU, "cards": [CARD], "sys_platform": "linux"},
        ["an NVIDIA card, but torch", "built without CUDA", "nothing uses the card."],
    ),
    ("old-driver", "error", {"driver_cuda": "12.9"}, ["for CUDA 12.9", "for CUDA 13.0", "can't run it"]),
    ("old-driver", "note", {"driver_cuda": "13.0", "torch_cuda": "13.2"}, ["for CUDA 13.2", "that works"]),
    (
        "no-device",
        "error",
        {**UNTESTED, "device": "cpu", "loads_ahead": True, "device_error": "No CUDA GPUs are available"},
        ["No CUDA GPUs are available", "nvidia-smi"],
    ),
    (
        "no-device",
        "error",
        {"device_error": "No CUDA GPUs", "device": "cpu", "environment": {"CUDA_VISIBLE_DEVICES": ""}},
        ["Unset CUDA_VISIBLE_DEVICES=''"],
    ),
    (
        "no-device",
        "note",
        {"device_error": "Found no NVIDIA driver", "device": "cpu", "nvidia_driver": False, "cards": None},
        ["Found no NVIDIA driver", "Nothing, without a GPU."],
    ),
    (
        "no-device",
        "error",
        {**ON_THE_CPU, "torch_hip": "6.4", "torch_accelerator": "cuda", "device_error": "No HIP GPUs are available"},
        ["No HIP GPUs", "rocm-smi"],
    ),
    (
        "no-device",
        "note",
        {**ON_THE_CPU, "torch_accelerator": "xpu", "device_error": "xpu is not available"},
        ["xpu is not available", "Nothing, without a GPU."],
    ),
    (
        "extension",
        "error",
        {**UNTESTED, "extension_error": REBUILD, "extension_torch": "2.10"},
        ["built for torch 2.10, but torch 2.11.0 is running", "Rebuild it with `pip`."],
    ),
    ("extension", "note", {**ON_THE_CPU, "extension_error": REBUILD}, ["The CPU does not need it."]),
    ("loading-ahead", "error", {"loads_ahead": False}, ["no batch was asked for while a step ran"]),
    ("loading-ahead", "error", {**UNTESTED, "failures": {"loads_ahead": "TimeoutError: no batch"}}, ["TimeoutError"]),
    ("loading-ahead", "error", {**UNTESTED, "device": None, "failures": {"device": "RuntimeError: x"}}, ["Error: x"]),
    ("overlap", "error", {"overlap": Overlap(0.004, 0.006, 0.0099, 0.02)}, ["only 2% of a copy", "other programs"]),
    ("overlap", "slow", {"overlap": Overlap(0.004, 0.006, 0.008, 0.5)}, ["only 50% of a copy"]),
    ("overlap", "error", {"overlap": None, "failures": {"overlap": "OutOfMemoryError: no"}}, ["OutOfMemoryError: no"]),
    ("launch-blocking", "slow", {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, ["Remove-Item", "unset CUDA_LAUNCH"]),
    ("openmp", "note", {"environment": {"KMP_DUPLICATE_LIB_OK": "TRUE"}}, ["KMP_DUPLICATE_LIB_OK is set", "Intel"]),
    ("openmp", "slow", {"openmp": ["a\\libiomp5md.dll", "b\\libomp.dll"]}, ["a\\libiomp5md.dll, b\\libomp.dll"]),
    (
        "openmp",
        "slow",
        {"openmp": ["/a/libgomp.so.1", "/b/libiomp5.so"], "environment": {"KMP_DUPLICATE_LIB_OK": "True"}},
        ["/a/libgomp.so.1, /b/libiomp5.so, and KMP_DUPLICATE_LIB_OK hides it"],
    ),
    ("pinned", "slow", {"pinned": {"4 KiB": "ok", "64 MiB": "CUDA error: out of memory"}}, ["64 MiB (CUDA error: out"]),
    ("one-core", "slow", {"cpus": 1, "intra_op_threads": 1}, ["1 CPU core", "num_threads=0"]),
    ("one-core", "slow", {"container_cpus": 1.0, "intra_op_threads": 1}, ["may use 1 CPU core"]),
    ("one-core", "slow", {"container_cpus": 1.5, "intra_op_threads": 1}, ["1.5 CPU cores"]),
    ("too-many-threads", "slow", {"intra_op_threads": 9}, ["torch.get_num_threads() is 9", "8 CPU cores"]),
    ("too-many-threads", "slow", {"container_cpus": 2.5}, ["is 8", "2.5 CPU cores", "OMP_NUM_THREADS to 2 or"]),
    ("too-many-threads", "slow", {"environment": {"OMP_NUM_THREADS": "16,2"}}, ["OMP_NUM_THREADS is 16"]),
    ("too-many-threads", "slow", {"environment": {"MKL_NUM_THREADS": "16"}}, ["MKL_NUM_THREADS is 16"]),
    (
        "too-many-threads",
        "slow",
        {"environment": {"MKL_NUM_THREADS": "9" * 5000, "OMP_NUM_THREADS": "16"}},
        ["OMP_NUM_THREADS is 16, but"],
    ),
    ("spinning-threads", "slow", {"environment": {"OMP_WAIT_POLICY": "ACTIVE"}}, ["OMP_WAIT_POLICY=ACTIVE"]),
    ("spinning-threads", "slow", {"environment": {"GOMP_SPINCOUNT": "infinity"}}, ["GOMP_SPINCOUNT=infinity"]),
    ("spinning-threads", "slow", {"environment": {"KMP_BLOCKTIME": "infinite"}}, ["KMP_BLOCKTIME=infinite"]),
    ("debug-build", "slow", {"python_debug": True}, ["Python"]),
    ("debug-build", "slow", {"torch_debug": True, "extension_optimized": False}, ["torch, gpuprefetch's compiled"]),
    ("wddm", "note", {"cards": [{**CARD, "driver_model": "WDDM"}]}, ["WDDM", "collects commands"]),
    ("slow-link", "note", {"cards": [{**CARD, "link_width": "4"}]}, ["gen 4 of 4, x4 of x16"]),
    ("slow-link", "note", {"cards": [{**CARD, "link_generation": "2"}]}, ["gen 2 of 4, x16 of x16"]),
    ("commit-limit", "note", {"commit_free_bytes": 3 * GIB}, ["only 3.0 GiB more", "page file"]),
    ("memory-limit", "note", {"container_free_bytes": GIB}, ["leaves 1.0 GiB"]),
    ("no-compiler", "note", {"compiler": None}, ["cl on the path", "Desktop development with C++"]),
    ("no-compiler", "note", {"compiler": None, "sys_platform": "linux"}, ["CXX, c++ and g++", "apt install g++"]),
    ("gil", "note", {"gil": True}, ["no free threading", "pure Python", "free-threaded build"]),
]


@pytest.mark.parametrize(("name", "severity", "change", "texts"), FOUND, ids=[f"{row[0]}-{row[1]}" for row in FOUND])
def test_found(name, severity, change, texts):
    facts = dataclasses.replace(WELL, **change)
    (finding,) = find(facts)
    assert (finding.name, finding.severity) == (name, severity)
    told = " ".join((finding.what, finding.why, finding.do))
    for text in texts:
        assert text in told
    for part in (finding.what, finding.why, finding.do):
        assert part and "\n" not in part
    assert works(facts, [finding]) == (severity != "error")
    printed = report(facts, [finding], works(facts, [finding]), colour=False)
    assert f"\n{severity:8}{finding.what[:20]}" in printed


# What is just well.
@pytest.mark.parametrize(
    "change",
    [
        {},
        ON_THE_CPU,
        {**ON_THE_CPU, "torch_accelerator": "mps", "device": "mps"},
        {**ON_THE_CPU, "torch_accelerator": "xpu", "device": "xpu:0", "nvidia_driver": True},
        {"driver_cuda": "13.1"},
        {"driver_cuda": "14.0"},
        {"driver_cuda": None},
        {"torch_cuda": None, "torch_hip": "6.4", "driver_cuda": "12.0"},
        {"overlap": Overlap(0.004, 0.006, 0.0068, 0.8)},
        {"environment": {"CUDA_LAUNCH_BLOCKING": "0", "KMP_DUPLICATE_LIB_OK": "FALSE", "OMP_NUM_THREADS": "8"}},
        {"environment": {"CUDA_LAUNCH_BLOCKING": "", "OMP_NUM_THREADS": "", "MKL_NUM_THREADS": "many"}},
        {"environment": {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}},
        {"cpus": 2, "container_cpus": 2.0, "intra_op_threads": 2},
        {"commit_free_bytes": 4 * GIB, "container_free_bytes": 2 * GIB},
        {"cards": [{**CARD, "link_width": "8", "link_generation": "3"}]},
        {"cards": [{**CARD, "link_width": None, "link_generation": None}]},
        {"cards": []},
        {"cards": [{**CARD, "uuid": "GPU-2", "driver_model": "WDDM"}, {**CARD, "uuid": "GPU-3"}]},  # whose is ours?
    ],
    ids=str,
)
def test_nothing_found(change):
    facts = dataclasses.replace(WELL, **change)
    assert find(facts) == []
    assert works(facts, [])


def test_each_check_is_tested_by_a_row():
    for check in CHECKS:
        assert any(check(dataclasses.replace(WELL, **change)) for _, _, change, _ in FOUND), check


def test_an_idle_link_is_no_slow_one():
    cards = [{**CARD, "link_generation": "1"}]
    facts = dataclasses.replace(WELL, cards=cards, overlap=None)
    assert find(facts) == []
    assert "gen 1 of 4, x16 of x16, idle" in report(facts, [], True, colour=False)


def test_the_worst_comes_first():
    facts = dataclasses.replace(WELL, compiler=None, python_bits=32, python_debug=True)
    assert tuple(finding.severity for finding in find(facts)) == SEVERITIES


def test_nothing_known():
    """Whatever fails, the doctor has something to say."""
    facts = Facts()
    findings = find(facts)
    assert {finding.severity for finding in findings} <= {"note"}
    assert not works(facts, findings)
    assert report(facts, findings, False, colour=False).count("unknown") > 5


@pytest.mark.parametrize("change", [{}, ON_THE_CPU], ids=["cuda", "cpu"])
def test_all_is_well_on_one_screen(change):
    facts = dataclasses.replace(WELL, **change)
    lines = report(facts, [], True, colour=False).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("Prefetching works here")
    assert "threads of create_dataloader: 0 1 2 4 8 -> 0 1 2 4 8, no process" in lines[15]


def test_each_row_says_what_is_known():
    text = " ".join(report(WELL, [], True, colour=False).split())
    for told in (
        "platform Windows-11-10.0.22631-SP0 (sys.platform: win32)",
        "gpuprefetch 0.1.0",
        "torch 2.11.0+cu130, built for CUDA 13.0",
        "Python 3.12.3, 64 bits",
        "device cuda:1 of 2, NVIDIA GeForce RTX 4070",
        "extension built for torch 2.11 by MSVC 194435207",
        "num_threads 8 recommended, to begin with",
        "pinned memory 4 KiB ok, 64 MiB ok",
        "copying good: copy 4.00 ms, kernel 6.00 ms, both 6.20 ms; 95% of the copy hidden",
    ):
        assert told in text


def test_colour():
    findings = find(dataclasses.replace(WELL, python_debug=True))
    plain, coloured = (report(WELL, findings, True, colour=colour) for colour in (False, True))
    assert "\033" not in plain
    assert "\033[33mslow\033[0m" in coloured and "\033[32mPrefetching works here.\033[0m" in coloured
    assert "\033[31mPrefetching does not work here" in report(WELL, findings, False, colour=True)


@pytest.mark.parametrize(
    ("copy", "kernel", "both", "hidden"),
    [
        (1.0, 1.5, 1.5, 1.0),
        (1.0, 1.5, 2.5, 0.0),
        (1.0, 1.5, 1.75, 0.75),
        (2.0, 1.0, 2.5, 0.5),
        (1.0, 1.5, 1.4, 1.0),  # noise
        (1.0, 1.5, 2.6, 0.0),
    ],
)
def test_the_hidden_share(copy, kernel, both, hidden):
    assert hidden_share(copy, kernel, both) == hidden


@pytest.mark.parametrize("times", [(0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, float("nan"))], ids=str)
def test_times_that_can_not_be(times):
    with pytest.raises(ValueError, match="times must be above 0 seconds"):
        hidden_share(*times)
