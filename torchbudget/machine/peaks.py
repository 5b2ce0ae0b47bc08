"""The most memory that a block of code takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from torchbudget.machine.host import reset_peak_memory
from torchbudget.machine.kernel_files import ROOT, read_fields


@dataclass(slots=True, eq=False)
class Peak:
    """What `peak_memory` measured; filled in when its context ends.

    Attributes:
        bytes: the most memory in use on the device. On the CPU: resident in this process. On CUDA:
            reserved by torch's allocator, and all that is in use outside it (contexts, other
            processes).
        reserved_bytes: on CUDA, the part of it that torch's allocator reserved.
        allocated_bytes: on CUDA, the most that living tensors took.
        sampled: whether memory was only read every millisecond.
        retries: on CUDA, how many allocations failed at first, or for good: torch's
            `num_alloc_retries` and `num_ooms`.
    """

    bytes: int = 0
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    sampled: bool = False
    retries: int = 0


@contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """Measure the most memory that this process uses on `device` inside the context.

    On the CPU that is the high-water mark of resident memory, which is reset first; where the
    kernel does not allow that, a thread reads the resident memory every millisecond.
    """
    peak = Peak()
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = _failed_allocations(device)
        yield peak
        torch.cuda.synchronize(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
        peak.reserved_bytes = torch.cuda.max_memory_reserved(device)
        peak.bytes = peak.reserved_bytes + outside_bytes
        peak.allocated_bytes = torch.cuda.max_memory_allocated(device)
        peak.retries = _failed_allocations(device) - before
    elif reset_peak_memory():
        yield peak
        peak.bytes = read_fields(ROOT / "proc/self/status")["VmHWM"]
    else:
        peak.sampled = True
        yield from _sampled(peak)


def _failed_allocations(device: torch.device) -> int:
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0))


def _sampled(peak: Peak) -> Iterator[Peak]:
    process = psutil.Process()
    ended = threading.Event()

    def sample() -> None:
        while True:
            peak.bytes = max(peak.bytes, process.memory_info().rss)
            if ended.wait(0.001):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
