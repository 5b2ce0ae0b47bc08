"""Dealing to ranks: equal numbers, nothing lost, sums as even as can be."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import oracles
from tests.support.strategies import problems
from torchbudget import MemoryBudgetBatchSampler, PaddedCost
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cut import SortedWindows
from torchbudget.plan.dealing import (
    Ranks,
    deal_rounds,
    deal_steps,
    lowest_budgets,
    rotate,
    split_to,
)
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import WindowKey, solve

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


# ---------------------------------------------------------------------- lowering the budget


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

    def lower() -> Any:
        return lowest_budgets(
            SortedWindows(ordered[None], rule),
            low=np.array([low]),
            high=high,
            length=length,
            ranks=Ranks(number=ranks),
        )

    if wanted > length:
        with pytest.raises(UnevenRanksError, match=f"{length} samples that need {least} micro"):
            lower()
        return
    (budget,), (target,) = lower()
    assert target == wanted
    assert low - 1 <= budget <= high
    assert len(oracles.greedy_cut(ordered, TOKENS, int(budget))) <= target
    below = int(budget) - 1 - (high - low + 1) // 2**11
    if below >= low:
        assert len(oracles.greedy_cut(ordered, TOKENS, below)) > target


def test_windows_are_lowered_as_if_alone() -> None:
    rng = np.random.default_rng(0)
    sizes = -np.sort(-rng.integers(1, 500, (9, 64)), axis=1)
    rule = BatchRules(cost=TOKENS, budget_bytes=2000)

    def lower(some: Any) -> Any:
        return lowest_budgets(
            SortedWindows(some, rule),
            low=np.ones(len(some), np.int64),
            high=2000,
            length=64,
            ranks=Ranks(number=4),
        )

    budgets, targets = lower(sizes)
    for window in range(9):
        alone = lower(sizes[window : window + 1])
        assert (budgets[window], targets[window]) == (alone[0][0], alone[1][0])


@given(problems(most=120), st.integers(1, 8), st.booleans(), st.integers(0, 2**32))
def test_windows_are_solved_as_if_alone(
    problem: Any, ranks: int, even_sums: bool, seed: int
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
    must_be_as_if_alone(many, rule, ranks, even_sums)


@pytest.mark.parametrize("even_sums", [False, True])
@pytest.mark.parametrize("rounds", [4, 100])
def test_windows_of_many_bytes_are_solved_as_if_alone(rounds: int, even_sums: bool) -> None:
    """With budgets of gigabytes, and with more rounds than are exchanged between ranks."""
    rng = np.random.default_rng(0)
    many = np.clip(rng.lognormal(5, 1, (4, 16 * 3 * rounds)), 16, 4096).astype(np.int64)
    many[:2] //= 7
    rule = BatchRules(cost=PaddedCost(unit_bytes=1_000_003), budget_bytes=4096 * 1_000_003)
    must_be_as_if_alone(many, rule, 3, even_sums)


def must_be_as_if_alone(many: Any, rule: BatchRules, ranks: int, even_sums: bool) -> None:
    windows, length = many.shape[:2]
    dealt = Ranks(number=ranks, even_sums=even_sums)

    def key(first: int, number: int) -> WindowKey:
        those = np.arange(first, first + number)
        return WindowKey(seed=3, path=(1,), places=those * length, numbers=those, shuffle=True)

    block = solve(rule, many, dealt, key(0, windows), strips=3)
    at = 0
    for window in range(windows):
        alone = solve(rule, many[window : window + 1], dealt, key(window, 1), strips=3)
        number = int(block.rounds[window]) * ranks
        assert alone.rounds.tolist() == [block.rounds[window]]
        assert (block.starts[at : at + number] - window * length).tolist() == alone.starts.tolist()
        assert (block.stops[at : at + number] - window * length).tolist() == alone.stops.tolist()
        mine = slice(window * length, (window + 1) * length)
        assert (block.samples[mine] - window * length).tolist() == alone.samples.tolist()
        at += number


# ---------------------------------------------------------------------- fair over time


@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**32), st.integers(0, 10**6))
def test_each_rank_takes_each_place_once_in_every_run_of_windows(
    ranks: int, windows: int, seed: int, first: int
) -> None:
    """In any `ranks` consecutive windows, whatever the seed, rank r stands at every place once."""
    numbers = np.arange(first, first + windows)
    key = WindowKey(seed=seed, path=(0,), places=numbers, numbers=numbers, shuffle=True)
    places = np.tile(np.arange(ranks), (windows, 1))  # a round of each window
    taken = rotate(places, key.turns(ranks))
    assert np.array_equal(np.sort(taken, axis=1), places)
    for start in range(windows - ranks + 1):
        for rank in range(ranks):
            assert len(set(taken[start : start + ranks, rank].tolist())) == ranks


@pytest.mark.parametrize("options", [{"samples_per_step": 1024}, {"window": 1024}], ids=str)
def test_ranks_see_as_many_and_as_long_samples(options: dict[str, int]) -> None:
    """Over five epochs each rank's share of samples and their mean size is near the mean's.

    Turns go on over epochs: 16 windows each, so that 80 windows are whole runs of 8.
    """
    sizes = np.clip(np.random.default_rng(0).lognormal(5, 1, 16 * 1024), 16, 4096).astype(np.int64)
    counts, totals = [], []
    for rank in range(8):
        sampler = MemoryBudgetBatchSampler(
            sizes, TOKENS, 8192, num_replicas=8, rank=rank, **options
        )
        indices = [i for _ in range(5) for batch in sampler for i in batch]
        counts.append(len(indices))
        totals.append(sizes[indices].sum())
    share = np.array(counts) / np.mean(counts)
    length = np.array(totals) / np.array(counts) / sizes.mean()
    assert abs(share - 1).max() < 0.08
    assert abs(length - 1).max() < 0.08


# ---------------------------------------------------------------------- what cannot be dealt


def sampler_of(sizes: Any, budget: int = 100, **options: Any) -> MemoryBudgetBatchSampler:
    return MemoryBudgetBatchSampler(sizes, TOKENS, budget, **({"rank": 0} | options))


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(UnevenRanksError, match="3 samples cannot be dealt to 4 ranks"):
        sampler_of([1, 2, 3], num_replicas=4)
    with pytest.raises(UnevenRanksError, match="2 samples cannot be dealt to 4 ranks"):
        sampler_of([1] * 10, num_samples=2, num_replicas=4)


def test_windows_below_the_number_of_ranks() -> None:
    with pytest.raises(OptionError, match="window=3 is below the number of ranks, 4"):
        sampler_of([1] * 10, window=3, num_replicas=4)
    with pytest.raises(OptionError, match="samples_per_step=3 is below the number of ranks, 4"):
        sampler_of([1] * 10, samples_per_step=3, num_replicas=4)


@pytest.mark.parametrize("options", [{"max_batch_size": 1}, {"budget": 50}], ids=str)
def test_samples_that_stand_alone(options: Any) -> None:
    """Where no two fit together, only a multiple of the ranks' number can be dealt evenly."""
    for n in (4, 5, 7, 8, 9, 28, 30):
        those = [sampler_of([50] * n, num_replicas=4, rank=rank, **options) for rank in range(4)]
        if n % 4 == 0:
            assert [len(list(sampler)) for sampler in those] == [n // 4] * 4
            continue
        with pytest.raises(UnevenRanksError, match="cannot be dealt evenly to 4 ranks"):
            len(those[0])
        with pytest.raises(UnevenRanksError, match="drop_last=True"):
            next(iter(those[0]))
        those = [
            sampler_of([50] * n, num_replicas=4, rank=rank, drop_last=True, **options)
            for rank in range(4)
        ]
        assert [len(list(sampler)) for sampler in those] == [n // 4] * 4


def test_one_giant_per_window_is_dealt() -> None:
    """Windows of one sample that fills the budget and of small ones are split evenly."""
    sizes = [100] + [1] * 30
    those = [sampler_of(sizes, num_replicas=8, rank=rank) for rank in range(8)]
    batches = [list(sampler) for sampler in those]
    assert {len(mine) for mine in batches} == {1}
    assert sorted(i for mine in batches for batch in mine for i in batch) == list(range(31))


# ---------------------------------------------------------------------- how even it is

QUADRATIC = PaddedCost(unit_bytes=64, pair_bytes=1)


@pytest.mark.parametrize(
    ("cost", "most"), [(TOKENS, 1.003), (QUADRATIC, 1.01)], ids=["linear", "quadratic"]
)
def test_eight_ranks_do_the_same_work(cost: Any, most: float) -> None:
    """On lognormal lengths, steps of 4,096 over 8 ranks: Σ costliest / Σ mean is near 1.

    With six or more micro-batches for each rank and step; two or three cannot be as even.
    """
    rng = np.random.default_rng(0)
    sizes = np.clip(rng.lognormal(5, 1, 24 * 4096), 16, 4096).astype(np.int64)
    budget = 16_384 if cost is TOKENS else int(cost.batch_bytes(1, 4096))
    those = [
        MemoryBudgetBatchSampler(
            sizes, cost, budget, samples_per_step=4096, num_replicas=8, rank=rank
        )
        for rank in range(8)
    ]
    steps = list(those[0].steps)
    ends = np.cumsum(steps)
    per_rank = []
    for sampler in those:
        batches = list(sampler)
        numbers = np.array([len(batch) for batch in batches])
        longest = np.array([sizes[batch].max() for batch in batches])
        costs = cost.batch_bytes(numbers, longest)
        assert len(costs) == ends[-1]
        per_rank.append(np.add.reduceat(costs, ends - steps))
    together = np.array(per_rank, np.float64)
    measured = together.max(axis=0).sum() / together.mean(axis=0).sum()
    assert measured <= most
    those[0].set_epoch(0)
    assert those[0].report().imbalance == pytest.approx(measured)
