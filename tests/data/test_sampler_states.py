"""States of a sampler: what they hold, and from where an epoch goes on."""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing
import pickle
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.resuming import check_every_stop, in_parts
from tests.support.samplers import LENGTHS, counted, loader_of, sampler_of
from torchbudget import PackedCost, PaddedCost, StateMismatchError, TableCost
from torchbudget.errors import OptionError, SizesError, StateError


def test_a_state_has_its_keys() -> None:
    """Constant keys, plain types, and copies: what is done to one state changes no other."""
    sampler = sampler_of(window=50)
    states = [sampler.state_dict()] + [sampler.state_dict() for _ in sampler]
    assert len({tuple(sorted(state)) for state in states}) == 1
    for state in states:
        assert json.loads(json.dumps(state)) == state
    before = copy.deepcopy(states[3])
    states[3]["order"].clear()
    states[3]["dealing"]["window"] = 0
    list(itertools.islice(sampler, 3))
    sampler.set_epoch(0)
    list(itertools.islice(sampler, 3))
    assert sampler.state_dict() == before


def test_loading_keeps_its_argument() -> None:
    """A state is read, not taken: loading it twice, or into two samplers, is the same."""
    saved = sampler_of()
    list(itertools.islice(saved, 4))
    state = saved.state_dict()
    before = copy.deepcopy(state)
    one, other = sampler_of(), sampler_of()
    one.load_state_dict(state)
    other.load_state_dict(state)
    rest = list(one)
    assert state == before
    assert list(other) == rest


def test_iter_before_and_after_loading() -> None:
    """Loaders call `iter` before they load a state, and again after it."""
    saved = sampler_of()
    whole = list(saved)
    saved.set_epoch(0)
    list(itertools.islice(saved, 4))
    sampler = sampler_of()
    stale = iter(sampler)
    sampler.load_state_dict(saved.state_dict())
    fresh = iter(sampler)
    next(stale)
    assert list(fresh) == whole[4:]


def test_a_second_resume() -> None:
    """A resumed epoch is saved and resumed again, at every batch."""
    make = partial(sampler_of, window=40)
    whole = check_every_stop(make)
    assert in_parts(make, [1] * (len(whole) - 1)) == whole


def test_len_is_the_whole_epochs_whatever_was_loaded() -> None:
    """In the middle of an epoch, and of the next one after its end; `batches_left` is the rest.

    Frameworks read the one once, and subtract what is done by themselves.
    """
    sampler = sampler_of(window=40)
    whole = len(sampler)
    for done, _ in enumerate(sampler, 1):
        resumed = sampler_of(window=40)
        resumed.load_state_dict(sampler.state_dict())
        left = resumed.batches_left
        assert left == len(list(iter(resumed)))
        resumed.load_state_dict(sampler.state_dict())
        assert len(resumed) == len(loader_of(resumed)) == (whole if done < whole else left)
        assert left == whole - done or resumed.epoch == 1


def test_len_after_other_ranks_is_what_was_done_and_what_is_left() -> None:
    """Those done on three ranks, counted there, and those of the rest on two; saved again, too."""
    those = [sampler_of(budget=500, window=100, num_replicas=3, rank=rank) for rank in range(3)]
    for sampler in those:
        list(itertools.islice(sampler, 4))
    resumed = sampler_of(budget=500, window=100, num_replicas=2, rank=0)
    resumed.load_state_dict(those[0].state_dict())
    whole = len(resumed)
    assert resumed.batches_left == whole - 4 != len(those[0]) - 4
    assert len(list(itertools.islice(resumed, 5))) == 5
    again = sampler_of(budget=500, window=100, num_replicas=2, rank=0)
    again.load_state_dict(resumed.state_dict())
    assert (len(again), again.batches_left) == (whole, whole - 9)
    assert len(list(again)) == whole - 9
    assert len(again) == again.batches_left  # of the next epoch


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_dropped_end_is_an_end(window: int) -> None:
    """After the last batch that `drop_last` leaves, the state is of the next epoch."""
    for n in range(2, 9):
        sampler = sampler_of([5] * n, 10, window=window, drop_last=True)
        batches = list(sampler)
        again = sampler_of([5] * n, 10, window=window, drop_last=True)
        list(itertools.islice(again, len(batches)))
        resumed = sampler_of([5] * n, 10, window=window, drop_last=True)
        resumed.load_state_dict(again.state_dict())
        assert resumed.epoch == 1
        assert len(list(resumed)) == len(batches)


def test_batches_done_is_checked() -> None:
    """More than was drawn, or no number at all, is refused."""
    sampler = sampler_of()
    with pytest.raises(OptionError, match="batches_done=2, but no batch was yielded"):
        sampler.state_dict(batches_done=2)
    assert sampler.state_dict(batches_done=0) == sampler.state_dict()
    list(itertools.islice(sampler, 3))
    with pytest.raises(OptionError, match="batches_done=4, but only 3 were drawn"):
        sampler.state_dict(batches_done=4)
    for wrong in (-1, 1.0, True):
        with pytest.raises(OptionError, match="batches_done must be an int"):
            sampler.state_dict(batches_done=wrong)


