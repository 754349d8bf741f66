"""Pure Python samples by one thread and by several: every figure is of right samples."""

import itertools
import json

import pure_python
import pytest


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(pure_python, "SECONDS", 0)
    made = {name: pure_python.SAMPLES[name] for name in ("small integers", "floats")}
    monkeypatch.setattr(pure_python, "SAMPLES", made)


def test_the_whole_run(tmp_path, capsys):
    written = tmp_path / "out.json"
    assert pure_python.main(["--threads", "3", "--repeats", "2", "--json", str(written)]) == 0
    result = json.loads(written.read_text())
    assert [row["row"] for row in result["rows"]] == ["small integers", "floats"]
    for row in result["rows"]:
        one, three = (row["samples_per_second"][number]["raw"] for number in ("1", "3"))
        assert row["gain"]["raw"] == [more / less for more, less in zip(three, one, strict=True)]
        assert len(one) == 2 and min(one + three) > 0
    said = capsys.readouterr().out
    assert "the interpreter's lock: o" in said
    assert [line.split()[0] for line in said.splitlines()[-3:]] == ["samples/s", "small", "floats"]


@pytest.mark.parametrize("name", ["small integers", "large integers", "large integers of its own", "a document"])
def test_a_sample_is_a_function_of_its_index(name):
    from python_samples import SAMPLES

    _, make = SAMPLES[name]
    assert make(7) == make(7) != make(8)


def test_a_wrong_sample_is_no_figure():
    drawn = itertools.count()
    with pytest.raises(ValueError, match="a sample is not what one thread makes of it"):
        pure_python.seconds_of(lambda index: next(drawn), 2, 1)


def test_threads_are_several():
    with pytest.raises(SystemExit):
        pure_python.main(["--threads", "1"])
