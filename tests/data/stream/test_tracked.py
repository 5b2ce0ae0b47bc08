"""Streams in a plain `DataLoader`: the position rides on the batch, and a loop goes on from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    numbers,
    same,
    size_of,
    tracked_loop,
    workers_of,
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


@dataclass
class Foreign:
    """A batch of another library."""

    numbers: list[int]


def foreign(batch: list[Any]) -> Foreign:
    assert type(batch) is list  # not what carries the position
    return Foreign([number for number, _ in batch])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pinned", [False, True])
def test_foreign_collates_see_the_batch_alone(workers: int, pinned: bool) -> None:
    """The loader's own function, batches of any type, and a thread that pins them."""

    def loader(stream: BudgetedIterableDataset) -> DataLoader[Any]:
        options: dict[str, Any] = {"num_workers": workers, "pin_memory": pinned}
        return DataLoader(stream, batch_size=None, collate_fn=foreign, **options)

    whole = check_every_stop(make, loop=lambda stream: stream.tracked(loader(stream)), every=20)
    assert whole == list(loader(make()))


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


# -------------------------------------------------------------------- epochs of a number of batches


def epochs_of(
    stream: Any, workers: int, epochs: int, *, tracked: bool, **options: Any
) -> list[list[Any]]:
    loader = loader_of(stream, workers, **options)
    return [list(stream.tracked(loader) if tracked else loader) for _ in range(epochs)]


@pytest.mark.parametrize(
    ("workers", "tracked", "persistent"),
    [
        (0, False, False), (0, True, False), (2, False, True), (2, True, True), (2, True, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["iterable", "shards", "map"])
def test_an_epoch_goes_on_where_the_last_one_ended(
    kind: str, workers: int, tracked: bool, persistent: bool
) -> None:
    """Wherever that is known: the epochs together are one pass after the other."""
    several = partial(make, kind, batches_per_epoch=12)  # as many from each worker
    found = epochs_of(several(), workers, 9, tracked=tracked, persistent_workers=persistent)
    assert [len(epoch) for epoch in found] == [12] * 9
    [whole] = epochs_of(make(kind, batches_per_epoch=108), workers, 1, tracked=False)
    together = numbers([batch for epoch in found for batch in epoch])
    assert together == numbers(whole)
    assert set(together) == set(range(len(SIZES)))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("done", [1, 10, 11, 25])
def test_epochs_of_a_number_of_batches_go_on_from_any_batch(done: int, persistent: bool) -> None:
    """Workers that persist may change turns after the epoch that was gone on with."""
    several = partial(make, batches_per_epoch=11)
    options: dict[str, Any] = {"tracked": True, "persistent_workers": persistent}
    whole = epochs_of(several(), 2, 4, **options)
    running = several()
    loader, taken = loader_of(running, 2, persistent_workers=persistent), 0
    while taken < done:
        for _ in running.tracked(loader):
            taken += 1
            if taken == done:
                break
    following = several()
    following.load_state_dict(as_json(running.state_dict()))
    assert following.epoch == done // 11
    epoch, taken = divmod(done, 11)
    rest = epochs_of(following, 2, 4 - epoch, **options)
    assert rest[0] == whole[epoch][taken:]
    for found, expected in zip(rest[1:], whole[epoch + 1 :], strict=True):
        assert sorted(found) == sorted(expected) if persistent else found == expected


@pytest.mark.parametrize("chosen", [False, True])
def test_what_workers_have_ended_is_not_guessed(chosen: bool) -> None:
    """Nobody tracked their loop: the next one, which cannot go on there, is refused."""
    stream = make(batches_per_epoch=12)
    first = list(loader_of(stream, 2))
    for workers in (0, 2):
        if chosen:
            stream.set_epoch(1)  # the next one anyway
        with pytest.raises(StateError, match=r"epoch 1 of batches_per_epoch=12 .*\.tracked"):
            list(loader_of(stream, workers))
    stream.set_epoch(5)
    assert list(loader_of(stream, 2)) != first
    stream.set_epoch(0)
    assert list(loader_of(stream, 2)) == first


def test_fewer_batches_are_left_than_workers() -> None:
    """Those that get none of an epoch's last batches are at its end."""
    options: dict[str, Any] = {"batches_per_epoch": 9, "window": 10, "max_batch_size": 5}
    running, done = make(**options), 0
    for _ in running:
        done += 1
        state = running.state_dict()
        if done > 5 and not workers_of(state)[0]["rounds"]:
            break
    assert 0 < 9 - done < 4
    following = make(**options)
    following.load_state_dict(as_json(state))
    assert [len(list(tracked_loop(following, 4))) for _ in range(2)] == [9 - done, 9]
