"""What is found from the readings of a worker's memory, on readings that are given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from torchbudget.data.loading.batch_bytes import BatchBytes
from torchbudget.data.loading.loader_parts import LoaderParts
from torchbudget.data.loading.trial import _taken, try_batches, try_stream
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


class Counted(IterableDataset[torch.Tensor]):
    """Batches without end, which are counted where all processes see it."""

    def __init__(self) -> None:
        self.made = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.made += 1
            yield torch.zeros(100)


def test_a_stream_is_read_one_batch_ahead() -> None:
    """A worker that reads further ahead has more in memory than one of the smallest loader."""
    dataset = Counted()
    parts = LoaderParts(
        dataset=dataset, collate_fn=None, worker_init_fn=None, context="fork", is_iterable=True
    )
    trial = try_stream(parts, seconds=60, most=12)
    assert len(trial.batches) == 12
    assert {(one.building, one.samples) for one in trial.batches} == {(0, 0)}  # unknown
    assert 12 <= int(dataset.made) <= 12 + 1


class Slow(Dataset[torch.Tensor]):
    """Samples that take a while each."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(100)


def test_batches_are_tried_one_after_the_other() -> None:
    """Each takes as long as its samples, whatever those before it took."""
    parts = LoaderParts(
        dataset=Slow(), collate_fn=None, worker_init_fn=None, context="fork", is_iterable=False
    )
    batches = [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]
    trial = try_batches(parts, batches, seconds=60, fits=lambda *_: True)
    assert [one.samples for one in trial.batches] == [2, 3, 4]
    assert list(trial.numbers) == [1, 2, 3]
    for one in trial.batches:
        assert 0.02 * one.samples <= one.seconds < 30
