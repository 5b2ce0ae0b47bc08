"""The most memory that a block of code takes, read off the kernel's high-water mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbudget.errors import MachineError
from torchbudget.machine import process_tree
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import RESIDENT, process_memory
from torchbudget.units import MiB

pytestmark = pytest.mark.skipif(
    not RESIDENT.reset(), reason="the kernel does not let the high-water mark be reset"
)


def taken_and_freed(num_bytes: int) -> int:
    """The most that was resident, by reading while the bytes are taken."""
    taken = bytearray(b"\1") * num_bytes
    most = process_memory(shares=False).resident_bytes
    del taken
    return most


def test_memory_that_is_freed_meanwhile_counts() -> None:
    """If it was taken inside; what was taken and freed before does not."""
    before = taken_and_freed(MiB(192)) - MiB(192)
    with peak_memory("cpu") as peak:
        taken_and_freed(MiB(64))
    assert peak.bytes - before == pytest.approx(MiB(64), abs=MiB(16))
    assert (peak.reserved_bytes, peak.allocated_bytes, peak.retries) == (0, 0, 0)


def test_a_mark_that_cannot_be_reset_is_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own mark would be that of the whole process."""
    monkeypatch.setattr(process_tree, "ROOT", Path("/no-such-folder"))
    assert not RESIDENT.reset()
    with pytest.raises(MachineError, match="clear_refs is not writable"), peak_memory("cpu"):
        pass


def test_a_peak_inside_another_leaves_the_outer_one() -> None:
    """Each context has its own most, though the kernel's one mark is reset meanwhile."""
    others = len(RESIDENT._open)  # that errors of earlier tests refer to
    with peak_memory("cpu") as outer:
        before = taken_and_freed(MiB(96))
        with peak_memory("cpu") as inner:
            within = taken_and_freed(MiB(48))
            with pytest.raises(KeyError), peak_memory("cpu"):
                raise KeyError
            # The one that was left keeps no mark.
            assert len(RESIDENT._open) == others + 2
        RESIDENT.reset()
    assert outer.bytes == pytest.approx(before, abs=MiB(4))
    assert inner.bytes == pytest.approx(within, abs=MiB(4))
    assert outer.bytes - inner.bytes == pytest.approx(MiB(48), abs=MiB(8))
