"""Cells that are run again, left, interrupted and changed, in one namespace, as docs/notebooks.md tells it."""

import builtins
import code
import gc
import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from loaders import THREADS, Gate, eventually, threads

windows = pytest.mark.windows  # on what starts no process

DEFINE = """
class Cell(Dataset):
    def __init__(self):
        self.lock, self.make = threading.Lock(), lambda i: torch.tensor(i + 100)
    def __len__(self):
        return 30
    def __getitem__(self, i):
        before(i)
        with self.lock:
            return self.make(i)
"""
WRAP = 'batches = PrefetchIterator(DataLoader(Cell(), batch_size=3), device="cpu", num_threads=num_threads)'
LOOP = """
seen = []
for batch in batches:
    seen += batch.tolist()
"""
ALL = list(range(100, 130))


class Notebook(code.InteractiveInterpreter):
    """Runs cells as a kernel does: in one namespace, and an error is printed and kept."""

    def __init__(self, **names):
        super().__init__({"__name__": "__main__", **names})
        self.printed = ""
        self.run("import threading, torch\nfrom torch.utils.data import DataLoader, Dataset")
        self.run("from gpuprefetch import PrefetchIterator")

    def write(self, data):
        self.printed += data

    def run(self, cell, mode="exec"):
        """What the cell printed as its error."""
        self.printed = ""
        self.runcode(compile(textwrap.dedent(cell), "<cell>", mode))
        return self.printed

    def __getitem__(self, name):
        return self.locals[name]


@pytest.fixture
def before():
    gc.collect()
    assert eventually(lambda: not threads())
    yield
    assert eventually(lambda: not threads())


@pytest.fixture
def notebook(before, monkeypatch):
    """With a wrapped loader, whose dataset calls ``hooks[i]`` before sample i."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hooks = {}

    def opened(num_threads):
        notebook = Notebook(hooks=hooks, before=lambda i: hooks.get(i, lambda: None)(), num_threads=num_threads)
        assert notebook.run(DEFINE) + notebook.run(WRAP) == ""
        return notebook

    yield opened
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)


@windows
@pytest.mark.parametrize("num_threads", THREADS)
def test_cells_may_be_run_again(num_threads, notebook):
    cells = notebook(num_threads)
    for again in ([], [], [WRAP], [DEFINE, WRAP], [DEFINE]):
        for cell in (*again, LOOP):
            assert cells.run(cell) == ""
        assert cells["seen"] == ALL
        assert eventually(lambda: not threads(), collect=False)


@windows
@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize(("leave", "error"), [("break", ""), ("1 / 0", "ZeroDivisionError")])
def test_a_loop_that_is_left_leaves_no_thread(leave, error, num_threads, notebook):
    """Not even while the error's traceback is kept for a debugger."""
    cells = notebook(num_threads)
    printed = cells.run(LOOP + f"    if len(seen) == 6: {leave}\n")
    assert error in printed and bool(printed) == bool(error)
    assert cells["seen"] == ALL[:6]
    assert eventually(lambda: not threads(), collect=False)
    assert cells.run(LOOP) == "" and cells["seen"] == ALL


HELD = {
    "a variable": ("it = iter(batches)", "exec"),
    "the cell's value": ("iter(batches)", "single"),
    "a kept traceback": ("def peek():\n    it = iter(batches)\n    next(it)\n    1 / 0\npeek()", "exec"),
    "next(batches)": ("first = next(batches)", "exec"),
}
ENDED = {
    "a variable": ("it = iter(batches)", "del it"),
    "the cell's value": ("iter(batches)", "0"),
    "a kept traceback": ("peek()", "1 / 0"),
    "next(batches)": ("first = next(batches)", "for batch in batches: pass"),
}


