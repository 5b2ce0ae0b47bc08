"""The memory of a process and of all its descendants, such as the workers of a `DataLoader`."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchbudget.errors import MachineError
from torchbudget.machine.kernel_files import ROOT, read_fields, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The memory of one process.

    Attributes:
        pid: the process.
        resident_bytes: pages in memory; a page that several processes map counts in each.
        peak_resident_bytes: the most that `resident_bytes` ever was; None where the kernel does
            not keep it.
        anonymous_bytes: the resident pages that are neither a file's nor shared memory; after a
            fork they are shared too, until one of the processes writes to them.
        shared_bytes: the part of `proportional_bytes` that is shared memory.
        proportional_bytes: pages in memory, each divided by the number of processes that map it,
            so that a sum over processes counts it once; see `is_proportional`.
        unreclaimable_bytes: the part of `proportional_bytes` that the kernel cannot reclaim:
            anonymous pages and shared memory, but not the pages of files, which can be read again.
        is_proportional: whether the shares of the pages were read. Otherwise
            `proportional_bytes` are the anonymous bytes, without all that may be shared, and
            `unreclaimable_bytes` are those and the whole of the shared memory that is mapped.
    """

    pid: int
    resident_bytes: int
    peak_resident_bytes: int | None
    anonymous_bytes: int
    shared_bytes: int
    proportional_bytes: int
    unreclaimable_bytes: int
    is_proportional: bool


def process_memory(
    pid: int | None = None, *, shares: bool = True, root: Path = ROOT
) -> ProcessMemory:
    """The memory of one process.

    Args:
        pid: the process; None is this one.
        shares: read which part of each page is the process's. The kernel visits every page for it,
            which takes about 15 ms a GiB; the rest takes a thousandth of that.
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
    anonymous_bytes = status.get("RssAnon", 0)  # no such line once a process has ended
    pages: dict[str, int] = {}
    has_ended = "VmRSS" not in status
    if shares:
        try:
            pages = read_fields(folder / "smaps_rollup")
        except MachineError as error:  # another user's process shows its status only
            has_ended = has_ended or isinstance(error.__cause__, ProcessLookupError)
    mapped_bytes = status.get("RssShmem", 0)
    unreclaimable_bytes = anonymous_bytes + mapped_bytes
    if "Pss_Anon" in pages:
        unreclaimable_bytes = pages["Pss_Anon"] + pages.get("Pss_Shmem", 0)
    return ProcessMemory(
        pid=status["Pid"],
        resident_bytes=status.get("VmRSS", 0),
        peak_resident_bytes=status.get("VmHWM"),
        anonymous_bytes=anonymous_bytes,
        shared_bytes=pages.get("Pss_Shmem", mapped_bytes if "Pss" in pages else 0),
        proportional_bytes=pages.get("Pss", anonymous_bytes),
        unreclaimable_bytes=unreclaimable_bytes,
        is_proportional="Pss" in pages or has_ended,
    )


class ProcessTree:
    """A process and its descendants, to be read again and again.

    To find the descendants, every process of the machine is looked at once: those that were started
    since the last time, if any was. A descendant stays one when its parent has ended.

    Args:
        pid: the process; None is the calling one.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._newest = ""
        self._known: set[int] = set()  # processes of the machine that were looked at
        self._descendants: list[int] = []

    def read(self, *, shares: bool = True) -> tuple[ProcessMemory, ...]:
        """The memory of the process, first, and of each of its descendants.

        Descendants that end meanwhile are left out.

        Args:
            shares: see `process_memory`.

        Raises:
            MachineError: there is no such process, or no `/proc`.
        """
        readings = [process_memory(self._pid, shares=shares)]
        for pid in self._find():
            with suppress(MachineError):
                readings.append(process_memory(pid, shares=shares))
        return tuple(readings)

    def _find(self) -> list[int]:
        newest = _newest_process()
        if newest in ("", "0") or newest != self._newest:
            self._newest = newest
            self._find_new()
        return self._descendants

    def _find_new(self) -> None:
        """Look at the processes that were not there the last time."""
        there = {int(name) for name in os.listdir(ROOT / "proc") if name.isdecimal()}
        parents = {pid: _parent(pid) for pid in there - self._known}
        tree = {os.getpid() if self._pid is None else self._pid, *self._descendants}
        while found := {pid for pid, parent in parents.items() if parent in tree} - tree:
            tree |= found
            self._descendants += sorted(found)
        self._descendants = [pid for pid in self._descendants if pid in there]
        self._known = there


def process_tree() -> tuple[ProcessMemory, ...]:
    """The memory of this process, first, and of each of its descendants.

    Descendants that end meanwhile are left out.

    Raises:
        MachineError: there is no `/proc`.
    """
    return ProcessTree().read()


def _newest_process() -> str:
    """The number that the last process or thread was given; empty where it is unknown."""
    lines = read_lines(ROOT / "proc/loadavg")
    return lines[0].split()[-1] if lines else ""


def _parent(pid: int) -> int | None:
    """The process that has started another one; `None` where that has ended."""
    with suppress(MachineError):  # it ended while it was read
        for line in read_lines(ROOT / f"proc/{pid}/stat"):
            # A line reads: number, (name), state, parent; names may have blanks and brackets.
            return int(line.rpartition(")")[2].split()[1])
    return None
