"""Streams in a plain `DataLoader`: the position rides on the batch, and a loop goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.resuming import as_json, check_every_stop, in_parts
from tests.support.streams import (
    KINDS,
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
from torchbudget.errors import OptionError, StateError

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:'pin_memory' argument is set as true:UserWarning",  # there is no device here
)


def tensor_of(sample: Any) -> Any:
    return torch.ones(sample[1])


@pytest.mark.parametrize("workers", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_any_batch(kind: str, workers: int) -> None:
    """The rest equals the rest, in its order, and again from a state within the rest."""
    loop, every = partial(tracked_loop, workers=workers), 17 if workers else 8
    whole = check_every_stop(partial(make, kind), loop=loop, every=every)
    assert whole == list(loader_of(make(kind), workers))
    for done in range(1, len(whole) - 3, 2 * every):
        assert in_parts(partial(make, kind), [done, 3], loop=loop) == whole


@pytest.mark.parametrize("done", [1, 4])
def test_it_goes_on_out_of_order(done: int) -> None:
    """Every sample once, though the order of batches is unknown."""
    loop = partial(tracked_loop, workers=2, in_order=False)
    found = in_parts(make, [done], loop=loop)
    assert sorted(chain.from_iterable(found)) == sorted(chain.from_iterable(loop(make())))


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


def test_what_workers_read_ahead_is_not_lost_in_silence() -> None:
    """A state without the loop's count would begin the epoch again, or skip what was read ahead."""
    stream = make()
    batches = iter(loader_of(stream, 2))
    next(batches)
    with pytest.raises(StateError, match=r"tracked\(loader\).*StatefulDataLoader"):
        stream.state_dict()
    list(batches)
    with pytest.raises(StateError, match="tracked"):
        stream.state_dict()
    stream.set_epoch(1)
    assert stream.state_dict()["epoch"] == 1


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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
def test_other_loaders() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    stream = make()
    with pytest.raises(OptionError, match="tracked needs a DataLoader"):
        stream.tracked(loader_of(make(), 2))
    with pytest.raises(OptionError, match="tracked needs a DataLoader"):
        stream.tracked(DataLoader(stream))
    with pytest.raises(OptionError, match="saves its position itself"):
        stream.tracked(stateful(stream, batch_size=None))


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize("taken", [1, 3, None])
def test_another_loop_over_workers_that_persist(taken: int | None) -> None:
    """It takes the batches of the tracked one, which would be over without a word."""
    stream = make()
    loader = loader_of(stream, 2, persistent_workers=True)
    batches = stream.tracked(loader)
    next(batches)
    assert list(islice(loader, taken))
    with pytest.raises(StateError, match="a loader of its own"):
        list(batches)
