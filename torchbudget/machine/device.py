"""The memory of a CUDA device: the part of this process, and the part of others.

The device's bytes of a process are what torch's allocator has reserved plus what the process uses
outside it: its context, libraries, buffers of collectives. Memory of other processes is no part.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch

from torchbudget.errors import MachineError, OptionError
from torchbudget.machine.allocators import has_expandable_segments
from torchbudget.machine.host import MemoryPool, machine_memory
from torchbudget.machine.nvml import free_bytes_before, process_bytes, remember_free_bytes
from torchbudget.machine.process_tree import HighWater
from torchbudget.units import format_bytes

# Where segments grow, torch compares its limit with a request rounded up to 2 MiB, and then takes
# pages of 20 MiB. With segments of fixed sizes so much stays free.
_BEYOND_BYTES: Final = 18 * 2**20
_OWN_POOL: Final = (0, 0)
# By either name on CUDA and on ROCm: every request goes to the driver, as for debugging.
_UNCACHED: Final = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_devices: dict[tuple[int, int], DeviceMemory] = {}  # by process and index


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """One reading of a device, as torch, the driver and NVML say it.

    Attributes:
        total_bytes: of the device.
        free_bytes: what no process uses.
        process_bytes: what this process uses, context and libraries included; None: unknown.
        free_before_bytes: what was free before this process had a context; None: unknown.
        reserved_bytes: what torch's allocator has reserved.
        allocated_bytes: what living tensors take.
        peak_reserved_bytes: the most that was reserved since the peaks were reset.
        peak_allocated_bytes: the most that living tensors took since then.
        fraction: of the device, that the allocator may reserve.
        retries: allocations so far that succeeded after the cache was flushed.
        ooms: allocations so far that failed for good.
    """

    total_bytes: int
    free_bytes: int
    process_bytes: int | None = None
    free_before_bytes: int | None = None
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    fraction: float = 1.0
    retries: int = 0
    ooms: int = 0


def may_return_early(device: torch.device | str | int | None) -> bool:
    """Return whether a copy to a device may be `non_blocking`: return before it is done.

    Towards CUDA it may: work that is enqueued later waits for it, pinned memory is not reused
    before, and other memory was read by then. Towards the CPU it may not: whoever reads the copy
    would not wait. Other devices promise neither.
    """
    if device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


def device_in_use(*, prefers_current: bool) -> int | None:
    """Return the device on which torch's allocator has most reserved; None: nothing is reserved.

    A model may be on another device than the thread's current one, which is the first one unless it
    was set: `"cuda"` would name that, and asking for its memory would take a context there. This
    asks the allocator alone.

    Args:
        prefers_current: the thread's current device, if anything is reserved there.

    Raises:
        MachineError: torch allocates without its own allocator.
    """
    _check_counted()
    devices = range(torch.cuda.device_count())
    if prefers_current and devices:
        current = torch.cuda.current_device()
        if torch.cuda.memory_reserved(current):
            return current
    reserved = [torch.cuda.memory_reserved(index) for index in devices]
    return reserved.index(max(reserved)) if any(reserved) else None


def _check_counted() -> None:
    """Raise where torch allocates without its own allocator, which alone counts its blocks."""
    backend = torch.cuda.get_allocator_backend()
    settings = [f"{name}=1" for name in _UNCACHED if os.environ.get(name) == "1"]
    if backend != "native":
        settings.append(f"backend:{backend}")
    if settings:
        raise MachineError(
            f"with {settings[0]} torch bypasses its own allocator, so the use of a CUDA device "
            "cannot be read; unset it"
        )


class TorchSource:
    """A CUDA device, as torch and NVML see it; tests without one put another class in its place.

    The first one in a process initialises CUDA, which it cannot share with forked children.

    Args:
        device: `"cuda"` means the current device.

    Raises:
        OptionError: `device` is no CUDA device.
        MachineError: there is no such device, or torch allocates without its own allocator.
    """

    def __init__(self, device: torch.device | str) -> None:
        wanted = named_cuda(device)
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if number <= (wanted.index or 0):
            raise MachineError(
                f"cannot read the memory of {wanted}: torch {torch.__version__} finds {number} "
                "CUDA devices, counted from 0"
            )
        remember_free_bytes()
        try:
            self.index = torch.cuda.current_device() if wanted.index is None else wanted.index
            properties = torch.cuda.get_device_properties(self.index)
        except RuntimeError as error:
            raise MachineError(f"cannot read the memory of {wanted}: {error}") from error
        _check_counted()
        self._uuid = str(properties.uuid).removeprefix("GPU-")
        self._shares_hosts = bool(properties.is_integrated)

    def figures(self) -> DeviceFigures:
        """Read the device now; NVML first, since what is allocated meanwhile is not outside."""
        own_bytes = process_bytes(self._uuid)
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
            stats = torch.cuda.memory_stats(self.index)
        except RuntimeError as error:
            raise MachineError(f"cannot read the memory of cuda:{self.index}: {error}") from error
        if self._shares_hosts:  # of which the driver counts files that the kernel can drop as used
            free_bytes = min(max(free_bytes, machine_memory().free_bytes), total_bytes)
        # Torch 2.6 can set the fraction, but not return it.
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        return DeviceFigures(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            process_bytes=own_bytes,
            free_before_bytes=free_bytes_before(self._uuid),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            fraction=fraction(self.index),
            retries=stats.get("num_alloc_retries", 0),
            ooms=stats.get("num_ooms", 0),
        )

    def synchronize(self) -> None:
        """Wait for all that was enqueued."""
        torch.cuda.synchronize(self.index)

    def reset_peaks(self) -> None:
        """Make the peaks start from what is reserved and allocated now."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def empty_cache(self) -> None:
        """Return the allocator's free blocks to the device."""
        torch.cuda.empty_cache()

    def set_fraction(self, fraction: float) -> None:
        """Let the allocator reserve no more than this part of the device."""
        with torch.cuda.device(self.index):  # which torch would leave as the current one
            torch.cuda.set_per_process_memory_fraction(fraction, self.index)

    def name(self) -> str:
        """Return the name of the device."""
        return torch.cuda.get_device_name(self.index)

    def allocator(self) -> str:
        """Return the kind of the allocator's segments, by which the reserved bytes differ."""
        return "expandable segments" if has_expandable_segments() else "segments of fixed sizes"

    def graph_bytes(self) -> int:
        """Return the bytes reserved in memory pools but the default one, as for CUDA graphs."""
        return sum(
            one["total_size"]
            for one in torch.cuda.memory_snapshot()
            if one["device"] == self.index and tuple(one["segment_pool_id"]) != _OWN_POOL
        )


