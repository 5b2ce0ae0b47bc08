"""An error within an epoch is no end of it: it is met again, and the state says where it stood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from tests.support.resuming import as_json
from tests.support.samplers import forks
from tests.support.streams import TOKENS, Numbered, make
from torchbudget import BudgetedIterableDataset, MemoryBudgetBatchSampler
from torchbudget.errors import SampleError
from torchbudget.plan import plan

SIZES = np.random.default_rng(3).integers(1, 60, 300)
BROKEN = 250  # the number of the sample that fails
FAULTS: set[str] = set()  # where it fails; workers are started with what is here then

pytestmark = [forks, pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")]


class TornFileError(Exception):
    """As a disk may raise."""


def fails(place: str, sample: Any, error: type[Exception] = TornFileError) -> None:
    if place in FAULTS and sample[0] == BROKEN:
        raise error("torn")


@pytest.fixture(autouse=True)
def _mended() -> Iterator[None]:
    yield
    FAULTS.clear()


class Source(Numbered):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            fails("source", sample)
            yield sample


class Map(Dataset[Any]):
    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> Any:
        fails("data set", (index,))
        return index, int(SIZES[index])


def transform(sample: Any) -> Any:
    fails("transform", sample)
    return sample


def size(sample: Any) -> int:
    fails("size", sample)
    return int(sample[1])


def collate(samples: list[Any]) -> list[Any]:
    for sample in samples:
        fails("collate", sample)
        fails("end", sample, StopIteration)
    return samples


def stream_of(collate_fn: Any = collate) -> BudgetedIterableDataset:
    return make(Source(SIZES), size=size, transforms=[transform], collate_fn=collate_fn)


Made = tuple[Any, Callable[[], Any]]


def plain_stream(_: int) -> Made:
    stream = stream_of()
    return stream, lambda: iter(stream)


def tracked_stream(workers: int) -> Made:
    stream = stream_of()
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    return stream, lambda: stream.tracked(loader)


def tracked_sampler(workers: int) -> Made:
    sampler = MemoryBudgetBatchSampler(SIZES, TOKENS, 300, window=64)
    loader = DataLoader(Map(), batch_sampler=sampler, num_workers=workers, collate_fn=collate)
    return sampler, lambda: sampler.tracked(loader)


CASES = [
    *[(plain_stream, place, 0) for place in ("source", "transform", "size", "collate", "end")],
    *[(tracked_stream, place, 0) for place in ("source", "transform", "collate", "end")],
    *[(tracked_stream, place, 2) for place in ("transform", "collate", "end")],
    *[(tracked_sampler, place, n) for place in ("data set", "collate", "end") for n in (0, 2)],
]


@pytest.mark.parametrize(("make", "place", "workers"), CASES)
def test_what_was_caught_loses_nothing(make: Any, place: str, workers: int) -> None:
    """Wherever a sample fails: the batches before it, and those after the state, are the epoch."""
    FAULTS.add(place)
    source, loop = make(workers)
    done: list[Any] = []
    with pytest.raises(Exception, match=r"torn|StopIteration") as caught:  # noqa: PT012  (each)
        for batch in loop():
            done += batch
    assert place != "end" or caught.type is SampleError
    state = as_json(source.state_dict())
    assert state["epoch"] == 0
    assert 0 < len(done) < len(SIZES)
    FAULTS.clear()
    other, rest = make(workers)
    other.load_state_dict(state)
    for batch in rest():
        done += batch
    assert Counter(number for number, _ in done) == Counter(range(len(SIZES)))


@pytest.mark.parametrize("place", ["transform", "size", "collate", "end"])
def test_the_next_batch_that_is_asked_for_meets_it_again(place: str) -> None:
    """It does not go past the samples of the batch that failed."""
    FAULTS.add(place)
    stream = stream_of()
    reader, done = iter(stream), []
    with pytest.raises(Exception, match=r"torn|StopIteration"):
        done += reader
    for _ in range(2):
        with pytest.raises(Exception, match=r"torn|StopIteration"):
            next(reader)
    FAULTS.clear()
    assert done + list(reader) == list(stream_of())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loaders_own_collate_cannot_end_the_epoch(workers: int) -> None:
    """Nor in the tracked loop over a stream, where it is given whole batches."""
    stream = stream_of(collate_fn=list)
    loader = DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=collate)
    FAULTS.add("end")
    with pytest.raises(SampleError, match="StopIteration"):
        list(stream.tracked(loader))
    assert stream.state_dict()["epoch"] == 0


@pytest.mark.slow
def test_a_window_that_cannot_be_planned_is_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches before it come, then the error, and then the window."""
    sampler = MemoryBudgetBatchSampler(SIZES, TOKENS, 300, window=64)
    whole, solve, calls = list(sampler), plan.solve, 0

    def moody(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise TornFileError("torn")
        return solve(*arguments, **options)

    monkeypatch.setattr(plan, "solve", moody)
    sampler.set_epoch(0)
    batches, done = iter(sampler), []
    while len(done) < len(whole):
        with suppress(TornFileError):
            done.append(next(batches))
    assert done == whole
    assert calls > 4
    assert sampler.epoch == sampler.state_dict()["epoch"] == 1
