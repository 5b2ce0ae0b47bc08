"""Dealing to ranks: equal numbers, nothing lost, sums as even as can be, and fair over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sampler_cases import samplers
from tests.support.samplers import TOKENS
from torchbudget.plan.dealing import deal_rounds
from torchbudget.plan.solver import WindowKey


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


# ---------------------------------------------------------------------- dealing


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


# ---------------------------------------------------------------------- fair over time


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**32), st.integers(0, 10**6))
def test_each_rank_takes_each_place_once_in_every_run_of_windows(
    ranks: int, windows: int, seed: int, first: int
) -> None:
    """In any `ranks` consecutive windows, whatever the seed, rank r stands at every place once."""
    numbers = np.arange(first, first + windows)
    key = WindowKey(seed=seed, path=(0,), places=numbers, numbers=numbers, shuffle=True)
    places = np.tile(np.arange(ranks), (windows, 1))  # a round of each window
    taken = key.rotated(places, np.ones(windows, np.int64))
    assert np.array_equal(np.sort(taken, axis=1), places)
    for start in range(windows - ranks + 1):
        for rank in range(ranks):
            assert len(set(taken[start : start + ranks, rank].tolist())) == ranks


@pytest.mark.parametrize(
    "options",
    [{"samples_per_step": 1024}, {"window": 1024}, {"window": 1024, "batches_per_epoch": 240}],
    ids=str,
)
def test_ranks_see_as_many_and_as_long_samples(options: dict[str, int]) -> None:
    """Over five epochs each rank's share of samples and their mean size is near the mean's.

    Turns go on over epochs: 16 windows each, so that 80 windows are whole runs of 8.
    """
    sizes = np.clip(np.random.default_rng(0).lognormal(5, 1, 16 * 1024), 16, 4096).astype(np.int64)
    counts, totals = [], []
    for sampler in samplers(sizes, TOKENS, 8192, 8, **options):
        indices = [i for _ in range(5) for batch in sampler for i in batch]
        counts.append(len(indices))
        totals.append(sizes[indices].sum())
    share = np.array(counts) / np.mean(counts)
    length = np.array(totals) / np.array(counts) / sizes.mean()
    assert abs(share - 1).max() < 0.08
    assert abs(length - 1).max() < 0.08
