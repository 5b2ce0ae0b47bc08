"""Levelling a step's ranks: a better cut of the same samples, or none."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import PaddedCost
from torchbudget.plan import dealing
from torchbudget.plan.cut import SortedWindows
from torchbudget.plan.dealing import _Level, deal_steps, level
from torchbudget.plan.rules import BatchRules


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
    rules = BatchRules(
        cost=cost, budget_bytes=budget, batch_size_multiple=multiple, balance=balance
    )
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
    before = int(work[deal_steps(work[None], ranks)[0]].sum(axis=0).max())
    found = level(windows, 0, work, before, budget, ranks)
    if found is None:
        return
    cuts, numbers = found
    assert len(cuts) == count
    assert cuts[0] == 0
    assert (np.diff(cuts, append=len(sizes)) > 0).all()
    assert sorted(numbers.reshape(-1).tolist()) == list(range(count))
    assert numbers.shape == (count // ranks, ranks)
    assert (cost.batch_bytes(np.diff(cuts, append=len(sizes)), sizes[cuts]) <= budget).all()
    assert work_of(cuts)[numbers].sum(axis=0).max() < before


@pytest.mark.parametrize("together", [1, 2**18])
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 3), st.floats(0, 1))
def test_ranks_are_filled_up_to_a_level(
    together: int, seed: int, ranks: int, rounds: int, share: float
) -> None:
    """From the rank with the most room on, each takes as many of the longest samples as fit.

    At least one, and it leaves one for each later rank; if samples remain, the level is too low.
    How many runs are computed together makes no difference.
    """
    rng = np.random.default_rng(seed)
    sizes = -np.sort(-rng.integers(1, 12, ranks * (rounds + 6)))
    cost = PaddedCost(unit_bytes=1, fixed_bytes=3)
    rules = BatchRules(cost=cost, budget_bytes=40)
    starts = np.arange(rounds * ranks + 1)
    head = cost.batch_bytes(1, sizes[: rounds * ranks])
    sums = head[deal_steps(head[None], ranks)[0]].sum(axis=0)
    top = int(sums.max() + share * 60)
    bounds = [0]
    tail = sizes[rounds * ranks :]
    for rank, done in enumerate(np.sort(sums)):
        at = bounds[-1]
        most = len(tail) - at - (ranks - 1 - rank)
        numbers = np.arange(1, most + 1)
        needed = cost.batch_bytes(numbers, np.full(most, tail[at]))
        fits = int(np.count_nonzero((needed <= 40) & (needed + done <= top)))
        bounds.append(at + max(fits, 1))
    with mock.patch.object(dealing, "_RUNS_AT_ONCE", together):
        found = _Level(sizes, starts, rules, ranks)._bounds(top)
    assert found == (bounds if bounds[-1] == len(tail) else None)


@pytest.mark.parametrize("seed", [0, 2, 3])  # that need 24 micro-batches
def test_few_coarse_micro_batches_become_even(seed: int) -> None:
    """Three of quadratic cost on each of eight ranks: dealing alone leaves them uneven."""
    sizes = np.clip(np.random.default_rng(seed).lognormal(5, 1, 4096), 16, 4096).astype(np.int64)
    cost, budget, ranks = PaddedCost(pair_bytes=1), 2 * 4096**2, 8
    rules = BatchRules(cost=cost, budget_bytes=budget)
    windows = SortedWindows(sizes[None], rules)
    low, high = 4096**2, budget
    while high - low > budget // 2048:  # the lowest budget of 24 micro-batches
        middle = (low + high) // 2
        if len(windows.starts(0, middle)) <= 24:
            high = middle
        else:
            low = middle
    starts = np.array(windows.starts(0, high))
    assert len(starts) == 24
    work = cost.batch_bytes(np.diff(starts, append=4096), windows.sizes[0][starts])
    dealt = work[deal_steps(work[None], ranks)[0]].sum(axis=0)
    found = level(windows, 0, work, int(dealt.max()), high, ranks)
    assert found is not None
    cuts, numbers = found
    levelled = cost.batch_bytes(np.diff(cuts, append=4096), windows.sizes[0][cuts])[numbers]
    sums = levelled.sum(axis=0)
    assert sums.max() / sums.mean() - 1 < 0.5 * (dealt.max() / dealt.mean() - 1)
