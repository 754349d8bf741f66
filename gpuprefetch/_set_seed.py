"""Everything that a training run draws from or that makes it repeatable, set in one call."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy
import torch

from gpuprefetch._arguments import accelerator, checked_bool, checked_int

LARGEST_GLOBAL_SEED = (1 << 32) - 1  # of numpy.random.seed and PYTHONHASHSEED


def set_seed(seed: int = 42, deterministic: bool = True, benchmark: bool = False) -> dict[str, Any]:
    """Seeds the global generators of Python, NumPy and torch, those of all devices among them, and sets torch's flags.

    For weights, dropout and all else that the training loop draws. What a dataset draws is seeded by
    ``PrefetchIterator(seed=...)``; without that, a shuffled order comes from torch's generator, which this seeds.

    Args:
        seed: 0 to 2**32 - 1, the same for every generator.
        deterministic: value of ``torch.backends.cudnn.deterministic`` and of ``torch.use_deterministic_algorithms``,
            which warns of operations that have no deterministic form. Also sets the environment variable
            CUBLAS_WORKSPACE_CONFIG to ":4096:8" unless it is set, which counts if no matrix product has run on a CUDA
            device yet. False sets both flags back, and leaves the variable as it is.
        benchmark: value of ``torch.backends.cudnn.benchmark``. True lets cuDNN choose algorithms by their time, so that
            two runs may choose differently.

    Returns:
        What was set, and to what: "random", "numpy.random", "torch", the accelerator if there is one, as in
        "torch.cuda" (all its devices), the flags and the environment variables by their names. PYTHONHASHSEED is for
        child processes: the order of sets of strings in the running interpreter was decided when it started.

    Raises:
        TypeError, ValueError: an argument is not what is said above. Then nothing was set.
    """
    seed = checked_int("seed", seed, 0, LARGEST_GLOBAL_SEED)
    deterministic = checked_bool("deterministic", deterministic)
    benchmark = checked_bool("benchmark", benchmark)
    done: dict[str, Any] = {"random": seed, "numpy.random": seed, "torch": seed}
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)  # of all devices, which need not be initialised: they are seeded when they are
    built_for = accelerator()
    if built_for is not None and torch.accelerator.is_available():
        done[f"torch.{built_for.type}"] = seed
    torch.use_deterministic_algorithms(deterministic, warn_only=deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = benchmark
    done["torch.use_deterministic_algorithms"] = deterministic
    done["torch.use_deterministic_algorithms.warn_only"] = deterministic
    done["torch.backends.cudnn.deterministic"] = deterministic
    done["torch.backends.cudnn.benchmark"] = benchmark
    os.environ["PYTHONHASHSEED"] = done["PYTHONHASHSEED"] = str(seed)
    if deterministic and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = done["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return done
