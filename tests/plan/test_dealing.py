"""Dealing to ranks: equal numbers, nothing lost, sums as even as can be."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import PaddedCost
from torchbudget.plan.cut import SortedWindows
from torchbudget.plan.dealing import deal_rounds, level, split_to
from torchbudget.plan.rules import BatchRules

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


# ---------------------------------------------------------------------- dealing


@given(dealings())
def test_every_micro_batch_is_dealt_once(case: Any) -> None:
    """Each position once; a window's missing rounds come behind its own, whole."""
    costs, ranks = case
    before = costs.copy()
    dealt = deal_rounds(costs, costs % 7, ranks)
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


def split(starts: Any, length: int, costs: Any, target: int) -> list[int]:
    return split_to(np.array(starts), length, np.array(costs), target).tolist()


@given(splittings())
def test_splitting_only_adds_starts(case: Any) -> None:
    """Runs are split until there are enough, and are never joined, moved, or left empty."""
    starts, length, costs, target = case
    found = split(starts, length, costs, target)
    assert len(found) == max(target, len(starts))
    assert set(starts) <= set(found)
    assert found[0] == 0
    assert (np.diff(found, append=length) > 0).all()


def test_the_costliest_is_split_first() -> None:
    """A half counts as half, so that the next split may take another run; singles never."""
    assert split([0, 4, 8], 12, [10, 30, 20], 4) == [0, 4, 6, 8]
    assert split([0, 4, 8], 12, [10, 30, 20], 5) == [0, 4, 6, 8, 10]
    assert split([0, 1], 4, [100, 1], 3) == [0, 1, 3]
    assert split([0], 5, [1], 5) == [0, 1, 2, 3, 4]


# ---------------------------------------------------------------------- levelling


@given(
    st.integers(0, 2**32),
    st.integers(2, 6),
    st.integers(1, 4),
    st.sampled_from([PaddedCost(unit_bytes=1), PaddedCost(pair_bytes=1, fixed_bytes=50)]),
    st.sampled_from([1, 1, 4]),
    st.booleans(),
)
def test_a_level_is_a_better_cut_within_the_budget(
    seed: int, ranks: int, rounds: int, cost: Any, multiple: int, other: bool
) -> None:
    """As many runs that tile the window, each dealt once, none over; the costliest has less."""
    rng = np.random.default_rng(seed)
    sizes = -np.sort(-np.clip(rng.lognormal(4, 1, 400), 1, 600).astype(np.int64))
    budget = int(cost.batch_bytes(int(rng.integers(1, 8)), int(sizes[0])))
    balance = PaddedCost(unit_bytes=3, pair_bytes=0.1) if other else None
    rules = BatchRules(cost=cost, budget_bytes=budget, batch_size_multiple=multiple, time=balance)
    windows = SortedWindows(sizes[None], rules)
    starts = np.array(windows.starts(0, budget))
    count = -(-len(starts) // ranks) * ranks * rounds
    if count > len(sizes):
        return
    while len(starts) < count:  # halve the longest until the ranks have as many
        runs = np.diff(starts, append=len(sizes))
        longest = int(runs.argmax())
        starts = np.insert(starts, longest + 1, starts[longest] + runs[longest] // 2)
    model = cost if balance is None else balance

    def work_of(starts: Any) -> Any:
        return model.batch_bytes(np.diff(starts, append=len(sizes)), sizes[starts])

    work = work_of(starts)
    dealt = deal_rounds(work[None], work[None], ranks)[0]
    found = level(windows, 0, work, dealt, budget)
    if found is None:
        return
    cuts, numbers = found
    assert len(cuts) == count
    assert cuts[0] == 0
    assert (np.diff(cuts, append=len(sizes)) > 0).all()
    assert sorted(numbers.reshape(-1).tolist()) == list(range(count))
    assert numbers.shape == (count // ranks, ranks)
    assert (cost.batch_bytes(np.diff(cuts, append=len(sizes)), sizes[cuts]) <= budget).all()
    assert work_of(cuts)[numbers].sum(axis=0).max() < work[dealt].sum(axis=0).max()
