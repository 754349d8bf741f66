"""What the tests of benchmarks share; with those in tests, how a test that needs a card is told."""

import time
from types import SimpleNamespace

import pytest
import torch
from gpu_marker import pytest_runtest_setup as pytest_runtest_setup  # in tests, which pyproject.toml adds to the path
from target import Target


@pytest.fixture
def target():
    return Target(torch.device("cpu"))


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test says so: `clock.now += seconds`."""
    fake = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: fake.now)
    return fake
