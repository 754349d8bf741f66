"""On a free-threaded Python nothing of ours brings the GIL back."""

import sys
import sysconfig

import pytest
from loaders import script

pytestmark = pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL anyway")


@pytest.mark.process
def test_the_extension_leaves_the_gil_off():
    code, out, err = script(
        """
        import sys
        from gpuprefetch._extension import extension
        before = sys._is_gil_enabled()
        extension()
        print(before, sys._is_gil_enabled())
        """
    )
    assert (code, out.split(), err) == (0, ["False", "False"], "")


def test_it_is_off_while_the_tests_run():
    assert not sys._is_gil_enabled(), "some module brought the GIL back, so these tests show nothing"
