"""Shared memory that is nobody's: files of `/dev/shm` on their way from one process to another.

A batch that a worker has sent, and that the main process has not received yet, is a file that is
open in the worker, and mapped by neither. It takes memory, but shows in no process's pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torchbudget.errors import MachineError
from torchbudget.machine.kernel_files import ROOT, read_lines
from torchbudget.machine.process_tree import ProcessMemory

_FOLDER = "/dev/shm/"  # noqa: S108  (a name to compare with, not a file to write)


def unmapped_shared_bytes(pids: Sequence[int], *, root: Path = ROOT) -> int:
    """The bytes of files in `/dev/shm` that processes have open, and that none of them has mapped.

    Also files that torch has made in one of the processes and that have their name yet, as under
    the sharing strategy `"file_system"`.

    Args:
        pids: the processes; what cannot be read of one is left out.
        root: the folder that `/proc` and `/dev/shm` are looked up in.
    """
    try:
        device = (root / _FOLDER[1:]).stat().st_dev
    except OSError:
        return 0
    found = {
        status.st_ino: status.st_blocks * 512
        for status in (*_open_files(pids, root), *_named_files(pids, root))
        if status.st_dev == device
    }
    mapped = {inode for pid in pids for inode in _mapped(pid, root)} if found else set()
    return sum(num_bytes for inode, num_bytes in found.items() if inode not in mapped)


def _open_files(pids: Iterable[int], root: Path) -> Iterator[os.stat_result]:
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(root / f"proc/{pid}/fd"):  # noqa: PTH208  (names are enough)
                with suppress(OSError):
                    yield os.stat(f"{root}proc/{pid}/fd/{name}")  # noqa: PTH116  (ten times faster)


def _named_files(pids: Iterable[int], root: Path) -> Iterator[os.stat_result]:
    prefixes = tuple(f"torch_{pid}_" for pid in pids)
    for path in (root / _FOLDER[1:]).iterdir():
        with suppress(OSError):
            if path.name.startswith(prefixes):
                yield path.stat()


def _mapped(pid: int, root: Path) -> Iterator[int]:
    """The inodes of the files in `/dev/shm` that a process has mapped.

    A line reads: addresses, rights, offset, device, inode, path.
    """
    with suppress(MachineError):
        for line in read_lines(root / f"proc/{pid}/maps"):
            if _FOLDER in line:
                yield int(line.split(maxsplit=5)[4])


def job_bytes(tree: Sequence[ProcessMemory], *, root: Path = ROOT) -> int:
    """The memory of several processes together, where each byte counts once.

    It is the sum of their proportional bytes, and what is on its way between them: what a budget's
    `host` is compared with.

    Args:
        tree: readings of the processes, with the shares of their pages.
        root: see `unmapped_shared_bytes`.
    """
    in_transit_bytes = unmapped_shared_bytes([process.pid for process in tree], root=root)
    return sum(process.proportional_bytes for process in tree) + in_transit_bytes
