"""The most memory that a block of code takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from torchbudget.errors import MachineError
from torchbudget.machine.device import DeviceMemory, device_memory, is_cpu
from torchbudget.machine.process_tree import RESIDENT


@dataclass(slots=True, eq=False)
class Peak:
    """The result of `peak_memory`, filled in when its context ends.

    Attributes:
        bytes: the most memory that this process used on the device. On the CPU: resident memory. On
            CUDA: bytes reserved by torch's allocator, and bytes in use outside it (context,
            libraries, buffers of collectives), without those of other processes.
        reserved_bytes: on CUDA, the part that torch's allocator reserved.
        reserved_before_bytes: on CUDA, the bytes that it had reserved when the context began.
        outside_bytes: on CUDA, the part outside the allocator when the context ended.
        allocated_bytes: on CUDA, the most bytes of living tensors.
        retries: on CUDA, the number of allocations that succeeded only after the allocator had
            returned its free blocks to the device: torch's `num_alloc_retries`.
        failures: on CUDA, the number of allocations that failed: torch's `num_ooms`. Some libraries
            continue without the memory that they asked for.
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

    On the CPU this is the high-water mark of resident memory, which is reset first. On CUDA see
    `torchbudget.machine.device`; memory outside torch's allocator is read when the context ends.

    Args:
        device: a CPU or a CUDA device.
        synchronize: wait for the device at the beginning and the end. The allocator's bytes are
            known without waiting, but bytes that a library allocates after the end are then missed.

    Raises:
        OptionError: the device is neither a CPU nor a CUDA device.
        MachineError: there is no such device, or it does not respond; torch's allocator has no
            counters; or, on the CPU, the high-water mark cannot be reset.
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
