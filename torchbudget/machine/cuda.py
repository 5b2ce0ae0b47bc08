"""What torch and NVML say of one CUDA device, and what can be done to torch's allocator there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

import torch

from torchbudget.errors import MachineError, OptionError
from torchbudget.machine.allocators import cuda_allocator_settings
from torchbudget.machine.host import machine_memory
from torchbudget.machine.nvml import free_bytes_before, process_bytes, remember_free_bytes

_OWN_POOL: Final = (0, 0)
# Settings whose values in force torch returns, so that what the environment says is not needed.
_READ_OFF: Final = ("backend", "expandable_segments")

# By either name on CUDA and on ROCm.
_UNCACHED: Final = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")

_fractions: dict[int, float] = {}  # by device, as set here


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
    """Whether a copy to a device may be `non_blocking`: return before it is done.

    Towards CUDA it may: work that is enqueued later waits for it, pinned memory is not reused
    before, and other memory was read by then. Towards the CPU it may not: whoever reads the copy
    would not wait. Other devices promise neither.
    """
    if device is None:
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


def device_in_use(*, prefers_current: bool) -> int | None:
    """The device that torch's allocator has most reserved on, in this process; None: nothing is.

    A model may be on another device than the thread's current one, which is the first one unless it
    was set: `"cuda"` would name that, and asking for its memory would take a context there. This
    asks the allocator alone.

    Args:
        prefers_current: the thread's current device, if anything is reserved there.

    Raises:
        MachineError: the allocator does not say, as a pluggable one.
    """
    devices = range(torch.cuda.device_count())
    try:
        if prefers_current and devices:
            current = torch.cuda.current_device()
            if torch.cuda.memory_reserved(current):
                return current
        reserved = [torch.cuda.memory_reserved(index) for index in devices]
    except RuntimeError as error:
        raise MachineError(f"cannot read what torch's allocator has reserved: {error}") from error
    return reserved.index(max(reserved)) if any(reserved) else None


def check_counted() -> None:
    """Check that torch's allocator counts what it allocates.

    Raises:
        MachineError: it passes every request on to the driver, as for debugging, and counts none.
    """
    for name in _UNCACHED:
        if os.environ.get(name) == "1":
            raise MachineError(
                f"{name}=1 has torch allocate without its allocator, which then counts nothing: no "
                "peak of a CUDA device can be measured; unset it"
            )


class TorchSource:
    """A CUDA device, as torch and NVML see it; tests without one put another class in its place.

    The first one in a process initialises CUDA, which it cannot share with forked children.

    Args:
        device: `"cuda"` means the current device.

    Raises:
        OptionError: `device` is no CUDA device.
        MachineError: there is no such device.
    """

    def __init__(self, device: torch.device | str) -> None:
        wanted = _cuda_device(device)
        remember_free_bytes()
        if wanted.index is not None and wanted.index >= torch.cuda.device_count():
            raise MachineError(
                f"cannot read the memory of {wanted}: there are {torch.cuda.device_count()} CUDA "
                "devices, counted from 0"
            )
        try:
            self.index = torch.cuda.current_device() if wanted.index is None else wanted.index
            properties = torch.cuda.get_device_properties(self.index)
        except RuntimeError as error:
            raise MachineError(f"cannot read the memory of {wanted}: {error}") from error
        # The oldest versions of torch that are supported may not know these.
        self._uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
        self._shares_hosts = bool(getattr(properties, "is_integrated", False))

    def figures(self) -> DeviceFigures:
        """Read them now."""
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.index)
            stats = torch.cuda.memory_stats(self.index)  # which a pluggable allocator does not have
        except RuntimeError as error:
            raise MachineError(f"cannot read the memory of cuda:{self.index}: {error}") from error
        if self._shares_hosts:  # of which the driver counts files that the kernel can drop as used
            free_bytes = min(max(free_bytes, machine_memory().free_bytes), total_bytes)
        # The oldest versions of torch that are supported can set the fraction, but not return it.
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", _fraction_set)
        return DeviceFigures(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            process_bytes=process_bytes(self._uuid),
            free_before_bytes=free_bytes_before(self._uuid),
            reserved_bytes=stats.get("reserved_bytes.all.current", 0),
            allocated_bytes=stats.get("allocated_bytes.all.current", 0),
            peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
            peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
            fraction=min(fraction(self.index), 1.0),  # cudaMallocAsync without a limit says more
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
        _fractions[self.index] = fraction

    def name(self) -> str:
        """Which device it is."""
        return torch.cuda.get_device_name(self.index)

    def allocator(self) -> str:
        """Which allocator, with which settings, is in force.

        What the segments are like is read off one of them. Other settings are those that the
        environment states, of which torch does not return what is in force.
        """
        backend, segments = torch.cuda.get_allocator_backend(), self._segments()
        if not segments:
            return backend
        growing = any(one.get("is_expandable", False) for one in segments)
        kind = "expandable segments" if growing else "segments of fixed sizes"
        others = cuda_allocator_settings().items()
        options = [f"{k}:{value}" for k, value in others if k not in _READ_OFF]
        return ", ".join([backend, kind, *options])

    def graph_bytes(self) -> int:
        """Bytes that memory pools other than the default one have reserved, as for CUDA graphs."""
        return sum(
            one["total_size"]
            for one in self._segments()
            if tuple(one.get("segment_pool_id", _OWN_POOL)) != _OWN_POOL
        )

    def _segments(self) -> list[dict[str, Any]]:
        """Those of the allocator on this device; none of another backend, which has no snapshot."""
        if torch.cuda.get_allocator_backend() != "native":
            return []
        return [one for one in torch.cuda.memory_snapshot() if one["device"] == self.index]


def _fraction_set(index: int) -> float:
    return _fractions.get(index, 1.0)


def named_cuda(device: torch.device | str) -> torch.device:
    """The CUDA device of this name, whether there is one or not.

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


def _cuda_device(device: torch.device | str) -> torch.device:
    """The CUDA device of this name, if there is any CUDA device."""
    wanted = named_cuda(device)
    if not torch.cuda.is_available():
        reason = (
            f"torch {torch.__version__} is built without CUDA"
            if torch.version.cuda is None and torch.version.hip is None
            else "torch finds no driver or no device"
        )
        raise MachineError(f"cannot read the memory of {wanted}: {reason}")
    return wanted
