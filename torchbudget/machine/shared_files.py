"""Shared memory of a job that shows in no process's pages, such as batches that workers have sent.

A batch on its way is a file of `/dev/shm` that is open in the worker and mapped by neither side.
The main process maps it when it receives it, but has pages of it only once it reads them. Meanwhile
it takes memory all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from torchbudget.errors import MachineError
from torchbudget.machine.kernel_files import ROOT, read_lines
from torchbudget.machine.process_tree import ProcessMemory

_FOLDER: Final = "/dev/shm/"
# Shared memory that is no file of a folder: memfd_create, mmap without a file, and System V's.
_ELSEWHERE: Final = ("/memfd:", "/dev/zero", "/SYSV")


def untouched_shared_bytes(tree: Sequence[ProcessMemory], *, root: Path = ROOT) -> int:
    """The bytes of a job's files in `/dev/shm` that are not among the pages of its processes.

    A file counts if one of the processes has it open or mapped, or if torch has made it in one of
    them and it has its name yet, as under the sharing strategy `"file_system"`. From the sum of
    them, what the processes have of shared memory is taken away; where they have other shared
    memory than `/dev/shm`'s, that is taken to be touched throughout.

    Args:
        tree: readings of the processes, with the shares of their pages.
        root: the folder that `/proc` and `/dev/shm` are looked up in.
    """
    pids = [process.pid for process in tree]
    try:
        device = (root / _FOLDER[1:]).stat().st_dev
    except OSError:
        return 0
    files, elsewhere = _mapped(pids, root)
    for status in (*_open_files(pids, root), *_named_files(pids, root)):
        if status.st_dev == device:
            files[status.st_ino] = status.st_blocks * 512
    touched_bytes = sum(process.shared_bytes for process in tree) - sum(elsewhere.values())
    return max(0, sum(files.values()) - max(0, touched_bytes))


def touched_bytes(status: os.stat_result, pids: Iterable[int], *, root: Path = ROOT) -> int:
    """What processes have of a file that they map, each page counted once; O(mappings).

    Args:
        status: of the file.
        pids: the processes; pages that others map, too, count in part.
        root: the folder that `/proc` is looked up in.
    """
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    wanted = [device, str(status.st_ino)]
    found_bytes, is_wanted = 0, False
    for pid in pids:
        with suppress(MachineError):
            for line in read_lines(root / f"proc/{pid}/smaps"):
                fields = line.split(maxsplit=5)
                if not fields[0].endswith(":"):  # `7f00-7f10 rw-s 00000000 00:01 42   /memfd:…`
                    is_wanted = fields[3:5] == wanted
                elif is_wanted and fields[0] == "Pss:":
                    found_bytes += int(fields[1]) * 1024
    return found_bytes


def _open_files(pids: Iterable[int], root: Path) -> Iterator[os.stat_result]:
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(root / f"proc/{pid}/fd"):
                with suppress(OSError):
                    yield os.stat(f"{root}/proc/{pid}/fd/{name}")  # noqa: PTH116  (ten times faster)


def _named_files(pids: Iterable[int], root: Path) -> Iterator[os.stat_result]:
    prefixes = tuple(f"torch_{pid}_" for pid in pids)
    for path in (root / _FOLDER[1:]).iterdir():
        with suppress(OSError):
            if path.name.startswith(prefixes):
                yield path.stat()


def _mapped(pids: Iterable[int], root: Path) -> tuple[dict[int, int], dict[int, int]]:
    """The bytes of mapped files in `/dev/shm`, and of other shared memory, by their inodes.

    A line reads: addresses, rights, offset, device, inode, path.
    """
    files: dict[int, int] = {}
    elsewhere: dict[int, int] = {}
    for pid in pids:
        with suppress(MachineError):
            for line in read_lines(root / f"proc/{pid}/maps"):
                addresses, rights, *_, inode, path = (*line.split(maxsplit=5), "")[:6]
                if rights[-1] != "s" or not path.startswith((_FOLDER, *_ELSEWHERE)):
                    continue
                begin, end = (int(address, 16) for address in addresses.split("-"))
                found = files if path.startswith(_FOLDER) else elsewhere
                found[int(inode)] = max(found.get(int(inode), 0), end - begin)
    return files, elsewhere
