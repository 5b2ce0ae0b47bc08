"""What one process may use, whatever the machine has: `ulimit`'s limits, and CPUs."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from torchbudget.machine.kernel_files import ROOT, read_fields, read_lines, read_number
from torchbudget.machine.pools import MemoryPool


def process_limits() -> tuple[MemoryPool, ...]:
    """The limits on this process's memory that are set, in bytes of address space, not of memory.

    `RLIMIT_DATA` bounds heap and private mappings, `RLIMIT_AS` all mappings. What is reserved and
    not used counts too: torch with CUDA maps far more than it uses. Each process has its own.
    """
    status = read_fields(ROOT / "proc/self/status")
    pools = []
    for name, field in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
        limit_bytes = resource.getrlimit(getattr(resource, name))[0]
        if limit_bytes != resource.RLIM_INFINITY and field in status:
            used = status[field]
            pools.append(
                MemoryPool(name=name, limit_bytes=limit_bytes, used_bytes=used, own_bytes=used)
            )
    return tuple(pools)


def open_files_limit() -> int | None:
    """How many files this process may have open: workers take some for each batch; None: any."""
    number = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if number == resource.RLIM_INFINITY else number


def usable_cpus(*, root: Path = ROOT) -> int:
    """CPUs that this process may run on, at most its control group's quota, rounded up.

    Args:
        root: the folder that the group's files are looked up in, at the usual mount points.

    >>> 1 <= usable_cpus() <= (os.cpu_count() or 1)
    True
    """
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(root / "sys/fs/cgroup")
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _quota(folder: Path) -> float | None:
    """CPUs' worth of time that the control group may take; None: all."""
    text = " ".join(read_lines(folder / "cpu.max")).split()
    if len(text) == 2 and text[0].isdecimal():
        return int(text[0]) / int(text[1])
    quota = read_number(folder / "cpu/cpu.cfs_quota_us")
    period = read_number(folder / "cpu/cpu.cfs_period_us")
    return quota / period if quota and period else None
