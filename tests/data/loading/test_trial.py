"""What is found from the readings of a worker's memory, on readings that are given."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from torchbudget.data.loading.batch_bytes import BatchBytes
from torchbudget.data.loading.trial import _taken
from torchbudget.machine.process_pages import ProcessPages

IDLE = ProcessPages(
    resident=1000,
    peak_resident=1000,
    anonymous=600,
    private=500,
    file=300,
    private_file=0,
    shared_memory=100,
)


@given(st.integers(0, 500), st.integers(0, 500))
def test_what_building_leaves_in_the_heap_counts_once(kept, freed) -> None:
    """It is in the worker's memory between batches; only what is freed again comes on top."""
    weight = BatchBytes(storages=(64,), plain=0)
    after = replace(
        IDLE,
        resident=1000 + 64 + kept,
        peak_resident=1000 + 64 + kept + freed,
        anonymous=600 + kept,
    )
    assert _taken(IDLE, after, weight, highest=600 + kept) == freed
    assert _taken(IDLE, after, weight, highest=600) == kept + freed  # freed before it was read