def named_cuda(device: torch.device | str) -> torch.device:
    """Return the CUDA device of this name, whether the machine has it or not.

    Raises:
        OptionError: it is the name of none.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is None or wanted.type != "cuda":
        raise OptionError(
            f"expected a CUDA device such as 'cuda:0', got {str(device)!r}; "
            "for another device, state the budget's bytes"
        )
    return wanted


class DeviceMemory:
    """The memory of one device, told apart from that of other processes.

    The bytes of this process are those that NVML counts for it, read each time, unless torch's
    allocator has reserved more. Elsewhere they are all bytes in use, less those that were in use
    before this process had a context, if that is known: doubtful bytes are its own.

    Attributes:
        source: the source of the figures, which also acts on the allocator.
        high_water: the most that the allocator reserved, and that living tensors took.
    """

    def __init__(self, source: TorchSource) -> None:
        self.source = source
        self.high_water = HighWater(self._peaks, source.reset_peaks)
        first = source.figures()
        before_bytes = first.free_before_bytes
        self._others_bytes = 0 if before_bytes is None else first.total_bytes - before_bytes

    def _peaks(self) -> tuple[int, ...]:
        figures = self.source.figures()
        return figures.peak_reserved_bytes, figures.peak_allocated_bytes

    def outside_bytes(self, figures: DeviceFigures) -> int:
        """Return the bytes that this process used outside torch's allocator at a reading."""
        used_bytes = figures.total_bytes - figures.free_bytes - self._others_bytes
        if _is_counted(figures):
            used_bytes = figures.process_bytes or 0
        return max(0, used_bytes - figures.reserved_bytes)

    def told_apart_by(self, figures: DeviceFigures) -> str:
        """Name the source that told this process's bytes from those of others at a reading."""
        if _is_counted(figures):
            return "as NVML counts this process"
        others = format_bytes(self._others_bytes)
        return f"all that is in use, except {others} from before this process had a context"

    def pool(self) -> MemoryPool:
        """Return the device as memory that this process shares with others.

        `own_bytes` are this process's, its context included. Other processes count as others, those
        of this job too: a GPU belongs to one rank. Where the allocator may take a fraction only,
        the rest counts as used.
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
    """Return whether NVML counts this process, and no less than torch's allocator has reserved.

    It counts no managed memory, and some versions of its package mix up the fields of processes.
    """
    return figures.process_bytes is not None and figures.process_bytes >= figures.reserved_bytes


def device_memory(device: torch.device | str = "cuda") -> DeviceMemory:
    """Return the memory of a CUDA device; one object for each device, made at the first call.

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
    """Return whether it is the CPU. `device_memory` checks whether the machine has another one."""
    return str(device) in ("cpu", "cpu:0")
