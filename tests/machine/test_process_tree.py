"""The memory of processes and of their descendants."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.memory_groups import skip_on_tmpfs
from torchbudget.errors import MachineError
from torchbudget.machine.process_tree import (
    ProcessTree,
    mapped_data_bytes,
    process_memory,
    process_pages,
    process_tree,
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
