"""What one process may use: `ulimit`'s limits as they are set, and CPUs by affinity and quota."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT
from torchbudget.machine.process_limits import open_files_limit, usable_cpus

READ = """
import resource
from torchbudget.machine.process_limits import process_limits
for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
    resource.setrlimit(name, (limit, limit))
for pool in process_limits():
    assert 0 < pool.used_bytes == pool.own_bytes
    print(pool.name, pool.limit_bytes, pool.usable_bytes)
"""


def test_limits_that_are_set_are_found() -> None:
    """In a process of its own, whose limits are real."""
    for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY and hard < limit:
            pytest.skip("this session is limited already")
    done = subprocess.run(
        [sys.executable, "-c", READ], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        f"RLIMIT_DATA {2**41} {2**41}",
        f"RLIMIT_AS {2**42} {2**42}",
    ], done.stderr


def test_open_files() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert open_files_limit() == (None if soft == resource.RLIM_INFINITY else soft)


def test_cpus_are_those_of_the_affinity() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "120000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cpus_are_at_most_the_quota(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    """Files as the kernel writes them, in both versions: a group with a quota needs its rights."""
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    allowed = len(os.sched_getaffinity(0))
    expected = allowed if quota is None else min(allowed, -int(-quota // 1))
    assert usable_cpus(root=tmp_path) == expected
