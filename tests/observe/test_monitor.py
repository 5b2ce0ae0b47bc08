"""The numbers of a monitor, compared with the kernel's and a device's; its warnings."""

from __future__ import annotations

import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import torchbudget as tb
from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget import MemoryBudget, MemoryMonitor
from torchbudget.errors import MachineError, MemoryLimitWarning, OptionError
from torchbudget.machine import device as device_module
from torchbudget.machine.high_water import RESIDENT
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.observe.sample import MemoryReader
from torchbudget.units import GiB, MiB


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


# ---------------------------------------------------------------------- a CUDA device


CONTEXT = MiB(600)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device that this process uses already."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    device = FakeDevice(free_bytes=GiB(80) - CONTEXT, process_bytes=CONTEXT)
    return put_in_place(monkeypatch, device)


def test_the_allocators_peaks_are_kept_whoever_resets_them(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the monitor's whole time, of a block's, and of a batch's inside it, which waits for none.

    A loop goes on to enqueue ahead of the device.
    """
    with tb.MemoryMonitor(interval_s=10) as monitor:
        fake.take(GiB(9), reserving=GiB(1))
        fake.free(GiB(9))
        fake.empty_cache()
        with peak_memory("cuda") as outer:
            fake.take(GiB(4))
            fake.free(GiB(4))
            fake.empty_cache()
            with monkeypatch.context() as patch, monitor.batch(4, 100) as inner:
                patch.setattr(fake, "synchronize", pytest.fail)
                fake.take(GiB(2))
            sample = monitor.snapshot("now")
        fake.free(GiB(2))
    assert (outer.reserved_bytes, outer.allocated_bytes) == (GiB(4), GiB(4))
    assert (inner.reserved_bytes, inner.bytes) == (GiB(2), GiB(2) + CONTEXT)
    assert (sample.allocated_bytes, sample.reserved_bytes) == (GiB(2), GiB(2))
    assert (sample.outside_bytes, sample.device_bytes) == (CONTEXT, GiB(2) + CONTEXT)
    peak = monitor.report().peak
    assert (peak.reserved_bytes, peak.allocated_bytes) == (GiB(10), GiB(9))
    assert "device, reserved" in str(monitor.report())


def test_a_thread_reads_the_device_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its own current device: a thread's is the first one, and a rank may be on another."""
    used = put_in_place(monkeypatch, FakeDevice(reserved_bytes=GiB(2)))
    asked: list[str] = []
    monkeypatch.setattr(device_module, "TorchSource", lambda name: asked.append(str(name)) or used)
    reserved: dict[int, int] = {0: 0, 1: 0}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reserved))
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved.__getitem__)
    reader = MemoryReader(None, None)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(reader.read, 0, whole=False).result().reserved_bytes is None
        reserved[1] = GiB(2)
        assert other.submit(reader.read, 0, whole=False).result().reserved_bytes == GiB(2)
    assert asked == ["cuda:1"]


def test_cuda_is_never_initialised() -> None:
    """Nor is a device read before the process uses it: its forked workers would not start."""
    with tb.MemoryMonitor("8MiB", device="cuda") as monitor:
        sample = monitor.snapshot("now")
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
    assert sample.device_bytes is None
    assert "device" not in [limit.name for limit in monitor.report().limits]
