"""Linux's `/proc`: the memory of this process and of its descendants, and of files they share.

A batch on its way from a worker is a file of `/dev/shm` that is open in the worker and mapped by
neither side. The main process maps it when it receives it, but has pages of it only once it reads
them. Meanwhile the file takes memory all the same.

The kernel keeps one high-water mark of a process's memory, and CUDA's allocator others of its own.
A mark can only be read and reset. Blocks of code that each want the most of their own time, one
inside the other or in several threads, share it through `HighWater`: whoever resets the mark hands
over what it was to all others first. Only what is reset elsewhere, past this module, is lost.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchbudget.errors import MachineError

ROOT: Final = Path("/")
_LIBRARY: Final = ("/usr/lib/locale/", "/memfd:", "/dev/", "/SYSV")
_FOLDER: Final = "/dev/shm/"
# Shared memory that is no file of a folder: memfd_create, mmap without a file, and System V's.
_ELSEWHERE: Final = ("/memfd:", "/dev/zero", "/SYSV")


def read_lines(path: Path) -> list[str]:
    """Return the lines of one of the kernel's files; none where there is no such file.

    Raises:
        MachineError: the file exists, but cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error


def read_number(path: Path) -> int | None:
    """Read a file with one number; None where there is no such file, or it says "max"."""
    text = "".join(read_lines(path))
    return int(text) if text.isdecimal() else None


def read_fields(path: Path) -> dict[str, int]:
    """Read lines such as `inactive_file 4096` or `VmRSS:    12 kB`; the latter as bytes."""
    fields = {}
    for line in read_lines(path):
        key, _, rest = line.partition(" " if ":" not in line else ":")
        value, _, unit = rest.strip().partition(" ")
        if value.isdecimal():
            fields[key] = int(value) * (1024 if unit == "kB" else 1)
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The memory of one process.

    Attributes:
        pid: the process.
        resident_bytes: pages in memory; a page that several processes map counts in each.
        peak_resident_bytes: the most that `resident_bytes` ever was; None where the kernel does
            not keep it.
        shared_bytes: the part of `proportional_bytes` that is shared memory.
        proportional_bytes: pages in memory, each divided by the number of processes that map it,
            so that a sum over processes counts it once; see `is_proportional`.
        unreclaimable_bytes: the part of `proportional_bytes` that the kernel cannot reclaim:
            anonymous pages and shared memory, but not the pages of files, which can be read again.
        is_proportional: whether the shares of the pages were read. Otherwise
            `proportional_bytes` are the anonymous bytes (pages that are neither a file's nor shared
            memory), and `unreclaimable_bytes` are those and the whole of the shared memory that is
            mapped.
    """

    pid: int
    resident_bytes: int
    peak_resident_bytes: int | None
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
    folder = _folder(pid, root)
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
    mapped_bytes = pages.get("Pss_Shmem", status.get("RssShmem", 0))
    return ProcessMemory(
        pid=status["Pid"],
        resident_bytes=status.get("VmRSS", 0),
        peak_resident_bytes=status.get("VmHWM"),
        shared_bytes=pages.get("Pss_Shmem", 0),
        proportional_bytes=pages.get("Pss", anonymous_bytes),
        unreclaimable_bytes=pages.get("Pss_Anon", anonymous_bytes) + mapped_bytes,
        is_proportional="Pss" in pages or has_ended,
    )


class ProcessTree:
    """A process and its descendants, to be read again and again.

    To find the descendants, every process of the machine is looked at once, when it is new. A
    descendant stays one when its parent has ended.

    Args:
        pid: the process; None is the calling one.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._known: set[int] = set()  # processes of the machine that were looked at
        self._descendants: list[int] = []

    def read(self, *, shares: bool = True) -> tuple[ProcessMemory, ...]:
        """Return the memory of the process, first, and of each of its descendants.

        Descendants that end meanwhile are left out.

        Args:
            shares: see `process_memory`.

        Raises:
            MachineError: there is no such process, or no `/proc`.
        """
        readings = [process_memory(self._pid, shares=shares)]
        for pid in self._find_new():
            with suppress(MachineError):
                readings.append(process_memory(pid, shares=shares))
        return tuple(readings)

    def _find_new(self) -> list[int]:
        """Look at the processes that were not there the last time; return all descendants."""
        there = {int(name) for name in os.listdir(ROOT / "proc") if name.isdecimal()}
        parents = {pid: _parent(pid) for pid in there - self._known}
        tree = {os.getpid() if self._pid is None else self._pid, *self._descendants}
        while found := {pid for pid, parent in parents.items() if parent in tree} - tree:
            tree |= found
            self._descendants += sorted(found)
        self._descendants = [pid for pid in self._descendants if pid in there]
        self._known = there
        return self._descendants


