import contextlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_groups import REPOSITORY
from torchbudget import machine
from torchbudget.errors import MachineError, OptionError
from torchbudget.machine import (
    MemoryPool,
    cgroup_memory,
    cuda_memory,
    host_memory,
    machine_memory,
    process_memory,
    process_tree,
    shared_memory,
)
from torchbudget.units import GiB, MiB

amounts = st.integers(0, 2**50)
pools = st.builds(
    MemoryPool, name=st.just("pool"), limit_bytes=amounts, used_bytes=amounts, held_bytes=amounts
)


# --- pools ---------------------------------------------------------------------------------------


@given(pool=pools)
def test_usable_is_what_is_free_and_what_is_held(pool):
    """0 <= free <= usable <= limit, and usable = free + held where all held is part of the use."""
    assert 0 <= pool.free_bytes <= pool.usable_bytes <= pool.limit_bytes
    if pool.held_bytes <= pool.used_bytes <= pool.limit_bytes:
        assert pool.usable_bytes == pool.free_bytes + pool.held_bytes


@given(pool=pools, taken=amounts)
def test_what_the_job_takes_does_not_change_what_it_can_use(pool, taken):
    """Usable is the same before and after the job allocates: it compares with a peak."""
    after = MemoryPool(
        name=pool.name,
        limit_bytes=pool.limit_bytes,
        used_bytes=pool.used_bytes + taken,
        held_bytes=min(pool.held_bytes, pool.used_bytes) + taken,
    )
    assert after.usable_bytes == pool.usable_bytes


# --- machine, shared memory ----------------------------------------------------------------------


def test_the_machine_is_what_the_kernel_tells():
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    pool = machine_memory(held_bytes=5)
    assert pool.limit_bytes == int(fields["MemTotal"].split()[0]) * 1024
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    assert pool.free_bytes == pytest.approx(available_bytes, abs=GiB(1))
    assert (pool.name, pool.held_bytes) == ("machine", 5)


def test_the_host_is_the_machine_and_its_groups():
    """The machine comes first, and all pools know what the job holds."""
    first, *groups = host_memory()
    assert first.name == "machine"
    assert [pool.name for pool in groups] == [pool.name for pool in cgroup_memory()]
    assert {pool.held_bytes for pool in groups} <= {first.held_bytes}
    assert first.held_bytes == pytest.approx(process_memory().held_bytes, abs=MiB(64))


@contextlib.contextmanager
def mounted_tmpfs(root: Path, size: str):
    """A `/dev/shm` below `root` that no other process writes to."""
    folder = root / "dev/shm"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "torchbudget-test", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_shared_memory_counts_what_is_written(tmp_path):
    """A real tmpfs, to the byte; what this job wrote is not free for it either."""
    with mounted_tmpfs(tmp_path, "64m") as folder:
        assert shared_memory(root=tmp_path).free_bytes == MiB(64)
        (folder / "batch").write_bytes(bytes(MiB(24)))
        pool = shared_memory(root=tmp_path)
        assert (pool.limit_bytes, pool.used_bytes) == (MiB(64), MiB(24))
        assert pool.free_bytes == pool.usable_bytes == MiB(40)


def test_a_real_tmpfs_without_a_limit(tmp_path):
    with mounted_tmpfs(tmp_path, "0"):
        assert shared_memory(root=tmp_path) is None


