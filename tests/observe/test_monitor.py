"""The numbers of a monitor, compared with the kernel's; and its warnings before a limit."""

from __future__ import annotations

import subprocess
import warnings
from typing import Any

import pytest

from torchbudget import MemoryBudget, MemoryMonitor
from torchbudget.errors import MachineError, MemoryLimitWarning, OptionError
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import RESIDENT, process_memory
from torchbudget.units import MiB


def take(num_bytes: int) -> None:
    """Take bytes and free them at once: far shorter than any interval."""
    taken = bytearray(b"\1") * num_bytes
    del taken


@pytest.mark.skipif(not RESIDENT.reset(), reason="the kernel lets no mark be reset")
def test_peaks_are_the_kernels_and_may_overlap() -> None:
    """Within 1 % of VmHWM, each of its own time, whoever resets the kernel's mark inside."""
    with MemoryMonitor(interval_s=10) as outer:
        take(MiB(300))
        high_water = process_memory(shares=False).peak_resident_bytes
        with MemoryMonitor() as inner, peak_memory("cpu") as peak:
            take(MiB(100))
        RESIDENT.reset()
    assert high_water is not None
    outer_bytes, inner_bytes = (one.report().peak.process_peak_bytes for one in (outer, inner))
    assert outer_bytes == pytest.approx(high_water, rel=0.01)
    assert inner_bytes == pytest.approx(peak.bytes, rel=0.02)
    assert peak.bytes < high_water - MiB(150)


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
        high_water = process_memory(process.pid).peak_resident_bytes
        process.kill()
        process.wait()
        with pytest.raises(MachineError):
            monitor.snapshot("dead")
    assert monitor.report().peak.process_peak_bytes == pytest.approx(high_water, rel=0.01)


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
