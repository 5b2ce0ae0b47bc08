"""Shared memory that shows in no process's pages, such as batches on their way."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.memory_groups import SHM
from torchbudget.machine.process_tree import process_memory, process_tree, untouched_shared_bytes
from torchbudget.units import KiB, MiB

if not SHM.is_dir():
    pytest.skip("there is no /dev/shm", allow_module_level=True)

A_FEW = KiB(64)  # semaphores of multiprocessing, which are files there too


@pytest.fixture
def path() -> Iterator[Path]:
    """A file of 8 MiB in shared memory, of a name as torch gives it."""
    file = SHM / f"torch_{os.getpid()}_test"
    file.write_bytes(bytes(MiB(8)))
    yield file
    file.unlink(missing_ok=True)


def untouched(*pids: int) -> int:
    return untouched_shared_bytes([process_memory(pid) for pid in pids or [os.getpid()]])


def near(num_bytes: int) -> Any:
    return pytest.approx(num_bytes, abs=A_FEW)


def test_a_file_counts_until_its_pages_are_touched(path: Path) -> None:
    """By its name; as an open file without one; as a mapped one; then its pages do.

    What is shared and touched elsewhere, as without a file, is told apart.
    """
    with mmap.mmap(-1, MiB(16)) as without_file:
        without_file.write(b"\1" * MiB(16))
        assert untouched() == near(MiB(8))
    with path.open("r+b") as file:
        path.unlink()
        assert untouched() == near(MiB(8))
        mapped = mmap.mmap(file.fileno(), 0)
    assert untouched() == near(MiB(8))
    sum(mapped[: MiB(4) : mmap.PAGESIZE])
    assert untouched() == near(MiB(4))
    job = process_memory().proportional_bytes + untouched()
    sum(mapped[:: mmap.PAGESIZE])
    assert untouched() == near(0)
    assert process_memory().proportional_bytes == pytest.approx(job, abs=MiB(2))
    mapped.close()
    assert untouched() == near(0)


def test_a_file_that_several_processes_have_open_counts_once(path: Path) -> None:
    """Files of another process's name do not count."""
    renamed = path.rename(path.with_name(f"torch_1_{os.getpid()}"))
    try:
        assert untouched() == near(0)
        with renamed.open("rb") as file, subprocess.Popen(["sleep", "60"], stdin=file) as child:
            assert untouched(child.pid, os.getpid()) == near(MiB(8))
            child.kill()
    finally:
        renamed.unlink()


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_batches_that_workers_have_sent_count_as_the_jobs(strategy: str) -> None:
    """All that was prefetched, and what was received but not read, is counted."""
    before_strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        samples: Any = [torch.ones(MiB(2) // 4)] * 100
        forked = {"prefetch_factor": 3, "multiprocessing_context": "fork"}
        batches = iter(DataLoader(samples, batch_size=4, num_workers=2, **forked))
        received = next(batches)
        expected = 7 * MiB(8)  # two workers, three batches each, and the received one
        sent = 0
        while sent < expected - A_FEW:
            time.sleep(0.05)
            sent = untouched_shared_bytes(process_tree())
        assert sent == near(expected)
        received.sum()
        assert untouched_shared_bytes(process_tree()) == near(expected - MiB(8))
    finally:
        torch.multiprocessing.set_sharing_strategy(before_strategy)
