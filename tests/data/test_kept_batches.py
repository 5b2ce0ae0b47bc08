"""Loops over a loader keep nothing of a batch that their caller has dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import pytest
from torch.utils.data import DataLoader

from tests.support.tracked_streams import SIZES, make
from torchbudget import MemoryBudgetBatchSampler, PaddedCost, stop_together


class Batch:
    """One that can be referred to weakly."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


def tracked(loader: DataLoader[Any]) -> Iterable[Any]:
    planned: Any = loader.dataset if loader.batch_sampler is None else loader.batch_sampler
    batches: Iterable[Any] = planned.tracked(loader)
    return batches


@pytest.mark.parametrize("loop", [iter, tracked, stop_together])
@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_it_is_gone_while_the_next_one_is_made(
    kind: str, loop: Callable[[DataLoader[Any]], Iterable[Any]]
) -> None:
    """A loop that drops its own has the memory of one."""
    alive: WeakSet[Batch] = WeakSet()

    def collate(samples: list[Any]) -> Batch:
        assert not alive
        batch = Batch(samples)
        alive.add(batch)
        return batch

    if kind == "stream":
        loader = DataLoader(make(collate_fn=collate), batch_size=None)
    else:
        sampler = MemoryBudgetBatchSampler(SIZES, PaddedCost(unit_bytes=1), 300)
        loader = DataLoader(range(len(SIZES)), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]  # a range is map-style
    found = 0
    for batch in loop(loader):
        found += len(batch.samples)
        del batch
    assert found == len(SIZES)
