"""Epochs of a number of batches, in loops that are tracked."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.support.resuming import as_json
from tests.support.streams import (
    SIZES,
    loader_of,
    make,
    numbers,
    tracked_loop,
    workers_of,
)
from torchbudget.errors import StateError

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:'pin_memory' argument is set as true:UserWarning",  # there is no device here
)


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
