"""The most memory that a block of code takes, read off the high-water mark or sampled."""

import time

import pytest

from torchbudget.machine import peaks
from torchbudget.machine.host import reset_peak_memory
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.units import MiB


@pytest.mark.parametrize("resettable", [True, False])
def test_memory_that_is_freed_meanwhile_counts(monkeypatch, resettable):
    """The peak is above what was resident before by what was taken inside, if only for a while."""
    if not resettable:
        monkeypatch.setattr(peaks, "reset_peak_memory", lambda: False)
    elif not reset_peak_memory():
        pytest.skip("the kernel does not let the high-water mark be reset")
    before = process_memory().resident_bytes
    with peak_memory("cpu") as peak:
        taken = bytearray(b"\1") * MiB(64)
        while not resettable and peak.bytes < before + MiB(48):
            time.sleep(0.001)  # the thread that samples gets its turn
        del taken
    assert peak.sampled is not resettable
    assert peak.bytes - before == pytest.approx(MiB(64), abs=MiB(16))
    assert (peak.reserved_bytes, peak.allocated_bytes, peak.retries) == (0, 0, 0)


def test_the_high_water_mark_starts_anew(tmp_path):
    """What was taken and freed before the context does not count; a read-only /proc is reported."""
    taken = bytearray(b"\1") * MiB(64)
    most = process_memory().resident_bytes
    del taken
    if not reset_peak_memory():
        pytest.skip("the kernel does not let the high-water mark be reset")
    assert process_memory().peak_resident_bytes < most - MiB(32)
    assert not reset_peak_memory(root=tmp_path)