def process_tree() -> tuple[ProcessMemory, ...]:
    """Return the memory of this process, first, and of each of its descendants.

    Descendants that end meanwhile are left out.

    Raises:
        MachineError: there is no `/proc`.
    """
    return ProcessTree().read()


def _parent(pid: int) -> int | None:
    """Return the parent of a process; `None` where the process has ended."""
    with suppress(MachineError):  # it ended while it was read
        for line in read_lines(ROOT / f"proc/{pid}/stat"):
            # A line reads: number, (name), state, parent; names may have blanks and brackets.
            return int(line.rpartition(")")[2].split()[1])
    return None


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
    """

    resident: int
    peak_resident: int
    anonymous: int
    private: int
    file: int
    private_file: int

    @property
    def common(self) -> int:
        """Anonymous pages that other processes map too: they are copied once one writes to them."""
        return max(0, self.anonymous - self.private)


def process_pages(pid: int | None = None) -> ProcessPages:
    """Return the pages of a process, by their kind; O(pages).

    Args:
        pid: the process; None is this one.

    Raises:
        MachineError: there is no such process, no Linux `/proc`, or it is another user's.

    >>> pages = process_pages()
    >>> 0 < pages.private <= pages.anonymous < pages.resident
    True
    """
    folder = _folder(pid)
    status, sums = read_fields(folder / "status"), read_fields(folder / "smaps_rollup")
    if "RssAnon" not in status or "Private_Dirty" not in sums:
        raise MachineError(f"cannot read {folder}: no such process, or no Linux /proc")
    # Dirty are also shared memory, and files that were written a moment ago.
    others = status["RssShmem"] + mapped_data_bytes(pid, field="Private_Dirty:")
    return ProcessPages(
        resident=status["VmRSS"],
        peak_resident=status.get("VmHWM", 0),
        anonymous=status["RssAnon"],
        private=min(max(0, sums["Private_Dirty"] - others), status["RssAnon"]),
        file=status["RssFile"],
        private_file=min(sums["Private_Clean"], status["RssFile"]),
    )


def mapped_data_bytes(pid: int | None = None, *, field: str = "Rss:") -> int:
    """Return the resident bytes of files that a process maps and that are no libraries.

    The kernel takes them back when memory is short, since they can be read again. O(mappings).
    """
    resident: dict[str, int] = {}
    libraries = set()
    for (_, rights, *_, path), own_bytes in _mapping_bytes(_folder(pid), field):
        if "x" in rights:
            libraries.add(path)
        if path.startswith("/") and not path.startswith(_LIBRARY):
            resident[path] = resident.get(path, 0) + own_bytes
    return sum(size for path, size in resident.items() if path not in libraries)


def _folder(pid: int | None, root: Path = ROOT) -> Path:
    return root / "proc" / ("self" if pid is None else str(pid))


def _mapping_bytes(folder: Path, field: str) -> Iterator[tuple[list[str], int]]:
    """Yield each mapping of a process, and the bytes that a field of its smaps states.

    A mapping is six texts: addresses, rights, offset, device, inode, path.
    """
    mapping: list[str] = []
    for line in read_lines(folder / "smaps"):
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):  # `7f00-7f10 r--p 00000000 08:01 42   /path`
            mapping = [*fields, ""][:6]
        elif fields[0] == field:
            yield mapping, int(fields[1]) * 1024


def untouched_shared_bytes(tree: Sequence[ProcessMemory]) -> int:
    """Return the bytes of a job's files in `/dev/shm` that are no pages of its processes.

    A file counts if one of the processes has it open or mapped, or if torch has made it in one of
    them and it has its name yet, as under the sharing strategy `"file_system"`. From the sum of
    them, what the processes have of shared memory is taken away; where they have other shared
    memory than `/dev/shm`'s, that is taken to be touched throughout.

    Args:
        tree: readings of the processes, with the shares of their pages.
    """
    pids = [process.pid for process in tree]
    try:
        device = Path(_FOLDER).stat().st_dev
    except OSError:
        return 0
    files, elsewhere = _mapped(pids)
    for status in (*_open_files(pids), *_named_files(pids)):
        if status.st_dev == device:
            files[status.st_ino] = status.st_blocks * 512
    touched_bytes = sum(process.shared_bytes for process in tree) - sum(elsewhere.values())
    return max(0, sum(files.values()) - max(0, touched_bytes))


def touched_bytes(status: os.stat_result, pids: Iterable[int]) -> int:
    """Return the bytes of a file that processes have mapped, each page counted once; O(mappings).

    Args:
        status: of the file.
        pids: the processes; pages that others map, too, count in part.
    """
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    wanted = [device, str(status.st_ino)]
    found_bytes = 0
    for pid in pids:
        with suppress(MachineError):
            for mapping, own_bytes in _mapping_bytes(_folder(pid), "Pss:"):
                found_bytes += own_bytes if mapping[3:5] == wanted else 0
    return found_bytes


def _open_files(pids: Iterable[int]) -> Iterator[os.stat_result]:
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(ROOT / f"proc/{pid}/fd"):
                with suppress(OSError):
                    yield os.stat(f"/proc/{pid}/fd/{name}")  # noqa: PTH116  (ten times faster)


def _named_files(pids: Iterable[int]) -> Iterator[os.stat_result]:
    prefixes = tuple(f"torch_{pid}_" for pid in pids)
    for path in Path(_FOLDER).iterdir():
        with suppress(OSError):
            if path.name.startswith(prefixes):
                yield path.stat()


def _mapped(pids: Iterable[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the bytes of mapped files in `/dev/shm`, and of other shared memory, by their inodes.

    A line reads: addresses, rights, offset, device, inode, path.
    """
    files: dict[int, int] = {}
    elsewhere: dict[int, int] = {}
    for pid in pids:
        with suppress(MachineError):
            for line in read_lines(ROOT / f"proc/{pid}/maps"):
                addresses, rights, *_, inode, path = (*line.split(maxsplit=5), "")[:6]
                if rights[-1] != "s" or not path.startswith((_FOLDER, *_ELSEWHERE)):
                    continue
                begin, end = (int(address, 16) for address in addresses.split("-"))
                found = files if path.startswith(_FOLDER) else elsewhere
                found[int(inode)] = max(found.get(int(inode), 0), end - begin)
    return files, elsewhere


