"""Windows and ranks: lengths, equal numbers, groups and units, and sums as even as can be."""

from __future__ import annotations

import math
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sampler_cases import samplers
from tests.support.samplers import TOKENS, sampler_of
from tests.support.strategies import problems
from torchbudget import PackedCost, plan_step
from torchbudget.errors import OptionError, OversizeError, UnevenRanksError
from torchbudget.plan.dealing import Dealing, deal_rounds
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import WindowKey, default_window, rounds_needed, solve


@given(problems(most=120), st.integers(1, 8), st.booleans(), st.integers(0, 2**32))
def test_windows_are_solved_as_if_alone(
    problem: Any, ranks: int, even_sums: bool, seed: int
) -> None:
    """Its micro-batches do not depend on the windows it is planned with: resuming is exact."""
    sizes, cost, budget = problem
    if hasattr(cost, "base_bytes"):
        return  # packed windows are solved one by one anyway
    length = min(max(len(sizes) // 4, 2 * ranks), len(sizes))
    length -= length % ranks
    windows = len(sizes) // length if length else 0
    if not windows:
        return
    rule = BatchRules(cost=cost, budget_bytes=budget, strips=3)
    many = sizes[np.random.default_rng(seed).permutation(len(sizes))[: windows * length]]
    many = many.reshape(windows, length, *sizes.shape[1:])
    many[: windows // 2] //= 7  # windows of unlike scales share a block
    dealt = Dealing(number=ranks, even_sums=even_sums)

    def key(first: int, number: int) -> WindowKey:
        those = np.arange(first, first + number)
        return WindowKey(seed=3, path=(1,), places=those * length, numbers=those, shuffle=True)

    block = solve(rule, many, dealt, key(0, windows))
    assert block.rounds.tolist() == rounds_needed(rule, many, dealt).tolist()
    at = 0
    for window in range(windows):
        alone = solve(rule, many[window : window + 1], dealt, key(window, 1))
        number = int(block.rounds[window]) * ranks
        assert alone.rounds.tolist() == [block.rounds[window]]
        assert (block.starts[at : at + number] - window * length).tolist() == alone.starts.tolist()
        assert (block.stops[at : at + number] - window * length).tolist() == alone.stops.tolist()
        mine = slice(window * length, (window + 1) * length)
        assert (block.samples[mine] - window * length).tolist() == alone.samples.tolist()
        at += number


@pytest.mark.parametrize(
    ("ranks", "positions", "micro_batches", "expected"),
    [
        (1, math.inf, 1.0, 4096),
        (3, math.inf, 1.0, 3 * 4096),
        (2, math.inf, 1 / 200, 32 * 2 * 200),  # of many samples in a micro-batch
        (1, 10_000, 1.0, 2500),  # a quarter of the epoch
        (1, 1000, 1 / 100, 800),  # unless that is less than 8 micro-batches
        (4, 10_000, 1 / 50, 2500),
        (5, 7, 1.0, 40),
        (7, 1, 100.0, 7),  # at least one for each rank
    ],
)
def test_the_default_window(
    ranks: int, positions: float, micro_batches: float, expected: int
) -> None:
    """4,096 or 32 micro-batches for each rank, and at most a quarter of the epoch."""
    found = default_window(ranks, positions=positions, micro_batches=micro_batches)
    assert found == expected


# ---------------------------------------------------------------------- groups


def group_sampler(sizes: Any, groups: Any, ranks: int = 1, **options: Any) -> Any:
    return sampler_of(sizes, 16_384, groups=groups, num_replicas=ranks, rank=0, **options)


@pytest.mark.parametrize("ranks", [1, 8])
def test_groups_cost_few_rounds(ranks: int) -> None:
    """Eight groups of Zipf shares: at most 2 % more rounds than without groups.

    Their windows take turns: a quarter of the epoch has the share of each group that the whole has.
    """
    rng, n = np.random.default_rng(0), 2**18
    sizes = np.clip(rng.lognormal(5, 1, n), 16, 4096).astype(np.int64)
    shares = 1 / np.arange(1, 9)
    groups = rng.choice(8, n, p=shares / shares.sum())
    apart = group_sampler(sizes, groups, ranks)
    whole = len(group_sampler(sizes, None, ranks))
    assert len(apart) <= 1.02 * whole
    if ranks == 1:
        batches = list(group_sampler(sizes, groups, window=256))
        quarter = np.concatenate(batches[: len(batches) // 4])
        found = np.bincount(groups[quarter], minlength=8) / len(quarter)
        assert np.abs(found - shares / shares.sum()).max() < 0.1


def test_groups_come_by_first_appearance_without_shuffling() -> None:
    """Text is a label, too; a group's samples keep their order from window to window."""
    labels = np.array(["b", "a", "b", "c", "a", "b"], object)  # as a column of pandas
    sampler = group_sampler([9, 9, 9, 9, 9, 9], labels, shuffle=False, window=2)
    assert list(sampler) == [[0, 2], [5], [1, 4], [3]]


def test_a_group_too_small_for_the_ranks_is_named() -> None:
    """Before the first batch, by `len` too, and not with `drop_last`, which drops it."""
    labels = ["large"] * 40 + ["small"] * 3
    for asked in (list, len):
        with pytest.raises(
            UnevenRanksError, match=r"group 'small': 3 .* too few for 4 ranks"
        ) as met:
            asked(group_sampler([5] * 43, labels, 4))
        assert "next epoch" not in str(met.value)  # which would be the same
        assert "merge small groups, or drop them by drop_last=True" in str(met.value)
    dropping = group_sampler([5] * 43, labels, 4, drop_last=True, max_batch_size=5)
    assert dropping.report().dropped == 3
    with pytest.raises(OptionError, match="drop_last=True drops all 3"):
        next(iter(group_sampler([5] * 3, ["x"] * 3, 4, drop_last=True, window=8)))


def test_with_steps_windows_mix_groups() -> None:
    """A step is a uniform draw of the whole data set; its micro-batches are of one group each."""
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 3, 3000)
    sampler = group_sampler(rng.integers(1, 500, 3000), groups, samples_per_step=500)
    batches = list(sampler)
    assert all(len(set(groups[batch])) == 1 for batch in batches)
    ends = np.cumsum(sampler.steps)
    for start, end in zip(ends - sampler.steps, ends, strict=True):
        assert set(groups[np.concatenate(batches[start:end])]) == {0, 1, 2}


# ---------------------------------------------------------------------- units


def test_steps_have_whole_units() -> None:
    """About `samples_per_step` samples each; unshuffled, units come by their first appearance."""
    rng = np.random.default_rng(0)
    units = rng.permutation(np.repeat(np.arange(400), rng.integers(1, 8, 400)))
    sizes, appear = rng.integers(1, 900, len(units)), list(dict.fromkeys(units.tolist()))
    for shuffle in (True, False):
        options: dict[str, Any] = {"units": units, "shuffle": shuffle, "samples_per_step": 200}
        sampler = group_sampler(sizes, None, **options)
        batches = iter(list(sampler))
        steps = [[*chain.from_iterable(islice(batches, each))] for each in sampler.steps]
        found = [unit for one in steps for unit in sorted(set(units[one]), key=appear.index)]
        assert sorted(found) == sorted(appear)
        assert shuffle or found == appear
        assert not shuffle or all(150 < len(one) < 250 for one in steps[:-1])
        assert f"of {len(units) / len(steps):.1f} samples" in str(sampler.report())


def test_a_unit_of_one_micro_batch_is_oversize_as_a_whole() -> None:
    """Each sample fits the budget, and three of one unit do not: padded, packed and by number."""
    for cost, budget, options in (
        (TOKENS, 20, {}),
        (PackedCost(unit_bytes=1), 20, {}),
        (TOKENS, 99, {"max_batch_size": 2}),
    ):
        given = {"units": ([7, 7, 3, 7, 3], "micro_batch"), **options}
        with pytest.raises(OversizeError, match=r"1 of 2 units .* the first at index 0"):
            plan_step([8, 7, 9, 7, 2], cost, budget, **given)
        skipping = plan_step([8, 7, 9, 7, 2], cost, budget, oversize="skip", **given)
        assert skipping.skipped_samples.tolist() == [0, 1, 3]
        assert sorted(skipping.micro_batches[0][0]) == [2, 4]
        alone = plan_step([8, 7, 9, 7, 2], cost, budget, oversize="alone", **given)
        assert sorted(map(sorted, alone.micro_batches[0])) == [[0, 1, 3], [2, 4]]


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("packs", [True, False])
def test_units_leave_ranks_as_even_as_they_allow(ranks: int, packs: bool) -> None:
    """4,096 rollouts in units of 8 to 16: 2 % above the mean, or the heaviest unit's own work."""
    rng = np.random.default_rng(0)
    units = np.repeat(np.arange(600), rng.integers(8, 17, 600))[:4096]
    each = rng.lognormal(7, 0.8, 600)[units] * rng.lognormal(0, 0.5, 4096)
    sizes = np.clip(each, 16, 16_384).astype(np.int64)
    work = PackedCost(unit_bytes=24_576, pair_bytes=1)
    cost = PackedCost(unit_bytes=1) if packs else TOKENS
    step = plan_step(sizes, cost, 32_768, num_replicas=ranks, units=units, time=work)
    done = work.item_bytes(sizes)
    sums = np.array([done[np.concatenate(mine)].sum() for mine in step.micro_batches])
    heaviest = np.bincount(units, done).max() / sums.mean()
    assert sums.max() / sums.mean() <= max(1.02, heaviest + 1e-9)


def test_units_that_cannot_be_dealt_are_refused() -> None:
    """Two samples need a micro-batch each, and the other rank's unit has one sample alone."""
    with pytest.raises(
        UnevenRanksError, match=r"2 units .* have 1 samples, and .* 2 micro-batches"
    ):
        plan_step([9, 5, 5], PackedCost(unit_bytes=1), 9, num_replicas=2, units=[0, 1, 1])
    with pytest.raises(OptionError, match=r"at least the 2 ranks, got 1 units \(3 samples\)"):
        group_sampler([9] * 9, None, 2, samples_per_step=3, units=[0, 0, 0, 1, 1, 1, 2, 2, 2])


# ---------------------------------------------------------------------- dealing


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
