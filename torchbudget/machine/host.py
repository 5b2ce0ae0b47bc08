"""The memory of the host: of processes, of the machine and its control groups, and `/dev/shm`."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchbudget.errors import MachineError
from torchbudget.machine.cgroups import cgroup_memory
from torchbudget.machine.kernel_files import ROOT, read_fields
from torchbudget.machine.pools import MemoryPool


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
        name="/dev/shm",  # noqa: S108  (a name, not a file to write)
        limit_bytes=system.f_blocks * system.f_frsize,
        used_bytes=(system.f_blocks - system.f_bavail) * system.f_frsize,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The memory of one process.

    Attributes:
        pid: the process.
        resident_bytes: pages in memory; a page that several processes map counts in each.
        peak_resident_bytes: the most that `resident_bytes` ever was; None where the kernel does
            not keep it.
        proportional_bytes: pages in memory, each divided by the number of processes that map it,
            so that a sum over processes counts it once.
        unreclaimable_bytes: the part of `proportional_bytes` that the kernel cannot reclaim:
            anonymous pages and shared memory, but not the pages of files, which can be read again.
    """

    pid: int
    resident_bytes: int
    peak_resident_bytes: int | None
    proportional_bytes: int
    unreclaimable_bytes: int


def process_memory(pid: int | None = None, *, root: Path = ROOT) -> ProcessMemory:
    """The memory of one process.

    Args:
        pid: the process; None is this one.
        root: the folder that `/proc` is looked up in.

    Raises:
        MachineError: there is no such process, or no `/proc`.

    >>> memory = process_memory()
    >>> 0 < memory.unreclaimable_bytes <= memory.proportional_bytes <= memory.resident_bytes
    True
    """
    folder = root / "proc" / ("self" if pid is None else str(pid))
    status = read_fields(folder / "status")
    if "Pid" not in status:
        raise MachineError(f"cannot read {folder / 'status'}: no such process, or no Linux /proc")
    resident_bytes = status.get("VmRSS", 0)  # no such line once a process has ended
    unreclaimable_bytes = status.get("RssAnon", 0) + status.get("RssShmem", 0)
    shares: dict[str, int] = {}
    with suppress(MachineError):  # another user's process shows its status only
        shares = read_fields(folder / "smaps_rollup")
    if "Pss_Anon" in shares:
        unreclaimable_bytes = shares["Pss_Anon"] + shares.get("Pss_Shmem", 0)
    return ProcessMemory(
        pid=status["Pid"],
        resident_bytes=resident_bytes,
        peak_resident_bytes=status.get("VmHWM"),
        proportional_bytes=shares.get("Pss", resident_bytes),
        unreclaimable_bytes=unreclaimable_bytes,
    )


def process_tree(pid: int | None = None) -> tuple[ProcessMemory, ...]:
    """The memory of a process, first, and of each of its descendants.

    Descendants that end meanwhile are left out.

    Args:
        pid: the process; None is this one.

    Raises:
        MachineError: there is no such process, or no `/proc`.
    """
    readings = [process_memory(pid)]
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    for descendant in descendants:
        with suppress(MachineError):
            readings.append(process_memory(descendant.pid))
    return tuple(readings)


def reset_peak_memory(*, root: Path = ROOT) -> bool:
    """Reset this process's high-water mark of resident memory to what is resident now.

    Returns:
        Whether the kernel allowed it, which takes Linux with a `/proc` that may be written to.
    """
    try:
        (root / "proc" / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