@windows
@pytest.mark.parametrize("num_threads", [n for n in THREADS if n])
@pytest.mark.parametrize("how", ["close", "drop"])
@pytest.mark.parametrize("holder", HELD)
def test_an_epoch_that_something_holds_ends_by_close_or_with_its_holder(
    holder, how, num_threads, notebook, monkeypatch, capsys
):
    monkeypatch.setattr(builtins, "_", None, raising=False)
    cells = notebook(num_threads)
    cell, mode = HELD[holder]
    again, drop = ENDED[holder]
    cells.run(cell, mode)
    of_one_epoch = 1 if num_threads == 1 else num_threads + 1
    assert eventually(lambda: len(threads()) == of_one_epoch)
    for _ in range(2):  # which does not add up
        cells.run(again, mode)
        assert eventually(lambda: len(threads()) == of_one_epoch)
    cells.run("batches.close()" if how == "close" else drop, "exec" if how == "close" else mode)
    assert eventually(lambda: not threads(), collect=how == "drop")
    assert cells.run(LOOP) == "" and cells["seen"] == ALL


@windows
def test_a_batch_that_was_looked_at_is_not_missing_from_the_loop(notebook):
    cells = notebook(1)
    cells.run("first = next(batches); second = next(iter(batches))")
    assert cells["first"].tolist() == cells["second"].tolist() == ALL[:3]
    cells.run(LOOP)
    assert cells["seen"] == ALL


@pytest.mark.skipif(sys.platform == "win32", reason="an interrupt comes from a console there")
@pytest.mark.parametrize("num_threads", THREADS)
def test_an_interrupted_cell_can_be_run_again(num_threads, notebook):
    cells = notebook(num_threads)
    with Gate(at=None) as gate:
        cells["hooks"][4] = lambda: gate(None)

        def interrupt():
            assert gate.reached.wait(20) and eventually(lambda: cells.locals.get("seen") == ALL[:3], collect=False)
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = threading.Thread(target=interrupt, daemon=True)
        interrupting.start()
        printed = cells.run(LOOP)
        assert "KeyboardInterrupt" in printed.splitlines()
        assert cells["seen"] == ALL[:3]
        interrupting.join(20)
        cells["hooks"].clear()
        gate.opened.set()
    assert cells.run(LOOP) == ""
    assert cells["seen"] == ALL


@windows
def test_a_reloaded_module_counts_from_the_next_wrapping(notebook, tmp_path, monkeypatch):
    def write(start):
        source = f"""
            import torch
            class Data(list):
                def __getitem__(self, i):
                    return torch.tensor(i + {start})
        """
        (tmp_path / "cell_data.py").write_text(textwrap.dedent(source), encoding="utf-8")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    cells = notebook(1)
    wrap = 'batches = PrefetchIterator(DataLoader(cell_data.Data(range(30)), batch_size=3), device="cpu")'
    try:
        write(100)
        assert cells.run("import importlib, cell_data\n" + wrap) == ""
        write(20_000)
        assert cells.run("importlib.reload(cell_data)") == ""
        assert cells.run(LOOP) == "" and cells["seen"] == ALL
        assert cells.run(wrap) == ""
        assert cells.run(LOOP) == "" and cells["seen"] == list(range(20_000, 20_030))
    finally:
        sys.modules.pop("cell_data", None)


@pytest.mark.process
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_spawned_worker_does_not_find_what_a_cell_defines(wrapped, tmp_path):
    source = """
import torch
from torch.utils.data import DataLoader
from gpuprefetch import PrefetchIterator
class Cell(list):
    def __getitem__(self, i):
        return torch.tensor(i)
try:
    if WRAPPED:
        batches = PrefetchIterator(DataLoader(Cell(range(4))), device="cpu")
    else:
        batches = DataLoader(Cell(range(4)), num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in batches])
except RuntimeError as error:
    print(error)
""".replace("WRAPPED", str(wrapped))
    # As in a kernel, __main__ has no file.
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    if wrapped:
        assert (done.stdout, done.stderr) == ("[[0], [1], [2], [3]]\n", "")
    else:
        assert "exited unexpectedly" in done.stdout
        assert "attribute 'Cell'" in done.stderr  # "Can't get" it, or since Python 3.14 the module "has no" such
