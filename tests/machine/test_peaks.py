"""The most memory that a block of code takes, read off the high-water mark or sampled."""

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from torchbudget.machine import high_water
from torchbudget.machine.high_water import reset_peak_memory
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.units import MiB

needs_reset = pytest.mark.skipif(
    not reset_peak_memory(), reason="the kernel does not let the high-water mark be reset"
)


@pytest.mark.parametrize("resettable", [True, False])
def test_memory_that_is_freed_meanwhile_counts(monkeypatch, resettable):
    """The peak is above what was resident before by what was taken inside, if only for a while."""
    if not resettable:
        monkeypatch.setattr(high_water, "ROOT", Path("/no-such-folder"))
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


def test_the_high_water_mark_starts_anew(monkeypatch, tmp_path):
    """What was taken and freed before the context does not count; a read-only /proc is reported."""
    taken = bytearray(b"\1") * MiB(64)
    most = process_memory().resident_bytes
    del taken
    if not reset_peak_memory():
        pytest.skip("the kernel does not let the high-water mark be reset")
    assert process_memory().peak_resident_bytes < most - MiB(32)
    monkeypatch.setattr(high_water, "ROOT", tmp_path)
    assert not reset_peak_memory()


def taken_and_freed(num_bytes):
    """The most that was resident, by reading while the bytes are taken."""
    taken = bytearray(b"\1") * num_bytes
    most = process_memory(shares=False).resident_bytes
    del taken
    return most


@needs_reset
def test_a_peak_inside_another_leaves_the_outer_one():
    """Each context has its own most, though the kernel's one mark is reset meanwhile."""
    with peak_memory("cpu") as outer:
        before = taken_and_freed(MiB(96))
        with peak_memory("cpu") as inner:
            within = taken_and_freed(MiB(48))
            with peak_memory("cpu"):
                pass
        reset_peak_memory()
    assert outer.bytes == pytest.approx(before, abs=MiB(4))
    assert inner.bytes == pytest.approx(within, abs=MiB(4))
    assert outer.bytes - inner.bytes == pytest.approx(MiB(48), abs=MiB(8))


@needs_reset
def test_a_peak_that_is_never_read_is_forgotten():
    """A context that was left by an error does not keep its mark."""
    with pytest.raises(KeyError), peak_memory("cpu"):
        raise KeyError
    with peak_memory("cpu"):
        assert len(high_water.RESIDENT._open) == 1


@needs_reset
def test_a_process_that_is_forked_meanwhile_reads_its_own_mark():
    """Whatever thread of the parent's had the lock: it is free in the child."""
    locked, ended = threading.Event(), threading.Event()

    def hold():
        with high_water.RESIDENT._lock:
            locked.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    child = multiprocessing.get_context("fork").Process(target=taken_in_child)
    child.start()
    child.join(60)
    ended.set()
    thread.join()
    assert child.exitcode == 0


def taken_in_child():
    before = process_memory(shares=False).resident_bytes
    with peak_memory("cpu") as peak:
        taken_and_freed(MiB(64))
    assert peak.bytes - before == pytest.approx(MiB(64), abs=MiB(16))
