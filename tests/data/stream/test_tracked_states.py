"""Loops after a state was loaded, looks and copies in between, and loops that end late."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.support.resuming import as_pickle
from tests.support.streams import loader_of, tracked_loop, workers_of
from tests.support.tracked_streams import begun_at, epochs_of, make, samples_of
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedCost,
)
from torchbudget.data.stream.cursor import StreamState
from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.errors import DiscardedStateWarning, StateError

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:'pin_memory' argument is set as true:UserWarning",  # there is no device here
)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_loops_after_the_one_that_went_on(workers: int, persistent: bool) -> None:
    """A state is used up where its epoch has ended: the next one comes as a whole."""
    whole, stream = begun_at(5, workers)
    expected = make()
    expected.set_epoch(1)
    loader = loader_of(stream, workers, persistent_workers=persistent and workers > 0)
    assert list(loader) == whole[5:]
    assert list(loader) == list(loader_of(expected, workers))


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_is_broken_off_is_begun_again(persistent: bool, tracked: bool) -> None:
    """Where it began, at a loaded state or at the epoch's beginning."""
    whole, stream = begun_at(9, kind="shards")
    loader = loader_of(stream, 2, persistent_workers=persistent)

    def loop() -> Iterator[Any]:
        return stream.tracked(loader) if tracked else iter(loader)

    for _ in range(2):
        batches = loop()
        assert next(batches) == whole[9]
        del batches  # its workers end, or wait for the next loop
    assert list(loop()) == whole[9:]
    batches = loop()
    first = next(batches)
    del batches
    assert next(loop()) == first


def test_a_tracked_loop_is_over_when_its_last_batch_came() -> None:
    """Not when its workers, which run ahead, have made it."""
    stream = make("shards", max_batch_size=50)
    whole = list(loader_of(make("shards", max_batch_size=50), 2))
    batches = tracked_loop(stream, 2, prefetch_factor=50)
    for _ in range(len(whole) - 2):
        next(batches)
    del batches
    assert stream.epoch == 0
    assert list(tracked_loop(stream, 2)) == whole
    assert stream.epoch == 1


def test_another_epoch_puts_a_state_aside() -> None:
    """In workers that persist, too, and for good."""
    whole, stream = begun_at(7)
    loader = loader_of(stream, 2, persistent_workers=True)
    assert next(iter(loader)) == whole[7]
    stream.set_epoch(1)
    next(iter(loader))
    stream.set_epoch(0)
    assert list(loader) == whole


def test_a_state_that_is_never_used_is_warned_about() -> None:
    _, stream = begun_at(7)
    with pytest.warns(DiscardedStateWarning, match="epoch 0") as found:
        stream.set_epoch(3)
    assert found[0].filename == __file__  # the line that has to change
    stream = begun_at(7)[1]
    stream.set_epoch(0)  # the same epoch: it stays
    assert any(worker["rounds"] or worker["start"] for worker in workers_of(stream.state_dict()))


def test_going_back_to_an_epoch_that_was_over_is_said() -> None:
    """A state saved after the last batch, and a loop from epoch 0: all samples would come again."""
    saved = make()
    list(saved)
    stream = make()
    stream.load_state_dict(saved.state_dict())
    with pytest.warns(DiscardedStateWarning, match=r"set_epoch\(0\) goes back .* epoch 1"):
        stream.set_epoch(0)
    assert list(stream) == list(make())


def test_a_state_that_comes_too_late_for_workers() -> None:
    """They live already, and would go on without it."""
    _, stream = begun_at(7)
    loader = loader_of(stream, 2, persistent_workers=True)
    next(iter(loader))
    stream.load_state_dict(make().state_dict())
    with pytest.raises(StateError, match="before the first loop"):
        list(loader)


