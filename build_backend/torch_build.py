"""Build backend: setuptools, building against the torch that the package will run with.

Under build isolation pip hides the installed torch, and a torch among the build requirements would be a second, perhaps
different one. So the installed torch is looked up outside the isolation and its folder appended to sys.path; where none
is installed, the build requires exactly the release that the installation is about to take.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

NO_TORCH = (
    "gpuprefetch is compiled against the installed PyTorch, and this build sees no {} (found: {}): install PyTorch "
    "first, with setuptools and ninja beside it, then repeat the command with --no-build-isolation."
)
ONLY_64_BIT = "gpuprefetch needs a 64-bit Python, as PyTorch does, and this one is a 32-bit program: {}"
NO_SETUPTOOLS = (
    "gpuprefetch is built by setuptools 77 or newer, and this build sees {}: without build isolation, "
    "install or upgrade setuptools and ninja first."
)

if sys.maxsize < 2**32:
    raise SystemExit(ONLY_64_BIT.format(sys.executable))
try:
    import setuptools
    from setuptools import build_meta
except ImportError:
    raise SystemExit(NO_SETUPTOOLS.format("none")) from None
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(NO_SETUPTOOLS.format(setuptools.__version__))

build_sdist = build_meta.build_sdist
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

LOOK = """
import importlib.metadata, importlib.util, json, sys
sys.path[:] = [p for p in sys.path if p]  # without the working directory
def folder(name):
    spec = importlib.util.find_spec(name)
    return spec and spec.submodule_search_locations and list(spec.submodule_search_locations)[0]
torch = [d.version for d in importlib.metadata.distributions(name="torch")]
print(json.dumps({
    "torch": torch[0] if torch and folder("torch") else None, "torch_folder": folder("torch"),
    "setuptools_folder": folder("setuptools"), "path": sys.path,
}))
"""


def run_outside(*args):
    """Run this interpreter as it is outside pip's build isolation, which consists of these two variables."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    command = [sys.executable, *args]
    return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8")


def look_outside():
    done = run_outside("-c", LOOK)
    done.check_returncode()
    return json.loads(done.stdout)


def torch_requirement():
    """The project's own "torch>=A.B". By a pattern, since Python 3.10 reads no TOML."""
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    return re.search(r'"(torch>=\d+\.\d+)"', pyproject.read_text(encoding="utf-8")).group(1)


def satisfies(version):
    def release(text):
        return [int(n) for n in re.search(r"(\d+)\.(\d+)", text).groups()]

    return version is not None and release(version) >= release(torch_requirement())


def torch_that_pip_will_install():
    """Its version, or None where pip is missing or finds none. Without --no-deps it would read 3 GB of CUDA wheels."""
    options = ["--quiet", "--dry-run", "--no-deps", "--report", "-"]
    done = run_outside("-m", "pip", "install", *options, torch_requirement())
    chosen = json.loads(done.stdout)["install"] if done.returncode == 0 else []
    return chosen[0]["metadata"]["version"] if chosen else None


def get_requires_for_build_wheel(config_settings=None):
    outside = look_outside()
    if satisfies(outside["torch"]):
        return []
    # pip lays its isolated packages over the environment that it installs into. Others (uv, build) make a throwaway
    # one, whose own setuptools is then the one in use: what will be installed elsewhere can't be known from there.
    over_the_target = outside["setuptools_folder"] != os.path.dirname(setuptools.__file__)
    version = torch_that_pip_will_install() if over_the_target else None
    if version is None:
        raise SystemExit(NO_TORCH.format(torch_requirement(), outside["torch"] or "none"))
    return [f"torch=={version}"]


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings=None):
    return []


def show_torch():
    """Make the torch to build against importable."""
    outside = look_outside()
    if satisfies(outside["torch"]):
        # At the end: setuptools and ninja stay the isolated ones. The rest of the path holds what torch imports.
        folders = [os.path.dirname(outside["torch_folder"]), *outside["path"]]
        sys.path += [f for f in dict.fromkeys(folders) if f not in sys.path]
    try:
        import torch
    except (ImportError, OSError) as e:
        raise SystemExit(NO_TORCH.format(torch_requirement(), e)) from None
    if not satisfies(torch.__version__):
        raise SystemExit(NO_TORCH.format(torch_requirement(), torch.__version__))


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    show_torch()
    # setuptools packs whatever an earlier build left there, modules that are gone from the sources too.
    for leftover in Path("build").glob("lib*"):
        shutil.rmtree(leftover)
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    show_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
