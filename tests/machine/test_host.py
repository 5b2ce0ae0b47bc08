"""The machine's memory, pools, `/dev/shm`, limits of processes, processors and open files."""

from __future__ import annotations

import os
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import printed_by
from torchbudget.machine.host import (
    MemoryPool,
    cgroup_memory,
    free_descriptors,
    host_memory,
    machine_memory,
    process_limits,
    shared_memory,
)
from torchbudget.machine.process_tree import process_tree
from torchbudget.units import MiB

amounts = st.integers(0, 2**50)
pools = st.builds(
    MemoryPool, name=st.just("pool"), limit_bytes=amounts, used_bytes=amounts, own_bytes=amounts
)


@given(pool=pools, taken=amounts)
def test_what_the_job_takes_does_not_change_what_it_can_use(pool: MemoryPool, taken: int) -> None:
    """0 <= free <= usable <= limit; usable is the same before and after the job allocates."""
    assert 0 <= pool.free_bytes <= pool.usable_bytes <= pool.limit_bytes
    own = min(pool.own_bytes, pool.used_bytes) + taken
    after = replace(pool, used_bytes=pool.used_bytes + taken, own_bytes=own)
    assert after.usable_bytes == pool.usable_bytes


def test_the_host_is_the_machine_and_its_groups() -> None:
    """The machine comes first, as the kernel has it, and all pools know what the job uses."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    first, *groups = host_memory()
    assert first.name == machine_memory().name == "machine"
    assert first.limit_bytes == int(fields["MemTotal"].split()[0]) * 1024
    assert [pool.name for pool in groups] == [pool.name for pool in cgroup_memory()]
    job = sum(process.unreclaimable_bytes for process in process_tree())  # with a fork server
    assert first.own_bytes == pytest.approx(job, abs=MiB(64))


@pytest.mark.parametrize("size", ["64m", "0"])
def test_shared_memory_counts_what_is_written(tmp_path: Path, size: str) -> None:
    """A real tmpfs, to the byte; one of size 0 has no limit."""
    assert shared_memory(root=tmp_path) is None
    folder = tmp_path / "dev/shm"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "torchbudget-test", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        (folder / "batch").write_bytes(bytes(MiB(24)))
        pool = shared_memory(root=tmp_path)
    finally:
        subprocess.run(["umount", folder], check=True)
    if size == "0":
        assert pool is None
    else:
        assert pool == MemoryPool(name="/dev/shm", limit_bytes=MiB(64), used_bytes=MiB(24))


def print_limits() -> None:
    """Limit this process, and print the limits that are found."""
    for name, limit in ((resource.RLIMIT_DATA, 2**41), (resource.RLIMIT_AS, 2**42)):
        resource.setrlimit(name, (limit, limit))
    found = process_limits()
    assert all(0 < pool.used_bytes == pool.own_bytes for pool in found)
    print([(pool.name, pool.limit_bytes, pool.usable_bytes) for pool in found])  # noqa: T201


def test_limits_that_are_set_are_found() -> None:
    """In a process of its own, whose limits are real."""
    for name in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
        if resource.getrlimit(name)[1] != resource.RLIM_INFINITY:
            pytest.skip("this session is limited already")
    expected = [("RLIMIT_DATA", 2**41, 2**41), ("RLIMIT_AS", 2**42, 2**42)]
    printed = printed_by(["-c", f"from {__name__} import print_limits; print_limits()"])
    assert printed == f"{expected}\n"


def test_an_open_file_is_one_less() -> None:
    """Descriptors that are free are those that may be opened yet."""
    before = free_descriptors()
    with open(os.devnull), open(os.devnull):  # noqa: PTH123  (the built-in is what users call)
        assert free_descriptors() == before - 2
    assert free_descriptors() == before
