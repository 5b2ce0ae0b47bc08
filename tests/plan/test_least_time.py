"""Steps in the least time, against the best cut of a dynamic program; ranks balanced by time."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.support.costs import Nodes, measured, piece
from tests.support.sampler_cases import samplers
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost, plan_step
from torchbudget.cost.protocol import CostModel

TOKENS = PaddedCost(unit_bytes=1)


def lengths(seed: int, samples: int) -> Any:
    return np.clip(np.random.default_rng(seed).lognormal(5, 1, samples), 8, 4096).astype(int)


def least_total(sizes: Any, most: int, each: int) -> int:
    """The oracle: the least Σ each + n·L over all cuts of the sorted samples into runs that fit."""
    ordered = np.sort(sizes)[::-1]
    least = np.full(len(ordered) + 1, np.iinfo(np.int64).max)
    least[0] = 0
    for first, longest in enumerate(ordered.tolist()):
        runs = np.arange(1, min(most // longest, len(ordered) - first) + 1)
        reached = least[first] + each + longest * runs
        np.minimum(least[first + runs], reached, out=reached)
        least[first + runs] = reached
    return int(least[-1])


def slowest(sizes: Any, cap: int, time: CostModel, ranks: int, *, timed: bool, samples: int) -> Any:
    """The time of each step's slowest rank, and all micro-batches."""
    steps, every = [], []
    options = {"samples_per_step": samples, "time": time if timed else None}
    for sampler in samplers(sizes, TOKENS, cap, ranks, **options):
        number, batches = len(sampler), list(sampler)
        assert len(batches) == number
        each = [int(time.batch_bytes(len(one), sizes[one].max())) for one in batches]
        ends = np.cumsum(sampler.steps)
        steps.append(np.add.reduceat(each, ends - sampler.steps))
        every += batches
    return np.max(steps, axis=0), every


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("cap", "each"), [(16_384, 1000), (65_536, 300), (262_144, 1000)])
def test_steps_are_nearly_as_fast_as_can_be(ranks: int, cap: int, each: int) -> None:
    """Each sample once, within the bytes; 1.03 of the least total; no slower than full batches."""
    sizes, time = lengths(0, 4096), PaddedCost(fixed_bytes=each, unit_bytes=1)
    steps, batches = slowest(sizes, cap, time, ranks, timed=True, samples=1024)
    full, _ = slowest(sizes, cap, time, ranks, timed=False, samples=1024)
    assert sorted(index for batch in batches for index in batch) == list(range(4096))
    assert all(len(batch) * sizes[batch].max() <= cap for batch in batches)
    sampler = MemoryBudgetBatchSampler(sizes, TOKENS, 10**9, samples_per_step=1024)
    bound = sum(least_total(sizes[step], cap, each) for step in sampler) / ranks
    assert steps.sum() <= 1.03 * bound
    assert steps.sum() <= 1.001 * full.sum()


def test_slow_samples_stand_alone() -> None:
    """A few samples take longer than the best micro-batches of the others."""
    sizes = np.append(np.full(16, 4000), np.random.default_rng(0).integers(10, 30, 1000))
    time = PaddedCost(fixed_bytes=200, unit_bytes=1)
    step = plan_step(sizes, TOKENS, 65_536, time=time)
    [batches] = step.micro_batches
    total = sum(200 + len(one) * sizes[one].max() for one in batches)
    assert total <= 1.05 * least_total(sizes, 65_536, 200)  # 1.08 if no cap were below their time


@pytest.mark.parametrize(
    ("cost", "time"),
    [
        (TOKENS, PaddedCost(unit_bytes=3)),  # n samples take as long together as one by one
        (PackedCost(unit_bytes=1), PackedCost(unit_bytes=1)),
    ],
)
def test_a_time_that_only_balances(cost: CostModel, time: CostModel) -> None:
    """The micro-batches of one rank are as full as without a time."""
    sizes = lengths(1, 512)
    with_time = plan_step(sizes, cost, 16_384, time=time)
    assert with_time.micro_batches == plan_step(sizes, cost, 16_384).micro_batches


def test_multiples_are_kept_unless_fewer_fit_the_bytes() -> None:
    """However short the best time: 8 samples together, but for the last ones and long ones."""
    sizes = lengths(2, 1024)
    time = PaddedCost(fixed_bytes=100, unit_bytes=1)
    [batches] = plan_step(sizes, TOKENS, 16_384, time=time, batch_size_multiple=8).micro_batches
    for batch in batches[:-2]:
        assert len(batch) % 8 == 0 or len(batch) == 16_384 // sizes[batch].max()


