"""Dealing to ranks: equal numbers, nothing lost, sums as even as can be."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import PaddedCost
from torchbudget.plan.dealing import deal_rounds, deal_steps, split_to

TOKENS = PaddedCost(unit_bytes=1)


@st.composite
def dealings(draw: st.DrawFn) -> tuple[Any, int]:
    """Costs of windows of different numbers of rounds, shape `(windows, rounds·ranks)`."""
    ranks = draw(st.integers(1, 8))
    windows = draw(st.integers(1, 4))
    rounds = draw(st.integers(1, 10))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = draw(st.sampled_from([1, 5, 1000, 2**40]))
    costs = rng.integers(0, most + 1, (windows, rounds * ranks))
    for window in range(1, windows):  # the first has them all
        costs[window, rng.integers(1, rounds + 1) * ranks :] = -1
    return costs, ranks


def sums_of(costs: Any, dealt: Any) -> Any:
    """What each rank has of each window: `(windows, ranks)`."""
    picked = np.take_along_axis(costs, dealt.reshape(len(costs), -1), axis=1)
    return np.maximum(picked.reshape(dealt.shape), 0).sum(axis=1)


# ---------------------------------------------------------------------- dealing


@given(dealings(), st.booleans())
def test_every_micro_batch_is_dealt_once(case: Any, even_sums: bool) -> None:
    """Each position once; a window's missing rounds come behind its own, whole."""
    costs, ranks = case
    before = costs.copy()
    dealt = deal_steps(costs, ranks) if even_sums else deal_rounds(costs, costs % 7, ranks)
    windows, number = costs.shape
    assert np.array_equal(costs, before)
    assert dealt.shape == (windows, number // ranks, ranks)
    flat = dealt.reshape(windows, -1)
    assert np.array_equal(np.sort(flat, axis=1), np.tile(np.arange(number), (windows, 1)))
    for window in range(windows):
        missing = (costs[window][dealt[window]] < 0).all(axis=1)
        assert np.array_equal(missing, (costs[window][dealt[window]] < 0).any(axis=1))
        assert (np.diff(missing.astype(int)) >= 0).all()


@given(dealings())
def test_rounds_are_as_alike_as_can_be(case: Any) -> None:
    """Where ranks wait for each other every round, Σ of rounds' maxima is the least there is.

    That of the costliest rank's, the next `ranks` after them, and so on: any other grouping has a
    maximum that is larger at some place of the sorted list.
    """
    costs, ranks = case
    dealt = deal_rounds(costs, costs % 7, ranks)
    for window, rounds in zip(costs, dealt, strict=True):
        maxima = window[rounds].max(axis=1)
        least = -np.sort(-window)[::ranks]
        assert np.array_equal(maxima, least)  # the costliest round first, too


@given(dealings())
def test_sums_are_never_worse_than_dealing_in_order(case: Any) -> None:
    """The costliest rank never has more than under dealing from the costliest down, in turn."""
    costs, ranks = case
    dealt = deal_steps(costs, ranks)
    in_order = -np.sort(-costs, axis=1).reshape(len(costs), -1, ranks)
    worst = np.maximum(in_order, 0).sum(axis=1).max(axis=1)
    assert (sums_of(costs, dealt).max(axis=1) <= worst).all()


@given(dealings())
def test_sums_differ_by_no_more_than_the_widest_round(case: Any) -> None:
    """Dealing the widest round first bounds the gap of sums by that round's own; swaps keep it."""
    costs, ranks = case
    sums = sums_of(costs, deal_steps(costs, ranks))
    for window, mine in zip(costs, sums, strict=True):
        rounds = -np.sort(-window[window >= 0]).reshape(-1, ranks)
        widest = int((rounds[:, 0] - rounds[:, -1]).max())
        assert mine.max() - mine.min() <= widest


def dealt_without_exchange(costs: Any, ranks: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchbudget.plan.dealing._EXCHANGES", 0)
        return deal_steps(costs, ranks)


@given(dealings())
def test_exchanging_never_harms_the_sums(case: Any) -> None:
    """Of as many as it takes: none that would bring the outermost ranks together is left."""
    costs, ranks = case
    plain = sums_of(costs, dealt_without_exchange(costs, ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchbudget.plan.dealing._EXCHANGES", 10_000)
        dealt = deal_steps(costs, ranks)
    even = sums_of(costs, dealt)
    assert (even.max(axis=1) <= plain.max(axis=1)).all()
    assert (np.ptp(even, axis=1) <= np.ptp(plain, axis=1)).all()
    for window, rounds, sums in zip(costs, dealt, even, strict=True):
        weighed = window[rounds]
        mine, theirs = (weighed[:, rank] for rank in (sums.argmax(), sums.argmin()))
        gains = np.subtract.outer(mine[mine >= 0], theirs[theirs >= 0])
        assert not ((gains > 0) & (gains < np.ptp(sums))).any()


def test_exchanging_brings_the_sums_together() -> None:
    """On random costs the gap between the costliest and the cheapest rank falls by two fifths."""
    costs = np.random.default_rng(0).integers(100, 1000, (50, 32))
    plain = np.ptp(sums_of(costs, dealt_without_exchange(costs, 4)), axis=1)
    even = np.ptp(sums_of(costs, deal_steps(costs, 4)), axis=1)
    assert even.mean() < 0.6 * plain.mean()


@pytest.mark.parametrize("seed", range(6))
def test_two_ranks_come_near_the_best_deal(seed: int) -> None:
    """For a few micro-batches on two ranks, sums are within 3 % of the best of all deals."""
    costs = np.random.default_rng(seed).integers(100, 1000, 10)
    half = costs.sum() / 2
    best = min(abs(costs[list(mine)].sum() - half) for mine in itertools.combinations(range(10), 5))
    found = sums_of(costs[None], deal_steps(costs[None], 2))[0]
    assert found.max() - half <= best + 0.03 * half


def test_windows_are_dealt_as_if_alone() -> None:
    rng = np.random.default_rng(0)
    costs = rng.integers(1, 10**6, (7, 24))
    costs[3, 16:] = -1
    for dealt in (partial(deal_steps, ranks=4), lambda some: deal_rounds(some, some % 7, 4)):
        together = dealt(costs)
        for window in range(7):
            assert np.array_equal(together[window], dealt(costs[window : window + 1])[0])


def test_equal_costs() -> None:
    """Nothing to even out: each rank has the same sum."""
    costs = np.full((1, 12), 5)
    assert sums_of(costs, deal_steps(costs, 4)).tolist() == [[15] * 4]


@given(dealings(), st.integers(0, 2**32))
def test_rounds_give_ranks_as_much_of_another_weight(case: Any, seed: int) -> None:
    """Sums of weights differ by no more than the widest round's own spread."""
    costs, ranks = case
    weights = np.where(costs < 0, 0, np.random.default_rng(seed).integers(1, 500, costs.shape))
    dealt = deal_rounds(costs, weights, ranks)
    for window, rounds, mine in zip(costs, dealt, weights, strict=True):
        real = rounds[window[rounds].min(axis=1) >= 0]
        sums = mine[real].sum(axis=0)
        assert np.ptp(sums) <= np.ptp(mine[real], axis=1).max()


# ---------------------------------------------------------------------- splitting


@st.composite
def splittings(draw: st.DrawFn) -> tuple[list[int], int, list[int], int]:
    runs = draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
    starts = np.cumsum([0, *runs])[:-1].tolist()
    costs = [draw(st.integers(0, 1000)) for _ in runs]
    return starts, sum(runs), costs, draw(st.integers(1, sum(runs)))


def split(starts: Any, length: int, costs: Any, target: int, multiple: int = 1) -> list[int]:
    found = split_to(np.array(starts), length, np.array(costs), target, multiple=multiple)
    return found.tolist()


@given(splittings(), st.sampled_from([1, 1, 2, 4, 8]))
def test_splitting_only_adds_starts(case: Any, multiple: int) -> None:
    """Runs are split until there are enough, and are never joined, moved, or left empty."""
    starts, length, costs, target = case
    found = split(starts, length, costs, target, multiple)
    assert len(found) == max(target, len(starts))
    assert set(starts) <= set(found)
    assert found[0] == 0
    assert (np.diff(found, append=length) > 0).all()


@given(splittings(), st.sampled_from([2, 4, 8]))
def test_the_first_half_is_a_multiple_where_the_run_is_longer(case: Any, multiple: int) -> None:
    """A run of more than the multiple is split at one, nearest above its middle where that is."""
    starts, length, costs, _ = case
    if length == len(starts):
        return  # nothing can be split
    found = split(starts, length, costs, len(starts) + 1, multiple)
    (middle,) = set(found) - set(starts)
    start = max(start for start in starts if start < middle)
    stop = min([other for other in starts if other > middle], default=length)
    if stop - start > 2 * multiple:
        assert (middle - start) % multiple == 0
        assert 0 <= 2 * (middle - start) - (stop - start) < 2 * multiple
    elif stop - start > multiple:
        assert (middle - start) % multiple == 0
    else:
        assert 0 <= 2 * (middle - start) - (stop - start) <= 1


def test_the_costliest_is_split_first() -> None:
    """A half counts as half, so that the next split may take another run; singles never."""
    assert split([0, 4, 8], 12, [10, 30, 20], 4) == [0, 4, 6, 8]
    assert split([0, 4, 8], 12, [10, 30, 20], 5) == [0, 4, 6, 8, 10]
    assert split([0, 1], 4, [100, 1], 3) == [0, 1, 3]
    assert split([0], 5, [1], 5) == [0, 1, 2, 3, 4]