def test_batches_done_counts_from_a_resumed_loops_start() -> None:
    """The loop that resumed counts its own batches, from 0."""
    whole = list(sampler_of())
    first = sampler_of()
    list(itertools.islice(first, 5))
    sampler = sampler_of()
    sampler.load_state_dict(first.state_dict())
    list(itertools.islice(sampler, 6))
    again = sampler_of()
    again.load_state_dict(sampler.state_dict(batches_done=2))
    assert list(again) == whole[7:]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"shuffle": False}, "shuffle: saved True, now False"),
        ({"sizes": LENGTHS[:-1]}, "the number of samples: saved 300, now 299"),
        ({"sizes": LENGTHS[::-1]}, "the samples' sizes: saved '[0-9a-f]{32}', now '[0-9a-f]{32}'"),
        ({"num_samples": 200}, "num_samples: saved 300, now 200"),
        ({"replacement": True}, "replacement: saved False, now True"),
        ({"weights": [1] * 300}, "the weights: saved None, now"),
        ({"budget": 300, "oversize": "skip"}, "the samples that are skipped as oversize"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_state_of_another_order_is_refused(other: Any, message: str) -> None:
    """Its position would mean other samples; the message names what differs, and both values."""
    sampler = sampler_of(**other)
    with pytest.raises(StateMismatchError, match=message):
        sampler.load_state_dict(sampler_of().state_dict())
    assert sampler.epoch == 0


@pytest.mark.parametrize(
    "other",
    [
        {"budget": 2000},
        {"cost": PaddedCost(unit_bytes=1, sample_bytes=1)},
        {"max_batch_size": 5},
        {"host_batch_bytes": (PaddedCost(unit_bytes=8), 4000)},
        {"batch_size_multiple": 4},
        {"size_multiple": 8},
        {"window": 77},
        {"num_replicas": 1, "rank": 0},
    ],
    ids=str,
)
def test_a_state_under_other_rules_goes_on(other: Any) -> None:
    """Budget, cost and rules may change at any batch: what is left comes once."""
    saved = sampler_of(window=100)
    done = {index for batch in itertools.islice(saved, 3) for index in batch}
    sampler = sampler_of(**({"window": 100} | other))
    sampler.load_state_dict(saved.state_dict())
    rest = counted(sampler)
    assert rest == Counter(set(range(300)) - done)


@pytest.mark.parametrize("step", [True, False])
def test_another_balance_is_another_dealing(step: bool) -> None:
    """Rounds that were dealt by one balance are not read as those of another one.

    At any batch, on several ranks, what is left comes once, and then as it would have come.
    """
    options: dict[str, Any] = {"samples_per_step" if step else "window": 100, "num_replicas": 3}
    saved, other = None, PaddedCost(sample_bytes=1)
    differ = 0
    for balances in (
        (saved, other),
        (other, saved),
        (other, PaddedCost(unit_bytes=1, pair_bytes=1)),
    ):
        before, after = (
            [sampler_of(rank=rank, balance=balance, **options) for rank in range(3)]
            for balance in balances
        )
        differ += [list(one) for one in before] != [list(one) for one in after]
        for done in range(1, len(before[0])):
            first: list[list[int]] = []
            for sampler in before:
                sampler.set_epoch(0)
                first += itertools.islice(sampler, done)
            for sampler in after:
                sampler.load_state_dict(before[0].state_dict())
                first += sampler
            assert counted(first) == Counter(range(300))
    assert differ == 3


@pytest.mark.parametrize("oversize", ["skip", "alone"])
@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_table_that_does_not_cover_all_samples(oversize: Any, axes: int, ranks: int) -> None:
    """Where it says nothing of some, there is a state as there are a length and a report."""
    table = TableCost(numbers=(9, 2), sizes=((40,) * axes, (90,) * axes), peak_bytes=(1000, 1200))
    sizes = LENGTHS if axes == 1 else np.stack([LENGTHS] * 2, axis=1)

    def make() -> Any:
        return sampler_of(
            sizes, 1300, cost=table, oversize=oversize, window=60, num_replicas=ranks, rank=0
        )

    whole = check_every_stop(make, every=5)
    assert len(make()) == len(whole)
    assert make().report().batches == ranks * len(whole)


@pytest.mark.parametrize("ones", [np.ones, partial(torch.ones, dtype=torch.float64)])
def test_weights_are_copied(ones: Any) -> None:
    """What becomes of the user's array changes neither draws nor states."""
    weights = ones(300)
    sampler = sampler_of(weights=weights, replacement=True)
    state = sampler.state_dict()
    weights[:150] = 0
    fresh = sampler_of(weights=np.ones(300), replacement=True)
    assert [list(sampler) for _ in range(2)] == [list(fresh) for _ in range(2)]
    fresh.load_state_dict(state)


def test_sizes_that_were_changed_in_place_are_noticed() -> None:
    """Small arrays are copied; of a large one a state is refused, which would name other draws."""
    few = LENGTHS.copy()
    sampler, fresh = sampler_of(few), sampler_of()
    few[:] = 1
    assert list(sampler) == list(fresh)
    sampler.state_dict()

    many = np.ones(2**25 + 7, np.uint8)
    sampler = sampler_of(many, 2**13, window=2**14)
    batches = iter(sampler)
    next(batches)
    sampler.state_dict()
    many[-5] = 9
    sampler.state_dict()  # of the same window: it is compared once
    for _ in range(2):
        next(batches)
    with pytest.raises(SizesError, match="changed in place"):
        sampler.state_dict()
    many[-5] = 1
    sampler.state_dict()


def _with(**changed: Any) -> Any:
    return lambda state: state | changed


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: None, "expected a mapping from state_dict"),
        (lambda _: [1], "got list"),
        (lambda _: {}, "lacks dealing, dealt, done, epoch"),
        (lambda state: {k: v for k, v in state.items() if k != "rounds"}, "lacks rounds"),
        (_with(version=99), "version 99, this torchbudget reads 3"),
        (_with(version=None), "version None"),
        (_with(epoch=-1), "epoch must be an int of at least 0, got -1"),
        (_with(epoch=1.0), "epoch must be an int of at least 0, got 1.0"),
        (_with(epoch=True), "epoch must be an int of at least 0, got True"),
        (_with(start="0"), "start must be an int"),
        (_with(start=200), r"200 … 100 are not within the epoch's 300"),
        (_with(stop=301), r"0 … 301 are not within the epoch's 300"),
        (_with(order=None), "order is malformed"),
        (_with(order={}), "order is malformed"),
        (_with(dealing=None, left="!"), "window of 100 samples is malformed"),
        (_with(dealing=None, left="AAAA"), "window of 100 samples is malformed"),
        (_with(dealt="AAAA", left="AAAA"), "window of 100 samples is malformed"),
        (_with(rounds=10**6), "rounds"),
    ],
    ids=itertools.count(),
)
def test_a_malformed_state_is_refused(spoil: Any, message: str) -> None:
    """What is no state, or lacks a part, is refused, and leaves the sampler as it was."""
    saved = sampler_of(window=100)
    list(itertools.islice(saved, 3))
    sampler = sampler_of(window=100)
    with pytest.raises(StateError, match=message):
        sampler.load_state_dict(spoil(saved.state_dict()))
    assert list(sampler) == list(sampler_of(window=100))


