"""A GPU that is not there: figures that tests set, in the place of torch's and NVML's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from torchbudget.machine import device as device_module
from torchbudget.machine.device import DeviceFigures


class FakeDevice:
    """Two equal devices of 80 GiB, which count what is taken and done.

    Attributes:
        now: the figures, which `take` and `free` change.
        cached: bytes of the allocator's that no tensor uses.
    """

    index = 1

    def __init__(self, **figures: Any) -> None:
        total = figures.pop("total_bytes", 80 * 2**30)
        self.now = DeviceFigures(total_bytes=total, **{"free_bytes": total} | figures)
        self.allocated = self.now.reserved_bytes

    def set(self, **figures: Any) -> None:
        """Figures from now on."""
        self.now = replace(self.now, **figures)

    def take(self, num_bytes: int, *, reserving: int = 0) -> None:
        """Allocate tensors; the allocator reserves more than they take."""
        self.allocated += num_bytes
        reserved = max(self.allocated + reserving, self.now.reserved_bytes)
        self.load(
            reserved - self.now.reserved_bytes,
            reserved_bytes=reserved,
            peak_reserved_bytes=max(self.now.peak_reserved_bytes, reserved),
            peak_allocated_bytes=max(self.now.peak_allocated_bytes, self.allocated),
        )

    def free(self, num_bytes: int) -> None:
        """Free tensors, which stay reserved."""
        self.allocated -= num_bytes

    def load(self, num_bytes: int, **figures: Any) -> None:
        """Use memory, as a library does, outside the allocator."""
        if self.now.process_bytes is not None:
            figures["process_bytes"] = self.now.process_bytes + num_bytes
        self.set(free_bytes=self.now.free_bytes - num_bytes, **figures)

    def figures(self) -> DeviceFigures:
        return replace(self.now, allocated_bytes=self.allocated)

    def synchronize(self) -> None:
        pass

    def reset_peaks(self) -> None:
        self.set(peak_reserved_bytes=self.now.reserved_bytes, peak_allocated_bytes=self.allocated)

    def empty_cache(self) -> None:
        self.load(self.allocated - self.now.reserved_bytes, reserved_bytes=self.allocated)

    def set_fraction(self, fraction: float) -> None:
        self.set(fraction=fraction)

    def name(self) -> str:
        return "a device that is not there"

    def allocator(self) -> str:
        return "expandable segments"

    def graph_bytes(self) -> int:
        return 0


def put_in_place(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> FakeDevice:
    """Make every CUDA device this one."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(device_module, "TorchSource", lambda _: fake)
    monkeypatch.setattr(device_module, "_devices", {})
    return fake
