"""What kinds of pages a process has: its own, those that it shares, and those of files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from torchbudget.errors import MachineError
from torchbudget.machine.kernel_files import ROOT, read_fields, read_lines

_LIBRARY: Final = ("/usr/lib/locale/", "/memfd:", "/dev/", "/SYSV")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPages:
    """The memory of one process by the kind of its pages, in bytes.

    Attributes:
        resident: pages in memory, of all kinds.
        peak_resident: the most that `resident` ever was since it was reset; 0 where the kernel does
            not keep it.
        anonymous: the heap and stacks; of a forked process with the pages that it has in common
            with its parent.
        private: the part of `anonymous` that no other process maps.
        file: pages of files: libraries, and data that is mapped.
        private_file: the part of `file` that no other process maps.
        shared_memory: pages of `/dev/shm` that it maps.
    """

    resident: int
    peak_resident: int
    anonymous: int
    private: int
    file: int
    private_file: int
    shared_memory: int

    @property
    def common(self) -> int:
        """Anonymous pages that other processes map too: they are copied once one writes to them."""
        return max(0, self.anonymous - self.private)


def process_pages(pid: int | None = None) -> ProcessPages:
    """The pages of a process, by their kind; O(pages).

    Args:
        pid: the process; None is this one.

    Raises:
        MachineError: there is no such process, no Linux `/proc`, or it is another user's.

    >>> pages = process_pages()
    >>> 0 < pages.private <= pages.anonymous < pages.resident
    True
    """
    folder = ROOT / "proc" / ("self" if pid is None else str(pid))
    status, sums = read_fields(folder / "status"), read_fields(folder / "smaps_rollup")
    if "RssAnon" not in status or "Private_Dirty" not in sums:
        raise MachineError(f"cannot read {folder}: no such process, or no Linux /proc")
    shared_memory = status["RssShmem"]
    # Of files only those are dirty that were written a moment ago.
    dirty = mapped_data_bytes(pid, field="Private_Dirty:")
    return ProcessPages(
        resident=status["VmRSS"],
        peak_resident=status.get("VmHWM", 0),
        anonymous=status["RssAnon"],
        private=min(max(0, sums["Private_Dirty"] - shared_memory - dirty), status["RssAnon"]),
        file=status["RssFile"],
        private_file=min(sums["Private_Clean"], status["RssFile"]),
        shared_memory=shared_memory,
    )


def mapped_data_bytes(pid: int | None = None, *, field: str = "Rss:") -> int:
    """Resident pages of files that a process maps and that are no libraries, such as memory maps.

    The kernel takes them back when memory is short, since they can be read again. O(mappings).
    """
    folder = ROOT / "proc" / ("self" if pid is None else str(pid))
    resident: dict[str, int] = {}
    libraries = set()
    path = ""
    for line in read_lines(folder / "smaps"):
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):  # `7f00-7f10 r--p 00000000 08:01 42   /path`
            path = fields[5] if len(fields) == 6 else ""
            if "x" in fields[1]:
                libraries.add(path)
        elif fields[0] == field and path.startswith("/") and not path.startswith(_LIBRARY):
            resident[path] = resident.get(path, 0) + int(fields[1]) * 1024
    return sum(size for path, size in resident.items() if path not in libraries)


def restart_peak(pid: int) -> None:
    """Make the high-water mark of a child begin anew, where the kernel allows it.

    This process's own mark has one owner: see `torchbudget.machine.high_water`.

    Args:
        pid: the child.
    """
    with suppress(OSError):
        (ROOT / "proc" / str(pid) / "clear_refs").write_text("5")
