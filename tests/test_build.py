"""The build backend finds the torch to build against or ends with one sentence, as does setup.py without a compiler."""

import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
import setuptools
import torch

ROOT = Path(__file__).parent.parent
REFUSAL = (
    "gpuprefetch is compiled against the installed PyTorch, and this build sees no torch>=2.6 (found: none): install "
    "PyTorch first, with setuptools and ninja beside it, then repeat the command with --no-build-isolation."
)


def backend(statement, *, python=sys.executable, options=(), path=()):
    """Run a statement in a process that has imported the backend, with `path` as PYTHONPATH."""
    return run([python, *options, "-c", f"import torch_build; {statement}"], backend_path(*path))


def backend_path(*path):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "build_backend", *path]))}


def run(command, env):
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def isolated_setuptools(tmp_path_factory):
    """A folder with setuptools and nothing else, as pip puts it on PYTHONPATH."""
    folder = tmp_path_factory.mktemp("isolated")
    packages = Path(setuptools.__file__).parents[1]
    for part in [packages / "_distutils_hack", *packages.glob("setuptools*")]:
        shutil.copytree(part, folder / part.name)
    return folder


@pytest.fixture
def empty_environment(tmp_path):
    """A virtual environment without any package: its interpreter and its site-packages."""
    builder = venv.EnvBuilder(symlinks=os.name != "nt")
    builder.create(tmp_path / "env")
    context = builder.ensure_directories(tmp_path / "env")
    packages = sysconfig.get_path("purelib", "venv", {"base": str(tmp_path / "env")})
    return context.env_exe, Path(packages)


def test_installed_torch_is_found_from_inside_the_isolation(isolated_setuptools):
    done = backend(
        "print(torch_build.get_requires_for_build_wheel());"
        "torch_build.show_torch(); import torch; print(torch.__file__)",
        options=["-S"],  # no site-packages, as under pip's isolation
        path=[isolated_setuptools],
    )
    assert done.stdout.splitlines() == ["[]", torch.__file__], done.stderr


def test_without_torch_the_build_takes_the_release_that_pip_will_install(isolated_setuptools, empty_environment):
    python, packages = empty_environment
    report = {"install": [{"metadata": {"name": "torch", "version": "2.99.1+cpu"}}]}
    (packages / "pip.py").write_text(f"print({json.dumps(json.dumps(report))})")
    done = backend("print(torch_build.get_requires_for_build_wheel())", python=python, path=[isolated_setuptools])
    assert done.stdout == "['torch==2.99.1+cpu']\n", done.stderr


def test_without_torch_and_without_pip_one_sentence(isolated_setuptools, empty_environment):
    python, _ = empty_environment
    done = backend("torch_build.get_requires_for_build_editable()", python=python, path=[isolated_setuptools])
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, REFUSAL)


@pytest.mark.parametrize("pip", [True, False])
def test_in_a_throwaway_environment_one_sentence(isolated_setuptools, empty_environment, pip):
    python, packages = empty_environment
    shutil.copytree(isolated_setuptools, packages, dirs_exist_ok=True)
    if pip:  # its choice would be one for the throwaway environment
        (packages / "pip.py").write_text("raise SystemExit('asked')")
    done = backend("torch_build.get_requires_for_build_wheel()", python=python)
    assert (done.returncode, done.stderr) == (1, REFUSAL + "\n")


def test_build_wheel_looks_again(isolated_setuptools, empty_environment):
    python, _ = empty_environment
    done = backend("torch_build.build_wheel('.')", python=python, path=[isolated_setuptools])
    assert done.returncode == 1
    assert done.stderr == REFUSAL.replace("found: none", "found: No module named 'torch'") + "\n"


def test_old_setuptools_one_sentence(tmp_path):
    (tmp_path / "setuptools").mkdir()
    (tmp_path / "setuptools" / "__init__.py").write_text("__version__ = '65.5.0'")
    (tmp_path / "setuptools" / "build_meta.py").write_text("")
    done = backend("pass", path=[tmp_path])
    assert (done.returncode, done.stderr) == (
        1,
        "gpuprefetch is built by setuptools 77 or newer, and this build sees 65.5.0: without build isolation, "
        "install or upgrade setuptools and ninja first.\n",
    )


