"""Every example runs as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"train_images": "PIL"}
MS = r"\d+\.\d ms a step \(median of 2 epochs\)"
PRINTED = {
    "train_images": [
        "64 images in 2 classes, 2 steps an epoch, cpu",
        rf"plain loader: {MS}",
        rf"gpuprefetch: {MS}",
        "On a CPU nothing is copied, .*",
    ],
    "gpu_dataset": [
        "32 faces, 2 steps an epoch, cpu",
        rf"plain loader, num_workers=0: {MS}",
        rf"gpuprefetch: {MS}",
        rf"precomputed, plain loader: {MS}",
        rf"precomputed, gpuprefetch: {MS}",
        "On a CPU .*",
    ],
    "fastreid_loader": [
        "on cpu, 5 batches of 16",
        r"DataLoader, num_workers=0 +\d+\.\d ms a batch",
        r"DataLoaderX, num_workers=0 +\d+\.\d ms a batch",
        r"DataLoaderX, num_workers=4 +\d+\.\d ms a batch",
    ],
}
"""What stands in the output, in this order."""


def run(arguments, folder):
    # No GPU, so that the lines are the same everywhere.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    environment["PYTHONWARNINGS"] = "ignore:with several num_threads"
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_all_are_known():
    assert {example.stem for example in EXAMPLES} == set(PRINTED)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs(example, tmp_path):
    if example.stem in NEEDS:
        pytest.importorskip(NEEDS[example.stem])
    done = run([str(example), "--quick"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(".*?".join(PRINTED[example.stem]), done.stdout, re.DOTALL), done.stdout


def test_without_pillow_one_sentence(tmp_path):
    example = Path(__file__).parents[1] / "examples" / "train_images.py"
    hiding = f"import runpy, sys; sys.modules['PIL'] = None; runpy.run_path({str(example)!r}, run_name='__main__')"
    done = run(["-c", hiding], tmp_path)
    assert done.returncode == 1
    assert done.stderr == ("train_images.py reads images with pillow, which is missing: python -m pip install pillow\n")


def test_a_folder_without_images_is_one_sentence(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "class0" / "x.jpg").mkdir(parents=True)  # which is none, whatever its name
    done = run([str(Path(__file__).parents[1] / "examples" / "train_images.py"), "."], tmp_path)
    assert done.returncode == 1
    assert done.stderr == ". has no folder with images in it; there must be one for each class\n"


@pytest.mark.parametrize(
    "example, arguments, told",
    [
        ("gpu_dataset", ["--steps", "0"], "argument --steps: 0 is not 1 or more"),
        ("gpu_dataset", ["--device", "nope"], "--device nope: "),
        ("train_images", ["--batch-size", "-1"], "argument --batch-size: -1 is not 1 or more"),
        ("train_images", ["nowhere"], "there is no folder 'nowhere'"),
        ("train_images", ["--num-threads", "-1"], "--num-threads must be 0 to 256, not -1"),
        ("train_images", ["--num-threads", "257"], "--num-threads must be 0 to 256, not 257"),
    ],
)
def test_a_wrong_argument_is_told_by_name(example, arguments, told, tmp_path):
    if example in NEEDS:
        pytest.importorskip(NEEDS[example])
    done = run([str(Path(__file__).parents[1] / "examples" / f"{example}.py"), *arguments], tmp_path)
    assert done.returncode == 2
    assert told in done.stderr and "Traceback" not in done.stderr
