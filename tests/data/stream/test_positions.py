"""Streams in a plain `DataLoader`: its process says what it has taken, and goes on from there."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchbudget.data.stream.positions import in_turn

from tests.support.resuming import check_every_stop, counted_state, in_parts
from tests.support.streams import KINDS, TOKENS, Numbered, loader_of, same, size_of, source_of
from torchbudget import BudgetedIterableDataset, StateMismatchError, transforms
from torchbudget.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SIZES = np.random.default_rng(2).integers(1, 60, 400)


def make(kind: str = "iterable", **options: Any) -> BudgetedIterableDataset:
    options = {"size": size_of, "window": 64, "collate_fn": same} | options
    if kind == "splits itself":
        options["split"] = "workers"
    return BudgetedIterableDataset(source_of(kind, SIZES, [30, 31, 200]), TOKENS, 300, **options)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_a_loader_takes_one_of_each_worker_in_turn(lengths: list[int], data: Any) -> None:
    """How many of each, and whose turn it is: as a loader does it, that knows no end beforehand."""
    batches = data.draw(st.integers(0, sum(lengths)))
    left = list(lengths)
    turns = cycle(range(len(lengths)))
    for _ in range(batches):
        left[next(turn for turn in turns if left[turn])] -= 1
    taken = [n - m for n, m in zip(lengths, left, strict=True)]
    following = next((turn for turn in islice(turns, len(lengths)) if left[turn]), None)
    # Of workers that have not reached their end the length may be unknown.
    known = [
        n if not m or data.draw(st.booleans()) else None for n, m in zip(lengths, left, strict=True)
    ]
    found, turn = in_turn(batches, known)
    assert found == taken
    if following is not None:
        assert turn == following


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_any_batch(kind: str, workers: int) -> None:
    """The rest equals the rest, in its order, and again from a state within the rest."""
    loop = partial(loader_of, workers=workers)
    whole = check_every_stop(partial(make, kind), loop=loop, save=counted_state, every=8)
    for done in range(1, len(whole) - 3, 16):
        found = in_parts(partial(make, kind), [done, 3], loop=loop, save=counted_state)
        assert found == whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_an_epoch_is_the_next_ones_beginning(kind: str) -> None:
    running = make(kind)
    batches = list(loader_of(running, 2))
    following, expected = make(kind), make(kind)
    following.load_state_dict(running.state_dict(batches_done=len(batches)))
    assert following.epoch == 1
    expected.set_epoch(1)
    assert list(loader_of(following, 2)) == list(loader_of(expected, 2))


def test_workers_that_begin_where_one_process_stood() -> None:
    """At a window's boundary; those that have made nothing yet begin there, too."""
    reader = iter(make())
    begun = []
    for batch in reader:
        begun.append(batch)
        state = reader.state_dict()
        if len(begun) > 5 and not state["done"]:
            break
    running = make()
    running.load_state_dict(state)
    batches = iter(loader_of(running, 3))
    taken = [next(batches)]
    second = make()
    second.load_state_dict(running.state_dict(batches_done=1))
    rest = list(loader_of(second, 3))
    assert rest == list(batches)
    assert sorted(n for batch in begun + taken + rest for n, _ in batch) == list(range(len(SIZES)))


@pytest.mark.parametrize("workers", [1, 3])
def test_epochs_of_a_number_of_batches(workers: int) -> None:
    """As many come, whatever the source has, and the rest from any of them."""
    loop = partial(loader_of, workers=workers)
    several = partial(make, batches_per_epoch=90)
    whole = list(loop(several()))
    assert len(whole) == 90
    for done in (1, 40, 89):
        assert in_parts(several, [done], loop=loop, save=counted_state) == whole


def test_workers_that_persist() -> None:
    """Each epoch counts from its own beginning."""
    running = make()
    loader = loader_of(running, 2, persistent_workers=True)
    for epoch in range(3):
        running.set_epoch(epoch)
        for done, _ in enumerate(loader, 1):
            if done == 7:
                state = running.state_dict(batches_done=7)
        fresh = make()
        fresh.set_epoch(epoch)
        whole = list(loader_of(fresh, 2))
        second = make()
        second.load_state_dict(state)
        assert list(loader_of(second, 2)) == whole[7:]


