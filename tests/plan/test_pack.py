"""Packing: every item in one bin, no bin over any room, and few bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MemoryBudgetBatchSampler, PackedCost
from torchbudget.errors import OptionError


@pytest.mark.parametrize(
    ("name", "most"),
    [("text", 0.01), ("text and patches", 0.025), ("graphs", 0.015), ("rows", 0.015)],
)
def test_limits_leave_little_of_the_fuller_one(name: str, most: float) -> None:
    """Batches of windows of 4,096, above the number that the sums need at the least."""
    rng, n = np.random.default_rng(0), 16_384
    text = np.clip(rng.lognormal(5, 1, n), 16, 4096)
    patches = np.where(rng.random(n) < 0.5, 0, rng.integers(64, 2048, n))
    nodes = np.clip(rng.lognormal(3.3, 0.6, n), 3, 400)
    edges = np.minimum(nodes * np.where(rng.random(n) < 1 / 30, nodes / 3, 4), 30_000)
    one, other, rooms = {
        "text": (text, np.ones(n), (16_384, n)),
        "text and patches": (text, patches, (16_384, 8192)),
        "graphs": (nodes, edges, (2048, 32_768)),
        "rows": (text, np.ones(n), (4096, 32)),
    }[name]
    sizes = np.stack([one, other], axis=1).astype(np.int64)
    costs = [PackedCost(unit_bytes=unit) for unit in ([1, 0], [0, 1])]
    limits = [(costs[1], rooms[1])]
    sampler = MemoryBudgetBatchSampler(sizes, costs[0], rooms[0], window=4096, limits=limits)
    report = sampler.report()
    assert report.over_budget == 0
    assert report.batches <= (1 + most) * max(sizes.sum(axis=0) / rooms)


@given(
    st.lists(st.integers(1, 50), min_size=3, max_size=60),
    st.integers(50, 200),
    st.integers(0, 99),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(103, 500),
)
def test_drop_last_leaves_out_the_emptiest_batch(
    sizes: list[int], budget: int, seed: int, most: int | None, amount: int | None
) -> None:
    """If another sample would have fitted it; with one rank and window, and nothing else."""
    options: dict[str, Any] = {"window": len(sizes), "seed": seed, "num_replicas": 1, "rank": 0}
    cost = PackedCost(unit_bytes=1)
    options["max_batch_size"] = most
    if amount is not None:
        options["limits"] = [(PackedCost(sample_bytes=3, unit_bytes=2), amount)]
    whole = list(MemoryBudgetBatchSampler(sizes, cost, budget, **options))
    free = []
    for batch in whole:
        n, total = len(batch) + 1, sum(sizes[index] for index in batch)
        least = total + min(sizes)
        over = least > budget or n > (most or n) or 3 * n + 2 * least > (amount or 10**9)
        free.append(0 if over else budget - total)
    emptiest = [batch for batch, left in zip(whole, free, strict=True) if left == max(free)]
    allowed = [sorted(sizes[index] for index in one) for one in emptiest if max(free) > 0] or [[]]
    try:
        kept = list(MemoryBudgetBatchSampler(sizes, cost, budget, drop_last=True, **options))
    except OptionError:
        assert any(len(one) == len(sizes) for one in allowed)  # nothing would be left
        return
    dropped = set(range(len(sizes))) - {index for batch in kept for index in batch}
    assert sorted(sizes[index] for index in dropped) in allowed
