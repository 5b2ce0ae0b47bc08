"""The memory of a CUDA device: what this process has of it, and what others have.

The device's bytes of a process are what torch's allocator has reserved plus what the process uses
outside it: its context, libraries, buffers of collectives. Memory of other processes is no part.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from torchbudget.machine.cuda import DeviceFigures, TorchSource
from torchbudget.machine.high_water import HighWater
from torchbudget.machine.pools import MemoryPool
from torchbudget.units import format_bytes

# Where nothing tells processes apart, up to so much of what is in use at first is this process's: a
# context takes about half a GiB, libraries that are loaded by then some hundred MiB more.
_ASSUMED_BYTES: Final = 2**30
# Where segments grow, torch compares its limit with a request rounded up to 2 MiB, and then takes
# pages of 20 MiB. With segments of fixed sizes so much stays free.
_BEYOND_BYTES: Final = 18 * 2**20
_devices: dict[tuple[int, int], DeviceMemory] = {}  # by process and index


class DeviceMemory:
    """The memory of one device, told apart from that of other processes.

    Where NVML counts this process's bytes, at least those that torch's allocator has reserved, they
    are read each time. Elsewhere others are taken to use what they used before this process had a
    context, or, if that is unknown, all that was in use at the first reading beyond a GiB; what is
    added later is this process's.

    Attributes:
        source: of the figures, and what acts on the allocator.
        high_water: the most that the allocator reserved, and that living tensors took.
    """

    def __init__(self, source: TorchSource) -> None:
        self.source = source
        self.high_water = HighWater(self._peaks, self._reset_peaks)
        first = source.figures()
        used_bytes = first.total_bytes - first.free_bytes
        if first.free_before_bytes is not None:
            self._others_bytes = max(0, first.total_bytes - first.free_before_bytes)
        else:
            self._others_bytes = max(0, used_bytes - first.reserved_bytes - _ASSUMED_BYTES)

    def _peaks(self) -> tuple[int, ...]:
        figures = self.source.figures()
        return figures.peak_reserved_bytes, figures.peak_allocated_bytes

    def _reset_peaks(self) -> bool:
        self.source.reset_peaks()
        return True

    def outside_bytes(self, figures: DeviceFigures) -> int:
        """What this process used outside torch's allocator at a reading."""
        if _is_counted(figures):
            used_bytes = figures.process_bytes or 0
        else:
            used_bytes = figures.total_bytes - figures.free_bytes - self._others_bytes
        return max(0, used_bytes - figures.reserved_bytes)

    def told_apart_by(self, figures: DeviceFigures) -> str:
        """How this process's bytes were told from those of others at a reading."""
        if _is_counted(figures):
            return "as NVML counts this process"
        if figures.free_before_bytes is not None:
            return "what is in use, less what was in use before this process had a context"
        others = format_bytes(self._others_bytes)
        return f"an assumption, {others} in use being others'; with nvidia-ml-py it is read"

    def pool(self) -> MemoryPool:
        """The device as memory that this process shares with others.

        Where the allocator may take a fraction only, the rest counts as used.
        """
        figures = self.source.figures()
        cap_bytes = int(figures.total_bytes * figures.fraction)
        free_bytes = min(figures.free_bytes, max(0, cap_bytes - figures.reserved_bytes))
        return MemoryPool(
            name=f"cuda:{self.source.index}",
            limit_bytes=figures.total_bytes,
            used_bytes=figures.total_bytes - free_bytes,
            own_bytes=figures.reserved_bytes + self.outside_bytes(figures),
        )

    def limit(self, num_bytes: int) -> int:
        """Let the allocator reserve no more than what keeps this process within `num_bytes`.

        Returns:
            What it may reserve: `num_bytes` less what is used outside it; 0 where that leaves
            nothing, and the limit is what it was.
        """
        figures = self.source.figures()
        room_bytes = min(num_bytes - self.outside_bytes(figures), figures.total_bytes)
        if room_bytes <= _BEYOND_BYTES:
            return 0
        self.source.empty_cache()  # what it has reserved already, it would keep
        self.source.set_fraction((room_bytes - _BEYOND_BYTES) / figures.total_bytes)
        return room_bytes


def _is_counted(figures: DeviceFigures) -> bool:
    """Whether NVML counts this process, and not less of it than torch's allocator has reserved.

    It counts no managed memory, and some versions of its package mix up the fields of processes.
    """
    return figures.process_bytes is not None and figures.process_bytes >= figures.reserved_bytes


def device_memory(device: torch.device | str = "cuda") -> DeviceMemory:
    """The memory of a CUDA device; one for each device, made at the first call.

    The first call in a process initialises CUDA, which it cannot share with forked children.

    Args:
        device: `"cuda"` means the current device.

    Raises:
        OptionError: `device` is no CUDA device.
        MachineError: there is no such device, or CUDA does not answer.
    """
    source = TorchSource(device)
    key = os.getpid(), source.index
    if key not in _devices:
        _devices[key] = DeviceMemory(source)
    return _devices[key]


def is_cpu(device: torch.device | str) -> bool:
    """Whether it is the CPU; not whether there is such a device, which `device_memory` checks."""
    return str(device) in ("cpu", "cpu:0")


def cuda_memory(device: torch.device | str = "cuda") -> MemoryPool:
    """The memory of one GPU; this job's own is what this process uses of it, context included.

    See `device_memory`, whose errors it raises. Other processes on one GPU count as others, those
    of this job too: a GPU belongs to one rank.
    """
    return device_memory(device).pool()
