"""The end of a process, Ctrl-C and a fork, each in a process of its own: the threads end, in time."""

import os
import signal
import subprocess
import sys
import time

import pytest
from loaders import finish, script, start, within

from gpuprefetch import _threads

pytestmark = pytest.mark.windows

ENDINGS = {
    "pass": ("", 0, ""),
    "exit": ("sys.exit(3)", 3, ""),
    "error": ("raise ValueError('in the loop')", 1, "ValueError: in the loop"),
    "del": ("del zero, one, slow", 0, ""),
    "collected": ("box = [zero, one, slow]; box.append(box); del zero, one, slow, box", 0, ""),
    "waiting": ("threading.Thread(target=list, args=(slow,), daemon=True).start(); slow_reached.wait(20)", 0, ""),
    "dataset": ("list(PrefetchIterator(DataLoader(Ramp(9, hook=lambda i: sys.exit(4))), 'cpu'))", 4, ""),
}

BEGIN = """
slow_reached = threading.Event()
def slow_hook(i):
    if i:
        slow_reached.set()
        time.sleep(0.3)  # load
data = TensorDataset(torch.randn(4096, 64))
zero = iter(PrefetchIterator(DataLoader(data, batch_size=8), device="cpu", num_threads=0))
one = iter(PrefetchIterator(DataLoader(data, batch_size=8), device="cpu", num_threads=1))
slow = iter(PrefetchIterator(DataLoader(Ramp(9, hook=slow_hook)), device="cpu", num_threads=1))
for it in (zero, zero, one, one, slow):
    next(it)
print("begun", flush=True)
"""

