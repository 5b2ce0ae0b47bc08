"""What people otherwise do: the largest batches of each kind whose worst one fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import problems
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost

TOKENS = PaddedCost(unit_bytes=1)


@given(problems(most=120), st.integers(1, 200), st.sampled_from([1, 4]))
def test_what_is_compared_keeps_the_budget(case: Any, window: int, multiple: int) -> None:
    """Every alternative takes every sample once, and none of its batches is over the budget."""
    sizes, cost, budget = case
    largest = -(-sizes.max(axis=0).astype(np.int64) // multiple) * multiple
    budget = max(budget, int(cost.batch_bytes(1, largest)))
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget, window=window, size_multiple=multiple)
    for name, figures in sampler.report().compared.items():
        assert figures.samples == len(sizes), name
        assert figures.over_budget == 0, name
        assert figures.fill + figures.shares.empty == pytest.approx(1), name


@given(problems(most=120, packed=False), st.integers(10, 200))
def test_the_token_limit_is_the_largest(case: Any, window: int) -> None:
    """With one element more, some batch of samples of one length would be over the budget."""
    sizes, cost, budget = case
    report = MemoryBudgetBatchSampler(sizes, cost, budget, window=window).report()
    if sizes.ndim == 2:
        assert report.tokens is report.token_limit is None
        return
    if report.tokens is None:  # samples of no length take room
        assert sizes.min() == 0
        return
    lengths = np.arange(sizes.min(), sizes.max() + 1).astype(np.int64)
    most = min(window, len(sizes))

    def over(tokens: int) -> bool:
        numbers = np.minimum(tokens // np.maximum(lengths, 1), most)
        numbers = np.where(lengths == 0, most, numbers)
        return bool((cost.capacity(lengths, budget) < np.maximum(numbers, 1)).any())

    assert not over(report.tokens)
    if report.tokens < most * int(sizes.max()):
        assert over(report.tokens + 1)


def test_a_token_limit_in_tokens_is_the_budget() -> None:
    """Where the cost counts elements, a token limit is the same plan."""
    sizes = np.random.default_rng(0).integers(10, 500, 5000)
    report = MemoryBudgetBatchSampler(sizes, TOKENS, 4000).report()
    assert report.token_limit == report.plan
    assert 4000 <= (report.tokens or 0) < 4000 + 10
    packed = MemoryBudgetBatchSampler(sizes, PackedCost(unit_bytes=1), 4000).report()
    assert (packed.tokens, packed.token_limit) == (4000, packed.plan)


def test_grouped_batches_are_sorted_fifty_at_a_time() -> None:
    """By hand: the same number of samples as fixed batches, of neighbours in size."""
    sizes = np.random.default_rng(1).integers(1, 100, 1234)
    sampler = MemoryBudgetBatchSampler(sizes, TOKENS, 1000)
    report = sampler.report()
    drawn = sizes[sampler.plan.order.epoch(0).indices(0, len(sizes))]
    number, elements = report.fixed.largest, 0
    batches = []
    for start in range(0, len(drawn), 50 * number):
        group = np.sort(drawn[start : start + 50 * number])
        batches += [group[at : at + number] for at in range(0, len(group), number)]
    elements = sum(len(batch) * int(batch.max()) for batch in batches)
    grouped = report.grouped
    assert grouped is not None
    assert grouped.batches == len(batches)
    assert grouped.padding == pytest.approx(1 - sizes.sum() / elements)
    assert grouped.padding < report.fixed.padding / 5


def test_grouping_by_several_axes_is_by_what_a_sample_costs() -> None:
    sizes = np.random.default_rng(1).integers(1, 100, (1000, 2))
    report = MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=(1, 9)), 10_000).report()
    assert report.grouped is not None
    assert report.grouped.batches == report.fixed.batches
    assert report.grouped.fill < report.fixed.fill
    assert report.token_limit is None


def test_packed_batches_have_nothing_to_group_for() -> None:
    report = MemoryBudgetBatchSampler([3, 4, 5], PackedCost(unit_bytes=1), 9).report()
    assert report.grouped is None
    assert list(report.compared) == ["torchbudget", "fixed batches of 1", "at most 9 tokens"]


def test_what_is_skipped_does_not_shrink_the_fixed_batches() -> None:
    """Regression: a sample that is never drawn made the fixed batches ones of a single sample."""
    report = MemoryBudgetBatchSampler([5, 500, 5, 5], TOKENS, 10, oversize="skip").report()
    assert report.fixed.largest == 2
    assert report.tokens is not None
    assert report.tokens >= 10
