"""Tests that need a card: skipped where there is none, unless one is demanded. A hook, for each conftest."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    required = os.environ.get("GPUPREFETCH_REQUIRE_GPU") == "1"
    if not torch.cuda.is_available():
        if required:
            pytest.fail("GPUPREFETCH_REQUIRE_GPU=1, and torch finds no CUDA device", pytrace=False)
        pytest.skip("no CUDA device")
    if required:
        from gpuprefetch._extension import extension

        try:
            extension()
        except ImportError as error:
            pytest.fail(f"GPUPREFETCH_REQUIRE_GPU=1, and the compiled module can't be used: {error}", pytrace=False)
