"""Processors, open files, and the kinds of pages that a process has."""

import mmap
import os

import numpy as np
import pytest

from torchbudget.errors import MachineError
from torchbudget.machine.limits import free_descriptors, usable_processors
from torchbudget.machine.process_pages import mapped_data_bytes, process_pages
from torchbudget.units import MiB


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "90000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_quota_limits_the_processors(tmp_path, files, expected) -> None:
    """Of either version; without one, those that the process may be scheduled on."""
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    affinity = len(os.sched_getaffinity(0))
    assert usable_processors(root=tmp_path) == min(affinity, expected or affinity)


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
