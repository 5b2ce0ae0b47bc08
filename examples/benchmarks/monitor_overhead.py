"""What does a monitor cost?

Question: a training with two workers runs for a while, in a process of its usual size and in one of
some GiB more, and its memory changes with every batch. Which share of one processor's time does the
monitor's thread take, all it does included, and what does `monitor.batch` add to a batch?

Command: python examples/benchmarks/monitor_overhead.py [--seconds S] [--gib G] [--json PATH]

Hardware: 2 cores of an AMD EPYC, shared with other jobs, Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    process     seconds  samples  thread's share  µs a batch
    0 GiB more       60       94           0.76%         160
    2 GiB more       61      104           0.75%         164
    0 GiB more, thread's share ≤ 0.01: 0.0076024, holds
    2 GiB more, thread's share ≤ 0.01: 0.0074786, holds

The thread's time is the kernel's, of its own processor clock. `monitor.batch` is timed around an
empty batch, in the processor time of the loop's thread, with a file that lines are written to.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import Results, options
from torch.utils.data import DataLoader, Dataset

from torchbudget import MemoryMonitor

EMPTY = 2000  # batches


class Samples(Dataset[Any]):
    """A MiB each."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2**18)


def train(seconds: float, monitor: MemoryMonitor) -> tuple[float, float, int]:
    """The thread's processor time, the wall's and the number of samples that it has read."""
    model = torch.nn.Linear(256, 256)
    with monitor:
        clock = time.pthread_getcpuclockid(monitor._thread.ident or 0)
        began_s, cpu_s = time.perf_counter(), time.clock_gettime(clock)
        for batch in DataLoader(Samples(), batch_size=8, num_workers=2):
            with monitor.batch(len(batch), batch.shape[1]):
                model(batch.reshape(-1, 256)).square().mean().backward()
            if time.perf_counter() - began_s > seconds:
                break
        wall_s, cpu_s = time.perf_counter() - began_s, time.clock_gettime(clock) - cpu_s
        return cpu_s, wall_s, monitor.report().end["samples"]


def a_batch(monitor: MemoryMonitor) -> float:
    """Processor time of the loop's thread that `monitor.batch` takes."""
    with monitor:
        before_s = time.thread_time()
        for number in range(EMPTY):
            with monitor.batch(1, number):
                pass
        return (time.thread_time() - before_s) / EMPTY


def main() -> None:
    arguments = options(__doc__, seconds=60, gib=2)
    results = Results(
        {
            "process": "s",
            "seconds": ".0f",
            "samples": ",d",
            "thread's share": ".2%",
            "µs a batch": ".0f",
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        for gib in (0, arguments.gib):
            taken = torch.ones(gib * 2**28)
            path = Path(folder, f"{gib}.jsonl")
            cpu_s, wall_s, samples = train(arguments.seconds, MemoryMonitor(path=path))
            results.row(
                process=f"{gib} GiB more",
                seconds=wall_s,
                samples=samples,
                **{
                    "thread's share": cpu_s / wall_s,
                    "µs a batch": 1e6 * a_batch(MemoryMonitor(path=path)),
                },
            )
            results.bar(f"{gib} GiB more, thread's share", cpu_s / wall_s, 0.01)
            del taken
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
