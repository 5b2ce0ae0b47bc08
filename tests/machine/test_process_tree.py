"""The memory of processes and of their descendants."""

import mmap
import multiprocessing
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from torchbudget.errors import MachineError
from torchbudget.machine.process_tree import (
    ProcessTree,
    mapped_data_bytes,
    process_memory,
    process_pages,
    process_tree,
)
from torchbudget.units import MiB


def test_memory_that_is_taken_is_resident_and_unreclaimable():
    before = process_memory()
    taken = bytearray(b"\1") * MiB(64)
    after = process_memory()
    del taken
    assert before.pid == after.pid == os.getpid()
    # Not the proportional bytes: other processes that load the same libraries lower them.
    for name in ("resident_bytes", "unreclaimable_bytes"):
        assert getattr(after, name) - getattr(before, name) == pytest.approx(MiB(64), abs=MiB(8))
    assert after.peak_resident_bytes >= after.resident_bytes


MAP = """
import mmap, sys
with mmap.mmap(int(sys.argv[1]), 0) as mapped:
    sum(mapped[:: mmap.PAGESIZE])
    print("ready", flush=True)
    input()
"""


def test_shared_memory_counts_once_over_the_processes_that_map_it():
    """Half of the pages count in each of two processes, none in one that has ended."""
    file = os.memfd_create("torchbudget-test")
    os.truncate(file, MiB(64))
    with mmap.mmap(file, MiB(64)) as mapped:
        mapped.write(b"\1" * MiB(64))
        alone = process_memory()
        with subprocess.Popen(
            [sys.executable, "-c", MAP, str(file)], stdin=-1, stdout=-1, pass_fds=[file]
        ) as child:
            assert child.stdout.readline() == b"ready\n"
            # Other tests in this process may have left helpers of multiprocessing running.
            tree = {reading.pid: reading for reading in process_tree()}
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            ended = process_memory(child.pid)
    os.close(file)
    here, there = tree[os.getpid()], tree[child.pid]
    assert there.resident_bytes >= MiB(64)
    assert here.unreclaimable_bytes + there.unreclaimable_bytes == pytest.approx(
        alone.unreclaimable_bytes, abs=MiB(16)
    )
    assert (ended.resident_bytes, ended.unreclaimable_bytes) == (0, 0)
    assert ended.peak_resident_bytes is None
    assert ended.is_proportional  # there is nothing left that could be shared


def test_a_tree_leaves_out_what_ends_meanwhile(monkeypatch):
    """A descendant that is gone when its turn comes is no error; the process itself would be."""
    monkeypatch.setattr(ProcessTree, "_find_new", lambda _: [2**30])
    assert [reading.pid for reading in process_tree()] == [os.getpid()]
    with pytest.raises(MachineError, match="no such process"):
        ProcessTree(2**30).read()


WAIT = "import time; print('ready', flush=True); time.sleep(600)"


def test_a_tree_that_is_read_again_has_the_processes_of_that_moment():
    """A child, its own child and a forked one are found once they run, and are gone once killed."""
    tree = ProcessTree()
    tree.read()
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAIT!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"  # of the grandchild
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=[600])
        forked.start()
        pids = [reading.pid for reading in tree.read(shares=False)]
        assert pids[0] == os.getpid()
        assert {child.pid, forked.pid} < set(pids)
        [grandchild] = psutil.Process(child.pid).children()
        assert grandchild.pid in pids
        for ending in (grandchild, forked):
            ending.kill()
        forked.join()
    left = {reading.pid for reading in tree.read()}
    assert not left & {child.pid, forked.pid, grandchild.pid}


STATUS = """Name:\tpython
State:\tR (running)
Pid:\t77
Uid:\t0\t0\t0\t0
VmHWM:\t    900 kB
VmRSS:\t    800 kB
RssAnon:\t    500 kB
RssFile:\t    200 kB
RssShmem:\t    100 kB
"""
ROLLUP = """5615-7fff ---p 00000000 00:00 0                          [rollup]
Rss:                 800 kB
Pss:                 600 kB
Pss_Anon:            400 kB
Pss_File:            150 kB
Pss_Shmem:            50 kB
"""


@pytest.mark.parametrize(
    ("rollup", "proportional", "unreclaimable"),
    [
        (ROLLUP, 600, 450),
        (ROLLUP[: ROLLUP.index("Pss_Anon")], 600, 600),  # before Linux 5.4
        (None, 500, 600),  # another user's process
    ],
    ids=["all", "sum only", "unreadable"],
)
def test_a_process_whose_shares_may_be_unreadable(tmp_path, rollup, proportional, unreclaimable):
    """Without its shares, only pages that cannot be shared are counted, and it says so."""
    folder = tmp_path / "proc/77"
    folder.mkdir(parents=True)
    (folder / "status").write_text(STATUS)
    if rollup is None:
        (folder / "smaps_rollup").mkdir()  # reading it fails, for root too
    else:
        (folder / "smaps_rollup").write_text(rollup)
    reading = process_memory(77, root=tmp_path)
    assert reading.pid == 77
    assert reading.resident_bytes == 800 * 1024
    assert reading.peak_resident_bytes == 900 * 1024
    assert reading.proportional_bytes == proportional * 1024
    assert reading.unreclaimable_bytes == unreclaimable * 1024
    assert reading.is_proportional is (rollup is not None)


def test_pages_by_their_kind():
    """What a child shares with its parent is common until it is written to."""
    taken = np.ones(MiB(64) // 8)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.read(reader, 1)
        os._exit(0)
    try:
        before = process_pages(child)
        taken += 1  # the parent's copy is its own now
        after = process_pages(child)
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
    assert before.common > MiB(64) > before.private
    # Reading takes objects of the parent's too.
    assert after.private - before.private == pytest.approx(MiB(64), abs=MiB(8))
    assert before.common - after.common == pytest.approx(MiB(64), abs=MiB(8))
    with pytest.raises(MachineError):
        process_pages(child)


def test_a_mapped_data_file_is_told_from_libraries(tmp_path):
    """Its pages are resident once they were touched, but the kernel may drop them."""
    kind = ["stat", "-f", "-c", "%T", tmp_path]
    if subprocess.run(kind, capture_output=True, text=True, check=True).stdout == "tmpfs\n":
        pytest.skip("the temporary folder is a tmpfs")
    path = tmp_path / "data"
    path.write_bytes(b"x" * MiB(64))
    before, data_before = process_memory(), mapped_data_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[:: mmap.PAGESIZE])
        after = process_memory()
        assert mapped_data_bytes() - data_before == pytest.approx(MiB(64), abs=MiB(0.5))
    assert after.resident_bytes - before.resident_bytes == pytest.approx(MiB(64), abs=MiB(8))
    assert after.unreclaimable_bytes - before.unreclaimable_bytes == pytest.approx(0, abs=MiB(8))