# ---------------------------------------------------------------------- high-water marks


class HighWater:
    """The owner of one memory's marks.

    Args:
        read: the marks now; several where several are reset together.
        reset: makes them start from what is used now; returns false where that is not possible.

    Attributes:
        read: as given.
        lock: held while marks are read or reset.
    """

    def __init__(self, read: Callable[[], tuple[int, ...]], reset: Callable[[], object]) -> None:
        self.read = read
        self._reset = reset
        self._open: weakref.WeakSet[Mark] = weakref.WeakSet()
        self.lock = threading.Lock()

    def begin(self) -> Mark | None:
        """Return a mark that starts from the present use; `None` where the mark cannot be reset."""
        with self.lock:
            if self._open:
                now = self.read()
                for mark in self._open:
                    mark.hand_over(now)
            if self._reset() is False:
                return None
            mark = Mark(self)
            self._open.add(mark)
            return mark

    def renew_lock(self) -> None:
        """Make a lock that is free, in a process that was forked while a thread may have had it."""
        self.lock = threading.Lock()


class Mark:
    """The highest values since it began, as long as it is referred to.

    Attributes:
        before: the most up to the last time that the memory's mark was read or reset.
    """

    def __init__(self, owner: HighWater) -> None:
        self._owner = owner
        self.before: tuple[int, ...] = ()

    def most(self) -> tuple[int, ...]:
        """Return the highest values since the mark began."""
        with self._owner.lock:
            self.hand_over(self._owner.read())
            return self.before

    def hand_over(self, now: tuple[int, ...]) -> None:
        """Take in the present values of the memory's marks."""
        self.before = tuple(map(max, self.before, now)) if self.before else now


def _read() -> tuple[int, ...]:
    return (read_fields(ROOT / "proc/self/status").get("VmHWM", 0),)


def restart_peak(pid: int | None = None) -> bool:
    """Reset a process's mark itself; return whether the kernel allowed it.

    Args:
        pid: a child; None is this process, whose mark has one owner, `RESIDENT`.
    """
    try:
        (ROOT / "proc" / str(pid or "self") / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


# The mark of this process's resident memory, `VmHWM`.
RESIDENT: Final = HighWater(_read, restart_peak)
os.register_at_fork(after_in_child=RESIDENT.renew_lock)
