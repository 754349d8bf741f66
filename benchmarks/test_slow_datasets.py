"""What slow_datasets.py compares gives the same samples, and leaves no file behind."""

import json
import random
import tempfile
from pathlib import Path

import numpy
import pytest
import slow_datasets
import storages
import torch
from slow_datasets import Crops, cropped, stored
from storages import KINDS, decode_with_pil
from workloads import vary_photo

PAGE = Path(__file__).parents[1] / "docs" / "slow-datasets.md"
PHOTOS = 5
FULL = [name for name, kind in KINDS.items() if not kind.is_half]
HALF = [name for name, kind in KINDS.items() if kind.is_half]
APPROXIMATE = ("jpeg-opencv", "jpeg-torchvision")  # decoders that round in another way
QUICK = ["--photos", "4", "--batch-size", "2", "--repeats", "2", "--seconds", "0.01", "--threads", "3"]


@pytest.fixture(scope="module")
def photos():
    return vary_photo(PHOTOS, 0)


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder in which temporary ones are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def use(photos, temporary):
    """`use(name, act)`: what `act(storage)` gives, of a storage that exists for that long."""

    def with_storage(name, act):
        if reason := KINDS[name].missing():
            pytest.skip(reason)
        with stored([name], photos) as made:
            return act(made[name])

    return with_storage


@pytest.mark.parametrize("name", FULL)
def test_the_photos_are_those_that_pil_decodes(name, use, photos):
    got = use(name, lambda storage: [numpy.array(storage(i)) for i in range(PHOTOS)])
    for photo, expected in zip(got, map(decode_with_pil, photos), strict=True):
        difference = numpy.abs(photo.astype(int) - numpy.asarray(expected))
        assert photo.shape == (400, 500, 3)
        assert difference.max() == 0 if name not in APPROXIMATE else difference.mean() < 2


@pytest.mark.parametrize("name", HALF)
def test_half_size_is_half_of_the_same_photo(name, use, photos):
    got = use(name, lambda storage: numpy.array(storage(0)))
    assert got.shape == (200, 250, 3)
    expected = numpy.asarray(decode_with_pil(photos[0]).resize((250, 200)))
    assert numpy.abs(got.astype(int) - expected).mean() < 4


@pytest.mark.parametrize("name", ["memory", "cached", "npy", "hdf5", "hdf5-gzip", "lmdb-jpeg", "lmdb"])
def test_the_samples_are_the_same_from_every_storage(name, use):
    def samples(storage):
        return torch.stack([Crops(storage, PHOTOS)(i) for i in range(2 * PHOTOS)])  # each photo twice

    got = use(name, samples)
    assert got.shape == (2 * PHOTOS, 3, 224, 224) and got.dtype == torch.uint8
    assert torch.equal(got, use("jpeg", samples))


def test_a_crop_is_flipped_by_chance():
    ramp = numpy.broadcast_to(numpy.arange(200, dtype=numpy.uint8)[None, :, None], (300, 200, 3))
    rising = [bool(crop[0, 0, 0] < crop[0, 0, -1]) for crop in (cropped(ramp, random.Random(i)) for i in range(20))]
    assert set(rising) == {True, False}


@pytest.mark.parametrize("name", KINDS)
def test_size(name, use, photos):
    disk, memory = use(name, lambda storage: (storage.disk_bytes, storage.memory_bytes))
    pixels = PHOTOS * 400 * 500 * 3
    jpeg = sum(map(len, photos))
    if name in ("memory", "cached"):
        assert (disk, memory) == (jpeg if name == "cached" else 0, pixels)
    elif name == "hdf5-gzip":
        assert jpeg < disk < pixels and memory == 0
    else:
        held = jpeg if "jpeg" in name else pixels
        assert held <= disk < held + 20_000 * PHOTOS and memory == 0


def test_a_run(temporary, tmp_path, capsys):
    written = tmp_path / "out.json"
    assert slow_datasets.main([*QUICK, "--json", str(written)]) == 0
    assert list(tmp_path.iterdir()) == [written]  # and no temporary folder
    result = json.loads(written.read_text(encoding="utf-8"))
    named = [storage["name"] for storage in result["storages"]]
    assert sorted([*named, *result["left_out"]]) == sorted(KINDS)
    for storage in result["storages"]:
        for rates in storage["samples_per_second"].values():
            assert len(rates["raw"]) == 2 and 0 < rates["low"] <= rates["median"] <= rates["high"]
        assert list(storage["samples_per_second"]) == ["1", "3"]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(named)
    assert all(line.count("|") == 6 for line in table)


def test_what_is_not_installed_is_left_out_and_that_is_said(temporary, monkeypatch, capsys):
    kind = storages.Kind("planted", "no_such_module", "no-such-package", lambda photos, folder: pytest.fail("made"))
    monkeypatch.setitem(KINDS, "planted", kind)
    assert slow_datasets.main([*QUICK, "--only", "memory,planted"]) == 0
    out = capsys.readouterr().out
    assert (
        "left out: planted, which needs no-such-package (ModuleNotFoundError: No module named 'no_such_module')" in out
    )
    assert "| uint8 arrays in memory" in out


def test_files_go_when_a_storage_fails(temporary, tmp_path, photos, monkeypatch):
    def fail(photos, folder):
        (folder / "begun").touch()
        raise OSError("no space left")

    monkeypatch.setitem(KINDS, "planted", storages.Kind("planted", "numpy", "numpy", fail))
    with pytest.raises(OSError, match="no space left"), stored(["memory", "planted"], photos):
        pytest.fail("went on")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--threads", "1"], "--threads must be 2 or more; got 1"),
        (["--only", "jpeg,zarr"], "no row is called zarr; there are jpeg,"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        slow_datasets.main(arguments)
    assert said in capsys.readouterr().err


def test_the_documentation_has_every_row():
    rows = [line.split("|")[1].strip() for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert rows[2:] == [kind.description for kind in KINDS.values()]
