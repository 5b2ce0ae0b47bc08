"""Loops after a state was loaded, loops that were broken off, and loops inside loops."""

from __future__ import annotations

import copy
import gc
import json
from itertools import islice
from typing import Any

import pytest

from tests.support.resuming import as_pickle
from tests.support.streams import OneProcess, begun_at, loader_of, make, numbers
from torchbudget import BudgetedIterableDataset, PaddedCost
from torchbudget.data.stream.cursor import StreamState, WorkerSlot
from torchbudget.errors import DiscardedStateWarning, StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_loops_after_the_one_that_went_on(workers: int, persistent: bool) -> None:
    """A state is used up where its epoch has ended: the next one comes as a whole."""
    whole, stream = begun_at(5, workers)
    expected = make()
    expected.set_epoch(1)
    loader = loader_of(stream, workers, persistent_workers=persistent and workers > 0)
    assert list(loader) == whole[5:]
    assert list(loader) == list(loader_of(expected, workers))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("ended", ["dropped", "closed", "raised"])
def test_a_tracked_loop_that_is_broken_off_goes_on(
    workers: int, persistent: bool, ended: str
) -> None:
    """In its order, and again; and the epoch after it is whole."""
    whole, stream = begun_at(9, workers, kind="shards")
    loader = loader_of(stream, workers, persistent_workers=persistent)
    for place in (9, 10, 11):
        batches = stream.tracked(loader)
        assert next(batches) == whole[place]
        if ended == "closed":
            batches.close()
        elif ended == "raised":
            stream.set_epoch(0)  # the present epoch: it changes nothing
        del batches
        gc.collect()
    assert list(stream.tracked(loader)) == whole[12:]
    assert stream.epoch == 1
    expected = make("shards")
    expected.set_epoch(1)
    assert numbers(list(stream.tracked(loader))) == numbers(list(expected))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_untracked_loop_that_is_broken_off_starts_over(workers: int) -> None:
    whole, stream = begun_at(9, workers, kind="shards")
    loader = loader_of(stream, workers)
    for _ in range(2):
        assert next(iter(loader)) == whole[9]
    assert list(loader) == whole[9:]


def test_another_epoch_puts_a_state_aside() -> None:
    """In workers that persist, too, and for good; it is said where no loop has used the state."""
    whole, stream = begun_at(7)
    loader = loader_of(stream, 2, persistent_workers=True)
    assert next(iter(loader)) == whole[7]
    stream.set_epoch(1)
    next(iter(loader))
    stream.set_epoch(0)
    assert list(loader) == whole
    _, stream = begun_at(7)
    with pytest.warns(DiscardedStateWarning, match="epoch 0") as found:
        stream.set_epoch(3)
    assert found[0].filename == __file__  # the line that has to change
    saved, stream = make(), make()
    list(saved)
    stream.load_state_dict(saved.state_dict())
    with pytest.warns(DiscardedStateWarning, match=r"set_epoch\(0\) discards .* epoch 1"):
        stream.set_epoch(0)
    assert list(stream) == list(make())


def test_a_state_that_comes_too_late_for_workers() -> None:
    """They live already, and would go on without it; a tracked loop starts new ones."""
    whole, stream = begun_at(7)
    loader = loader_of(stream, 2, persistent_workers=True)
    next(iter(loader))
    stream.load_state_dict(begun_at(9)[1].state_dict())
    with pytest.raises(StateError, match="before the first loop"):
        list(loader)
    assert list(stream.tracked(loader)) == whole[9:]


@pytest.mark.parametrize("workers", [0, 2])
def test_of_several_runs_the_last_that_yielded_counts(workers: int) -> None:
    whole, stream = begun_at(7, workers)
    loader = loader_of(stream, workers, prefetch_factor=8 if workers else None)
    old = stream.tracked(loader)
    list(islice(old, 2))
    new = stream.tracked(loader)
    assert [next(new), next(new)] == whole[9:11]
    following = make()
    following.load_state_dict(stream.state_dict())
    assert list(loader_of(following, workers)) == whole[11:]
    assert next(old) == whole[9]
    following.load_state_dict(stream.state_dict())
    assert list(loader_of(following, workers)) == whole[10:]
    assert [old.position(back)["epoch"] for back in range(3)] == [0] * 3
    following.load_state_dict(old.position(2))
    assert list(loader_of(following, workers)) == whole[8:]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, as_pickle])
def test_a_copy_goes_on_too(copied: Any) -> None:
    """With epochs and loops of its own, which its workers share."""
    whole, stream = begun_at(7)
    other = copied(stream)
    assert list(loader_of(other, 2)) == whole[7:]
    assert (other.epoch, stream.epoch) == (1, 0)
    with pytest.warns(DiscardedStateWarning):
        stream.set_epoch(4)
    assert other.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_inside_a_tracked_loop_change_nothing(workers: int) -> None:
    """As of an evaluation, whole or broken off: they begin where the tracked one began."""
    stream, whole = make(), list(loader_of(make(), workers))
    loader = loader_of(stream, workers)
    batches = stream.tracked(loader)
    taken = list(islice(batches, 9))
    assert numbers(list(loader)) == numbers(whole)
    assert isinstance(next(iter(stream)), list)
    following = make()
    following.load_state_dict(stream.state_dict())
    assert taken + list(loader_of(following, workers)) == whole
    assert taken + list(batches) == whole
    assert stream.epoch == 1


def test_a_state_of_many_workers_is_small() -> None:
    """What all of them have in common is saved once: 100 bytes a worker, and a bit a sample."""
    shards = [[str(n) for n in range(64)] for _ in range(64)]
    stream = BudgetedIterableDataset(shards, PaddedCost(unit_bytes=1), 20, size=len, window=32)
    slots = [WorkerSlot(worker=n, workers=32, rank=0, ranks=1) for n in range(32)]
    cursors = []
    for slot in slots:
        reader = iter(OneProcess(stream, slot))
        list(islice(reader, 11))
        cursors.append(reader.cursor)
        assert cursors[-1].rounds
    dealing = stream._options.dealing(slots[0])
    plain = StreamState(cursors=cursors, dealing=dealing, turn=3).to_plain(seeks=False)
    assert len(json.dumps(plain)) <= 700 + 32 * (100 + 32 // 8)
    found = StreamState.of_plain(json.loads(json.dumps(plain)))
    assert (found.turn, [at[:-1] for at in found.cursors]) == (3, [at[:-1] for at in cursors])
    assert found.to_plain(seeks=False) == plain
