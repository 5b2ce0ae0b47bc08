"""What a monitor reads of a CUDA device, on figures that stand in for a device's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchbudget as tb
from tests.support.costs import measured
from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget.errors import MeasureWarning, MemoryLimitWarning
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


def test_the_allocators_peaks_are_kept_whoever_resets_them(fake: FakeDevice) -> None:
    """Of the monitor's whole time, of a block's, and of a block's inside it."""
    with tb.MemoryMonitor(interval_s=10) as monitor:
        fake.take(GiB(9), reserving=GiB(1))
        fake.free(GiB(9))
        fake.empty_cache()
        with peak_memory("cuda") as outer:
            fake.take(GiB(4))
            fake.free(GiB(4))
            fake.empty_cache()
            with monitor.batch(4, 100) as inner:
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


def test_a_device_that_fills_up_is_warned_of_and_planned_for(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the budget's device bytes; the sampler goes on with the margin that was seen.

    A batch waits for no device, so that a loop goes on to enqueue ahead of it.
    """
    monkeypatch.setattr(fake, "synchronize", pytest.fail)
    cost = measured(tb.PaddedCost(fixed_bytes=GiB(1), unit_bytes=MiB(1)), margin=0.01)
    sampler = tb.MemoryBudgetBatchSampler([100] * 400, cost, "10GiB", window=40)
    monitor = tb.MemoryMonitor(tb.MemoryBudget(device="10GiB"), replan=sampler, replan_batches=1)
    with monitor:
        with pytest.warns(MeasureWarning, match="were predicted"):
            run_batch(monitor, fake, GiB(9))
        assert sampler.plan.rules.cost.margin > 0.01  # type: ignore[attr-defined]
        with pytest.warns(MemoryLimitWarning, match=r"9\.59 GiB of 10 GiB .* replan=sampler"):
            monitor.snapshot("near")


def run_batch(monitor: tb.MemoryMonitor, fake: FakeDevice, num_bytes: int) -> None:
    with monitor.batch(50, (100,)):
        fake.take(num_bytes)


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes that the allocator has reserved on each of four devices; the current one is the first.

    The allocator that is asked is a stand-in: it says which device it was asked for.
    """
    found = dict.fromkeys(range(4), 0)

    def source(name: object) -> FakeDevice:
        index = str(name).partition(":")[2]
        return FakeDevice(reserved_bytes=found[int(index)] + int(index) if index else 0)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", found.__getitem__)
    put_in_place(monkeypatch, FakeDevice())
    monkeypatch.setattr(device_module, "TorchSource", source)
    return found


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_thread_reads_the_device_that_is_used(
    device: str | None, reserved: dict[int, int]
) -> None:
    """Not its own current device: a thread's is the first one, and a rank may be on the fourth."""
    reader = MemoryReader(None, device)
    with ThreadPoolExecutor(1) as other:
        # Before the rank has anything on its device, and after.
        for on_devices, read in (({}, None), ({1: MiB(20), 3: GiB(2)}, GiB(2) + 3)):
            reserved |= on_devices
            sample = other.submit(reader.read, 0, whole=False).result()
            assert sample.reserved_bytes == read
    with tb.MemoryMonitor(device=device, interval_s=10) as monitor, monitor.batch() as peak:
        pass
    assert {monitor.report().peak.reserved_bytes, peak.reserved_bytes} == {GiB(2) + 3}


def test_cuda_is_never_initialised() -> None:
    """Nor is a device read before the process uses it: its forked workers would not start."""
    with tb.MemoryMonitor("8MiB", device="cuda") as monitor:
        sample = monitor.snapshot("now")
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
    assert sample.device_bytes is None
    assert "device" not in [limit.name for limit in monitor.report().limits]
