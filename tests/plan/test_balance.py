"""Ranks balanced by time instead of bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.costs import Nodes, measured, piece
from torchbudget import MemoryBudgetBatchSampler, PaddedCost

# Bytes are linear in the length, and time is quadratic: 1 µs a sample and squared unit.
NODES = Nodes()
N, LENGTH = NODES.make("symbol", 0), NODES.make("symbol", 1)
BYTES = NODES.make("Mul", NODES.number(1000), N, LENGTH)
FLOPS = NODES.make("Mul", N, LENGTH, LENGTH)
# 1, n, L, n·L, operations, bytes, bytes above the knee
SECONDS = 0.0, 0.0, 0.0, 0.0, 1e-6, 0.0, 0.0
UNTIMED = measured(pieces=(piece(NODES, BYTES, flops=FLOPS),), largest=(1000,))
COST = replace(UNTIMED, seconds=SECONDS)


def samplers(sizes: Any, ranks: int, **options: Any) -> list[MemoryBudgetBatchSampler]:
    return [
        MemoryBudgetBatchSampler(
            sizes, UNTIMED, 2_000_000, num_replicas=ranks, rank=rank, **options
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("step", [pytest.param(1024, marks=pytest.mark.slow), None])
def test_time_is_more_even_than_when_bytes_are_balanced(step: int | None) -> None:
    """Over an epoch of 8 ranks, the slowest rank of each step is nearer to the mean."""
    sizes = np.clip(np.random.default_rng(0).lognormal(4, 1, 20_000), 1, 1000).astype(int)
    imbalance = {}
    for balance, model in (("cost", None), ("time", COST.time)):
        ours = samplers(sizes, 8, time=model, samples_per_step=step)
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


def test_a_round_is_one_run_where_that_takes_less_time() -> None:
    """Each sample takes time, so that ranks that wait every round have as many of them."""
    sizes = np.clip(np.random.default_rng(0).lognormal(4, 1, 20_000), 1, 1000).astype(int)
    ours = samplers(sizes, 8, time=PaddedCost(sample_bytes=1))
    numbers = np.array([[len(batch) for batch in sampler] for sampler in ours])
    assert (np.ptp(numbers, axis=0) <= 1).all()
