"""What a monitor reads of a CUDA device, on figures that stand in for a device's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchbudget as tb
from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget.machine import device as device_module
from torchbudget.machine.peaks import peak_memory
from torchbudget.observe.sample import MemoryReader
from torchbudget.units import GiB, MiB

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
