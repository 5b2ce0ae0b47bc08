"""What is assumed of a CUDA device, where none is at hand."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

import torch

from torchbudget.cost.measuring.caching_allocator import AllocatorSettings
from torchbudget.errors import CostError
from torchbudget.machine.allocators import cuda_allocator_settings
from torchbudget.units import format_bytes

# What a process has on a device outside torch's allocator: the context, and libraries with their
# kernels. It differs between devices and drivers; a run on the device measures it.
CONTEXT_BYTES: Final = 600 * 2**20
# ATen/cuda/CublasHandlePool.cpp: workspaces that cuBLAS gets from torch's allocator, 8 of 4 MiB
# from Hopper on, 2 of 4 MiB and 8 of 16 KiB before; and that of cuBLASLt. Older versions of torch
# take the smaller one on Blackwell, too.
CUBLAS_HOPPER_BYTES: Final = 8 * 4096 * 1024
CUBLAS_BYTES: Final = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_LT_BYTES: Final = 1024 * 1024
_HOPPER: Final = 9  # the major number of its compute capability
# Each thread has a handle of its own, which has a workspace: the forward's, and the backward's.
_THREADS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedDevice:
    """What is assumed of a CUDA device that no step runs on.

    Attributes:
        settings: of torch's allocator.
        context_bytes: outside the allocator.
        workspaces: of libraries, from the allocator, in bytes.
        architecture: whose workspaces they are.
    """

    settings: AllocatorSettings
    context_bytes: int
    workspaces: tuple[int, ...]
    architecture: str

    @classmethod
    def of(cls, capability: tuple[int, int] | None, settings: AllocatorSettings) -> AssumedDevice:
        """A device of a compute capability; `None`: unknown, so that the most is assumed."""
        hopper = capability is None or capability[0] >= _HOPPER
        architecture = "Hopper, which has the largest" if capability is None else f"{capability}"
        default = CUBLAS_HOPPER_BYTES if hopper else CUBLAS_BYTES
        each = [_stated_workspace() or default, CUBLAS_LT_BYTES]
        return cls(
            settings=settings,
            context_bytes=CONTEXT_BYTES,
            workspaces=tuple(each * _THREADS),
            architecture=architecture,
        )

    @classmethod
    def detect(cls) -> AssumedDevice:
        """The current device, if this process uses one, with the settings of the environment.

        A trace needs no device: a context that it made would take memory, and forked workers of a
        process that has one cannot use CUDA.
        """
        capability = torch.cuda.get_device_capability() if torch.cuda.is_initialized() else None
        return cls.of(capability, AllocatorSettings.of(cuda_allocator_settings()))

    @property
    def fixed_bytes(self) -> int:
        """On the device before there is any tensor."""
        return self.context_bytes + sum(self.workspaces)

    @property
    def segments(self) -> str:
        """The kind of its allocator's segments, in words."""
        return "expandable segments" if self.settings.expandable else "segments of fixed sizes"

    def room_for_tensors(self, room: int | None) -> int | None:
        """What a budget leaves for tensors.

        Raises:
            CostError: nothing.
        """
        if room is not None and room <= self.fixed_bytes:
            raise CostError(
                f"a CUDA context and the workspaces of cuBLAS take {format_bytes(self.fixed_bytes)}"
                f", which leaves nothing of a budget of {format_bytes(room)}"
            )
        return None if room is None else room - self.fixed_bytes


def _stated_workspace() -> int | None:
    """The bytes that `CUBLAS_WORKSPACE_CONFIG` sets, such as 32 MiB for ":4096:8", in KiB."""
    stated = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(size) * int(number) * 1024 for size, number in stated) or None