def test_what_workers_read_ahead_is_not_lost_in_silence() -> None:
    """A state without the number of batches would begin the epoch again."""
    stream = make()
    batches = iter(loader_of(stream, 2))
    next(batches)
    with pytest.raises(StateError, match="batches_done"):
        stream.state_dict()
    deque(batches, maxlen=0)
    with pytest.raises(StateError, match="batches_done"):
        stream.state_dict()
    stream.set_epoch(1)
    assert stream.state_dict()["epoch"] == 1


def test_a_look_at_the_first_batch_does_not_count() -> None:
    whole = list(loader_of(make(), 2))
    stream = make()
    next(iter(stream))
    batches = iter(loader_of(stream, 2))
    list(islice(batches, 6))
    following = make()
    following.load_state_dict(stream.state_dict(batches_done=6))
    assert list(loader_of(following, 2)) == whole[6:]


def test_numbers_of_batches_that_cannot_be() -> None:
    stream = make()
    next(iter(stream))
    with pytest.raises(StateError, match="1 were"):
        stream.state_dict(batches_done=2)
    stream = make()
    with pytest.raises(StateError, match="not read yet"):
        stream.state_dict(batches_done=1)
    assert stream.state_dict(batches_done=0) == stream.state_dict()
    batches = iter(loader_of(stream, 2))
    next(batches)
    with pytest.raises(StateError, match="more than"):
        stream.state_dict(batches_done=10_000)


def test_another_number_of_workers() -> None:
    stream = make()
    batches = iter(loader_of(stream, 2))
    next(batches)
    other = make()
    other.load_state_dict(stream.state_dict(batches_done=1))
    with pytest.raises(StateMismatchError, match="num_workers=2"):
        list(loader_of(other, 3))


def test_workers_that_are_too_far_ahead() -> None:
    """More positions than are kept: an error, and not another position."""
    stream = make(max_batch_size=1)
    batches = iter(loader_of(stream, 1, prefetch_factor=300))
    next(batches)
    for _ in range(600):  # a minute at the most
        with contextlib.suppress(StateError):
            stream.state_dict(batches_done=256)
            break
        time.sleep(0.1)
    with pytest.raises(StateError, match="prefetch_factor"):
        stream.state_dict(batches_done=1)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_loops_after_the_one_that_went_on(workers: int) -> None:
    """A state is used up where its epoch has ended: then it comes as a whole again."""
    whole = list(loader_of(make(), workers))
    running = make()
    batches = iter(loader_of(running, workers))
    list(islice(batches, 5))
    second = make()
    second.load_state_dict(running.state_dict(batches_done=5))
    loader = loader_of(second, workers)
    assert list(loader) == whole[5:]
    assert list(loader) == whole
    third = iter(loader)
    assert list(islice(third, 5)) == whole[:5]
    fourth = make()
    fourth.load_state_dict(second.state_dict(batches_done=5))
    assert list(loader_of(fourth, workers)) == whole[5:]


def begun_at(done: int, **options: Any) -> tuple[list[Any], BudgetedIterableDataset]:
    """A whole epoch's batches, and a stream that begins after so many of them."""
    whole = list(loader_of(make(**options), 2))
    running = make(**options)
    batches = iter(loader_of(running, 2))
    list(islice(batches, done))
    stream = make(**options)
    stream.load_state_dict(running.state_dict(batches_done=done))
    return whole, stream


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_is_broken_off_is_begun_again(persistent: bool) -> None:
    """Where one worker is at its end already, both go on from the state again."""
    last = len(list(loader_of(make("shards"), 2))) - 6  # the loader has met that end already
    whole, stream = begun_at(last, kind="shards")
    assert any(state["finished"] for state in stream.state_dict()["workers"])
    loader = loader_of(stream, 2, persistent_workers=persistent)
    for _ in range(2):
        batches = iter(loader)
        assert next(batches) == whole[last]
        del batches  # its workers end, or wait for the next loop
    assert list(loader) == whole[last:]
    assert list(loader) == whole
    batches = iter(loader)
    assert list(islice(batches, 4)) == whole[:4]
    following = make("shards")
    following.load_state_dict(stream.state_dict(batches_done=4))
    assert list(loader_of(following, 2)) == whole[4:]


