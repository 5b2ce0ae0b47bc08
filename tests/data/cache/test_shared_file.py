"""Bytes that processes share, and a lock that does not outlive its owner."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
from pathlib import Path

import pytest

from torchbudget.data.cache.shared_file import SharedFile


def write(file: SharedFile) -> None:
    with file.locked():
        file.memory[:5] = b"child"


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_processes_see_the_same_bytes(context: str) -> None:
    file = SharedFile(4096)
    assert file.memory[:5] == bytes(5)
    process = multiprocessing.get_context(context).Process(target=write, args=(file,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert file.memory[:5] == b"child"


def test_a_copy_is_an_empty_file() -> None:
    file = SharedFile(4096)
    file.memory[:5] = b"bytes"
    for other in (pickle.loads(pickle.dumps(file)), copy.deepcopy(file)):  # noqa: S301  (ours)
        assert other.nbytes == 4096
        assert other.memory[:5] == bytes(5)


def test_a_process_that_is_killed_inside_the_lock_lets_others_in() -> None:
    file = SharedFile(4096)
    child = os.fork()
    if not child:
        with file.locked():
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with file.locked():
        file.memory[:2] = b"ok"


def test_no_descriptor_is_left() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    for _ in range(20):
        SharedFile(4096)
    assert descriptors() == before
