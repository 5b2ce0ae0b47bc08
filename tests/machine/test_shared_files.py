"""Shared memory that no process has mapped, such as batches on their way."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.memory_groups import SHM
from torchbudget.machine.process_tree import process_tree
from torchbudget.machine.shared_files import job_bytes, unmapped_shared_bytes
from torchbudget.units import MiB

if not SHM.is_dir():
    pytest.skip("there is no /dev/shm", allow_module_level=True)


@pytest.fixture
def path() -> Iterator[Path]:
    """A file of 8 MiB in shared memory, of a name as torch gives it."""
    file = SHM / f"torch_{os.getpid()}_test"
    file.write_bytes(bytes(MiB(8)))
    yield file
    file.unlink(missing_ok=True)


def test_a_file_counts_until_it_is_mapped(path: Path) -> None:
    """By its name, then as an open file without one, and no more once it is mapped."""
    assert unmapped_shared_bytes([os.getpid()]) == MiB(8)
    with path.open("r+b") as file:
        path.unlink()
        assert unmapped_shared_bytes([os.getpid()]) == MiB(8)
        with mmap.mmap(file.fileno(), 0):
            assert unmapped_shared_bytes([os.getpid()]) == 0
    assert unmapped_shared_bytes([os.getpid()]) == 0


def test_a_file_that_several_processes_have_open_counts_once(path: Path) -> None:
    """Those of other names, and of processes that have ended, do not count."""
    renamed = path.rename(path.with_name(f"of-another-{os.getpid()}"))
    wait = [sys.executable, "-c", "print('ready', flush=True); input()"]
    try:
        with renamed.open("rb") as file, subprocess.Popen(wait, stdin=file, stdout=-1) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            assert unmapped_shared_bytes([child.pid, os.getpid(), 2**30]) == MiB(8)
            child.kill()
        assert unmapped_shared_bytes([child.pid, os.getpid()]) == 0
    finally:
        renamed.unlink()


class Ones(Dataset[Any]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(MiB(2) // 4)


def test_batches_that_workers_have_sent_count_as_the_jobs() -> None:
    """All that was prefetched is counted, though it shows in no process's pages."""
    context = multiprocessing.get_context("fork")
    loader = DataLoader(
        Ones(), batch_size=4, num_workers=2, prefetch_factor=3, multiprocessing_context=context
    )
    batches = iter(loader)
    received = next(batches)
    sent_bytes = 0
    while sent_bytes < 6 * MiB(8):  # two workers, three batches each
        time.sleep(0.05)
        tree = process_tree()
        sent_bytes = unmapped_shared_bytes([process.pid for process in tree])
    assert sent_bytes == 6 * MiB(8)
    assert received.shape[0] == 4
    proportional = sum(process.proportional_bytes for process in tree)
    assert job_bytes(tree) == proportional + sent_bytes