def test_a_measured_time_is_part_of_the_plan() -> None:
    """Which ranks compare, and states know: those who measured for themselves are told of it."""
    sizes = lengths(4, 256)
    # 1, n, L, n·L, operations, bytes, bytes above the knee
    fast, slow = (measured(seconds=(a, 0.0, 0.0, 1e-6, 0.0, 0.0, 0.0)) for a in (1e-4, 2e-3))
    one, other = (
        MemoryBudgetBatchSampler(sizes, cost, 10**8, samples_per_step=128).plan
        for cost in (fast, slow)
    )
    assert one.rules.most_time != other.rules.most_time
    differing = {name for name in one.dealing if one.dealing[name] != other.dealing[name]}
    assert differing == {"time"}
    untouched = (MemoryBudgetBatchSampler(sizes, cost, 10**8).plan.dealing for cost in (fast, slow))
    assert next(untouched) == next(untouched)  # where each micro-batch is a step


def test_a_time_that_was_measured_anew_cuts_the_same_steps() -> None:
    """Resumed in the midst of a step: each sample once, and later steps have the same samples."""
    sizes = lengths(3, 512)

    def sampler(each: int) -> MemoryBudgetBatchSampler:
        time = PaddedCost(fixed_bytes=each, unit_bytes=1)
        return MemoryBudgetBatchSampler(sizes, TOKENS, 16_384, samples_per_step=128, time=time)

    def by_step(batches: list[list[int]], steps: Any) -> list[set[int]]:
        ends = np.cumsum(steps)
        return [
            {index for batch in batches[end - step : end] for index in batch}
            for step, end in zip(steps, ends, strict=True)
        ]

    whole = sampler(100)
    expected = by_step(list(whole), whole.steps)
    begun, resumed = sampler(100), sampler(3000)
    first = list(islice(begun, 3))
    resumed.load_state_dict(begun.state_dict())
    rest = list(resumed)
    assert sorted(index for batch in first + rest for index in batch) == list(range(512))
    assert by_step(rest, resumed.steps)[1:] == expected[1:]
    assert len(rest) < len(list(whole)) - 3


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_windows_that_the_cap_cannot_be_dealt_in(ranks: int) -> None:
    """Steps of few samples that have too many micro-batches are cut without the cap, each alone."""
    time = PaddedCost(fixed_bytes=5, unit_bytes=1)
    for seed in range(20):
        sizes = np.random.default_rng(seed).choice([10, 11, 200, 300], 35 * ranks)
        common: dict[str, Any] = {
            "samples_per_step": 5, "num_replicas": ranks, "time": time, "shuffle": False,
        }  # fmt: skip

        def sampler(rank: int, sizes: Any = sizes, common: Any = common) -> Any:
            return MemoryBudgetBatchSampler(sizes, TOKENS, 1200, rank=rank, **common)

        every = [list(sampler(rank)) for rank in range(ranks)]
        assert {len(batches) for batches in every} == {len(sampler(0))}
        begun, resumed = sampler(0), sampler(0)
        first = list(islice(begun, len(every[0]) // 2))
        resumed.load_state_dict(begun.state_dict())
        assert first + list(resumed) == every[0]


# ---------------------------------------------------------------------- balanced by time


# Bytes are linear in the length, and time is quadratic: 1 µs a sample and squared unit.
NODES = Nodes()
N, LENGTH = NODES.make("symbol", 0), NODES.make("symbol", 1)
BYTES = NODES.make("Mul", NODES.number(1000), N, LENGTH)
FLOPS = NODES.make("Mul", N, LENGTH, LENGTH)
# 1, n, L, n·L, operations, bytes, bytes above the knee
SECONDS = 0.0, 0.0, 0.0, 0.0, 1e-6, 0.0, 0.0
UNTIMED = measured(pieces=(piece(NODES, BYTES, flops=FLOPS),), largest=(1000,))
COST = replace(UNTIMED, seconds=SECONDS)


@pytest.mark.parametrize("step", [pytest.param(1024, marks=pytest.mark.slow), None])
def test_time_is_more_even_than_when_bytes_are_balanced(step: int | None) -> None:
    """Over an epoch of 8 ranks, the slowest rank of each step is nearer to the mean."""
    sizes = np.clip(np.random.default_rng(0).lognormal(4, 1, 20_000), 1, 1000).astype(int)
    imbalance = {}
    for balance, model in (("cost", None), ("time", COST.time)):
        ours = samplers(sizes, UNTIMED, 2_000_000, 8, time=model, samples_per_step=step)
        per_rank = []
        for sampler in ours:
            each = [COST.time.batch_bytes(len(batch), sizes[batch].max()) for batch in sampler]
            ends = np.cumsum(sampler.steps)
            per_rank.append(np.add.reduceat(each, ends - sampler.steps))
        times = np.array(per_rank, np.float64)
        imbalance[balance] = times.max(0).sum() / times.mean(0).sum()
        if balance == "time":
            ours[0].set_epoch(0)
            assert ours[0].report().imbalance == pytest.approx(imbalance["time"], rel=1e-6)
    assert imbalance["time"] < min(imbalance["cost"], 1.08)
