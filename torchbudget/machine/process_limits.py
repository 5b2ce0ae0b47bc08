"""What `ulimit` allows one process, whatever the machine has."""

from __future__ import annotations

import resource

from torchbudget.machine.kernel_files import ROOT, read_fields
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
