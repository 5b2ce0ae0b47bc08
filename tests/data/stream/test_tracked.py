"""Streams in a plain `DataLoader`: the position rides on the batch, and a loop goes on from it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.resuming import as_json, as_pickle, check_every_stop, in_parts
from tests.support.streams import (
    KINDS,
    TOKENS,
    Numbered,
    loader_of,
    same,
    size_of,
    source_of,
    tracked_loop,
)
from torchbudget import BudgetedIterableDataset, StateMismatchError, transforms
from torchbudget.errors import (
    DiscardedStateWarning,
    OptionError,
    RepeatedSamplesWarning,
    StateError,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:'pin_memory' argument is set as true:UserWarning",  # there is no device here
)

SIZES = np.random.default_rng(2).integers(1, 60, 400)


def make(kind: str = "iterable", **options: Any) -> BudgetedIterableDataset:
    options = {"size": size_of, "window": 64, "collate_fn": same} | options
    if kind == "splits itself":
        options["split"] = "workers"
    return BudgetedIterableDataset(source_of(kind, SIZES, [30, 31, 200]), TOKENS, 300, **options)


def samples_of(batches: list[Any]) -> list[int]:
    return sorted(number for batch in batches for number, _ in batch)


def begun_at(done: int, workers: int = 2, **options: Any) -> tuple[list[Any], Any]:
    """A whole epoch's batches, and a stream that begins after so many of them."""
    running = make(**options)
    whole = list(loader_of(make(**options), workers))
    list(islice(tracked_loop(running, workers), done))
    stream = make(**options)
    stream.load_state_dict(as_json(running.state_dict()))
    return whole, stream


# ---------------------------------------------------------------------- anywhere


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_from_any_batch(kind: str, workers: int) -> None:
    """The rest equals the rest, in its order, and again from a state within the rest."""
    loop = partial(tracked_loop, workers=workers)
    whole = check_every_stop(partial(make, kind), loop=loop, every=8)
    assert whole == list(loader_of(make(kind), workers))
    for done in range(1, len(whole) - 3, 16):
        assert in_parts(partial(make, kind), [done, 3], loop=loop) == whole


@pytest.mark.parametrize("kind", ["iterable", "shards"])
def test_out_of_order(kind: str) -> None:
    """Where batches come as they are ready: every remaining sample once, from any batch."""
    running = make(kind, transforms=[slow_in_turns])
    taken: list[Any] = []
    for batch in tracked_loop(running, 3, in_order=False):
        taken.append(batch)
        if len(taken) % 9 == 0:
            following = make(kind, transforms=[slow_in_turns])
            following.load_state_dict(as_json(running.state_dict()))
            rest = list(tracked_loop(following, 3, in_order=False))
            assert samples_of(taken + rest) == list(range(len(SIZES)))


def slow_in_turns(sample: Any) -> Any:
    if sample[0] % 50 == 0:
        torch.zeros(200, 200).exp().sum()
    return sample


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


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_persist(workers: int) -> None:
    """Epochs advance by themselves, and each goes on from any batch."""
    running, plain = make(), make()
    loader = loader_of(running, workers, persistent_workers=workers > 0)
    for epoch in range(3):
        whole = list(loader_of(plain, workers))
        assert running.epoch == epoch
        for done, batch in enumerate(running.tracked(loader), 1):
            assert batch == whole[done - 1]
            if done == 7 + epoch:
                following = make()
                following.load_state_dict(as_json(running.state_dict()))
                assert list(tracked_loop(following, workers)) == whole[done:]
        assert running.state_dict()["epoch"] == epoch + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_an_epoch_is_the_next_ones_beginning(kind: str) -> None:
    """And any number of workers can go on from there."""
    running, expected = make(kind), make(kind)
    list(tracked_loop(running, 2))
    following = make(kind)
    following.load_state_dict(as_json(running.state_dict()))
    assert following.epoch == 1
    expected.set_epoch(1)
    assert list(loader_of(following, 3)) == list(loader_of(expected, 3))


