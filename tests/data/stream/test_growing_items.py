"""Items that are read together stay within the look-ahead, and errors come soon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import pytest
import torch

import torchbudget as tb
from tests.support.streams import TOKENS
from torchbudget import BudgetedIterableDataset, PaddedCost

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


MEBIBYTES = 8


class Recordings:
    """Large samples, whose memory is never touched; counts those that were read."""

    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(800):
            self.reads += 1
            yield torch.empty(MEBIBYTES * 2**18)


@pytest.mark.parametrize(
    ("budget", "options", "most"),
    [
        ("64MiB", {}, 256),
        ("4GiB", {}, 1024),
        (tb.MemoryBudget(device="4GiB", host="64MiB"), {}, 16),
        ("64MiB", {"num_replicas": 2, "rank": 0}, 512),
        ("64MiB", {"window": 100}, None),
    ],
)
def test_the_default_window_has_a_limit_in_bytes(budget: Any, options: Any, most: Any) -> None:
    """A quarter of the device's, 256 MiB at least, a rank; a window that is given has none."""
    source = Recordings()
    cost = PaddedCost(unit_bytes=8)
    stream = BudgetedIterableDataset(source, cost, budget, collate_fn=len, **options)
    assert next(iter(stream))
    expected = 100 if most is None else most // MEBIBYTES
    assert 0.8 * expected <= source.reads <= 1.2 * expected + 5
