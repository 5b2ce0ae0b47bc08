"""Sources with a state of their own, which several readers of one process move."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from tests.support import streams
from torchbudget import BudgetedIterableDataset
from torchbudget.readers import sample_forever

SAMPLES = [[number] * (number % 7 + 1) for number in range(300)]


class Counting:
    """A source as torchdata's documentation has them: its place is an attribute."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.place < len(SAMPLES):
            self.place += 1
            yield self.sample()
        self.place = 0

    def sample(self) -> list[int]:
        """The one before the place."""
        return SAMPLES[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        """The place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.place = state["place"]


class Drawing(Counting):
    """One that draws from a global generator, too."""

    def sample(self) -> list[int]:
        """A random one."""
        return random.choice(SAMPLES)


def make(source: Any, **options: Any) -> BudgetedIterableDataset:
    if not isinstance(source, Counting):
        options["batches_per_epoch"] = 300  # beyond what is drawn at once
    return streams.make(source, budget=60, size=len, window=21, collate_fn=list, **options)


def forever() -> Any:
    return sample_forever(SAMPLES, seed=1)


@pytest.mark.parametrize("look_ahead", [None, 2000])
@pytest.mark.parametrize("source", [Counting, Drawing, forever])
def test_a_loop_within_another_one(source: Any, look_ahead: int | None) -> None:
    """Each has its own place in the source, and so has the state after any batch."""
    whole = list(make(source(), look_ahead=look_ahead))
    stream = make(source(), look_ahead=look_ahead)
    outer, begun = iter(stream), []
    for number in (1, 4, 9):
        begun += islice(outer, number)
        assert list(islice(iter(stream), 6)) == whole[:6]
        begun.append(next(outer))
    resumed = make(source(), look_ahead=look_ahead)
    resumed.load_state_dict(stream.state_dict())
    rest = list(outer)
    assert begun + rest == whole
    if source is not Drawing:  # what it drew is not in its state
        assert list(resumed) == rest


def test_streams_that_share_a_source() -> None:
    """Their loops take turns, and each reads all of it."""
    expected, source = list(make(Counting())), Counting()
    both = [*zip(make(source), make(source, seed=0), strict=True)]
    assert [one for one, _ in both] == [other for _, other in both] == expected