def test_shared_memory_reads_the_folders_file_system(tmp_path):
    """Limit and use are those of the file system that the folder lies in."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    system = os.statvfs(tmp_path)
    pool = shared_memory(root=tmp_path)
    assert pool.limit_bytes == system.f_blocks * system.f_frsize
    assert pool.free_bytes == pytest.approx(system.f_bavail * system.f_frsize, abs=GiB(1))


def test_shared_memory_that_does_not_exist(tmp_path):
    assert shared_memory(root=tmp_path) is None


def test_shared_memory_without_a_limit(monkeypatch):
    """A tmpfs of size=0 counts no blocks, and is not full."""
    unlimited = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: unlimited)
    assert shared_memory() is None


# --- processes -----------------------------------------------------------------------------------


def test_memory_that_is_taken_is_resident_and_held():
    before = process_memory()
    taken = bytearray(b"\1") * MiB(64)
    after = process_memory()
    del taken
    assert before.pid == after.pid == os.getpid()
    # Not the proportional bytes: other processes that load the same libraries lower them.
    for name in ("resident_bytes", "held_bytes"):
        assert getattr(after, name) - getattr(before, name) == pytest.approx(MiB(64), abs=MiB(8))
    assert after.peak_resident_bytes >= after.resident_bytes


def test_a_mapped_file_is_resident_but_not_held(tmp_path):
    """Its pages can be read again, so the kernel may drop them."""
    path = tmp_path / "file"
    path.write_bytes(bytes(MiB(64)))
    before = process_memory()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) == 0
        after = process_memory()
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    ).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("the temporary folder is a tmpfs")
    assert after.resident_bytes - before.resident_bytes == pytest.approx(MiB(64), abs=MiB(8))
    assert after.held_bytes - before.held_bytes == pytest.approx(0, abs=MiB(8))


MAP = """
import mmap, sys
with mmap.mmap(int(sys.argv[1]), 0) as mapped:
    sum(mapped[:: mmap.PAGESIZE])
    print("ready", flush=True)
    input()
"""


def test_shared_memory_is_held_once_over_the_processes_that_map_it():
    """Two processes hold half of the pages each; one that has ended holds nothing."""
    file = os.memfd_create("torchbudget-test")
    os.truncate(file, MiB(64))
    with mmap.mmap(file, MiB(64)) as mapped:
        mapped.write(b"\1" * MiB(64))
        alone = process_memory()
        with subprocess.Popen(
            [sys.executable, "-c", MAP, str(file)], stdin=-1, stdout=-1, pass_fds=[file]
        ) as child:
            assert child.stdout.readline() == b"ready\n"
            # Other tests in this process may have left helpers of multiprocessing behind.
            tree = {reading.pid: reading for reading in process_tree()}
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            ended = process_memory(child.pid)
    os.close(file)
    here, there = tree[os.getpid()], tree[child.pid]
    assert there.resident_bytes >= MiB(64)
    assert here.held_bytes + there.held_bytes == pytest.approx(alone.held_bytes, abs=MiB(16))
    assert (ended.resident_bytes, ended.held_bytes, ended.peak_resident_bytes) == (0, 0, None)


def test_a_tree_leaves_out_what_ends_meanwhile(monkeypatch):
    """A descendant that is gone when its turn comes is no error; the process itself would be."""
    gone = SimpleNamespace(pid=2**30)
    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [gone])
    assert [reading.pid for reading in process_tree()] == [os.getpid()]
    with pytest.raises(MachineError, match="no such process"):
        process_tree(2**30)


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
    ("rollup", "proportional", "held"),
    [
        (ROLLUP, 600, 450),
        (ROLLUP[: ROLLUP.index("Pss_Anon")], 600, 600),  # before Linux 5.4
        (None, 800, 600),  # another user's process
    ],
    ids=["all", "sum only", "unreadable"],
)
def test_a_process_whose_shares_may_be_unreadable(tmp_path, rollup, proportional, held):
    """Without its shares, a process is taken to hold its pages alone."""
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
    assert reading.held_bytes == held * 1024


# --- CUDA ----------------------------------------------------------------------------------------


@pytest.fixture
def fake_cuda(monkeypatch):
    """Two GPUs of 80 GiB that answer as torch does."""
    gpus = SimpleNamespace(free=GiB(50), reserved=GiB(20), fraction=1.0, asked=[])

    def get_info(index):
        gpus.asked.append(index)
        return gpus.free, GiB(80)

    for name, function in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "mem_get_info": get_info,
        "memory_reserved": lambda _: gpus.reserved,
        "get_per_process_memory_fraction": lambda _: gpus.fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return gpus


@pytest.mark.parametrize(
    ("device", "index"),
    [("cuda", 1), ("cuda:0", 0), (torch.device("cuda", 1), 1), (torch.device("cuda"), 1)],
)
def test_a_gpu_by_name(fake_cuda, device, index):
    """Held is what the allocator reserved; others and the context are used, and not usable."""
    assert cuda_memory(device) == MemoryPool(
        name=f"cuda:{index}",
        limit_bytes=GiB(80),
        used_bytes=GiB(30),
        held_bytes=GiB(20),
    )
    assert cuda_memory(device).usable_bytes == GiB(70)
    assert set(fake_cuda.asked) == {index}


@pytest.mark.parametrize(
    ("fraction", "usable_gib"), [(1.0, 70), (0.875, 70), (0.5, 40), (0.25, 20), (0.125, 20)]
)
def test_a_bound_allocator_cannot_use_more(fake_cuda, fraction, usable_gib):
    """The process's own fraction counts, but what is reserved already is not taken back."""
    fake_cuda.fraction = fraction
    assert cuda_memory().usable_bytes == GiB(usable_gib)


