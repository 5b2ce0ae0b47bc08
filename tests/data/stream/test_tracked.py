"""Streams in a plain `DataLoader`: the position rides on the batch, and a loop goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.resuming import as_json, check_every_stop
from tests.support.streams import (
    SIZES,
    TOKENS,
    Numbered,
    begun_at,
    loader_of,
    make,
    same,
    size_of,
    tracked_loop,
)
from torchbudget import BudgetedIterableDataset
from torchbudget.errors import StateError

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:'pin_memory' argument is set as true:UserWarning",  # there is no device here
)


def tensor_of(sample: Any) -> Any:
    return torch.ones(sample[1])


def test_whole_windows_go_on_on_other_ranks() -> None:
    """Where every worker is at a window's boundary: here each batch is a window."""
    options = {"window": 4, "budget": 10_000}
    whole, stream = begun_at(4, **options)
    begun, state = whole[:4], stream.state_dict()
    for rank in range(2):
        other = make(**options, num_replicas=2, rank=rank)
        other.load_state_dict(state)
        begun += tracked_loop(other, 2)
    assert sorted(chain.from_iterable(begun)) == sorted(chain.from_iterable(whole))


class Foreign:
    """A batch of another library."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


def foreign(batch: list[Any]) -> Foreign:
    assert type(batch) is list  # not what carries the position
    return Foreign([number for number, _ in batch])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_foreign_collates_see_the_batch_alone(workers: int, pinned: bool) -> None:
    """The loader's own function, batches of any type, and a thread that pins them."""
    running = make()
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": pinned, "batch_size": None}
    loader = DataLoader(running, collate_fn=foreign, **options)
    whole = [batch.numbers for batch in loader]
    running.set_epoch(0)
    for done, batch in enumerate(running.tracked(loader), 1):
        assert batch.numbers == whole[done - 1]
        if done % 20 == 0:
            following = make()
            following.load_state_dict(as_json(running.state_dict()))
            rest = following.tracked(DataLoader(following, collate_fn=foreign, **options))
            assert [one.numbers for one in rest] == whole[done:]
    assert loader.collate_fn is foreign


class Named(BudgetedIterableDataset):
    """It gives each batch a name, as a loader's `collate_fn` would."""

    def __iter__(self) -> Iterator[Any]:
        return (("named", batch) for batch in super().__iter__())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_changes_its_batches(workers: int) -> None:
    """It sees the batch alone, too."""

    def named() -> Named:
        return Named(Numbered(SIZES), TOKENS, 300, size=size_of, window=64, collate_fn=same)

    whole = check_every_stop(named, loop=partial(tracked_loop, workers=workers), every=20)
    assert whole == [("named", batch) for batch in loader_of(make(), workers)]


# ---------------------------------------------------------------------- what cannot be known


@pytest.mark.parametrize("workers", [0, 2])
def test_the_report_of_what_came(workers: int) -> None:
    """Of the last tracked loop, also while it is open."""
    stream = BudgetedIterableDataset(Numbered(SIZES), TOKENS, 60, size=len, transforms=[tensor_of])
    with pytest.raises(StateError, match="loop over stream"):
        stream.report()
    batches, loader = [], loader_of(stream, workers)
    for batch in stream.tracked(loader):
        batches.append(batch)
        assert stream.report().batches == len(batches)
    report, elements = stream.report(), sum(batch.data.numel() for batch in batches)
    assert (report.samples, report.elements) == (len(SIZES), elements)
    assert report.padding == pytest.approx(1 - sum(SIZES) / elements)
    assert report.fill == pytest.approx(elements / 60 / len(batches))


# ---------------------------------------------------------------------- windows