def test_a_loop_that_is_kept_alive_does_not_count() -> None:
    """The last tracked loop is the one whose batches are counted."""
    whole, stream = begun_at(7)
    loader = loader_of(stream, 2, prefetch_factor=8)
    old = stream.tracked(loader)
    list(islice(old, 2))  # one of each worker: both have begun
    new = stream.tracked(loader)
    for place in range(7, 12):
        assert next(new) == whole[place]
        next(old)
    following = make()
    following.load_state_dict(stream.state_dict())
    assert list(loader_of(following, 2)) == whole[12:]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_ends_late_changes_nothing(persistent: bool) -> None:
    """A traceback may keep it, after another loop has begun or ended."""
    stream, whole = make(), list(loader_of(make(), 2))
    loader = loader_of(stream, 2, persistent_workers=persistent)
    old = stream.tracked(loader)
    next(old)
    assert list(stream.tracked(loader)) == whole
    old.close()
    assert stream.epoch == 1
    batches = stream.tracked(loader)
    next(batches)
    new = stream.tracked(loader)
    batches.close()
    assert len(list(new)) > 30
    assert stream.epoch == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_before_the_first_batch(workers: int) -> None:
    """Workers may not have begun yet, and have begun another loop before."""
    stream = make()
    next(iter(loader_of(stream, workers)))
    batches = stream.tracked(loader_of(stream, workers))
    following = make()
    following.load_state_dict(stream.state_dict())
    assert list(following) == list(make())
    assert len(list(batches)) == len(list(loader_of(make(), workers)))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, as_pickle])
def test_a_copy_goes_on_too(copied: Any) -> None:
    """With epochs and loops of its own, which its workers share."""
    whole, stream = begun_at(7)
    other = copied(stream)
    assert list(loader_of(other, 2)) == whole[7:]
    assert (other.epoch, stream.epoch) == (1, 0)
    list(islice(other.tracked(loader_of(other, 2)), 5))
    assert any(worker["rounds"] for worker in workers_of(other.state_dict()))
    with pytest.warns(DiscardedStateWarning):
        stream.set_epoch(4)
    assert other.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_look_within_a_tracked_loop(workers: int) -> None:
    """It sees plain batches; where the stream stands is unclear until the loop's next batch."""
    stream, whole = make(), list(loader_of(make(), workers))
    batches = tracked_loop(stream, workers)
    taken = list(islice(batches, 9))
    assert isinstance(next(iter(loader_of(stream, 0))), list)
    assert isinstance(next(iter(stream)), list)
    with pytest.raises(StateError, match="unclear which one counts"):
        stream.state_dict()
    taken.append(next(batches))
    following = make()
    following.load_state_dict(stream.state_dict())
    assert taken + list(loader_of(following, workers)) == whole


@pytest.mark.parametrize(("workers", "tracked"), [(0, False), (0, True), (2, True)])
def test_a_whole_loop_inside_a_loop(workers: int, tracked: bool) -> None:
    """As of an evaluation: from its next batch on, the stream stands where the outer loop does."""
    stream, whole = make(), list(loader_of(make(), workers))
    loader = loader_of(stream, workers)
    batches = stream.tracked(loader) if tracked else iter(loader)
    taken = list(islice(batches, 9))
    assert samples_of(list(loader)) == samples_of(whole)
    taken.append(next(batches))
    following = make()
    following.load_state_dict(stream.state_dict())
    assert taken + list(loader_of(following, workers)) == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("chosen", [False, True])
def test_a_tracked_loop_that_is_kept_is_no_longer_the_stream(workers: int, chosen: bool) -> None:
    """As by a traceback: later loops are whole, advance the epoch, and say where they stand."""
    stream = make()
    kept = tracked_loop(stream, workers)
    list(islice(kept, 4))  # so that all workers have begun
    if chosen:
        stream.set_epoch(2)
    expected, first = make(), stream.epoch
    expected.set_epoch(first)
    assert list(loader_of(stream, 0)) == list(expected)
    assert stream.epoch == first + 1
    if not chosen:
        with pytest.raises(StateError, match="unclear"):
            stream.state_dict()
        stream.set_epoch(3)
    list(islice(stream, 4))
    assert workers_of(stream.state_dict())[0]["rounds"]
    kept.close()
    assert workers_of(stream.state_dict())[0]["rounds"]
    assert stream.epoch == 3


