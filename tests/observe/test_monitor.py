"""The numbers of a monitor, compared with the kernel's; and its warnings before a limit."""

from __future__ import annotations

import subprocess
import warnings
from typing import Any

import pytest

from torchbudget import MemoryBudget, MemoryMonitor
from torchbudget.errors import MachineError, MemoryLimitWarning, OptionError
from torchbudget.machine.high_water import reset_peak_memory
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.observe.report import MemoryLimit, limits_of
from torchbudget.observe.sample import MemorySample
from torchbudget.units import MiB


def take(num_bytes: int) -> None:
    """Take bytes and free them at once: far shorter than any interval."""
    taken = bytearray(b"\1") * num_bytes
    del taken


@pytest.mark.skipif(not reset_peak_memory(), reason="the kernel lets no mark be reset")
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
        for size in (MiB(800), 1, MiB(800)):
            taken = bytearray(b"\1") * size
            monitor.snapshot(f"{len(taken)} bytes")


@pytest.mark.slow
def test_it_warns_once_before_a_limit_and_says_what_to_change() -> None:
    reached: list[MemoryLimit] = []
    with MemoryMonitor() as reader:  # with all processes that earlier tests have started
        before = reader.snapshot("before").host_bytes or 0
    host, warn_at = before + MiB(880), (before + MiB(440)) / (before + MiB(880))
    monitor = MemoryMonitor(MemoryBudget(host=host), warn_at=warn_at, on_limit=reached.append)
    with pytest.warns(MemoryLimitWarning, match=r"budget\.host.* start fewer workers") as warned:
        come_near_twice(monitor)
    assert (len(warned), [limit.name for limit in reached]) == (1, ["host"])
    [seen] = [limit for limit in monitor.report().limits if limit.name == "host"]
    assert seen.share >= reached[0].share >= warn_at


@pytest.mark.filterwarnings("ignore::torchbudget.errors.MemoryLimitWarning")
def test_on_the_cpu_the_device_is_the_process() -> None:
    """Its high-water mark is compared with the budget's device bytes."""
    resident = process_memory(shares=False).resident_bytes
    for room, is_over in ((MiB(400), False), (MiB(100), True)):
        with MemoryMonitor(resident + room, device="cpu", interval_s=10, warn_at=1) as monitor:
            take(MiB(200))
        limit = monitor.report().limits[0]
        assert (limit.name, limit.limit_bytes) == ("device", resident + room)
        assert (limit.share > 1) is is_over


def test_limits_are_the_least_that_apply() -> None:
    """A budget above the size of /dev/shm hides no limit."""
    sample = MemorySample(time_s=0.0, shared_bytes=60)
    for budget, limit_bytes in (({"shared": 1000}, 64), ({"shared": 50}, 50), ({}, 64)):
        [found] = limits_of(sample, budget, {"shared": 64}, on_cpu=False)
        assert (found.name, found.limit_bytes) == ("shared", limit_bytes)


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
    with pytest.raises(OptionError, match="not running in this process"):
        monitor.report()
    with monitor:
        pass
    assert monitor.report().history == monitor.report().history
    with pytest.raises(OptionError, match="not running in this process"):
        monitor.snapshot("after")
    with pytest.raises(OptionError, match="entered once"):
        monitor.__enter__()


INVALID = {"interval_s": 0, "warn_at": 95, "replan_batches": 0, "device": "mps"}


@pytest.mark.parametrize(("name", "value"), INVALID.items())
def test_invalid_options_raise_at_once(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        MemoryMonitor(**{name: value})
