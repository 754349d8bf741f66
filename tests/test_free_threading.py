"""On a free-threaded Python nothing of ours brings the GIL back."""

import pathlib
import sys

import pytest
from loaders import NO_GIL, script

without_a_gil = pytest.mark.skipif(not NO_GIL, reason="this Python has a GIL anyway")


def test_the_extension_declares_that_it_needs_none():
    """Wherever the tests run: the next one does only where there is such a Python."""
    bindings = pathlib.Path(__file__).parents[1] / "csrc" / "bindings.cpp"
    assert "PYBIND11_MODULE(_C, m, py::mod_gil_not_used())" in bindings.read_text(encoding="utf-8")


@pytest.mark.process
@without_a_gil
def test_the_extension_leaves_the_gil_off(monkeypatch):
    monkeypatch.delenv("PYTHON_GIL", raising=False)  # with 0 it would stay off whatever is imported
    code, out, err = script(
        """
        import sys
        import torch
        if sys._is_gil_enabled():
            print("by torch")
            sys.exit()
        from gpuprefetch._extension import extension
        extension()
        print(sys._is_gil_enabled())
        """
    )
    if out.split() == ["by", "torch"]:
        pytest.skip("a module that torch imports brings the GIL back")
    assert (code, out.split(), err) == (0, ["False"], "")


@without_a_gil
def test_it_is_off_while_the_tests_run():
    assert not sys._is_gil_enabled(), "some module brought the GIL back, so these tests show nothing: set PYTHON_GIL=0"
