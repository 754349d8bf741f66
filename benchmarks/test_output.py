"""A file that can't be written is said before anything is measured, by every benchmark."""

import sys

import copy_speed
import handover
import memory
import pytest
import slow_datasets
import throughput


@pytest.mark.parametrize(
    "start",
    [
        handover.main,
        memory.main,
        slow_datasets.main,
        copy_speed.parse_arguments,
        throughput.parse_arguments,
    ],
    ids=lambda start: start.__module__,
)
def test_a_folder_that_is_not_there(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json", str(tmp_path / "missing" / "x.json")])
    with pytest.raises(SystemExit):
        start()
    assert "there is no folder" in capsys.readouterr().err
