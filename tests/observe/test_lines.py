"""JSON lines on disks that are full, and after a crash."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchbudget import MemoryMonitor
from torchbudget.errors import MonitorWarning
from torchbudget.observe.lines import LineFile, read_records
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
