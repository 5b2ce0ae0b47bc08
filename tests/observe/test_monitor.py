"""The numbers of a monitor, compared with the kernel's; and its warnings before a limit."""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest

from torchbudget import MemoryBudget, MemoryMonitor, peak_memory
from torchbudget.errors import MachineError, MemoryLimitWarning, OptionError
from torchbudget.machine.cgroups import ControlGroups
from torchbudget.machine.high_water import reset_peak_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.observe.report import MemoryLimit, limits_of
from torchbudget.observe.sample import MemorySample
from torchbudget.units import MiB

needs_reset = pytest.mark.skipif(
    not reset_peak_memory(), reason="the kernel does not let the high-water mark be reset"
)


def take(num_bytes: int) -> None:
    """Take bytes and free them at once: far shorter than any interval."""
    taken = bytearray(b"\1") * num_bytes
    del taken


@needs_reset
def test_peaks_are_the_kernels_and_may_overlap() -> None:
    """Within 1 % of VmHWM, each of its own time, whoever resets the kernel's mark inside."""
    with MemoryMonitor(interval_s=10) as outer:
        take(MiB(300))
        high_water = process_memory(shares=False).peak_resident_bytes
        with MemoryMonitor() as inner, peak_memory("cpu") as peak:
            take(MiB(100))
        reset_peak_memory()
    assert high_water is not None
    outer_bytes, inner_bytes = (one.report().peak.process_peak_bytes for one in (outer, inner))
    assert outer_bytes == pytest.approx(high_water, rel=0.01)
    assert inner_bytes == pytest.approx(peak.bytes, rel=0.02)
    assert peak.bytes < high_water - MiB(150)


def come_near_twice(monitor: MemoryMonitor) -> None:
    with monitor:
        for _ in range(2):
            taken = bytearray(b"\1") * MiB(800)
            monitor.snapshot("near")
            del taken
            monitor.snapshot("far")


@pytest.mark.slow
def test_it_warns_once_before_a_limit_and_says_what_to_change() -> None:
    reached: list[MemoryLimit] = []
    with MemoryMonitor() as reader:  # with all processes that earlier tests have started
        before = reader.snapshot("before").host_bytes
    assert before is not None
    host = before + MiB(880)
    monitor = MemoryMonitor(
        MemoryBudget(host=host), warn_at=(before + MiB(440)) / host, on_limit=reached.append
    )
    with pytest.warns(MemoryLimitWarning, match=r"budget\.host.* start fewer workers") as warned:
        come_near_twice(monitor)
    assert [limit.name for limit in reached] == ["host"]
    assert len(warned) == 1
    [seen] = [limit for limit in monitor.report().limits if limit.name == "host"]
    assert seen.share >= reached[0].share >= (before + MiB(440)) / host


@pytest.mark.filterwarnings("ignore::torchbudget.errors.MemoryLimitWarning")
@pytest.mark.parametrize("fraction", [0.5, 2.0])
def test_on_the_cpu_the_device_is_the_process(fraction: float) -> None:
    """Its high-water mark is compared with the budget's device bytes."""
    resident = process_memory(shares=False).resident_bytes
    budget = int(resident + MiB(200) / fraction)
    with MemoryMonitor(budget, device="cpu", interval_s=10, warn_at=1) as monitor:
        take(MiB(200))
    [limit] = [one for one in monitor.report().limits if one.name == "device"]
    assert limit.limit_bytes == budget
    assert (limit.share > 1) is (fraction > 1)


def test_limits_are_the_least_that_apply(tmp_path: Path) -> None:
    """Of nested groups now one has the least left, now another: no share mixes the two.

    A budget above the size of /dev/shm hides no limit.
    """
    sample = MemorySample(time_s=0.0, shared_bytes=60)
    for budget, limit_bytes in (({"shared": 1000}, 64), ({"shared": 50}, 50), ({}, 64)):
        [found] = limits_of(sample, budget, {"shared": 64}, on_cpu=False)
        assert (found.name, found.limit_bytes) == ("shared", limit_bytes)
    outer, inner = tmp_path, tmp_path / "inner"
    inner.mkdir()
    for folder, limit_bytes, used_bytes in ((outer, 200, 150), (inner, 64, 10)):
        (folder / "memory.max").write_text(f"{limit_bytes}\n")
        (folder / "memory.current").write_text(f"{used_bytes}\n")
    with MemoryMonitor(interval_s=10, warn_at=1) as monitor:
        monitor._limits = ()  # of the group that this process is in
        monitor._reader._groups = ControlGroups(version=2, folders=(inner, outer))
        monitor.snapshot("outer")
        (outer / "memory.current").write_text("140\n")
        monitor.snapshot("inner")
        limits = monitor.report().limits
    [limit] = [one for one in limits if one.name == "cgroup"]
    assert (limit.used_bytes, limit.limit_bytes) == (150, 200)


def test_a_warning_that_is_an_error_is_raised_in_the_training() -> None:
    """Nobody would see it in the thread; the monitor goes on until then."""
    monitor = MemoryMonitor(MemoryBudget(host=MiB(1)), interval_s=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MemoryLimitWarning), monitor:
            monitor.snapshot("first")
    assert monitor.report().limits


def test_another_process_is_watched_until_it_ends() -> None:
    """With the kernel's mark, its death in the middle included; then there is nothing to read."""
    process = subprocess.Popen(["sleep", "60"])
    with MemoryMonitor(pid=process.pid, interval_s=0.02) as monitor:
        monitor.snapshot("alive")
        with pytest.raises(OptionError, match="leave out pid"), monitor.batch(1, 1):
            pass
        high_water = process_memory(process.pid).peak_resident_bytes
        process.kill()
        process.wait()
        with pytest.raises(MachineError):
            monitor.snapshot("dead")
    assert monitor.report().peak.process_peak_bytes == pytest.approx(high_water, rel=0.01)
    with pytest.raises(MachineError), MemoryMonitor(pid=process.pid):
        pass


def test_it_is_used_inside_its_context_only() -> None:
    monitor = MemoryMonitor()
    for use in (monitor.report, lambda: monitor.snapshot("outside")):
        with pytest.raises(OptionError, match="not running in this process"):
            use()
    with monitor:
        pass
    assert monitor.report() is monitor.report()
    assert monitor.report().history
    with pytest.raises(OptionError, match="not running in this process"):
        monitor.snapshot("after")
    with pytest.raises(OptionError, match="entered once"):
        monitor.__enter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval_s": 0}, "interval_s"),
        ({"warn_at": "high"}, "warn_at"),
        ({"warn_at": 95}, "warn_at"),
        ({"replan_batches": 0}, "replan_batches"),
        ({"device": "mps"}, "expected a CUDA device such as"),
        ({"device": "meta"}, "expected a CUDA device such as"),
    ],
)
def test_invalid_options_raise_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MemoryMonitor(**options)
    MemoryMonitor(device="cuda:1")  # read once CUDA is in use
