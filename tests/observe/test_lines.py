"""JSON lines on disks that are full, and after a crash."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchbudget import MemoryBudget, MemoryMonitor
from torchbudget.errors import MonitorWarning
from torchbudget.observe.lines import LineFile, read_records
from torchbudget.observe.recorded_run import recorded_runs
from torchbudget.units import KiB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 KiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_lines_on_a_disk_that_is_full_for_a_while(small_disk: Path) -> None:
    """What fits is whole, what does not is counted, and once there is room it goes on."""
    other = small_disk / "other"
    other.write_bytes(bytes(KiB(8)))
    file = LineFile(small_disk / "lines.jsonl")
    written = [number for number in range(2000) if file.write({"event": "e", "number": number})]
    assert 0 < len(written) < 2000
    assert file.lost == 2000 - len(written)
    assert file.error is not None
    other.unlink()
    assert file.write({"event": "e", "number": 2000})
    file.close()
    read = [record["number"] for record in read_records(small_disk / "lines.jsonl")]
    assert read == [*written, 2000]


def take_snapshots(monitor: MemoryMonitor, *names: str) -> None:
    with monitor:
        for name in names:
            monitor.snapshot(name)


def test_a_monitor_survives_a_full_disk() -> None:
    """One warning, a count, and everything else goes on."""
    monitor = MemoryMonitor(path="/dev/full")
    with pytest.warns(MonitorWarning, match="cannot be written to") as warned:
        take_snapshots(monitor, "0", "1", "2")
    assert len(warned) == 1
    report = monitor.report()
    assert report.lost_lines >= 5  # and the end, which the report was made before
    assert [name for name, _ in report.snapshots] == ["0", "1", "2"]
    assert "lines could not be written" in str(report)


def test_lines_that_a_crash_has_cut_short_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"event":"begin","format":1}\n{"event":"sam')
    assert read_records(path) == [{"event": "begin", "format": 1}]
    path.write_text('3\n[]\n{"no":"event"}\n\xff\n')
    assert read_records(path) == []


def test_a_file_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    """Before the training begins, not after hours."""
    with pytest.raises(FileNotFoundError), MemoryMonitor(path=tmp_path / "no" / "lines.jsonl"):
        pass


def test_monitors_that_write_to_one_file_are_told_apart(tmp_path: Path) -> None:
    """As of several ranks: each run has its own budget, snapshots and end."""
    path = tmp_path / "run.jsonl"
    with MemoryMonitor(MemoryBudget(host="64GiB"), path=path) as first:
        with MemoryMonitor(MemoryBudget(host="32GiB"), path=path) as second:
            first.snapshot("first")
            second.snapshot("second")
        first.snapshot("later")
    runs = recorded_runs(path)
    assert [run.budget["host"] for run in runs] == [2**36, 2**35]
    assert [[one["name"] for one in run.snapshots] for run in runs] == [
        ["first", "later"],
        ["second"],
    ]
    assert all(run.end is not None for run in runs)


def test_a_line_that_an_earlier_writer_left_torn_takes_no_other_along(tmp_path: Path) -> None:
    """The first line of a run is its `begin`, without which it would be the run before."""
    path = tmp_path / "run.jsonl"
    with MemoryMonitor(MemoryBudget(host="64GiB"), path=path):
        pass
    with path.open("a") as file:
        file.write('{"event":"sam')
    with MemoryMonitor(MemoryBudget(host="32GiB"), path=path) as monitor:
        monitor.snapshot("here")
    before, run = recorded_runs(path)
    assert before.budget["host"] == 2**36
    assert run.budget["host"] == 2**35
    assert not before.snapshots
    assert [one["name"] for one in run.snapshots] == ["here"]


def test_a_run_whose_beginning_is_lost_is_no_part_of_another(tmp_path: Path) -> None:
    """As on a disk that was full; files from before lines had a run are read as ever."""
    path = tmp_path / "run.jsonl"
    file = LineFile(path)
    for record in (
        {"event": "begin", "format": 1, "run": "a", "budget": {}},
        {"event": "sample", "run": "b", "time_s": 1.0, "host_bytes": 9},
        {"event": "sample", "run": "a", "time_s": 2.0, "host_bytes": 3},
        {"event": "begin", "format": 1, "budget": {}},
        {"event": "sample", "time_s": 1.0, "host_bytes": 5},
    ):
        assert file.write(record)
    file.close()
    assert [run.peaks for run in recorded_runs(path)] == [{"host_bytes": 3}, {"host_bytes": 5}]
