"""Advice is told where following it raises the fill, and says the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import problems, rules
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost

TOKENS = PaddedCost(unit_bytes=1)


def lengths(n: int = 5000) -> Any:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(5, 0.3, n), 16, 400).astype(np.int64)


def follow(sizes: Any, cost: Any, budget: Any, options: dict[str, Any]) -> None:
    """Do what each advice says, alone."""
    report = MemoryBudgetBatchSampler(sizes, cost, budget, **options).report()
    for advice in report.advice:
        changed = {"budget": budget} | options | advice.options
        after = MemoryBudgetBatchSampler(sizes, cost, **changed).report()
        assert after.plan.fill >= report.plan.fill + 0.02, advice
        assert after.plan.fill == pytest.approx(advice.fill), advice


@given(problems(most=150), st.data())
def test_following_advice_raises_the_fill(case: Any, data: st.DataObject) -> None:
    """Each of them, by at least 2 points; on an epoch that is tried as a whole, to what it says."""
    sizes, cost, budget = case
    ranks = data.draw(st.integers(1, min(2, len(sizes))))
    options = data.draw(rules(packed=hasattr(cost, "base_bytes")))
    name = data.draw(st.sampled_from(["window", "samples_per_step"]))
    options[name] = data.draw(st.integers(ranks, max(len(sizes) // 4, ranks)))
    if ranks > 1 and (cost.capacity(sizes.max(axis=0).astype(np.int64), budget) < 2).any():
        ranks = 1  # it may be impossible to deal them
    follow(sizes, cost, budget, {"num_replicas": ranks, "rank": 0, **options})


def test_a_window_of_two_micro_batches() -> None:
    """A first look: 62 % of the budget beside 68 % in fixed batches. The report says why."""
    sizes = lengths()
    sampler = MemoryBudgetBatchSampler(sizes, TOKENS, 12_000, samples_per_step=64)
    report = sampler.report()
    assert report.plan.fill < report.fixed.fill
    assert report.plan.shares.left_over > 0.3
    [advice] = report.advice
    assert advice.options == {"samples_per_step": 1024}
    assert str(report).endswith(
        "\nadvice: a window holds 2 micro-batches, one of what is left: raise "
        f"samples_per_step to 1,024 (fill {advice.fill:.1%})"
    )
    follow(sizes, TOKENS, 12_000, {"samples_per_step": 64})


def test_a_window_on_several_ranks() -> None:
    """Rounded up to as many micro-batches for every rank."""
    options = {"window": 256, "num_replicas": 4, "rank": 1}
    [advice] = MemoryBudgetBatchSampler(lengths(), TOKENS, 10_000, **options).report().advice
    assert advice.reason.startswith("a window holds 2 micro-batches on each of 4 ranks")
    follow(lengths(), TOKENS, 10_000, options)


def test_what_limits_the_batch_size_is_named() -> None:
    for option, value in (("max_batch_size", 30), ("batch_size_multiple", 64)):
        options: dict[str, Any] = {option: value, "seed": 3}
        report = MemoryBudgetBatchSampler(lengths(), TOKENS, 15_000, **options).report()
        assert report.plan.shares.limited > 0.1
        assert [advice.change for advice in report.advice] == [f"leave {option} out"]
        assert f"{option}={value} keeps samples out" in str(report)
        follow(lengths(), TOKENS, 15_000, options)


def test_samples_that_are_large_beside_the_budget() -> None:
    """No option helps where two samples do not fit together: the budget does."""
    sizes = np.random.default_rng(0).integers(60, 80, 400)
    report = MemoryBudgetBatchSampler(sizes, TOKENS, 100).report()
    assert report.plan.shares.no_room == pytest.approx(1 - report.plan.fill)
    [advice] = report.advice
    assert advice.options == {"budget": 200}
    assert "too little for another sample" in advice.reason
    follow(sizes, TOKENS, 100, {})


def test_micro_batches_that_were_split_to_a_number() -> None:
    for options in (
        {"batches_per_epoch": 150},
        {"samples_per_step": 1024, "micro_batches_per_step": 30},
    ):
        [advice] = MemoryBudgetBatchSampler(lengths(), TOKENS, 15_000, **options).report().advice
        name = list(options)[-1]
        assert advice.reason == f"micro-batches are split to reach {name}={options[name]}"
        assert advice.options == {name: None}
        follow(lengths(), TOKENS, 15_000, options)


def test_a_full_budget_needs_no_advice() -> None:
    for cost in (TOKENS, PackedCost(unit_bytes=1)):
        report = MemoryBudgetBatchSampler(lengths(20_000), cost, 15_000).report()
        assert report.plan.fill > 0.95
        assert report.advice == ()
