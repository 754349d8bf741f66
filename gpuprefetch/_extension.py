"""The compiled module, or one sentence that says why it can't be used."""

from __future__ import annotations

import functools
import pathlib
from types import ModuleType

import torch

REBUILD = (
    "`python -m pip install --force-reinstall --no-deps --no-cache-dir <folder of gpuprefetch's source>`, or with uv "
    "`uv pip install --reinstall-package torch-gpuprefetch --no-deps --no-build-isolation <that folder>`"
)


@functools.cache
def extension() -> ModuleType:
    """The compiled module, checked against the torch that runs.

    Raises:
        ImportError: it is missing, does not load, or was built for another minor version of torch. A mismatch goes
            unnoticed by the system's loader: virtual tables move between versions while every symbol still resolves.
    """
    try:
        import gpuprefetch._C as module
    except ImportError as error:
        raise ImportError(_missing(error)) from error
    built = (module.TORCH_VERSION_MAJOR, module.TORCH_VERSION_MINOR)
    check_torch(built, torch.__version__)
    return module


def check_torch(built: tuple[int, int], running: str) -> None:
    """Raises ImportError unless ``running``, such as "2.11.0+cu130", is the minor version in ``built``."""
    if running.split(".")[:2] == [str(number) for number in built]:
        return
    raise ImportError(
        f"gpuprefetch's compiled module was built for torch {built[0]}.{built[1]}, but torch {running} is running: "
        f"rebuild it with {REBUILD}"
    )


def shutdown() -> None:
    """Joins the compiled module's threads, if it was ever loaded."""
    if extension.cache_info().currsize:
        extension().shutdown()


def _missing(error: ImportError) -> str:
    package = pathlib.Path(__file__).resolve().parent
    root = package.parent
    built = any(file.suffix in (".so", ".pyd") for file in package.glob("_C.*"))
    if not built and (root / "setup.py").exists() and (root / "csrc").exists():
        return (
            f"gpuprefetch was imported from its source folder {root}, which has no compiled module and would hide an "
            "installed package: install it (`python -m pip install .`) and start Python in another folder, or install "
            "it where it is with `python -m pip install -e .`"
        )
    return f"gpuprefetch's compiled module can't be loaded ({error}): rebuild it with {REBUILD}"