# ---------------------------------------------------------------------- pickle


@pytest.mark.parametrize("drawn", [0, 3, 10**6], ids=["fresh", "in mid-epoch", "after an epoch"])
def test_a_sampler_is_pickled(drawn: int) -> None:
    """A copy draws what the next loop of the original would, whatever was being drawn."""
    sampler = sampler_of()
    list(itertools.islice(sampler, drawn))
    copies = [pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)]  # noqa: S301
    expected = list(sampler)
    for twin in copies:
        assert len(twin) == len(expected)
        assert list(twin) == expected


def test_a_sampler_crosses_into_a_spawned_process() -> None:
    """A process that starts from nothing reads it, and draws the same."""
    sampler = sampler_of()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(list, (sampler,)) == list(sampler_of())


def test_a_shallow_copy_has_its_own_position() -> None:
    """A loop over it is none over the original, whose state is that of its own loop."""
    sampler = sampler_of()
    whole, batches = list(sampler_of()), iter(sampler)
    begun = list(itertools.islice(batches, 3))
    state = sampler.state_dict()
    other = copy.copy(sampler)
    assert list(other) == whole
    assert (other.epoch, other.iterations) == (1, 2)
    assert (sampler.epoch, sampler.iterations) == (0, 1)
    assert sampler.state_dict() == state
    assert begun + list(batches) == whole


SMALL_STATES = {
    "a length": (1, PaddedCost(unit_bytes=1), 20_000, {}),
    "a sample each": (1, PaddedCost(unit_bytes=1), 20_000, {"max_batch_size": 1}),
    "two axes": (2, PaddedCost(unit_bytes=[1, 1]), 4_000, {}),
    "three axes": (3, PaddedCost(unit_bytes=[1, 1, 1]), 8_000, {}),
    "packed": (1, PackedCost(unit_bytes=1), 4_000, {}),
}


@pytest.mark.parametrize("case", SMALL_STATES)
def test_a_state_within_a_window_is_small(case: str) -> None:
    """2 KB and a bit for each sample of the window, also where that was dealt anew, twice."""
    axes, cost, budget, options = SMALL_STATES[case]
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5, 0.7, (40_000, axes)), 1, 2000).astype(np.int64)
    state = None
    for number in (8, 4, 2):
        sampler = sampler_of(
            sizes, budget, cost=cost, samples_per_step=32_768, num_replicas=number, **options
        )
        if state is not None:
            sampler.load_state_dict(state)
        batches = iter(sampler)
        for _ in range(next(iter(sampler.steps)) // 3):
            next(batches)
        state = sampler.state_dict()
        assert state["stop"] - state["start"] == 32_768
        assert len(json.dumps(state)) <= 2048 + 32_768 // 8