def test_another_epoch_puts_a_state_aside() -> None:
    """In workers that persist, too, and for good."""
    whole, stream = begun_at(7)
    loader = loader_of(stream, 2, persistent_workers=True)
    assert next(iter(loader)) == whole[7]
    stream.set_epoch(1)
    next(iter(loader))
    stream.set_epoch(0)
    assert list(loader) == whole


def test_a_state_that_comes_too_late_for_workers() -> None:
    """They live already, and would go on without it."""
    _, stream = begun_at(7)
    loader = loader_of(stream, 2, persistent_workers=True)
    next(iter(loader))
    stream.load_state_dict(make().state_dict())
    with pytest.raises(StateError, match="before the first loop"):
        list(loader)


@pytest.mark.parametrize("loaded_between", [False, True])
def test_a_loop_that_is_kept_alive_does_not_count(loaded_between: bool) -> None:
    """The last loop over the loader is the one whose batches are counted."""
    whole, other = begun_at(7)
    state = other.state_dict()
    stream = make()
    if not loaded_between:
        stream.load_state_dict(state)
    loader = loader_of(stream, 2, prefetch_factor=8)
    old = iter(loader)
    list(islice(old, 2))  # one of each worker: both have begun
    if loaded_between:
        stream.load_state_dict(state)
    new = iter(loader)
    for place in range(7, 12):
        assert next(new) == whole[place]
        next(old)
    following = make()
    following.load_state_dict(stream.state_dict(batches_done=5))
    assert list(loader_of(following, 2)) == whole[12:]


@pytest.mark.parametrize("broken", [{"turn": 2}, {"turn": None}, {"workers": 3}, {"workers": []}])
def test_a_malformed_state_of_workers(broken: dict[str, Any]) -> None:
    _, stream = begun_at(7)
    with pytest.raises(StateError, match="malformed"):
        make().load_state_dict({**stream.state_dict(), **broken})


def test_a_copy_goes_on_too() -> None:
    whole, stream = begun_at(7)
    assert list(loader_of(copy.deepcopy(stream), 2)) == whole[7:]


@pytest.mark.parametrize("seed", range(6))
def test_skipped_samples_do_not_move_windows(seed: int) -> None:
    """Samples over the budget, and a look-ahead in bytes: resumed at every batch."""
    options: dict[str, Any] = {"oversize": "skip", "look_ahead": 6000, "seed": seed}
    sizes = np.random.default_rng(seed).integers(1, 60, 400)
    sizes[:: 7 + seed] = 5000

    def stream() -> BudgetedIterableDataset:
        return BudgetedIterableDataset(
            Numbered(sizes), TOKENS, 300, size=size_of, window=64, collate_fn=same, **options
        )

    assert len(check_every_stop(lambda: iter(stream()))) > 2


@pytest.mark.parametrize("rank", range(4))
def test_a_part_that_ends_in_a_windows_tail(rank: int) -> None:
    """With transforms that make many of one, and a look-ahead that cuts within the tail."""

    def stream() -> BudgetedIterableDataset:
        return BudgetedIterableDataset(
            Numbered([7] * 19),
            TOKENS,
            60,
            size=size_of,
            window=16,
            look_ahead=5000,
            transforms=[transforms.expand(thrice)],
            num_replicas=4,
            rank=rank,
            collate_fn=same,
        )

    assert len(check_every_stop(lambda: iter(stream()))) > 2


def thrice(sample: Any) -> list[Any]:
    return [sample, sample, sample]
