"""What ranks are dealt over epochs: each as much, as long, or an error before the first batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sampler_cases import samplers
from tests.support.samplers import TOKENS
from torchbudget import PaddedCost
from torchbudget.plan.solver import WindowKey

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
    sampler, *_ = samplers(sizes, cost, budget, 8, samples_per_step=4096)
    assert sampler.report().imbalance <= most
