"""Samples are what the seed and the index say, for every decoder; a decoder that is missing says so."""

import io
import pickle
import re
import sys
from pathlib import Path

import pytest
import throughput
import torch
from decoders import DECODERS, Crop
from target import Unusable
from workloads import Jpeg, find_images

MEANS = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATIONS = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@pytest.fixture(params=DECODERS)
def decoder(request):
    chosen = DECODERS[request.param]
    pytest.importorskip(chosen.module, exc_type=Exception)
    return chosen


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def in_quarters():
    """64 x 32 pixels: red and green above, blue and white below."""
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new("RGB", (64, 32))
    for place, colour in (((0, 0), "red"), ((32, 0), "lime"), ((0, 16), "blue"), ((32, 16), "white")):
        image.paste(colour, (*place, place[0] + 32, place[1] + 16))
    return image


def colour_at(sample, line, column):
    """Back to 0 .. 1."""
    return (normalised(sample)[:, line, column] * DEVIATIONS[:, 0, 0] + MEANS[:, 0, 0]).tolist()


def normalised(sample):
    return (sample / 255 - MEANS) / DEVIATIONS if sample.dtype == torch.uint8 else sample


@pytest.mark.parametrize("flipped", [False, True])
def test_a_sample_is_the_box_of_the_photo(decoder, flipped):
    seen = []

    def choose(width, height):
        seen.append((width, height))
        return Crop(16, 0, 48, 32, flipped)  # a third of the width is left of the middle, two thirds right

    sample = decoder.decode(encoded(in_quarters()), choose)
    assert seen == [(64, 32)]
    dtype = torch.uint8 if decoder.name == "torchvision-uint8" else torch.float32
    assert (sample.shape, sample.dtype, sample.is_contiguous()) == ((3, 224, 224), dtype, True)
    left, right = (223, 0) if flipped else (0, 223)
    assert colour_at(sample, 0, left) == pytest.approx([1, 0, 0], abs=0.01)
    assert colour_at(sample, 0, right) == pytest.approx([0, 1, 0], abs=0.01)
    assert colour_at(sample, 223, left) == pytest.approx([0, 0, 1], abs=0.01)
    assert colour_at(sample, 223, right) == pytest.approx([1, 1, 1], abs=0.01)
    border = 149 if flipped else 74
    assert colour_at(sample, 0, border - 8)[0] == pytest.approx(0 if flipped else 1, abs=0.01)
    assert colour_at(sample, 0, border + 8)[0] == pytest.approx(1 if flipped else 0, abs=0.01)


def test_a_photo_keeps_its_orientation_on_disk(decoder):
    """Else the box, which is one for all decoders, would lie elsewhere with one that turns photos."""
    image = in_quarters()
    exif = image.getexif()
    exif[0x0112] = 6  # to be shown turned by 90 degrees
    seen = []

    def choose(width, height):
        seen.append((width, height))
        return Crop(0, 0, width, height, False)

    decoder.decode(encoded(image, "JPEG", exif=exif), choose)
    assert seen == [(64, 32)]


def test_a_sample_is_a_function_of_seed_and_index(decoder):
    make = Jpeg(4, 0, None, decoder)
    copied = pickle.loads(pickle.dumps(make))  # as a worker process gets it
    for index in (0, 3, 4):
        assert torch.equal(make(index), copied(index))
    assert not torch.equal(make(0), make(4))  # one file, another crop
    assert not torch.equal(make(0), Jpeg(4, 1, None, decoder)(0))


def test_decoders_agree_but_for_interpolation(decoder):
    make, plain = Jpeg(4, 0, None, decoder), Jpeg(4, 0, None, DECODERS["pil"])
    for index in range(4):
        assert (normalised(make(index)) - plain(index)).abs().mean() < 0.1


@pytest.mark.parametrize("crop", [Crop(16, 0, 48, 32, False), Crop(0, 5, 20, 24, True)])
def test_few_calls_give_the_pixels_of_the_transforms(crop):
    """Those of the decoder, and those that the page shows."""
    pytest.importorskip("torchvision.io", exc_type=Exception)
    page = (Path(__file__).parents[1] / "docs/choosing-threads.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "decode_image" in code)
    shown = {}
    exec(code, shown)
    data = encoded(in_quarters(), "JPEG")
    transformed = DECODERS["torchvision"].decode(data, lambda width, height: crop)
    few = DECODERS["torchvision-io"].decode(data, lambda width, height: crop)
    bytes_of_file = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    of_page = shown["load"](bytes_of_file, crop.top, crop.left, crop.height, crop.width, crop.flipped)
    for pixels in (few, of_page):
        torch.testing.assert_close(pixels, transformed, rtol=0, atol=1e-5)
        assert pixels.is_contiguous()  # else the copy could not gather such samples


def test_the_files_of_a_folder(decoder, tmp_path):
    image = in_quarters()
    for name, kind in (("a.jpg", "JPEG"), ("b.PNG", "PNG"), ("c.webp", "WEBP"), ("d.bmp", "BMP")):
        (tmp_path / name).write_bytes(encoded(image, kind))
    (tmp_path / "labels.txt").write_text("a")
    files = find_images(tmp_path, decoder)
    expected = ["a.jpg", "b.PNG", "c.webp", "d.bmp"][: 3 if decoder.module == "torchvision.io" else 4]
    assert [path.name for path in files] == expected
    make = Jpeg(100, 0, tmp_path, decoder)
    for index in range(len(files)):
        assert make(index).shape == (3, 224, 224)


def test_a_broken_file_is_named(decoder, tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"no image")
    with pytest.raises(Unusable, match=f"--decoder {decoder.name} failed on .*a.jpg: "):
        Jpeg(1, 0, tmp_path, decoder)(0)


@pytest.mark.parametrize("name", DECODERS)
def test_a_missing_package_is_said_before_anything_is_measured(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, DECODERS[name].module, None)
    assert throughput.main(throughput.parse_arguments(["--decoder", name, "--device", "cpu"])) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"throughput.py: --decoder {name} can't import {DECODERS[name].module} (")
    assert "python -m pip install " in said.err and said.err.count("\n") == 1


def test_opencv_starts_no_threads():
    cv2 = pytest.importorskip("cv2")
    Jpeg(1, 0, None, DECODERS["opencv"])(0)
    assert cv2.getNumThreads() == 1
