"""The machine's memory, pools, `/dev/shm`, limits of processes, processors and open files."""

import contextlib
import os
import resource
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import ENVIRONMENT
from tests.support.memory_groups import JOIN, REPOSITORY
from torchbudget.machine.host import (
    MemoryPool,
    cgroup_memory,
    free_descriptors,
    groups_of,
    host_memory,
    machine_memory,
    shared_memory,
    usable_processors,
)
from torchbudget.machine.process_tree import process_tree
from torchbudget.units import GiB, MiB

amounts = st.integers(0, 2**50)
pools = st.builds(
    MemoryPool, name=st.just("pool"), limit_bytes=amounts, used_bytes=amounts, own_bytes=amounts
)


@given(pool=pools, taken=amounts)
def test_what_the_job_takes_does_not_change_what_it_can_use(pool, taken):
    """0 <= free <= usable <= limit; usable is the same before and after the job allocates."""
    assert 0 <= pool.free_bytes <= pool.usable_bytes <= pool.limit_bytes
    if pool.own_bytes <= pool.used_bytes <= pool.limit_bytes:
        assert pool.usable_bytes == pool.free_bytes + pool.own_bytes
    after = MemoryPool(
        name=pool.name,
        limit_bytes=pool.limit_bytes,
        used_bytes=pool.used_bytes + taken,
        own_bytes=min(pool.own_bytes, pool.used_bytes) + taken,
    )
    assert after.usable_bytes == pool.usable_bytes


def test_the_host_is_the_machine_and_its_groups():
    """The machine comes first, as the kernel has it, and all pools know what the job uses."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    first, *groups = host_memory()
    assert first.name == machine_memory().name == "machine"
    assert first.limit_bytes == int(fields["MemTotal"].split()[0]) * 1024
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    assert first.free_bytes == pytest.approx(available_bytes, abs=GiB(1))
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
    assert shared_memory(root=tmp_path) is None
    with mounted_tmpfs(tmp_path, "64m") as folder:
        (folder / "batch").write_bytes(bytes(MiB(24)))
        pool = shared_memory(root=tmp_path)
        assert (pool.limit_bytes, pool.used_bytes) == (MiB(64), MiB(24))
        assert pool.free_bytes == pool.usable_bytes == MiB(40)
    with mounted_tmpfs(tmp_path / "without a limit", "0"):
        assert shared_memory(root=tmp_path / "without a limit") is None


READ = """
import resource
from torchbudget.machine.host import process_limits
for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
    resource.setrlimit(name, (limit, limit))
for pool in process_limits():
    assert 0 < pool.used_bytes == pool.own_bytes
    print(pool.name, pool.limit_bytes, pool.usable_bytes)
"""


def test_limits_that_are_set_are_found():
    """In a process of its own, whose limits are real."""
    for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY and hard < limit:
            pytest.skip("this session is limited already")
    done = subprocess.run(
        [sys.executable, "-c", READ], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    lines = [f"RLIMIT_DATA {2**41} {2**41}", f"RLIMIT_AS {2**42} {2**42}"]
    assert done.stdout.splitlines() == lines, done.stderr


V1, V2 = "cpu.cfs_quota_us cpu.cfs_period_us", "cpu.max"
GROUPS = {
    V1: ("4:memory:/\n1:cpu,cpuacct:/job/step\n0::/", "- cgroup cgroup rw,cpu,cpuacct"),
    V2: ("0::/job/step", "- cgroup2 cgroup2 rw"),
}


@pytest.mark.parametrize(
    ("names", "quotas", "expected"),
    [
        (V2, {"job/step": "max 100000"}, None),
        (V2, {"job/step": "max 100000", "job": "90000 100000"}, 1),
        (V2, {"job/step": "900000 100000", ".": "50000 100000"}, 1),
        (V1, {"job/step": "-1 100000"}, None),
        (V1, {"job/step": "-1 100000", "job": "90000 100000"}, 1),
    ],
)
def test_a_quota_limits_the_processors(tmp_path, names, quotas, expected):
    """Of either version, the least of all groups; else those that it may be scheduled on."""
    affinity = len(os.sched_getaffinity(0))
    assert usable_processors(root=tmp_path) == affinity
    groups, kind = GROUPS[names]
    mount = f"33 31 0:30 / /sys/fs/cgroup/cpu rw,relatime {kind}"
    files = {"proc/self/cgroup": groups, "proc/self/mountinfo": mount}
    for folder, quota in quotas.items():
        values = quota.split() if names == V1 else [quota]
        for name, value in zip(names.split(), values, strict=True):
            files[f"sys/fs/cgroup/cpu/{folder}/{name}"] = value
    (tmp_path / "sys/fs/cgroup/cpu/job/step").mkdir(parents=True)
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert usable_processors(root=tmp_path) == min(affinity, expected or affinity)


COUNT = "from torchbudget.machine.host import usable_processors; print(usable_processors())"


def test_a_real_quota_of_the_group_above(tmp_path):
    """A process in a group without a quota, below one that pays for one processor."""
    version, folders = groups_of("cpu")
    if not version or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("no controller of processors, or one processor only")
    above = folders[-1] / f"test-{uuid.uuid4().hex}"
    inner = above / "inner"
    try:
        inner.mkdir(parents=True)
        name, quota = (
            ("cpu.cfs_quota_us", "100000") if version == 1 else ("cpu.max", "100000 100000")
        )
        (above / name).write_text(quota)
        join = ["sh", "-c", JOIN, str(inner / "cgroup.procs"), sys.executable, "-c", COUNT]
        done = subprocess.run(join, capture_output=True, text=True, check=True, cwd=REPOSITORY)
        assert int(done.stdout) == 1
    except OSError as error:
        pytest.skip(f"control groups of processors cannot be made here: {error}")
    finally:
        for folder in (inner, above):
            if folder.exists():
                folder.rmdir()


def test_an_open_file_is_one_less():
    """Descriptors that are free are those that may be opened yet."""
    before = free_descriptors()
    with open(os.devnull), open(os.devnull):  # noqa: PTH123  (the built-in is what users call)
        assert free_descriptors() == before - 2
    assert free_descriptors() == before
