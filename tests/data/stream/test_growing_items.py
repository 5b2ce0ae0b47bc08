"""Items that are read together stay within the look-ahead, and errors come soon."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

from tests.support.streams import TOKENS, OneProcess
from torchbudget import BudgetedIterableDataset
from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.errors import SampleError

LARGE = 50_000
LOOK_AHEAD = 1_000_000


class Item:
    """One that can be referred to weakly."""

    def __init__(self, size: int) -> None:
        self.content = bytes(size)


class Jumping:
    """500 small items, then 300 large ones; and the most bytes of them that were alive."""

    def __init__(self) -> None:
        self.alive: WeakSet[Item] = WeakSet()
        self.most = 0

    def __iter__(self) -> Iterator[Item]:
        for number in range(800):
            item = Item(100 if number < 500 else LARGE)
            self.alive.add(item)
            self.most = max(self.most, sum(len(one.content) for one in self.alive))
            yield item


def hundreds(item: Item) -> int:
    return len(item.content) // 100


def stream_of(source: Any, **options: Any) -> BudgetedIterableDataset:
    options = {"size": hundreds, "look_ahead": LOOK_AHEAD, "collate_fn": len} | options
    return BudgetedIterableDataset(source, TOKENS, 2000, **options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", [{}, {"transforms": [hundreds], "size": int}])
def test_what_was_small_may_be_large_in_a_moment(options: dict[str, Any], ranks: int) -> None:
    source = Jumping()
    batches = list(stream_of(source, window=400, num_replicas=ranks, rank=0, **options))
    assert sum(batches) == 800 if ranks == 1 else 100 < sum(batches) < 700
    waiting = 2 * 4 * LARGE if ranks == 2 else 0  # the last round, of micro-batches of four
    assert source.most <= 1.2 * LOOK_AHEAD + LARGE + waiting


@pytest.mark.parametrize("options", [{}, {"transforms": [hundreds], "size": int}])
def test_what_is_skipped_is_not_kept(options: dict[str, Any]) -> None:
    """Windows of another worker, and what comes before a position."""
    source = Jumping()
    stream = stream_of(source, window=300, **options)
    slots = [WorkerSlot(worker=worker, workers=2, rank=0, ranks=1) for worker in range(2)]
    assert sum(sum(OneProcess(stream, slot)) for slot in slots) == 800
    begun = stream_of(source, window=300, **options)
    came = sum(islice(begun, 30))
    rest = stream_of(source, window=300, **options)
    rest.load_state_dict(begun.state_dict())
    assert came + sum(rest) == 800
    assert source.most <= 2 * (1.2 * LOOK_AHEAD + LARGE)  # the first loop is open still


class Waiting:
    """Items of 1 to 20 kB, and how many bytes of them wait for their transform."""

    def __init__(self) -> None:
        self.waiting = self.most = self.reads = 0

    def __iter__(self) -> Iterator[bytes]:
        sizes = np.random.default_rng(0).permutation(np.repeat([1000, 3000, 20_000], 1000))
        for size in sizes.tolist():
            self.reads += not self.waiting
            self.waiting += size
            self.most = max(self.most, self.waiting)
            yield bytes(size)

    def shorter(self, item: bytes) -> bytes:
        """One sixtieth of it."""
        self.waiting -= len(item)
        return item[: len(item) // 60]


@pytest.mark.parametrize("look_ahead", [3_200_000, 64_000])
def test_items_are_read_together(look_ahead: int) -> None:
    """Until they have a 32nd of the look-ahead: many at once, or one or two."""
    source = Waiting()
    options: dict[str, Any] = {"size": len, "transforms": [source.shorter]}
    assert sum(stream_of(source, look_ahead=look_ahead, **options)) == 3000
    assert 20_000 <= source.most <= look_ahead // 32 + 20_000
    assert source.reads < 1000 if look_ahead > 10**6 else source.reads > 1500


def test_a_transform_that_fails_in_threads_is_told_soon() -> None:
    """Long before the whole window is made."""
    made: list[int] = []

    def fails_early(number: int) -> int:
        if number == 3:
            raise ValueError("the fourth")
        made.append(number)
        return number

    options: dict[str, Any] = {"transforms": [fails_early], "threads": 2, "look_ahead": None}
    with (
        stream_of(range(100_000), size=int, shuffle=False, window=100_000, **options) as stream,
        pytest.raises(SampleError, match="the fourth"),
    ):
        list(stream)
    assert len(made) < 1000
