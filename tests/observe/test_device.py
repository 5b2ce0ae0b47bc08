"""What a monitor reads of a CUDA device, on figures that stand in for a device's."""

from __future__ import annotations

import pytest
import torch

from tests.support.costs import measured
from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget import (
    MemoryBudget,
    MemoryBudgetBatchSampler,
    MemoryMonitor,
    PaddedCost,
    peak_memory,
)
from torchbudget.errors import MeasureWarning, MemoryLimitWarning
from torchbudget.units import GiB, MiB

CONTEXT = MiB(600)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device that this process uses already."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return put_in_place(
        monkeypatch, FakeDevice(free_bytes=GiB(80) - CONTEXT, process_bytes=CONTEXT)
    )


def test_the_allocators_peaks_are_kept_whoever_resets_them(fake: FakeDevice) -> None:
    """Of the monitor's whole time, of a block's, and of a block's inside it."""
    with MemoryMonitor(interval_s=10) as monitor:
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


def test_a_batch_waits_for_no_device(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that enqueues ahead of its device goes on to do so."""

    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr(fake, "synchronize", fail)
    with MemoryMonitor() as monitor, monitor.batch(4, 100):
        fake.take(GiB(1))


def test_a_device_that_fills_up_is_warned_of_and_planned_for(fake: FakeDevice) -> None:
    """Against the budget's device bytes; the sampler goes on with the margin that was seen."""
    form = PaddedCost(fixed_bytes=GiB(1), unit_bytes=MiB(1))
    cost = measured(form, margin=0.01)
    sampler = MemoryBudgetBatchSampler([100] * 400, cost, "10GiB", window=40)
    monitor = MemoryMonitor(MemoryBudget(device="10GiB"), replan=sampler, replan_batches=1)
    with monitor:
        with pytest.warns(MeasureWarning, match="were predicted"):
            run_batch(monitor, fake, GiB(9))
        assert sampler.plan.rules.cost.margin > 0.01
        with pytest.warns(MemoryLimitWarning, match=r"9\.59 GiB of 10 GiB .* replan"):
            monitor.snapshot("near")


def run_batch(monitor: MemoryMonitor, fake: FakeDevice, num_bytes: int) -> None:
    with monitor.batch(50, (100,)):
        fake.take(num_bytes)


def test_cuda_is_never_initialised() -> None:
    """Nor is a device read before the process uses it: its forked workers would not start."""
    with MemoryMonitor("8MiB", device="cuda") as monitor:
        sample = monitor.snapshot("now")
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
    assert sample.device_bytes is None
    assert "device" not in [limit.name for limit in monitor.report().limits]
