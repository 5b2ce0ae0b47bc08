"""The memory of processes and of their descendants: pages, shared files, and peaks."""

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

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.memory_groups import SHM, skip_on_tmpfs
from torchbudget.errors import MachineError
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import (
    RESIDENT,
    ProcessTree,
    mapped_data_bytes,
    process_memory,
    process_pages,
    process_tree,
    untouched_shared_bytes,
)
from torchbudget.units import KiB, MiB


def near(num_bytes: float) -> Any:
    return pytest.approx(num_bytes, abs=MiB(8))


def end(pid: int) -> None:
    """Kill a child; its number stays until it is waited for."""
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def touch(mapped: mmap.mmap, pipe: Any) -> None:
    """Touch all pages in a child, say so, and go on."""
    sum(mapped[:: mmap.PAGESIZE])
    pipe.send("ready")
    time.sleep(600)


def test_shared_memory_counts_once_over_the_processes_that_map_it() -> None:
    """Half of the pages count in each of two processes, none in one that has ended."""
    with mmap.mmap(-1, MiB(64)) as mapped:
        mapped.write(b"\1" * MiB(64))
        alone = process_memory()
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=touch, args=[mapped, there])
        child.start()
        here.recv()
        assert child.pid is not None
        # Other tests in this process may have left helpers of multiprocessing running.
        tree = {reading.pid: reading for reading in process_tree()}
        end(child.pid)
        ended = process_memory(child.pid)
        child.join()
    both = tree[os.getpid()], tree[child.pid]
    assert both[1].resident_bytes >= MiB(64)
    # Pages of the parent's that a forked child has not written to count once, too.
    both_bytes = sum(one.unreclaimable_bytes for one in both)
    assert both_bytes == pytest.approx(alone.unreclaimable_bytes, abs=MiB(16))
    assert (ended.resident_bytes, ended.unreclaimable_bytes) == (0, 0)
    assert ended.is_proportional  # there is nothing left that could be shared


WAIT = "import time; print('ready', flush=True); time.sleep(600)"


def test_a_tree_has_the_processes_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child and its own child are found once they run, and are gone once killed."""
    tree = ProcessTree()
    tree.read()
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"  # of the grandchild
        pids = [reading.pid for reading in tree.read(shares=False)]
        assert pids[0] == os.getpid()
        [grandchild] = psutil.Process(child.pid).children()
        assert {child.pid, grandchild.pid} < set(pids)
        grandchild.kill()
    assert not {reading.pid for reading in tree.read()} & {child.pid, grandchild.pid}
    # A descendant that is gone when its turn comes is no error; the process itself would be.
    monkeypatch.setattr(ProcessTree, "_find_new", lambda _: [2**30])
    assert [reading.pid for reading in process_tree()] == [os.getpid()]
    with pytest.raises(MachineError, match="no such process"):
        ProcessTree(2**30).read()


STATUS = "Pid:\t77\nVmHWM:\t900 kB\nVmRSS:\t800 kB\nRssAnon:\t500 kB\nRssShmem:\t100 kB\n"
ROLLUP = (
    "5615-7fff ---p 00000000 00:00 0  [rollup]\nPss: 600 kB\nPss_Anon: 400 kB\nPss_Shmem: 50 kB"
)


@pytest.mark.parametrize(
    ("rollup", "proportional", "unreclaimable"),
    [(ROLLUP, 600, 450), (None, 500, 600)],  # another user's process shows its status only
)
def test_a_process_whose_shares_may_be_unreadable(
    tmp_path: Path, rollup: str | None, proportional: int, unreclaimable: int
) -> None:
    """Without its shares, only pages that cannot be shared are counted, and it says so."""
    folder = tmp_path / "proc/77"
    folder.mkdir(parents=True)
    (folder / "status").write_text(STATUS)
    if rollup is None:
        (folder / "smaps_rollup").mkdir()  # reading it fails, for root too
    else:
        (folder / "smaps_rollup").write_text(rollup)
    reading = process_memory(77, root=tmp_path)
    assert (reading.resident_bytes, reading.peak_resident_bytes) == (KiB(800), KiB(900))
    assert reading.proportional_bytes == KiB(proportional)
    assert reading.unreclaimable_bytes == KiB(unreclaimable)
    assert reading.is_proportional is (rollup is not None)


def test_pages_by_their_kind() -> None:
    """What a child shares with its parent is common until it is written to."""
    taken = np.ones(MiB(64) // 8)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600])
    child.start()
    assert child.pid is not None
    before = process_pages(child.pid)
    taken += 1  # the parent's copy is its own now
    after = process_pages(child.pid)
    end(child.pid)
    with pytest.raises(MachineError):
        process_pages(child.pid)
    child.join()
    assert before.common > MiB(64) > before.private
    # Reading takes objects of the parent's too.
    assert after.private - before.private == near(MiB(64))
    assert before.common - after.common == near(MiB(64))


def test_a_mapped_data_file_is_told_from_libraries(tmp_path: Path) -> None:
    """Its pages are resident once they were touched, but the kernel may drop them."""
    skip_on_tmpfs(tmp_path)
    path = tmp_path / "data"
    path.write_bytes(b"x" * MiB(64))
    before, data_before = process_memory(), mapped_data_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[:: mmap.PAGESIZE])
        after = process_memory()
        assert mapped_data_bytes() - data_before == pytest.approx(MiB(64), abs=MiB(0.5))
    assert after.resident_bytes - before.resident_bytes == near(MiB(64))
    assert after.unreclaimable_bytes - before.unreclaimable_bytes == near(0)


# ---------------------------------------------------------------------- shared files


NEEDS_SHM = pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm")
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


def files(num_bytes: int) -> Any:
    return pytest.approx(num_bytes, abs=A_FEW)


@NEEDS_SHM
def test_a_file_counts_until_its_pages_are_touched(path: Path) -> None:
    """By its name; as an open file without one; as a mapped one; then its pages do.

    What is shared and touched elsewhere, as without a file, is told apart.
    """
    with mmap.mmap(-1, MiB(16)) as without_file:
        without_file.write(b"\1" * MiB(16))
        assert untouched() == files(MiB(8))
    with path.open("r+b") as file:
        path.unlink()
        assert untouched() == files(MiB(8))
        mapped = mmap.mmap(file.fileno(), 0)
    assert untouched() == files(MiB(8))
    sum(mapped[: MiB(4) : mmap.PAGESIZE])
    assert untouched() == files(MiB(4))
    job = process_memory().proportional_bytes + untouched()
    sum(mapped[:: mmap.PAGESIZE])
    assert untouched() == files(0)
    assert process_memory().proportional_bytes == pytest.approx(job, abs=MiB(2))
    mapped.close()
    assert untouched() == files(0)


@NEEDS_SHM
def test_a_file_that_several_processes_have_open_counts_once(path: Path) -> None:
    """Files of another process's name do not count."""
    renamed = path.rename(path.with_name(f"torch_1_{os.getpid()}"))
    try:
        assert untouched() == files(0)
        with renamed.open("rb") as file, subprocess.Popen(["sleep", "60"], stdin=file) as child:
            assert untouched(child.pid, os.getpid()) == files(MiB(8))
            child.kill()
    finally:
        renamed.unlink()