# Forks before anything has a thread, to import torch once only. Each child then runs to the end of the program.
FORK_EACH = """
children = {}
for name in NAMES:
    if (pid := os.fork()) == 0:
        for stream, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(os.path.join(FOLDER, f"{name}.{stream}"), os.O_WRONLY | os.O_CREAT), number)
        mine = name
        break
    children[pid] = name
else:
    while children:
        pid, status = os.wait()
        print(children.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """The return code, stdout and stderr of each ending."""
    if not hasattr(os, "fork"):
        running = {name: start(BEGIN + code) for name, (code, _, _) in ENDINGS.items()}
        return {name: finish(process, 200) for name, process in running.items()}
    folder = tmp_path_factory.mktemp("endings")
    names = f"NAMES, FOLDER = {list(ENDINGS)!r}, {str(folder)!r}\n"
    codes = f"exec({ {name: code for name, (code, _, _) in ENDINGS.items()}!r}[mine])"
    code, out, err = script(names + FORK_EACH + BEGIN + codes, 90)
    assert code == 0, err
    return {
        name: (int(code), (folder / f"{name}.out").read_text(), (folder / f"{name}.err").read_text())
        for name, code in (line.split() for line in out.splitlines())
    }


@pytest.mark.process
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends(ending, endings):
    _, expected, last_line = ENDINGS[ending]
    code, out, err = endings[ending]
    assert code == expected, err
    assert out == "begun\n"
    if last_line:
        assert err.strip().splitlines()[-1] == last_line
        assert "gpuprefetch" not in err
    else:
        assert err == ""


@pytest.mark.process
def test_exit_with_a_stuck_dataset_takes_bounded_time():
    """Two threads are stuck; one of them has been given up before, with its warning."""
    code, out, err = script(
        """
        def stand_here(i):
            if i:
                reached.release()
                time.sleep(3600)  # stuck
        reached = threading.Semaphore(0)
        p = PrefetchIterator(DataLoader(Ramp(9, hook=stand_here)), device="cpu")
        given_up, other = iter(p), iter(p)
        assert reached.acquire(timeout=20) and reached.acquire(timeout=20)
        given_up.close()
        print(time.time())
        """
    )
    ended = time.time()
    assert code == 0, err
    assert ended - float(out) < 8  # 2 s for the thread, and the interpreter's own end
    assert err.count("RuntimeWarning") == 2, err
    assert err.count("in stand_here") == 2, err
    assert "Fatal Python" not in err and "terminate called" not in err


@pytest.mark.process
def test_exit_ends_the_compiled_threads_though_the_warning_is_an_error():
    code, out, err = script(
        """
        import warnings
        from gpuprefetch import _extension
        def stand_here(i):
            reached.release()
            time.sleep(3600)  # stuck
        reached = threading.Semaphore(0)
        it = iter(PrefetchIterator(DataLoader(Ramp(9, hook=stand_here)), device="cpu"))
        assert reached.acquire(timeout=20)
        shutdown, _extension.shutdown = _extension.shutdown, lambda: print("ended", shutdown())
        warnings.simplefilter("error")
        """
    )
    assert code == 0, err
    assert out.split() == ["ended", "None"]
    assert "in stand_here" in err


@pytest.mark.process
def test_an_interrupt_reaches_a_waiting_consumer():
    """Ctrl-C while next() waits for a slow sample, without a thread and then with one."""
    options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP} if sys.platform == "win32" else {}
    process = start(
        """
        import signal, traceback
        if sys.platform == "win32":
            signal.signal(signal.SIGBREAK, signal.default_int_handler)
        def hook(i):
            if i:
                time.sleep(3600)  # stuck, until the interrupt
        def tell():
            while True:
                frame = sys._current_frames()[threading.main_thread().ident]
                if {"hook", "_wait"} & {frame.f_code.co_name for frame, _ in traceback.walk_stack(frame)}:
                    return print("waits", flush=True)
                time.sleep(0.001)  # between two looks; who started this has a limit
        def run(num_threads):
            for batch in PrefetchIterator(DataLoader(Ramp(9, hook=hook)), device="cpu", num_threads=num_threads):
                threading.Thread(target=tell, daemon=True).start()
        try:
            run(0)
        except KeyboardInterrupt:
            print(time.time(), flush=True)
        try:
            run(1)
        except KeyboardInterrupt:
            print(time.time(), flush=True)
            raise
        """,
        **options,
    )
    interrupt = signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT
    for _ in range(2):
        line = within(60, process.stdout.readline)
        assert line == "waits\n", finish(process, 1)
        sent = time.time()
        process.send_signal(interrupt)
        raised = float(within(30, process.stdout.readline))
        assert raised - sent < 1.5
    code, out, err = finish(process, 30)
    ended = time.time()
    assert ended - sent < 8  # a thread in the user's code is waited for 2 s
    assert out == ""
    assert err.count("KeyboardInterrupt") == 1
    assert code not in (0, 1)
    assert "Fatal Python" not in err and "terminate called" not in err


def test_an_epoch_that_a_dataset_begins_while_the_interpreter_ends_is_ended_too():
    code, out, err = script(
        """
        entered = threading.Event()

        def endless():
            while True:
                yield torch.zeros(1)

        def hook(i):
            entered.set()
            while not epoch._epoch._stopped:
                time.sleep(0.001)  # between two looks; the program has a limit
            for _ in PrefetchIterator(endless(), device="cpu"):
                pass

        warnings.simplefilter("ignore")
        epoch = iter(PrefetchIterator(DataLoader(Ramp(8, hook), batch_size=2), device="cpu", num_threads=2))
        assert entered.wait(20)
        warnings.simplefilter("error")
        """
    )
    assert (code, out, err) == (0, "", "")


def test_an_epoch_that_begins_while_the_exit_hook_looks_around_is_ended_too(monkeypatch):
    """Its thread is started by one that ends just then."""

    class Thread:
        def __init__(self, end=None):
            self.looks, self.end = 0, end

        def is_alive(self):
            self.looks += 1
            if self.looks == 2 and self.end is not None:
                self.end()
            return self.looks < 2

    class Worker:
        left_behind = False

        def __init__(self, *end):
            self.thread = Thread(*end)

        def join(self, deadline):
            pass

    told = []
    running = {}
    later = Worker()

    def begin_another_and_end():
        running[later] = lambda: told.append(later)
        running.pop(first)

    first = Worker(begin_another_and_end)
    running[first] = lambda: told.append(first)
    monkeypatch.setattr(_threads, "_running", running)
    assert _threads._stop_all(time.monotonic() + 10) == {first, later}
    assert told == [first, later]


@pytest.mark.process
def test_an_interrupt_while_an_abandoned_epoch_is_waited_for_arrives():
    """Where that is in a finalizer, Python itself would print the exception, and go on."""
    code, out, err = script(
        """
        import _thread
        from gpuprefetch import _threads

        ending, entered, waiting = threading.Event(), threading.Event(), threading.Event()
        join = _threads.Worker.join

        def joined(worker, deadline):
            waiting.set()
            join(worker, deadline)

        _threads.Worker.join = joined

        def run(end):
            for event in (ending, entered, waiting):
                event.clear()

            def hook(i):
                if i:
                    entered.set()
                    ending.wait(20)
                    time.sleep(1)  # load

            def interrupt():
                waiting.wait(20)
                _thread.interrupt_main()

            p = PrefetchIterator(DataLoader(Ramp(9, hook=hook)), device="cpu")
            held = [iter(p) if end == "an epoch" else p]
            del p
            next(held[0])
            assert entered.wait(20)
            threading.Thread(target=interrupt, daemon=True).start()
            try:
                ending.set()
                if end == "close()":
                    held[0].close()
                held.clear()
                for _ in range(100):
                    time.sleep(0.05)  # load: what the program goes on with
                print(end, "went on")
            except KeyboardInterrupt:
                print(end, "interrupted")

        for end in ("an epoch", "an iterator", "close()"):
            run(end)
        """
    )
    assert (code, out, err) == (0, "an epoch interrupted\nan iterator interrupted\nclose() interrupted\n", "")


# --- a forked child


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_forked_children_end_and_iterate_anew():
    """A child has none of its parent's threads. Each ends in its own way; the parent's epoch goes on."""
    code, out, err = script(
        """
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        p = PrefetchIterator(DataLoader(Ramp(9), batch_size=1), device="cpu")
        it = iter(p)
        next(it)
        def anew():
            assert [int(b[0, 0]) for b in p] == list(range(9))
        def anew_then_drop():
            global it
            anew()
            del it
        def close():
            p.close()
            anew()
        def on_and_on():
            try:
                assert [int(b[0, 0]) for b in it] == list(range(1, 9))
            except RuntimeError as error:
                assert "forked" in str(error), error
            anew()
        def leave():
            sys.exit(7)
        children = {}
        for task in (anew, anew_then_drop, close, on_and_on, leave):
            pid = os.fork()
            if pid == 0:
                task()
                sys.exit(5)  # through atexit, as any program ends
            children[pid] = task.__name__
        end = time.monotonic() + 30
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                print(children.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
            elif time.monotonic() > end:
                for pid in children:
                    os.kill(pid, 9)
                sys.exit(f"hangs: {list(children.values())}")
            else:
                time.sleep(0.01)  # between two looks
        print([int(b[0, 0]) for b in it])
        """
    )
    assert code == 0, err
    assert err == ""
    *children, rest = out.splitlines()
    assert sorted(children) == ["anew 5", "anew_then_drop 5", "close 5", "leave 7", "on_and_on 5"]
    assert rest == "[1, 2, 3, 4, 5, 6, 7, 8]"
