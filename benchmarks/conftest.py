"""Tests here need a card as those in tests do."""

from gpu_marker import pytest_runtest_setup as pytest_runtest_setup  # pytest adds tests to the path: pyproject.toml