@NEEDS_SHM
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
        assert sent == files(expected)
        received.sum()
        assert untouched_shared_bytes(process_tree()) == files(expected - MiB(8))
    finally:
        torch.multiprocessing.set_sharing_strategy(before_strategy)


# ---------------------------------------------------------------------- peaks


NEEDS_RESETS = pytest.mark.skipif(
    RESIDENT.begin() is None, reason="the kernel does not let the high-water mark be reset"
)


def taken_and_freed(num_bytes: int) -> int:
    """The most that was resident, by reading while the bytes are taken."""
    taken = bytearray(b"\1") * num_bytes
    most = process_memory(shares=False).resident_bytes
    del taken
    return most


@NEEDS_RESETS
def test_memory_that_is_freed_meanwhile_counts() -> None:
    """If it was taken inside; what was taken and freed before does not."""
    before = taken_and_freed(MiB(192)) - MiB(192)
    with peak_memory("cpu") as peak:
        taken_and_freed(MiB(64))
    assert peak.bytes - before == pytest.approx(MiB(64), abs=MiB(16))
    assert (peak.reserved_bytes, peak.allocated_bytes, peak.retries) == (0, 0, 0)


@NEEDS_RESETS
def test_a_mark_that_cannot_be_reset_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own mark would be that of the whole process."""
    monkeypatch.setattr("torchbudget.machine.process_tree.ROOT", Path("/no-such-folder"))
    assert RESIDENT.begin() is None
    with pytest.raises(MachineError, match="clear_refs is not writable"), peak_memory("cpu"):
        pass


@NEEDS_RESETS
def test_a_peak_inside_another_leaves_the_outer_one() -> None:
    """Each context has its own most, though the kernel's one mark is reset meanwhile."""
    others = len(RESIDENT._open)  # that errors of earlier tests refer to
    with peak_memory("cpu") as outer:
        before = taken_and_freed(MiB(96))
        with peak_memory("cpu") as inner:
            within = taken_and_freed(MiB(48))
            with pytest.raises(KeyError), peak_memory("cpu"):
                raise KeyError
            # The one that was left keeps no mark.
            assert len(RESIDENT._open) == others + 2
        RESIDENT.begin()
    assert outer.bytes == pytest.approx(before, abs=MiB(4))
    assert inner.bytes == pytest.approx(within, abs=MiB(4))
    assert outer.bytes - inner.bytes == pytest.approx(MiB(48), abs=MiB(8))