def test_workers_that_begin_where_one_process_stood() -> None:
    """At a window's boundary; those that have made nothing yet begin there, too."""
    running, begun = make(), []
    for batch in running:
        begun.append(batch)
        if len(begun) > 5 and not running.state_dict()["workers"][0]["rounds"]:
            break
    state = running.state_dict()
    running = make()
    running.load_state_dict(state)
    batches = tracked_loop(running, 3)
    taken = [next(batches)]
    second = make()
    second.load_state_dict(running.state_dict())
    rest = list(loader_of(second, 3))
    assert rest == list(batches)
    assert samples_of(begun + taken + rest) == list(range(len(SIZES)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_of_one_rank_is_that_of_all(rank: int) -> None:
    """Ranks that plan from one source stand in one place."""
    ranks: list[dict[str, Any]] = [{"num_replicas": 2, "rank": one} for one in (0, 1)]
    first = make(**ranks[0])
    list(islice(tracked_loop(first, 2), 9))
    mine, whole = make(**ranks[rank]), list(loader_of(make(**ranks[rank]), 2))
    mine.load_state_dict(as_json(first.state_dict()))
    assert list(loader_of(mine, 2)) == whole[9:]


# ---------------------------------------------------------------------- numbers of batches


def epochs_of(
    stream: BudgetedIterableDataset, workers: int, epochs: int, *, tracked: bool, **options: Any
) -> list[list[Any]]:
    loader = loader_of(stream, workers, **options)
    return [list(stream.tracked(loader) if tracked else loader) for _ in range(epochs)]


def joined(epochs: list[list[Any]]) -> list[Any]:
    return [batch for epoch in epochs for batch in epoch]


@pytest.mark.parametrize(
    ("workers", "tracked", "persistent"),
    [(0, False, False), (0, True, False), (2, False, True), (2, True, True), (2, True, False)],
)
@pytest.mark.parametrize("kind", ["iterable", "shards", "map"])
def test_an_epoch_goes_on_where_the_last_one_ended(
    kind: str, workers: int, tracked: bool, persistent: bool
) -> None:
    """Wherever that is known: the epochs together are one pass after the other."""
    several = partial(make, kind, batches_per_epoch=12)  # as many from each worker
    found = epochs_of(several(), workers, 9, tracked=tracked, persistent_workers=persistent)
    assert [len(epoch) for epoch in found] == [12] * 9
    [whole] = epochs_of(make(kind, batches_per_epoch=108), workers, 1, tracked=False)
    assert samples_of(joined(found)) == samples_of(whole)
    assert set(samples_of(joined(found))) == set(range(len(SIZES)))


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


def test_new_workers_that_start_over_say_so() -> None:
    """They cannot know where those before them ended."""
    stream = make(batches_per_epoch=11)
    loader = loader_of(stream, 0)
    list(loader)
    whole = list(loader_of(make(batches_per_epoch=11), 1))
    plain = make(batches_per_epoch=11)
    assert list(loader_of(plain, 1)) == whole
    with pytest.warns(RepeatedSamplesWarning, match="persistent_workers"):
        iter(copy.deepcopy(plain))


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


def test_a_look_at_the_first_batch_does_not_count() -> None:
    whole = list(loader_of(make(), 2))
    stream = make()
    next(iter(stream))
    list(islice(tracked_loop(stream, 2), 6))
    following = make()
    following.load_state_dict(stream.state_dict())
    assert list(loader_of(following, 2)) == whole[6:]


def test_another_number_of_workers() -> None:
    _, stream = begun_at(1)
    with pytest.raises(StateMismatchError, match="num_workers=2"):
        list(loader_of(stream, 3))


def test_workers_that_were_started_before() -> None:
    stream = make()
    loader = loader_of(stream, 2, persistent_workers=True)
    next(iter(loader))
    with pytest.raises(StateError, match="from its first loop on"):
        stream.tracked(loader)


def test_a_plain_loop_over_tracked_workers() -> None:
    """It yields batches alone."""
    stream, plain = make(), make()
    loader = loader_of(stream, 2, persistent_workers=True)
    for _ in range(2):
        assert list(stream.tracked(loader)) == list(loader_of(plain, 2))
        assert list(loader) == list(loader_of(plain, 2))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
def test_other_loaders() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    stream = make()
    with pytest.raises(OptionError, match="of this stream"):
        stream.tracked(loader_of(make(), 2))
    with pytest.raises(OptionError, match="batch_size=None"):
        stream.tracked(DataLoader(stream))
    with pytest.raises(OptionError, match="saves its position itself"):
        stream.tracked(stateful(stream, batch_size=None))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"batch_size": 3}])
def test_batches_are_not_collated_again(workers: int, options: dict[str, Any]) -> None:
    """A loader's default `batch_size` would give batches of one batch."""
    with pytest.raises(OptionError, match="batch_size=None"):
        next(iter(DataLoader(make(), num_workers=workers, **options)))


# ---------------------------------------------------------------------- after a state


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
    assert any(worker["rounds"] or worker["start"] for worker in stream.state_dict()["workers"])


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
    assert any(worker["rounds"] for worker in other.state_dict()["workers"])
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
    assert stream.state_dict()["workers"][0]["rounds"]
    kept.close()
    assert stream.state_dict()["workers"][0]["rounds"]
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


# ---------------------------------------------------------------------- windows


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

    assert len(check_every_stop(stream)) > 2


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

    assert len(check_every_stop(stream)) > 2


def thrice(sample: Any) -> list[Any]:
    return [sample, sample, sample]
