"""The lowest budget that gives all ranks as many micro-batches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import oracles
from tests.support.strategies import problems
from torchbudget import PaddedCost
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.cut import SortedWindows
from torchbudget.plan.dealing import Ranks, least_rounds, lowest_budgets
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import WindowKey, rounds_needed, solve

TOKENS = PaddedCost(unit_bytes=1)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=80),
    st.integers(1, 6),
    st.integers(2, 8),
)
def test_the_lowest_budget_of_as_many_micro_batches(
    sizes: list[int], most: int, ranks: int
) -> None:
    """The number of micro-batches rounds up to the ranks'; no budget below gives so few.

    None by more than the search's last step, that is: 1/2048 of the interval.
    """
    ordered = np.sort(np.array(sizes))[::-1]
    length, high, low = len(sizes), most * int(ordered[0]), int(ordered[-1])
    rule = BatchRules(cost=TOKENS, budget_bytes=high)
    least = len(oracles.greedy_cut(ordered, TOKENS, high))
    wanted = -(-least // ranks) * ranks

    def rounds() -> Any:
        return least_rounds(np.array([least]), length, Ranks(number=ranks))

    if wanted > length:
        with pytest.raises(UnevenRanksError, match=f"{length} samples that need {least} micro"):
            rounds()
        return
    target = int(rounds()[0]) * ranks
    assert target == wanted
    (budget,) = lowest_budgets(
        SortedWindows(ordered[None], rule),
        lowered=np.array([True]),
        target=np.array([target]),
        low=np.array([low]),
        high=high,
    )
    assert low - 1 <= budget <= high
    assert len(oracles.greedy_cut(ordered, TOKENS, int(budget))) <= target
    below = int(budget) - 1 - (high - low + 1) // 2**11
    if below >= low:
        assert len(oracles.greedy_cut(ordered, TOKENS, below)) > target


def test_windows_are_lowered_as_if_alone() -> None:
    rng = np.random.default_rng(0)
    sizes = -np.sort(-rng.integers(1, 500, (9, 64)), axis=1)
    rule = BatchRules(cost=TOKENS, budget_bytes=2000)

    lowered = rng.random(9) < 0.7
    most = [len(oracles.greedy_cut(window, TOKENS, 2000)) for window in sizes]
    target = np.array(most) + rng.integers(0, 20, 9)

    def lower(some: Any) -> Any:
        return lowest_budgets(
            SortedWindows(sizes[some], rule),
            lowered=lowered[some],
            target=target[some],
            low=np.ones(len(sizes[some]), np.int64),
            high=2000,
        )

    budgets = lower(slice(None))
    assert (budgets[~lowered] == 2000).all()
    for window in range(9):
        assert budgets[window] == lower(slice(window, window + 1))[0]


@given(problems(most=120), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_windows_are_solved_as_if_alone(
    problem: Any, ranks: int, even_sums: bool, more: bool, seed: int
) -> None:
    """What a window becomes does not depend on those it is planned with: so resuming is exact."""
    sizes, cost, budget = problem
    if hasattr(cost, "base_bytes"):
        return  # packed windows are solved one by one anyway
    length = min(max(len(sizes) // 4, 2 * ranks), len(sizes))
    length -= length % ranks
    windows = len(sizes) // length if length else 0
    if not windows:
        return
    rule = BatchRules(cost=cost, budget_bytes=budget)
    rng = np.random.default_rng(seed)
    many = sizes[rng.permutation(len(sizes))[: windows * length]]
    many = many.reshape(windows, length, *sizes.shape[1:])
    # Windows of unlike scales share a block.
    many[: windows // 2] //= 7
    must_be_as_if_alone(many, rule, ranks, even_sums, more=more)


@pytest.mark.parametrize("even_sums", [False, True])
@pytest.mark.parametrize("rounds", [4, 100])
def test_windows_of_many_bytes_are_solved_as_if_alone(rounds: int, even_sums: bool) -> None:
    """With budgets of gigabytes, and with more rounds than are exchanged between ranks."""
    rng = np.random.default_rng(0)
    many = np.clip(rng.lognormal(5, 1, (4, 16 * 3 * rounds)), 16, 4096).astype(np.int64)
    many[:2] //= 7
    rule = BatchRules(cost=PaddedCost(unit_bytes=1_000_003), budget_bytes=4096 * 1_000_003)
    must_be_as_if_alone(many, rule, 3, even_sums)


def must_be_as_if_alone(
    many: Any, rule: BatchRules, ranks: int, even_sums: bool, *, more: bool = False
) -> None:
    windows, length = many.shape[:2]
    dealt = Ranks(number=ranks, even_sums=even_sums)
    beyond = np.random.default_rng(windows).integers(0, 4, windows)

    def reach(needed: Any, first: int = 0) -> Any:
        return np.minimum(needed + beyond[first : first + len(needed)], length // ranks)

    def key(first: int, number: int) -> WindowKey:
        those = np.arange(first, first + number)
        return WindowKey(seed=3, path=(1,), places=those * length, numbers=those, shuffle=True)

    all_reach = reach if more else None
    block = solve(rule, many, dealt, key(0, windows), strips=3, reach=all_reach)
    needed = rounds_needed(rule, many, dealt, strips=3)
    assert block.rounds.tolist() == (reach(needed) if more else needed).tolist()
    at = 0
    for window in range(windows):
        one, its_key = many[window : window + 1], key(window, 1)
        its_reach = partial(reach, first=window) if more else None
        alone = solve(rule, one, dealt, its_key, strips=3, reach=its_reach)
        number = int(block.rounds[window]) * ranks
        assert alone.rounds.tolist() == [block.rounds[window]]
        assert (block.starts[at : at + number] - window * length).tolist() == alone.starts.tolist()
        assert (block.stops[at : at + number] - window * length).tolist() == alone.stops.tolist()
        mine = slice(window * length, (window + 1) * length)
        assert (block.samples[mine] - window * length).tolist() == alone.samples.tolist()
        at += number
