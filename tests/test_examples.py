"""Every example runs as a user starts it, and without its main guard where processes are spawned."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"train_images": "PIL"}
GUARD = 'if __name__ == "__main__":\n    '
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
}
"""What stands in the output, in this order. Of another example: something."""


def run(code, folder, *arguments):
    # No GPU, so that the lines are the same everywhere.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_there_are_examples():
    assert {example.stem for example in EXAMPLES} >= set(PRINTED)


@pytest.mark.parametrize("guarded", [True, False], ids=["as it is", "without its guard"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs(example, guarded, tmp_path):
    if example.stem in NEEDS:
        pytest.importorskip(NEEDS[example.stem])
    code = [str(example)]
    if not guarded:
        source = example.read_text(encoding="utf-8")
        assert source.count(GUARD) == 1
        spawning = "import multiprocessing\nmultiprocessing.set_start_method('spawn')\n"
        source = source.replace(GUARD, spawning + 'print("once")\n')
        (tmp_path / "unguarded.py").write_text(source, encoding="utf-8")
        code = ["unguarded.py"]
    done = run(code, tmp_path, "--quick")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("once\n") == (not guarded)
    assert re.search(".*?".join(PRINTED.get(example.stem, ["."])), done.stdout, re.DOTALL), done.stdout


def test_without_pillow_one_sentence(tmp_path):
    example = Path(__file__).parents[1] / "examples" / "train_images.py"
    hiding = f"import runpy, sys; sys.modules['PIL'] = None; runpy.run_path({str(example)!r}, run_name='__main__')"
    done = run(["-c", hiding], tmp_path)
    assert done.returncode == 1
    assert done.stderr == ("train_images.py reads images with pillow, which is missing: python -m pip install pillow\n")


@pytest.mark.parametrize("content", [None, "class0"])
def test_a_folder_without_images_is_one_sentence(content, tmp_path):
    pytest.importorskip("PIL")
    if content is not None:
        (tmp_path / content).mkdir()
    done = run([str(Path(__file__).parents[1] / "examples" / "train_images.py")], tmp_path, ".")
    assert done.returncode == 1
    assert done.stderr == ". has no folder with images in it; there must be one for each class\n"
