"""The memory of processes, as `/proc` counts it, and the high-water mark of this one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchbudget.errors import MachineError
from torchbudget.machine.kernel_files import ROOT, read_fields


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
