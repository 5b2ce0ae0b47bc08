"""The pace of readings, the history, and the file of a run, also of one that was killed."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import reduce
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MemoryBudget, MemoryMonitor
from torchbudget.errors import MonitorWarning, OptionError
from torchbudget.observe.recording import _QUICK_SHARE, _WHOLE_SHARE, History, Pace
from torchbudget.observe.report import recorded_runs
from torchbudget.observe.sample import MemorySample
from torchbudget.units import GiB, MiB

# ---------------------------------------------------------------------- pace


class Run:
    """A run on made-up time, whose readings take a given time; `wholes` are its whole readings."""

    def __init__(self, quick_s: float, whole_s: float, interval_s: float = 0.1) -> None:
        self.quick_s, self.whole_s = quick_s, whole_s
        self.pace, self.now_s = Pace(interval_s), 0.0
        self.wholes: list[float] = []

    def until(self, end_s: float, resident: int) -> None:
        while self.now_s < end_s:
            self.now_s += self.pace.wait_s()
            sample = MemorySample(time_s=self.now_s, resident_bytes=resident)
            is_whole = self.pace.wants_whole(sample, float("inf"))
            if is_whole:
                sample = replace(sample, host_bytes=resident)
                self.wholes.append(self.now_s)
            self.pace.note(self.quick_s + is_whole * self.whole_s, sample)


@given(st.floats(1e-5, 0.05), st.floats(1e-4, 2.0), st.floats(0.01, 1.0), st.data())
def test_readings_take_their_share_at_the_most(
    quick_s: float, whole_s: float, interval_s: float, data: st.DataObject
) -> None:
    """However long they take, and however memory changes; beside their share, two readings.

    A peak of the job is seen that lasts as long as a whole reading's share allows.
    """
    run = Run(quick_s, whole_s, interval_s)
    for _ in range(20):
        run.until(run.now_s + 2.0, data.draw(st.integers(MiB(1), GiB(4))))
    share = _QUICK_SHARE + _WHOLE_SHARE
    assert share < 0.01
    assert run.pace.spent_s <= share * run.now_s + 2 * (whole_s + quick_s)
    longest_s = (whole_s + quick_s) / _WHOLE_SHARE + 2 * run.pace.wait_s()
    assert np.diff([*run.wholes, run.now_s]).max() <= longest_s


# ---------------------------------------------------------------------- history

numbers = st.none() | st.integers(0, 2**50)
samples = st.builds(MemorySample, time_s=st.just(0), host_bytes=numbers, shared_bytes=numbers)


@given(st.lists(samples, min_size=1, max_size=200), st.integers(1, 20))
def test_a_history_is_bounded_and_keeps_every_peak(added: list[MemorySample], half: int) -> None:
    """Every kept sample has the maxima of `stride` samples; completed ones are returned."""
    history = History(2 * half)
    completed = [history.stride for one in added if history.add(one) is not None]
    stride = history.stride
    assert len(added) - sum(completed) < stride
    assert len(history.kept) <= 2 * half
    parts = [added[i : i + stride] for i in range(0, len(added), stride)]
    assert history.kept == [reduce(MemorySample.merged, part) for part in parts]


# ---------------------------------------------------------------------- the file


def take_snapshots(monitor: MemoryMonitor) -> None:
    with monitor:
        for name in "abc":
            monitor.snapshot(name)


def test_a_monitor_survives_a_full_disk() -> None:
    """One warning, a count of the lost lines, and everything else goes on."""
    monitor = MemoryMonitor(path="/dev/full", interval_s=10)
    with pytest.warns(MonitorWarning, match="cannot be written to") as warned:
        take_snapshots(monitor)
    report = monitor.report()
    # Each snapshot writes a sample, too; so do the beginning and the end.
    assert (len(warned), report.end["lost_lines"]) == (1, 3 * 2 + 3)
    assert [name for name, _ in report.snapshots] == ["a", "b", "c"]
    assert "9 lines could not be written" in str(report)


def test_a_file_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    """Before the training begins, not after hours."""
    with pytest.raises(FileNotFoundError), MemoryMonitor(path=tmp_path / "no" / "lines.jsonl"):
        pass


def test_the_file_and_the_scalars_have_all_of_the_run(tmp_path: Path) -> None:
    """A file that was read back is the report, and the scalars are its samples."""
    path, writer = tmp_path / "run.jsonl", Mock()
    stated = MemoryBudget(device="40GiB", host="50GiB")
    with MemoryMonitor(stated, path=path, writer=writer, device="cpu") as monitor:
        monitor.snapshot("first")
        with monitor.batch(4, (100,)) as peak:
            pass
        with monitor.batch():
            pass
    report, [run] = monitor.report(), recorded_runs(path)
    assert replace(run, begin={}, end={}, batches=()) == replace(report, begin={}, end={})
    assert report.begin.items() <= run.begin.items()
    assert report.end.items() <= run.end.items()
    budget = {"device": GiB(40), "host": GiB(50)}
    assert (report.begin["pid"], report.begin["budget"]) == (os.getpid(), budget)
    padded, other = run.batches
    assert (padded["n"], padded["size"], padded["bytes"]) == (4, [100], peak.bytes)
    assert "size" not in other
    assert writer.add_scalar.call_args_list == [
        call(f"memory/{name}", value, round(1000 * sample.time_s))
        for sample in run.history
        for name, value in sample.known().items()
        if name != "time_s"
    ]


def test_faults_of_a_writer_and_a_callback_end_nothing() -> None:
    """They are warned of once, beside the limit itself."""
    fails = Mock(side_effect=RuntimeError("broken"))
    budget = MemoryBudget(host=MiB(1))
    monitor = MemoryMonitor(budget, on_limit=fails, writer=Mock(add_scalar=fails))
    with pytest.warns() as warned, monitor:
        monitor.snapshot("second")
    texts = sorted(str(one.message) for one in warned if one.category is MonitorWarning)
    assert [text.split()[2:4] for text in texts] == [["on_limit", "raised"], ["writer", "raised"]]


def test_runs_of_one_file_are_told_apart(tmp_path: Path) -> None:
    """At the same time, as of several ranks, and after a line that an earlier writer left torn."""
    path = tmp_path / "run.jsonl"
    path.write_text('3\n[]\n{"no":"event"}\n{"event":"sample","run":"lost"}\n{"event":"sam')
    with MemoryMonitor(MemoryBudget(host="64GiB"), path=path) as first:
        with MemoryMonitor(MemoryBudget(host="32GiB"), path=path) as second:
            first.snapshot("first")
            second.snapshot("second")
        first.snapshot("later")
    runs = recorded_runs(path)
    assert [run.begin["budget"]["host"] for run in runs] == [GiB(64), GiB(32)]
    assert [[name for name, _ in run.snapshots] for run in runs] == [["first", "later"], ["second"]]
    assert all(run.end for run in runs)
    path.write_text('{"event":"begin","run":"a","format":99}')
    with pytest.raises(OptionError, match="format 99 of a monitor's file"):
        recorded_runs(path)
