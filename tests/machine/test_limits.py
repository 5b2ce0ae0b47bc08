"""Processors, open files, and the kinds of pages that a process has."""

import mmap
import os
import subprocess
import sys
import uuid

import numpy as np
import pytest

from tests.support.memory_groups import JOIN, REPOSITORY
from torchbudget.errors import MachineError
from torchbudget.machine.cgroups import groups_of
from torchbudget.machine.limits import free_descriptors, usable_processors
from torchbudget.machine.process_pages import mapped_data_bytes, process_pages
from torchbudget.units import MiB

V1, V2 = "cpu.cfs_quota_us cpu.cfs_period_us", "cpu.max"
GROUPS = {
    V1: ("4:memory:/\n1:cpu,cpuacct:/job/step\n0::/", "- cgroup cgroup rw,cpu,cpuacct"),
    V2: ("0::/job/step", "- cgroup2 cgroup2 rw"),
}


@pytest.mark.parametrize(
    ("names", "quotas", "expected"),
    [
        (V2, {}, None),
        (V2, {"job/step": "max 100000"}, None),
        (V2, {"job/step": "50000 100000"}, 1),
        (V2, {"job/step": "max 100000", "job": "90000 100000"}, 1),
        (V2, {"job/step": "900000 100000", ".": "50000 100000"}, 1),
        (V1, {"job/step": "-1 100000"}, None),
        (V1, {"job/step": "90000 100000"}, 1),
        (V1, {"job/step": "-1 100000", "job": "90000 100000"}, 1),
    ],
)
def test_a_quota_limits_the_processors(tmp_path, names, quotas, expected) -> None:
    """Of either version, the least of all groups; else those that it may be scheduled on."""
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
    affinity = len(os.sched_getaffinity(0))
    assert usable_processors(root=tmp_path) == min(affinity, expected or affinity)


def test_no_control_groups_no_quota(tmp_path) -> None:
    assert usable_processors(root=tmp_path) == len(os.sched_getaffinity(0))


COUNT = "from torchbudget.machine.limits import usable_processors; print(usable_processors())"


def test_a_real_quota_of_the_group_above(tmp_path) -> None:
    """A process in a group without a quota, below one that pays for one processor."""
    version, folders = groups_of("cpu")
    if not version or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("no controller of processors, or one processor only")
    above = folders[-1] / f"test-{uuid.uuid4().hex}"
    inner = above / "inner"
    try:
        inner.mkdir(parents=True)
        if version == 1:
            (above / "cpu.cfs_quota_us").write_text("100000")
        else:
            (above / "cpu.max").write_text("100000 100000")
    except OSError as error:
        _remove(inner, above)
        pytest.skip(f"control groups of processors cannot be made here: {error}")
    try:
        join = ["sh", "-c", JOIN, str(inner / "cgroup.procs"), sys.executable, "-c", COUNT]
        done = subprocess.run(join, capture_output=True, text=True, check=True, cwd=REPOSITORY)
        assert int(done.stdout) == 1
    finally:
        _remove(inner, above)


def _remove(*folders) -> None:
    for folder in folders:
        if folder.exists():
            folder.rmdir()


def test_an_open_file_is_one_less() -> None:
    """Descriptors that are free are those that may be opened yet."""
    before = free_descriptors()
    with open(os.devnull), open(os.devnull):  # noqa: PTH123  (the built-in is what users call)
        assert free_descriptors() == before - 2
    assert free_descriptors() == before


def test_pages_by_their_kind(tmp_path) -> None:
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


def test_a_mapped_data_file_is_told_from_libraries(tmp_path) -> None:
    """Its pages count once they were touched."""
    path = tmp_path / "data"
    path.write_bytes(b"x" * MiB(8))
    before = mapped_data_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sum(mapped[place] for place in range(0, len(mapped), 4096))
        assert mapped_data_bytes() - before == pytest.approx(MiB(8), abs=MiB(0.5))
