"""Streams under what broke them once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.support.resuming import check_every_stop
from tests.support.streams import (
    TOKENS,
    Numbered,
    SplitsItself,
    always_one,
    numbers,
    same,
    size_of,
    with_parts,
    workers_of,
)
from torchbudget import BudgetedIterableDataset, StateMismatchError, transforms
from torchbudget.errors import SampleError, SizesError, StateError

SIZES = np.random.default_rng(0).integers(1, 60, 400)


class Seeking:
    """A source whose state is a number."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        start, self.next = self.next, 0
        for number in range(start, len(SIZES)):
            self.next = number + 1
            yield number, int(SIZES[number])

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def early(sample: Any) -> bool:
    return sample[0] % 64 < 20


def make(source: Any = None, **options: Any) -> BudgetedIterableDataset:
    arguments = {"size": size_of, "window": 64, "collate_fn": list} | options
    return BudgetedIterableDataset(
        Numbered(SIZES) if source is None else source, TOKENS, 400, **arguments
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transforms": [same], "threads": 8},
        {"transforms": [transforms.keep_if(early)]},
        {"look_ahead": 5000},
    ],
)
def test_a_source_that_seeks_goes_on_anywhere(options: dict[str, Any]) -> None:
    """Its state is never one of after the position; and the epochs after are whole."""
    reference = make(Seeking(), **options)
    whole, following = list(reference), list(reference)
    check_every_stop(lambda: make(Seeking(), **options))
    for stop in range(0, len(whole), 3):
        first = make(Seeking(), **options)
        list(islice(first, stop))
        stream = make(Seeking(), **options)
        stream.load_state_dict(first.state_dict())
        assert list(stream) == whole[stop:]
        assert list(stream) == following


def test_skipped_samples_are_no_positions() -> None:
    """With every third sample over the budget, resumed anywhere: all others once."""
    sizes = SIZES.copy()
    sizes[::3] = 1000
    whole = check_every_stop(lambda: make(Numbered(sizes), oversize="skip"))
    assert numbers(whole) == np.flatnonzero(sizes < 1000).tolist()


def test_resumed_at_the_very_end_of_shards() -> None:
    stream = make([[(n, n + 1) for n in range(8)]], window=8)
    number = len(list(stream))
    stream.set_epoch(0)
    assert numbers(list(islice(stream, number))) == list(range(8))
    stream.load_state_dict(stream.state_dict())
    assert list(stream) == []


def test_a_source_that_became_shorter() -> None:
    longer = make()
    list(islice(longer, 20))
    stream = make(Numbered(SIZES[:20]))
    stream.load_state_dict(longer.state_dict())
    with pytest.raises(StateMismatchError, match="which has 20"):
        list(stream)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_look_before_the_workers(context: str) -> None:
    """Threads that a first look has started are not the workers'."""
    stream = make(transforms=[same], threads=4)
    next(iter(stream))
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert numbers(list(loader)) == list(range(len(SIZES)))
    stream.close()


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


def test_every_pass_is_dropped() -> None:
    with pytest.raises(SampleError, match="no samples for worker 0"):
        list(make([[(0, 1), (1, 2)]], drop_last=True, batches_per_epoch=4))


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


def part(start: int, stop: int) -> SplitsItself:
    return SplitsItself([(n, 1) for n in range(start, stop)])


def test_shards_that_split_themselves_are_split_once() -> None:
    stream = make([part(0, 50), part(50, 100), part(100, 130)])
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    assert numbers(list(loader)) == list(range(130))


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


def by_number(sample: Any) -> int:
    return 60 - int(sample[1])


def few(batch: list[Any], sample: Any) -> bool:
    return len(batch) < 7


def more(batch: list[Any], sample: Any) -> bool:
    return len(batch) < 11


READINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "size": ({}, {"size": by_number}),
    "another transform": (
        {"transforms": [transforms.keep_if(early)]},
        {"transforms": [transforms.keep_if(lambda sample: sample[0] % 64 < 40)]},
    ),
    "one more transform": ({}, {"transforms": [transforms.keep_if(early)]}),
    "a predicate": ({"cost": few, "budget": None}, {"cost": more, "budget": None}),
}


