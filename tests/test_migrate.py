"""The code of docs/migrate.md: the launcher on a package of FastReID's shape, and what each move ends with."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loaders import eventually, threads
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import gpuprefetch
from gpuprefetch import PrefetchIterator

PAGE = (Path(__file__).parents[1] / "docs" / "migrate.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")

pytestmark = [pytest.mark.windows, pytest.mark.filterwarnings("ignore:with several num_threads")]


def blocks(section):
    """The Python of one section, block by block."""
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


# --- the launcher

SHAPE = {
    "fastreid/__init__.py": "",
    "fastreid/data/__init__.py": "from .build import build_reid_test_loader, build_reid_train_loader",
    "fastreid/data/data_utils.py": """
        from torch.utils.data import DataLoader

        class DataLoaderX(DataLoader):
            def __init__(self, local_rank, **kwargs):
                super().__init__(**kwargs)
        """,
    "fastreid/data/build.py": """
        import itertools
        import torch
        from .data_utils import DataLoaderX

        def collate(samples):
            return {"targets": torch.tensor(samples), "img_paths": [f"{i}.jpg" for i in samples]}

        def build_reid_train_loader(num_workers):
            batch_sampler = torch.utils.data.BatchSampler(itertools.cycle(range(7)), 3, True)
            return DataLoaderX(
                0,
                dataset=range(7),
                num_workers=num_workers,
                batch_sampler=batch_sampler,
                collate_fn=collate,
                pin_memory=True,
            )

        def build_reid_test_loader(num_workers):
            batch_sampler = torch.utils.data.BatchSampler(range(7), 3, False)
            return DataLoaderX(
                0,
                dataset=range(7),
                batch_sampler=batch_sampler,
                num_workers=num_workers,
                collate_fn=collate,
                pin_memory=True,
            )
        """,
    "tools/beside.py": "",  # which a script that is run by itself finds
    "tools/train_net.py": """
        import argparse, sys
        import beside
        sys.path.append(".")
        from fastreid.data import build_reid_test_loader, build_reid_train_loader

        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--num-workers", type=int)
            num_workers = parser.parse_args().num_workers
            loader = build_reid_train_loader(num_workers)
            batches = iter(loader)
            print(type(loader).__module__, sys.argv[0])
            for _ in range(3):
                batch = next(batches)
                print(batch["targets"].tolist(), *batch["img_paths"])
            print(*(batch["targets"].tolist() for batch in build_reid_test_loader(num_workers)))
        """,
}


@pytest.fixture
def run(tmp_path):
    """Runs Python in a package of FastReID's shape, and gives the lines that it printed."""
    for name, body in SHAPE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(body))

    def run(*arguments):
        root = str(Path(gpuprefetch.__file__).parents[1])
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            # Unbuffered, two processes that print would mix within a line.
            env={**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    return run


def launcher():
    (block,) = [block for block in blocks("FastReID") if "runpy" in block]
    lines = [line for line in block.splitlines() if line]
    assert len(lines) == 4
    return lines


@pytest.mark.process
def test_a_name_that_python_no_longer_has_is_put_back(tmp_path, run):
    """FastReID's own build.py imports it so; the launcher alone fails there."""
    build = tmp_path / "fastreid" / "data" / "build.py"
    build.write_text("from collections import Mapping\n" + build.read_text())
    (put_back,) = [block for block in blocks("FastReID") if "Mapping" in block]
    (tmp_path / "launch.py").write_text(put_back + "\n".join(launcher()))
    assert run("launch.py", "tools/train_net.py", "--num-workers", "2")[0].startswith("gpuprefetch._dataloader_x ")
    (tmp_path / "launch.py").write_text("\n".join(launcher()))
    with pytest.raises(AssertionError, match="cannot import name 'Mapping' from 'collections'"):
        run("launch.py", "tools/train_net.py", "--num-workers", "2")


@pytest.mark.process
def test_the_launcher_and_the_way_back(tmp_path, run):
    (tmp_path / "launch.py").write_text("\n".join(launcher()))
    batches = ["[0, 1, 2] 0.jpg 1.jpg 2.jpg", "[3, 4, 5] 3.jpg 4.jpg 5.jpg", "[6, 0, 1] 6.jpg 0.jpg 1.jpg"]
    batches.append("[0, 1, 2] [3, 4, 5] [6]")  # of the test loader
    for num_workers in ("0", "2"):
        script = "tools/train_net.py"
        ours = run("launch.py", script, "--num-workers", num_workers)
        assert ours == [f"gpuprefetch._dataloader_x {script}", *batches]
    with pytest.raises(AssertionError, match=r"^launch.py needs a script\n"):  # all that it says
        run("launch.py")
    assert run("tools/train_net.py", "--num-workers", "0") == ["fastreid.data.data_utils tools/train_net.py", *batches]


@pytest.mark.process
def test_processes_that_are_spawned_have_it_from_the_script(tmp_path, run):
    """With several GPUs: a child imports the script, and no launcher."""
    script = tmp_path / "tools" / "train_net.py"
    before, begin, after = script.read_text().partition('sys.path.append(".")\n')
    after = after.replace('if __name__ == "__main__":\n', "def main(rank):\n")
    after += '\nif __name__ == "__main__":\n    import torch\n    torch.multiprocessing.spawn(main, (), 2)\n'
    script.write_text(before + begin + "\n".join(launcher()[:2]) + "\n" + after)
    lines = run("tools/train_net.py", "--num-workers", "0")
    assert sum(line.startswith("gpuprefetch._dataloader_x ") for line in lines) == 2
    assert sum(line == "[6, 0, 1] 6.jpg 0.jpg 1.jpg" for line in lines) == 2


# --- before and after

IMAGES = torch.arange(0, 240, 20, dtype=torch.uint8).reshape(12, 1, 1, 1).expand(12, 3, 2, 2).contiguous()
PAIRS = [(IMAGES[i], i) for i in range(12)]
MEAN, STD = torch.full((1, 3, 1, 1), 10.0), torch.full((1, 3, 1, 1), 20.0)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert eventually(lambda: not threads())


def run_last(section, **names):
    """Runs the last block of a section, which is the one after the move. Gives the names and what `train` got."""
    trained = []
    names |= {"PrefetchIterator": PrefetchIterator, "DataLoader": DataLoader, "device": CPU}
    names["train"] = lambda *batch: trained.append(batch)
    exec(blocks(section)[-1], names)
    return SimpleNamespace(**{name: value for name, value in names.items() if not name.startswith("__")}), trained


def assert_normalised(trained):
    assert [labels.tolist() for _, labels in trained] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(torch.cat([images for images, _ in trained]), (IMAGES.float() - 10) / 20)


def test_every_block_is_python():
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert len(sections) == 8
    for section in sections:
        found = blocks(section)
        assert len(found) >= 2 or section == "What stands in for what"
        for block in found:
            compile(block, section, "exec")


def test_apex():
    _, trained = run_last("apex: data_prefetcher", loader=DataLoader(PAIRS, batch_size=4), mean=MEAN, std=STD)
    assert_normalised(trained)


def test_timm():
    asked, erased = [], []

    def create_loader(dataset, *arguments, **options):
        asked.append(options)
        return SimpleNamespace(
            loader=DataLoader(dataset, batch_size=4),
            device=CPU,
            img_dtype=torch.float32,
            mean=MEAN,
            std=STD,
            random_erasing=lambda images: erased.append(len(images)) or images,
        )

    _, trained = run_last(
        "timm: PrefetchLoader", create_loader=create_loader, dataset=PAIRS, input_size=2, batch_size=4
    )
    assert_normalised(trained)
    assert erased == [4, 4, 4]
    assert asked == [{"is_training": True, "num_workers": 0, "persistent_workers": False}]


def test_basicsr():
    epochs, fed = [], []
    model = SimpleNamespace(feed_data=lambda data: fed.append(data), optimize_parameters=lambda step: None)
    run_last(
        "BasicSR: CUDAPrefetcher",
        train_loader=DataLoader([{"lq": IMAGES[i], "lq_path": f"{i}.png"} for i in range(4)], batch_size=2),
        train_sampler=SimpleNamespace(set_epoch=epochs.append),
        model=model,
        opt={"num_gpu": 0},
        start_epoch=3,
        total_epochs=4,
        current_iter=0,
    )
    assert epochs == [3, 4]
    assert [data["lq_path"] for data in fed] == [["0.png", "1.png"], ["2.png", "3.png"]] * 2
    assert torch.equal(torch.cat([data["lq"] for data in fed]), torch.cat([IMAGES[:4]] * 2))


def test_yolox():
    data = [(IMAGES[i], torch.tensor([i]), (2, 2), i) for i in range(6)]
    loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False))
    trainer = SimpleNamespace(train_loader=loader, device=CPU)
    names, _ = run_last("YOLOX: DataPrefetcher", self=trainer)
    assert torch.equal(names.inps, IMAGES[:2]) and names.targets.tolist() == [[0], [1]]
    inps, targets, _, _ = next(trainer.prefetcher)
    assert torch.equal(inps, IMAGES[2:4]) and targets.tolist() == [[2], [3]]
    del trainer.prefetcher


def test_prefetch_generator():
    section = "prefetch_generator: BackgroundGenerator, and the DataLoaderX recipe"
    names, trained = run_last(section, dataset=PAIRS)
    ((images, labels),) = trained  # of 64 at most
    assert sorted(labels.tolist()) == list(range(12))
    assert torch.equal(images, IMAGES[labels])
    assert "num_threads=4" in repr(names.prefetched)


def test_lightning():
    names, _ = run_last("PyTorch Lightning")
    module = SimpleNamespace(dataset=PAIRS, trainer=SimpleNamespace(strategy=SimpleNamespace(root_device=CPU)))
    loader = names.train_dataloader(module)
    assert isinstance(loader, PrefetchIterator) and not isinstance(loader, DataLoader)
    assert len(loader) == 1
    for _ in range(2):
        for images, labels in loader:
            assert images.to(CPU, non_blocking=True) is images
            assert torch.equal(images, IMAGES[labels])
