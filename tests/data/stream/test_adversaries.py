"""Streams under what broke them once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.support.streams import (
    TOKENS,
    Numbered,
    numbers,
    same,
    size_of,
    workers_of,
)
from torchbudget import BudgetedIterableDataset, StateMismatchError
from torchbudget.errors import SampleError, StateError

SIZES = np.random.default_rng(0).integers(1, 60, 400)


def make(source: Any = None, **options: Any) -> BudgetedIterableDataset:
    arguments = {"size": size_of, "window": 64, "collate_fn": list} | options
    return BudgetedIterableDataset(
        Numbered(SIZES) if source is None else source, TOKENS, 400, **arguments
    )


def test_a_source_that_became_shorter() -> None:
    longer = make()
    list(islice(longer, 20))
    stream = make(Numbered(SIZES[:20]))
    stream.load_state_dict(longer.state_dict())
    with pytest.raises(StateMismatchError, match="which has 20"):
        list(stream)


def test_two_iterations_at_a_time() -> None:
    before = threading.active_count()
    with make(transforms=[same], threads=4) as stream:
        first = iter(stream)
        begun = [next(first)]
        assert numbers(list(stream)) == list(range(len(SIZES)))
        assert numbers(begun + list(first)) == list(range(len(SIZES)))
        next(iter(stream))
        stream.set_epoch(3)
    assert threading.active_count() == before


def test_passes_that_ranks_cannot_share_are_joined() -> None:
    """Four samples of a pass, each a batch of its own, for five ranks: five passes, four rounds.

    It may be resumed anywhere, also where ten passes are read until the next batch is known.
    """
    options = {"num_replicas": 5, "max_batch_size": 1, "window": 5, "batches_per_epoch": 12}
    samples = [(number, 1) for number in range(4)]
    ranks = [list(make([samples], rank=rank, **options)) for rank in range(5)]
    assert [len(rank) for rank in ranks] == [12] * 5
    assert sorted(numbers([rank[n] for n in range(12) for rank in ranks])) == sorted(
        [*range(4)] * 15
    )
    for done in range(12):
        stopped, resumed = (make([samples], rank=0, **options) for _ in range(2))
        batches = iter(stopped)
        for _ in range(done):
            next(batches)
        resumed.load_state_dict(stopped.state_dict())
        assert list(resumed) == ranks[0][done:]


class UsedUp:
    """Keeps a generator, which is over after one epoch."""

    def __init__(self) -> None:
        self.samples = ((i, 1) for i in range(9))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.samples)

    def open_shard(self, *_: int) -> Iterator[tuple[int, int]]:
        return iter(self)


@pytest.mark.parametrize("of", [UsedUp, lambda: [UsedUp()], lambda: UsedUp().open_shard])
@pytest.mark.parametrize("options", [{}, {"batches_per_epoch": 1}])
def test_an_epoch_without_any_sample_is_no_epoch(of: Any, options: dict[str, int]) -> None:
    """A generator that an iterable keeps is used up: the second epoch would be empty."""
    stream = make(of(), **options)
    assert numbers(list(stream)) == list(range(9))
    with pytest.raises(SampleError, match=r"has no samples.* used up after one epoch"):
        list(stream)
    with pytest.raises(SampleError, match="has no samples"):
        list(make([[], []]))


@pytest.mark.parametrize(
    "changed", [{"look_ahead": 9000}, {"drop_last": True}, {"oversize": "skip"}, {"budget": 500}]
)
def test_other_rules_within_a_window_are_refused(changed: dict[str, Any]) -> None:
    running = make(look_ahead=5000)
    next(iter(running))
    state = running.state_dict()
    assert workers_of(state)[0]["rounds"]
    arguments = {"budget": 400, "size": size_of, "window": 64, "look_ahead": 5000} | changed
    stream = BudgetedIterableDataset(Numbered(SIZES), TOKENS, **arguments)
    stream.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="boundary"):
        iter(stream)


@pytest.mark.parametrize("bad", [{}, None, 5, {"workers": []}])
def test_what_is_no_state(bad: Any) -> None:
    with pytest.raises(StateError, match="state_dict"):
        make().load_state_dict(bad)


def test_an_error_does_not_end_the_epoch() -> None:
    """The next batch that is asked for raises it again, and the state says where it stood."""

    class Flaky(Numbered):
        broken = True

        def __iter__(self) -> Iterator[Any]:
            for place, sample in enumerate(super().__iter__()):
                if self.broken and place == 200:
                    raise OSError("not there yet")
                yield sample

    whole = list(make())
    source = Flaky(SIZES)
    stream = make(source)
    reader, found = iter(stream), []
    with pytest.raises(SampleError):
        found += reader
    done = len(found)
    assert found == whole[:done]
    with pytest.raises(SampleError):
        next(reader)
    state = stream.state_dict()
    assert state["epoch"] == 0
    source.broken = False
    assert list(reader) == whole[done:]
    other = make()
    other.load_state_dict(state)
    assert list(other) == whole[done:]