@pytest.mark.parametrize("case", READINGS)
def test_another_reading_needs_the_boundary_of_a_window(case: str) -> None:
    """Under another size, other transforms or another predicate a window is cut in other places.

    Within one the state is refused by name; at its boundary the rest is that of the new reading.
    """
    saved, changed = READINGS[case]
    name = "cost" if "cost" in changed else next(iter(changed))

    def made(options: dict[str, Any]) -> BudgetedIterableDataset:
        arguments = {"cost": TOKENS, "budget": 400, "size": size_of, "window": 64}
        return BudgetedIterableDataset(
            Numbered(np.minimum(SIZES, 59)), **arguments | {"collate_fn": list} | options
        )

    running, within, after = made(saved), 0, 0
    for _ in running:
        state = running.state_dict()
        [worker] = workers_of(state)
        stream = made(changed)
        stream.load_state_dict(state)
        if worker["rounds"]:
            within += 1
            with pytest.raises(StateMismatchError, match=rf"boundary: {name}: saved"):
                iter(stream)
        elif worker["start"]:
            after += 1
            left = {n for n, _ in Numbered(SIZES) if n >= worker["start"]}
            for keep in changed.get("transforms", ()):
                left = {n for n in left if list(keep((n, 1)))}
            assert numbers(list(stream)) == sorted(left)
        twin = made(saved)
        twin.load_state_dict(state)
        iter(twin)
    assert within > after > 2


def drawn(sample: Any) -> Any:
    return sample[0], 1, int(transforms.rng().integers(10**9))


def test_no_two_workers_draw_the_same() -> None:
    shards = [[(10 * i + j, 1) for j in range(10)] for i in range(4)]
    stream = make(shards, transforms=[drawn], size=always_one)
    found = [one[2] for batch in DataLoader(stream, batch_size=None, num_workers=2)
             for one in batch]  # fmt: skip
    assert len(set(found)) == 40


def mixed(sample: Any) -> Any:
    return (sample[1], sample[1]) if sample[0] == 3 else sample[1]


def test_sizes_of_other_axes_are_no_failures() -> None:
    with pytest.raises(SizesError, match="axes"):
        list(make(size=mixed, on_error="skip"))


def test_a_part_in_which_all_fail() -> None:
    shards = [[(n, "a") for n in range(60)] + [(n, 3) for n in range(60, 70)]]
    stream = make(shards, on_error="skip", look_ahead=2000)
    assert numbers(list(stream)) == list(range(60, 70))
    assert stream.skipped_samples.failed == 60


@pytest.mark.parametrize("bad", [{}, None, 5, {"workers": []}])
def test_what_is_no_state(bad: Any) -> None:
    with pytest.raises(StateError, match="state_dict"):
        make().load_state_dict(bad)


@pytest.mark.parametrize(
    "broken",
    [
        {"rounds": ["x"]},
        {"rounds": [-1]},
        {"start": [None]},
        {"start": []},
        {"start": 3},
        {"pass": [-1]},
        {"first_epoch": [True]},
        {"to_come": ["x"]},
    ],
)
def test_malformed_states(broken: dict[str, Any]) -> None:
    """Refused where they are loaded, or at the next loop, and nothing is lost."""
    stream = make()
    expected = list(make())
    next(iter(stream))
    good = stream.state_dict()
    bad = with_parts(good, workers=good["processes"][0]["workers"] | broken)
    other = make()
    with pytest.raises(StateError):  # noqa: PT012  (at either)
        other.load_state_dict(bad)
        iter(other)
    other.load_state_dict(good)
    assert list(other) == expected[1:]


@pytest.mark.parametrize(
    "broken",
    [
        lambda state: with_parts(state, version=0),
        lambda state: with_parts(state, turn=2),
        lambda state: with_parts(state, turn=None),
        lambda state: with_parts(state, workers=3),
        lambda state: with_parts(state, workers={}),
        lambda state: with_parts(state, order=None),
        lambda state: with_parts(state, dealing=None),
        lambda state: {**state, "epoch": -1},
        lambda state: {**state, "epoch": None},
    ],
)
def test_a_malformed_state_of_workers(broken: Callable[[Any], Any]) -> None:
    stream = make()
    next(iter(stream))
    with pytest.raises(StateError, match=r"malformed|version 0"):
        make().load_state_dict(broken(stream.state_dict()))


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
