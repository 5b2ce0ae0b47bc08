"""The pace of readings, the history, the file of a run, and figures of it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import (
    MemoryBudget,
    MemoryBudgetBatchSampler,
    MemoryMonitor,
    PackedCost,
    PaddedCost,
)
from torchbudget.errors import MonitorWarning, OptionError
from torchbudget.observe.figures import plot_memory, plot_predictions, plot_sizes
from torchbudget.observe.monitor import _QUICK_SHARE, _WHOLE_SHARE, History, Pace
from torchbudget.observe.report import MonitorReport, recorded_runs
from torchbudget.observe.sample import MemorySample
from torchbudget.units import GiB, MiB

# ---------------------------------------------------------------------- pace


@given(st.floats(1e-5, 0.05), st.floats(1e-4, 2.0), st.floats(0.01, 1.0), st.data())
def test_readings_take_their_share_at_the_most(
    quick_s: float, whole_s: float, interval_s: float, data: st.DataObject
) -> None:
    """However long they take, and however memory changes; beside their share, two readings.

    A peak of the job is seen that lasts as long as a whole reading's share allows.
    """
    pace, now_s, resident = Pace(interval_s), 0.0, 0
    wholes: list[float] = []
    for step in range(20):
        resident = data.draw(st.integers(MiB(1), GiB(4)))
        while now_s < 2.0 * (step + 1):
            now_s += pace.wait_s()
            sample = MemorySample(time_s=now_s, resident_bytes=resident)
            is_whole = pace.wants_whole(sample, float("inf"))
            if is_whole:
                sample = replace(sample, host_bytes=resident)
                wholes.append(now_s)
            pace.note(quick_s + is_whole * whole_s, sample)
    share = _QUICK_SHARE + _WHOLE_SHARE
    assert share < 0.01
    assert pace.spent_s <= share * now_s + 2 * (whole_s + quick_s)
    longest_s = (whole_s + quick_s) / _WHOLE_SHARE + 2 * pace.wait_s()
    assert np.diff([*wholes, now_s]).max() <= longest_s


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


@pytest.mark.parametrize("fault", ["disk", "writer"])
def test_a_monitor_survives_what_it_writes_to(fault: str) -> None:
    """One warning for each fault, a count of the lost lines, and everything else goes on."""
    fails = Mock(side_effect=RuntimeError("broken"))
    options: dict[str, Any] = {"on_limit": fails, "writer": Mock(add_scalar=fails)}
    if fault == "disk":
        options = {"path": "/dev/full"}
    monitor = MemoryMonitor(MemoryBudget(host=MiB(1)), interval_s=10, **options)
    with pytest.warns() as warned, monitor:
        monitor.snapshot("all the same")
    texts = sorted(str(one.message) for one in warned if one.category is MonitorWarning)
    report = monitor.report()
    assert [name for name, _ in report.snapshots] == ["all the same"]
    if fault == "writer":
        whose = [text.split()[2:4] for text in texts]
        assert whose == [["on_limit", "raised"], ["writer", "raised"]]
    else:
        assert len(texts) == 1
        assert report.end["lost_lines"] > 4
        assert "lines could not be written" in str(report)


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


# ---------------------------------------------------------------------- figures


MIB = 2**20
TOKENS = PaddedCost(unit_bytes=1)
SIZES = np.random.default_rng(0).integers(10, 200, 500)
HISTORY = (
    MemorySample(time_s=0, host_bytes=MIB, shared_bytes=0),
    MemorySample(time_s=1, host_bytes=None, shared_bytes=MIB),
    MemorySample(time_s=2, host_bytes=2 * MIB, shared_bytes=MIB),
)


def run(*batches: tuple[int, int], **budget: int) -> MonitorReport:
    """A run with a snapshot, and batches of predicted and measured MiB."""
    return MonitorReport(
        begin={"budget": budget, "on_cpu": False},
        history=HISTORY,
        snapshots=(("epoch 1", MemorySample(time_s=1.5)),),
        peak=HISTORY[-1],
        limits=(),
        batches=tuple({"predicted_bytes": p * MIB, "bytes": m * MIB} for p, m in batches),
        end={},
    )


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("cost", [TOKENS, PackedCost(unit_bytes=1), PaddedCost(unit_bytes=(1, 1))])
def test_sizes_are_an_epochs(cost: Any, multiple: int) -> None:
    """On each axis the bars sum up to the epoch's elements, and to its padding."""
    pytest.importorskip("matplotlib")
    sizes = np.stack([SIZES, SIZES[::-1]], 1)[:, : cost.axes]
    sampler = MemoryBudgetBatchSampler(sizes, cost, 2000, size_multiple=multiple)
    for axis in range(cost.axes):
        data, padding = plot_sizes(sampler.plan, axis=axis).axes[0].containers
        elements, padded = (sum(bar.get_height() for bar in bars) for bars in (data, padding))
        assert elements == sizes[:, axis].sum()
        if cost.axes == 1:
            assert padded / (padded + elements) == pytest.approx(sampler.report().padding)
        assert data[0].get_hatch() != padding[0].get_hatch()
    with pytest.raises(OptionError, match="axis must be 0 to"):
        plot_sizes(sampler.plan, axis=2)


def test_predicted_against_real_bytes() -> None:
    pytest.importorskip("matplotlib")
    figure = plot_predictions(run((1, 1), (2, 1), (3, 4), device=5 * MIB))
    lines: Any = figure.axes[0].get_lines()
    predicted, measured, budget = lines
    assert predicted.get_ydata().tolist() == [1, 2, 3]
    assert measured.get_ydata().tolist() == [1, 1, 4]
    assert set(budget.get_ydata()) == {5}
    assert len({line.get_linestyle() for line in lines}) == 3


def test_memory_and_its_budgets_over_time() -> None:
    """A line for each number that was read, its budget, and a mark at each snapshot's time."""
    pytest.importorskip("matplotlib")
    axes = plot_memory(run(host=3 * MIB)).axes[0]
    lines: Any = {line.get_label(): line for line in axes.get_lines()}
    assert lines["host"].get_xydata().tolist() == [[0, 1], [2, 2]]  # what was not read is no gap
    assert lines["shared"].get_ydata().tolist() == [0, 1, 1]
    assert set(lines["budget of host"].get_ydata()) == {3}
    assert lines["host"].get_linestyle() != lines["shared"].get_linestyle()
    assert [text.get_text() for text in axes.texts] == ["epoch 1"]
    assert "device" not in lines