def test_persistent_workers_of_a_loop_that_was_closed_at_once() -> None:
    stream = make()
    loader = loader_of(stream, 2, persistent_workers=True)
    expected = len(list(loader_of(make(), 2)))
    for _ in range(10):
        stream.tracked(loader).close()
        assert len(list(stream.tracked(loader))) > expected / 2
        stream.set_epoch(0)


def test_plain_loops_between_tracked_ones_of_a_number_of_batches() -> None:
    """Only the workers know where they went on: no state before a batch of each of them."""
    stream, several = make(batches_per_epoch=12), make(batches_per_epoch=12)
    loader = loader_of(stream, 2, persistent_workers=True)
    whole = epochs_of(several, 2, 3, tracked=True, persistent_workers=True)
    assert list(stream.tracked(loader)) == whole[0]
    assert list(loader) == whole[1]
    batches = stream.tracked(loader)
    assert next(batches) == whole[2][0]
    with pytest.raises(StateError, match="no batch has come yet"):
        stream.state_dict()
    assert next(batches) == whole[2][1]
    following = make(batches_per_epoch=12)
    following.load_state_dict(stream.state_dict())
    assert list(tracked_loop(following, 2)) == whole[2][2:]


def slow_start(worker: int) -> None:
    time.sleep(0.5 * worker)


def test_another_epoch_within_a_loop_is_noticed() -> None:
    """Workers that begin after it would read that one."""
    stream = make("map")
    loader = loader_of(stream, 3, worker_init_fn=slow_start)
    batches = stream.tracked(loader)
    next(batches)
    stream.set_epoch(1)
    with pytest.raises(StateError, match="between loops"):
        list(batches)


@pytest.mark.parametrize("sampler", [False, True])
def test_numpy_integers_are_plain_in_a_state(sampler: bool) -> None:
    """Options computed with NumPy, small types too, mean what Python's integers mean."""
    plain: dict[str, Any] = {"window": 60, "max_batch_size": 100, "batch_size_multiple": 2}
    plain |= {"size_multiple": 120, "seed": 3, "batches_per_epoch": 60}
    plain |= {"num_replicas": 2, "rank": 1}
    lengths = [number % 50 + 1 for number in range(120)]

    def begun(options: dict[str, Any], budget: Any) -> Any:
        source: Any
        if sampler:
            source = MemoryBudgetBatchSampler(lengths, PaddedCost(unit_bytes=1), budget, **options)
        else:
            source = BudgetedIterableDataset(
                [[list(range(n))] for n in lengths], PaddedCost(unit_bytes=1), budget,
                size=len, threads=options["rank"], **options,
            )  # fmt: skip
        list(islice(source, 2))
        return source

    expected = begun(plain, 500)
    came = begun({name: np.uint8(value) for name, value in plain.items()}, np.int64(500))
    assert json.dumps(came.state_dict()) == json.dumps(expected.state_dict())
    pads = PadCollate(size_multiple=came)
    assert pads([[1] * 130]).padded_size == (240,)


def test_a_state_of_many_workers_is_small() -> None:
    """What all of them have in common is saved once: 2 KB hold 32 workers within their windows."""
    shards = [[str(n) for n in range(64)] for _ in range(64)]
    stream = BudgetedIterableDataset(shards, PaddedCost(unit_bytes=1), 20, size=len, window=32)
    slots = [WorkerSlot(worker=n, workers=32, rank=0, ranks=1) for n in range(32)]
    cursors = []
    for slot in slots:
        reader = stream.reader_of(slot)
        list(islice(reader, 11))
        assert reader.cursor.rounds
        cursors.append(reader.cursor)
    settings = stream._settings
    state = StreamState(cursors=cursors, dealing=settings.dealing(slots[0]), turn=3)
    plain = state.to_plain(settings.order, seeks=False)
    assert len(json.dumps(plain)) <= 2048
    found = StreamState.of_plain(json.loads(json.dumps(plain)), settings.order)
    assert found.turn == 3
    assert found.cursors == cursors
