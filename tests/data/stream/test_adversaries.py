"""Streams under what broke them once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.streams import make, numbers
from torchbudget import transforms
from torchbudget.errors import SampleError


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


def is_text(sample: Any) -> bool:
    return isinstance(sample, str)


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
    for source, transform in (([[], []], []), ("iterable", [transforms.keep_if(is_text)])):
        with pytest.raises(SampleError, match="has no samples"):
            list(make(source, transforms=transform, **options))
