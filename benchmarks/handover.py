"""What `next()` costs the training loop when a batch is ready: median and p99, in microseconds.

    python benchmarks/handover.py [--json FILE]

The loader gives the same pair of tensors again and again, [64, 3, 224, 224] float32 and [64] int64. Before every timed
call the loop sleeps and waits for the device, so that the next batch has been loaded and copied, and all room is free.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from output import check_files, finish, start
from target import Target, describe, find_target, headline

WARM_UP_CALLS = 20


class SamePair:
    """A loader that costs nothing: `length` times the same batch."""

    def __init__(self, length: int) -> None:
        self.batch = (torch.rand(64, 3, 224, 224), torch.arange(64))
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(self.length):
            yield self.batch


def time_calls(target: Target, options: argparse.Namespace) -> list[float]:
    """Microseconds of each timed call of `next()`, with a batch ready."""
    from gpuprefetch import PrefetchIterator

    microseconds = []
    loader = SamePair(WARM_UP_CALLS + options.calls)
    arguments = {"prefetch_batches": options.prefetch_batches, "num_threads": options.num_threads}
    with PrefetchIterator(loader, target.device, **arguments) as prefetched:
        batches = iter(prefetched)
        batch = None
        for number in range(WARM_UP_CALLS + options.calls):
            time.sleep(options.settle_ms * 1e-3)
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            fresh = next(batches)
            end = time.perf_counter_ns()
            batch = fresh  # the batch before is freed here, outside the time of next()
            if number >= WARM_UP_CALLS:
                microseconds.append((end - start) * 1e-3)
        del batch
    return microseconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000, help="timed calls, at least 500 (1000)")
    parser.add_argument("--settle-ms", type=float, default=5.0, help="sleep before each call, in milliseconds (5)")
    parser.add_argument("--prefetch-batches", type=int, default=2)
    parser.add_argument("--num-threads", type=int, default=1, help="0 includes loading, by definition (1)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    check_files(parser, options)
    if options.calls < 500:
        parser.error(f"--calls must be at least 500, for a p99 to mean something; got {options.calls}")
    if not torch.cuda.is_available():
        print("handover.py: needs a CUDA device; torch finds none here", file=sys.stderr)
        return 1

    target = find_target("cuda")
    raw = time_calls(target, options)
    percentiles = statistics.quantiles(raw, n=100, method="inclusive")
    result: dict[str, Any] = {
        "benchmark": "handover",
        "format": 1,
        "environment": describe(target),
        "settings": {
            "calls": options.calls,
            "settle_ms": options.settle_ms,
            "prefetch_batches": options.prefetch_batches,
            "num_threads": options.num_threads,
            "batch": "[64, 3, 224, 224] float32 and [64] int64",
        },
        "next_us": {
            "median": statistics.median(raw),
            "p99": percentiles[98],
            "low": min(raw),
            "high": max(raw),
            "raw": raw,
        },
    }
    said = f"next() with a batch ready, {options.calls} calls: median {statistics.median(raw):.1f} us, "
    said += f"p99 {percentiles[98]:.1f} us, highest {max(raw):.1f} us"
    return 0 if finish("\n".join([*headline(result["environment"]), said]), result, options) else 1


if __name__ == "__main__":
    start(main)