@pytest.mark.parametrize(
    ("version", "enough"),
    [(None, False), ("1.13.1", False), ("2.5.1+cu124", False), ("2.6.0", True), ("2.14.0.dev20261101", True)],
)
def test_torch_that_is_too_old_counts_as_none(monkeypatch, version, enough):
    monkeypatch.syspath_prepend(ROOT / "build_backend")
    assert importlib.import_module("torch_build").satisfies(version) is enough


def test_sdist_needs_no_torch_and_holds_what_a_build_needs(isolated_setuptools, empty_environment, tmp_path):
    python, _ = empty_environment
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("build_backend", "csrc", "gpuprefetch"):
        shutil.copytree(ROOT / name, tree / name)
    statement = f"import os; os.chdir({str(tree)!r}); torch_build.build_sdist({str(tmp_path)!r})"
    done = backend(statement, python=python, path=[isolated_setuptools])
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    sources = {p.relative_to(tree).as_posix() for p in (tree / "csrc").rglob("*") if p.is_file()}
    assert sources | {"pyproject.toml", "setup.py", "build_backend/torch_build.py", "gpuprefetch/py.typed"} <= names


@pytest.mark.skipif(sys.platform == "win32", reason="CXX does not choose the compiler on Windows")
def test_missing_compiler_one_sentence(tmp_path):
    command = [sys.executable, "setup.py", "build_ext", f"--build-temp={tmp_path}", f"--build-lib={tmp_path}"]
    done = run(command, {**os.environ, "CXX": "no-such-compiler"})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        'gpuprefetch is compiled on installation, and no C++ compiler was found: "no-such-compiler" is not there; '
        "install g++ or clang++ (Debian and Ubuntu: apt install g++), or set CXX."
    )


class Msvc:
    """As much of distutils' compiler object as setup.py asks."""

    initialized = False

    def __init__(self, installed, folder):
        self.installed = installed
        self.cc = str(folder / "cl.exe")  # with a suffix that Windows looks for
        Path(self.cc).touch(mode=0o755)

    def initialize(self):
        if not self.installed:
            raise setuptools.errors.PlatformError("a page of text")


PROMPT = {"VSCMD_ARG_TGT_ARCH": "x64"}


@pytest.mark.parametrize(
    ("installed", "variables", "part"),
    [
        (True, {}, None),
        (True, {**PROMPT, "DISTUTILS_USE_SDK": "1"}, None),
        (True, PROMPT, "\n    set DISTUTILS_USE_SDK=1\nor, in PowerShell, $env:DISTUTILS_USE_SDK = 1"),
        (
            True,
            {"VSCMD_ARG_TGT_ARCH": "x86", "DISTUTILS_USE_SDK": "1"},
            "makes programs for x86, and PyTorch is one for x64",
        ),
        (False, {}, "\n    winget install Microsoft.VisualStudio.2022.BuildTools --override "),
        (False, {}, 'component "Desktop development with C++"'),
    ],
)
def test_msvc_that_cant_be_used_is_one_message_with_the_command(monkeypatch, tmp_path, installed, variables, part):
    for name in ("VSCMD_ARG_TGT_ARCH", "DISTUTILS_USE_SDK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    require_compiler = runpy.run_path(str(ROOT / "setup.py"))["require_compiler"]
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("PATHEXT", ".EXE")
    if part is None:
        require_compiler(Msvc(installed, tmp_path))
        return
    with pytest.raises(SystemExit) as stop:
        require_compiler(Msvc(installed, tmp_path))
    assert part in str(stop.value)


def test_a_32_bit_python_one_sentence():
    done = run([sys.executable, "-c", "import sys; sys.maxsize = 2**31 - 1; import torch_build"], backend_path())
    assert done.returncode == 1
    assert done.stderr == (
        f"gpuprefetch needs a 64-bit Python, as PyTorch does, and this one is a 32-bit program: {sys.executable}\n"
    )


def test_the_arguments_for_msvc(monkeypatch):
    """What its compiler needs for these sources, and nothing that only others know."""
    monkeypatch.setattr(sys, "platform", "win32")
    module = runpy.run_path(str(ROOT / "setup.py"))
    assert all(argument.startswith("/") for argument in module["COMPILE_ARGS"])
    assert {"/permissive-", "/Zc:preprocessor", "/Zc:__cplusplus", "/utf-8", "/bigobj"} <= set(module["COMPILE_ARGS"])
    assert module["MACROS"] == [("_DISABLE_CONSTEXPR_MUTEX_CONSTRUCTOR", None)]
