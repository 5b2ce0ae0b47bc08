"""The most memory that a block of code takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchbudget.errors import MachineError
from torchbudget.machine.device import DeviceMemory, device_memory, is_cpu
from torchbudget.machine.high_water import RESIDENT


@dataclass(slots=True, eq=False)
class Peak:
    """The result of `peak_memory`, filled in when its context ends.

    Attributes:
        bytes: the most memory that this process used on the device. On the CPU: resident. On CUDA:
            reserved by torch's allocator, and in use outside it (context, libraries, buffers of
            collectives); not what other processes use.
        reserved_bytes: on CUDA, the part of it that torch's allocator reserved.
        reserved_before_bytes: on CUDA, what it had reserved when the context began.
        outside_bytes: on CUDA, the part outside the allocator when the context ended.
        allocated_bytes: on CUDA, the most that living tensors took.
        retries: on CUDA, how many allocations succeeded only after the allocator had returned its
            free blocks to the device: torch's `num_alloc_retries`.
        failures: on CUDA, how many allocations failed: torch's `num_ooms`. Some libraries go on
            without the memory that they asked for.
    """

    bytes: int = 0
    reserved_bytes: int = 0
    reserved_before_bytes: int = 0
    outside_bytes: int = 0
    allocated_bytes: int = 0
    retries: int = 0
    failures: int = 0


@contextmanager
def peak_memory(device: torch.device | str, *, synchronize: bool = True) -> Iterator[Peak]:
    """Measure the most memory that this process uses on `device` inside the context.

    Contexts may be nested, and a `MemoryMonitor` may run around them: each has its own peak.

    On the CPU that is the high-water mark of resident memory, which is reset first. On CUDA see
    `torchbudget.machine.device`; memory outside torch's allocator is read when the context ends.

    Args:
        device: a CPU or a CUDA device.
        synchronize: wait for the device at the beginning and the end. What the allocator reserves
            is known without; what a library allocates later counts in a later block then.

    Raises:
        OptionError: the device is neither a CPU nor a CUDA device.
        MachineError: there is no such device, or it does not answer; torch's allocator counts
            nothing; or, on the CPU, the kernel does not let the mark be reset.
    """
    peak = Peak()
    if not is_cpu(device):
        yield from _on_device(peak, device_memory(device), synchronize=synchronize)
        return
    mark = RESIDENT.begin()
    if mark is None:
        raise MachineError(
            "the peak of resident memory is unknown, since /proc/self/clear_refs is not writable "
            "here; measure the cost with method='trace'"
        )
    yield peak
    [peak.bytes] = mark.most()


def _on_device(peak: Peak, memory: DeviceMemory, *, synchronize: bool) -> Iterator[Peak]:
    source = memory.source
    if synchronize:
        source.synchronize()
    mark = memory.high_water.begin()
    before = source.figures()
    yield peak
    if synchronize:
        source.synchronize()
    after = source.figures()
    if mark is not None:
        peak.reserved_bytes, peak.allocated_bytes = mark.most()
    peak.reserved_before_bytes = before.reserved_bytes
    peak.outside_bytes = memory.outside_bytes(after)
    peak.bytes = peak.reserved_bytes + peak.outside_bytes
    # Less than before: they were reset inside, by torch.cuda.reset_accumulated_memory_stats.
    peak.retries = max(after.retries - before.retries, 0)
    peak.failures = max(after.ooms - before.ooms, 0)