def test_a_torch_that_does_not_tell_the_fraction(fake_cuda, monkeypatch):
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert cuda_memory().usable_bytes == GiB(70)


def test_a_gpu_that_does_not_exist(fake_cuda):
    with pytest.raises(MachineError, match="there are 2 CUDA devices, counted from 0"):
        cuda_memory("cuda:2")


def test_a_gpu_that_does_not_answer(fake_cuda, monkeypatch):
    def fail(_):
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(MachineError, match="memory of cuda:0: CUDA error: out of memory"):
        cuda_memory("cuda:0")


@pytest.mark.parametrize("device", ["cpu", "mps", "gpu", "cuda:x", "", None, torch.device("meta")])
def test_a_device_that_is_none_of_cudas(fake_cuda, device):
    with pytest.raises(OptionError, match="expected a CUDA device such as 'cuda:0'"):
        cuda_memory(device)


@pytest.mark.parametrize(
    ("cuda", "reason"), [(None, "built without CUDA"), ("12.8", "no driver or no device")]
)
def test_no_cuda(monkeypatch, cuda, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(MachineError, match=f"cannot read the memory of cuda:0: .*{reason}"):
        cuda_memory("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_real_gpu():
    """What this process reserves is no longer free, but still usable."""
    torch.cuda.empty_cache()
    before = cuda_memory("cuda:0")
    tensor = torch.empty(MiB(512), dtype=torch.uint8, device="cuda:0")
    after = cuda_memory("cuda:0")
    del tensor
    torch.cuda.empty_cache()
    assert before.limit_bytes == after.limit_bytes
    assert before.usable_bytes <= torch.cuda.get_device_properties(0).total_memory
    assert after.held_bytes - before.held_bytes >= MiB(512)
    assert before.free_bytes - after.free_bytes >= MiB(480)
    assert after.usable_bytes == pytest.approx(before.usable_bytes, abs=MiB(16))


# --- the module ----------------------------------------------------------------------------------


def test_importing_reads_nothing():
    """Import opens none of the kernel's files, reads no environment, and starts no CUDA."""
    code = """
import os, sys
import numpy, psutil, torch

opened, asked, whole = [], [], type(os.environ).__getitem__
def watch(event, arguments):
    if event == "open":
        opened.append(str(arguments[0]))
sys.addaudithook(watch)
def ask(self, key):
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in {"os", "collections.abc", "_collections_abc"}:
        frame = frame.f_back
    asked.append(frame.f_globals["__name__"])
    return whole(self, key)
type(os.environ).__getitem__ = ask

import torchbudget.budget, torchbudget.machine

assert not [name for name in opened if name.startswith(("/proc", "/sys", "/dev"))], opened
assert not [name for name in asked if name.startswith("torchbudget")], asked
assert not torch.cuda.is_initialized()
os.environ.get("HOME"), os.getenv("HOME"), open("/proc/self/stat").close()
assert asked[-2:] == ["__main__", "__main__"], "the environment is not watched"
assert opened[-1] == "/proc/self/stat", "files are not watched"
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=120,
    )


def test_only_frozen_values_come_out():
    """Readings are values: a reading cannot be changed after it was taken."""
    for reading in (machine.machine_memory(), machine.process_memory()):
        with pytest.raises(AttributeError):
            reading.held_bytes = 0
