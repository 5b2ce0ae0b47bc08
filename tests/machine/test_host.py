"""The machine's memory, the host's pools, and `/dev/shm`."""

import contextlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchbudget.machine.cgroups import cgroup_memory
from torchbudget.machine.host import host_memory, machine_memory, shared_memory
from torchbudget.machine.process_tree import process_tree
from torchbudget.units import GiB, MiB


def test_the_machine_is_what_the_kernel_says():
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    pool = machine_memory(own_bytes=5)
    assert pool.limit_bytes == int(fields["MemTotal"].split()[0]) * 1024
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    assert pool.free_bytes == pytest.approx(available_bytes, abs=GiB(1))
    assert (pool.name, pool.own_bytes) == ("machine", 5)


def test_the_host_is_the_machine_and_its_groups():
    """The machine comes first, and all pools know what the job uses."""
    first, *groups = host_memory()
    assert first.name == "machine"
    assert [pool.name for pool in groups] == [pool.name for pool in cgroup_memory()]
    assert {pool.own_bytes for pool in groups} <= {first.own_bytes}
    job = sum(process.unreclaimable_bytes for process in process_tree())  # with a fork server
    assert first.own_bytes == pytest.approx(job, abs=MiB(64))


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
