"""The standard-library part of csrc inside Windows CPython, beside torch: bytes, errors, the GIL, and the end."""

import subprocess
import sys
import threading

import core_module
import pytest
import torch

PIECE, PIECES = 128 << 10, 4  # larger than what is copied on the calling thread


class Staging:
    """A copier whose ring is a torch tensor's memory."""

    def __init__(self):
        self.ring = torch.zeros(PIECE * PIECES, dtype=torch.uint8)
        self.copier = core_module.Copier(self.ring.data_ptr(), PIECE, PIECES)

    def stack(self, samples):
        """The samples' bytes one after the other, as a tensor [len(samples), *shape]."""
        output = torch.zeros(len(samples), *samples[0].shape, dtype=samples[0].dtype)
        self.copier.copy(output.data_ptr(), [(sample.data_ptr(), sample.nbytes) for sample in samples])
        return output


def samples(seed, shape=(3, 100, 100)):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator) for _ in range(32)]


def test_every_byte_arrives_and_sources_are_free_at_once():
    staging = Staging()
    outputs, expected = [], []
    for seed in range(6):
        batch = samples(seed)
        expected.append(torch.stack(batch))
        outputs.append(staging.stack(batch))
        for sample in batch:
            sample.zero_()
    staging.copier.finish()
    assert all(map(torch.equal, outputs, expected))
    assert staging.copier.overwritten() == 0


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_of_the_device_is_an_exception_and_leaves_the_ring_whole(at):
    staging = Staging()
    staging.copier.fail_at(at)
    with pytest.raises(RuntimeError, match="told to fail"):
        staging.stack(samples(1))
    output = staging.stack(samples(2))
    staging.copier.finish()
    assert torch.equal(output, torch.stack(samples(2)))


def test_two_threads_share_the_ring():
    staging, outputs = Staging(), {}

    def copy(seed):
        outputs[seed] = staging.stack(samples(seed))

    threads = [threading.Thread(target=copy, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    staging.copier.finish()
    assert all(torch.equal(outputs[seed], torch.stack(samples(seed))) for seed in range(4))


def test_others_run_while_a_copy_waits_for_the_device():
    staging, outputs = Staging(), []
    staging.copier.hold()
    thread = threading.Thread(target=lambda: outputs.append(staging.stack(samples(1))), daemon=True)
    thread.start()
    staging.copier.await_sleeper()  # would never return here if it slept with the GIL
    staging.copier.let_go()
    thread.join(60)
    staging.copier.finish()
    assert torch.equal(outputs[0], torch.stack(samples(1)))


def test_after_shutdown_the_calling_thread_copies():
    """In a process of its own, which then ends with the copier alive; another ends with the pool alive."""
    running = {
        ending: subprocess.Popen(
            [sys.executable, "-c", f"{BEGIN}\n{ending}\n{COPY}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for ending in ("core_module.shutdown()", "pass")
    }
    for process in running.values():
        out, _ = process.communicate(timeout=100)  # an exit that hangs is an error too
        assert (process.returncode, out.split()) == (0, [b"True"]), out


BEGIN = """
import torch, core_module
ring = torch.zeros(4 << 17, dtype=torch.uint8)
copier = core_module.Copier(ring.data_ptr(), 1 << 17, 4)
source = torch.rand(1 << 18)
"""
COPY = """
output = torch.zeros_like(source)
copier.copy(output.data_ptr(), [(source.data_ptr(), source.nbytes)])
copier.finish()
print(torch.equal(output, source), flush=True)
"""
