"""Dealing to ranks: equal numbers, nothing lost, sums as even as can be."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.plan.dealing import deal_rounds


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
