"""Levelling a step's ranks: a better cut of the same samples, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import PaddedCost
from torchbudget.plan.cut import SortedWindows
from torchbudget.plan.dealing import deal_steps, level
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
