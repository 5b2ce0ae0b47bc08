"""A GPU that is not there: figures that tests set, in the place of torch's and NVML's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch

from tests.support.caching_allocator import (
    AllocatorOutOfMemoryError,
    AllocatorSettings,
    Block,
    CachingAllocator,
)
from torchbudget.machine import device as device_module
from torchbudget.machine.device import DeviceFigures


class FakeDevice:
    """Two equal devices of 80 GiB, which count what is taken and done.

    Attributes:
        now: the figures, which `take` and `free` change.
        cached: bytes of the allocator's that no tensor uses.
        settings: of the allocator.
        graphs: bytes of CUDA graphs.
    """

    index = 1

    def __init__(self, **figures: Any) -> None:
        total = figures.pop("total_bytes", 80 * 2**30)
        self.now = DeviceFigures(total_bytes=total, **{"free_bytes": total} | figures)
        self.allocated = self.now.reserved_bytes
        self.settings = "native, expandable segments"
        self.graphs = 0
        self.emptied = 0

    def set(self, **figures: Any) -> None:
        """Figures from now on."""
        self.now = replace(self.now, **figures)

    def take(self, num_bytes: int, *, reserving: int = 0) -> None:
        """Allocate tensors; the allocator reserves more than they take."""
        now = self.now
        self.allocated += num_bytes
        grown = max(self.allocated + reserving - now.reserved_bytes, 0)
        reserved = now.reserved_bytes + grown
        process = None if now.process_bytes is None else now.process_bytes + grown
        self.set(
            reserved_bytes=reserved,
            free_bytes=now.free_bytes - grown,
            process_bytes=process,
            peak_reserved_bytes=max(now.peak_reserved_bytes, reserved),
            peak_allocated_bytes=max(now.peak_allocated_bytes, self.allocated),
        )

    def free(self, num_bytes: int) -> None:
        """Free tensors, which stay reserved."""
        self.allocated -= num_bytes

    def load(self, num_bytes: int) -> None:
        """Use memory outside the allocator, as a library does."""
        process = self.now.process_bytes
        self.set(
            free_bytes=self.now.free_bytes - num_bytes,
            process_bytes=None if process is None else process + num_bytes,
        )

    def figures(self) -> DeviceFigures:
        return replace(self.now, allocated_bytes=self.allocated)

    def synchronize(self) -> None:
        pass

    def reset_peaks(self) -> None:
        self.set(peak_reserved_bytes=self.now.reserved_bytes, peak_allocated_bytes=self.allocated)

    def empty_cache(self) -> None:
        cached = self.now.reserved_bytes - self.allocated
        process = self.now.process_bytes
        self.emptied += 1
        self.set(
            reserved_bytes=self.allocated,
            free_bytes=self.now.free_bytes + cached,
            process_bytes=None if process is None else process - cached,
        )

    def set_fraction(self, fraction: float) -> None:
        self.set(fraction=fraction)

    def name(self) -> str:
        return "a device that is not there"

    def allocator(self) -> str:
        return self.settings

    def graph_bytes(self) -> int:
        return self.graphs


class ModelledDevice(FakeDevice):
    """One whose allocator is the model of torch's, beside a process that has half of the device.

    Args:
        expandable: the kind of its segments.
    """

    def __init__(self, *, expandable: bool) -> None:
        super().__init__()
        self.model = CachingAllocator(AllocatorSettings(expandable=expandable))
        kind = "expandable segments" if expandable else "segments of fixed sizes"
        self.settings = f"native, {kind}"
        self.outside_bytes = 600 * 2**20

    def malloc(self, num_bytes: int) -> Block:
        """A block; raises torch's own error where there is none."""
        try:
            return self.model.malloc(num_bytes)
        except AllocatorOutOfMemoryError:
            raise torch.OutOfMemoryError("CUDA out of memory.") from None

    def load(self, num_bytes: int) -> None:
        self.outside_bytes += num_bytes

    def figures(self) -> DeviceFigures:
        model, total = self.model, self.now.total_bytes
        process = model.reserved_bytes + self.outside_bytes
        return DeviceFigures(
            total_bytes=total,
            free_bytes=total // 2 - process,
            process_bytes=process,
            reserved_bytes=model.reserved_bytes,
            peak_reserved_bytes=model.peak_reserved_bytes,
            peak_allocated_bytes=model.peak_allocated_bytes,
            fraction=1.0 if model.cap_bytes is None else model.cap_bytes / total,
            retries=model.num_alloc_retries,
            ooms=model.num_ooms,
        )

    def reset_peaks(self) -> None:
        self.model.reset_peaks()

    def empty_cache(self) -> None:
        self.model.empty_cache()

    def set_fraction(self, fraction: float) -> None:
        self.model.cap_bytes = int(fraction * self.now.total_bytes)


FakeDeviceT = TypeVar("FakeDeviceT", bound=FakeDevice)


def put_in_place(monkeypatch: pytest.MonkeyPatch, fake: FakeDeviceT) -> FakeDeviceT:
    """Make every CUDA device this one."""
    monkeypatch.setattr(device_module, "TorchSource", lambda _: fake)
    monkeypatch.setattr(device_module, "_devices", {})
    return fake
