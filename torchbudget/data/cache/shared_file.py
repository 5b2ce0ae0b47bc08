"""Memory that processes share, with a lock that is released when its owner dies."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Final

from torchbudget.machine.process_tree import touched_bytes

_NAME: Final = "torchbudget"


class SharedFile:
    """Bytes that forked and spawned processes share.

    It is a mapped file without a name, in memory if the system has `memfd_create`. So /dev/shm
    does not limit it, it is freed with the last process, and pages take memory when they are first
    written.

    A copy by plain `pickle` is an empty file of its own.

    Args:
        nbytes: the file's size.
    """

    def __init__(self, nbytes: int) -> None:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create(_NAME)
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, nbytes)
        self._open(descriptor, nbytes)
        self._maker = os.getpid()
        _MADE.add(self)

    def _open(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, nbytes)
        self._own: dict[int, threading.Lock] = {}  # one per process: a fork may copy a locked one

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude all other processes and threads; a killed process releases the lock."""
        # `lockf` locks out other processes, this one the threads of the same process.
        with self._own.setdefault(os.getpid(), threading.Lock()):
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def untouched_bytes(self, pids: Iterable[int]) -> int:
        """Its bytes that are not among the pages of these processes."""
        return max(0, self.nbytes - touched_bytes(os.fstat(self._descriptor), pids))

    def __getstate__(self) -> dict[str, Any]:
        shared = get_spawning_popen() is not None
        return {"nbytes": self.nbytes, "file": DupFd(self._descriptor) if shared else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["file"] is None:
            SharedFile.__init__(self, state["nbytes"])
        else:
            self._open(state["file"].detach(), state["nbytes"])

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


_MADE: Final[weakref.WeakSet[SharedFile]] = weakref.WeakSet()


def bytes_to_come(pids: Iterable[int]) -> int:
    """Bytes that files of this process will take beyond the pages of these processes.

    Each file counts as if it is full in the end. A file belongs to the process that made it.
    """
    pids, here = list(pids), os.getpid()  # a fork copies the set
    return sum(file.untouched_bytes(pids) for file in list(_MADE) if file._maker == here)
