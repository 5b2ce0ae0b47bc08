"""The memory of the host: of the machine and its control groups, and `/dev/shm`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import psutil

from torchbudget.machine.cgroups import cgroup_memory
from torchbudget.machine.kernel_files import ROOT
from torchbudget.machine.pools import MemoryPool
from torchbudget.machine.process_tree import process_tree

SHM: Final = "/dev/shm"


def host_memory() -> tuple[MemoryPool, ...]:
    """The machine and every control group that limits this process, the machine first.

    The kernel kills when any one of them is full, so what this job can use is
    `min(pool.usable_bytes for pool in host_memory())`.

    Raises:
        MachineError: a reading is missing.
    """
    own_bytes = sum(process.unreclaimable_bytes for process in process_tree())
    return (machine_memory(own_bytes=own_bytes), *cgroup_memory(own_bytes=own_bytes))


def machine_memory(*, own_bytes: int = 0) -> MemoryPool:
    """The memory of the whole machine, whatever a container may use of it, without swap.

    Args:
        own_bytes: bytes that this job uses.

    >>> machine_memory().free_bytes <= machine_memory().limit_bytes
    True
    """
    memory = psutil.virtual_memory()
    return MemoryPool(
        name="machine",
        limit_bytes=memory.total,
        # `available` counts reclaimable page cache as free, and tmpfs as used.
        used_bytes=max(0, memory.total - memory.available),
        own_bytes=own_bytes,
    )


def shared_memory(*, root: Path = ROOT) -> MemoryPool | None:
    """`/dev/shm`, through which workers hand over their batches; a worker that fills it dies.

    Args:
        root: the folder that `/dev/shm` is looked up in.

    Returns:
        The pool; None where `/dev/shm` does not exist, or has no limit of its own.
    """
    try:
        system = os.statvfs(root / "dev/shm")
    except FileNotFoundError:
        return None
    if system.f_blocks == 0:  # a tmpfs that was mounted with size=0 grows without limit
        return None
    return MemoryPool(
        name=SHM,
        limit_bytes=system.f_blocks * system.f_frsize,
        used_bytes=(system.f_blocks - system.f_bavail) * system.f_frsize,
    )
