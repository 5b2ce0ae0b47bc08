"""Costs of users: what is refused before the first batch, and fingerprints of what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.samplers import LENGTHS, TOKENS
from tests.support.streams import Numbered, make
from torchbudget import MemoryBudgetBatchSampler, PaddedCost, plan_step
from torchbudget.cost.protocol import AdditiveCost
from torchbudget.errors import CostError
from torchbudget.plan.fingerprint import cost_fingerprint, fingerprint

SIZES = LENGTHS.tolist()


@dataclass
class Users:
    """A cost as its two functions."""

    batch: Callable[[Any, Any], Any]
    most: Callable[[Any, Any], Any]

    def batch_bytes(self, n: Any, padded_size: Any) -> Any:
        return self.batch(n, padded_size)

    def capacity(self, padded_size: Any, budget_bytes: Any) -> Any:
        return self.most(padded_size, budget_bytes)


class Packing(AdditiveCost):
    """One of batches without padding, whose samples' bytes are floats."""

    base_bytes = 0

    def item_bytes(self, sizes: Any) -> Any:
        return np.asarray(sizes) * 1.5

    def batch_bytes(self, n: Any, padded_size: Any) -> Any:
        return n * padded_size * 2

    def capacity(self, padded_size: Any, budget_bytes: Any) -> Any:
        return budget_bytes // (padded_size * 2)


def right(n: Any, size: Any) -> Any:
    return n * size


def fitting(size: Any, budget: Any) -> Any:
    return budget // size


WRONG: dict[str, tuple[Any, str]] = {
    "capacity": (
        Users(right, lambda size, budget: 3 * budget // size),
        r"capacity says that \d+ samples of size \d+ fit 1000 B, .* need 2.* KiB: capacity must be",
    ),
    "float bytes": (
        Users(lambda n, size: n * size * 1.5, fitting),
        r"cost.batch_bytes, .* must return whole numbers \(int64\), returned float64",
    ),
    "float capacity": (
        Users(right, lambda size, budget: budget / size),
        "cost.capacity, .* must return whole numbers",
    ),
    "unsigned bytes": (
        Users(lambda n, size: (n * size).astype(np.uint64), fitting),
        "returned uint64",
    ),
    "scalar bytes": (
        Users(lambda n, size: max(7, n * size), fitting),
        "cost.batch_bytes, .* raised ValueError: The truth .* use np.maximum instead of max",
    ),
    "scalar capacity": (
        Users(right, lambda size, budget: int(budget) // int(size)),
        "cost.capacity, .* raised TypeError",
    ),
    "one number": (
        Users(lambda n, size: int(np.sum(n * size)), fitting),
        r"shape \(\d+,\), returned \(\)",
    ),
    "packed": (Packing(), "cost.item_bytes, .* must return whole numbers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_cost_that_is_none_is_refused(case: str) -> None:
    """By the sampler and `plan_step` at once, by a stream at its first window."""
    cost, message = WRONG[case]
    with pytest.raises(CostError, match=message):
        MemoryBudgetBatchSampler(LENGTHS, cost, 1000)
    with pytest.raises(CostError, match=message):
        plan_step(SIZES, cost, 1000)
    with pytest.raises(CostError, match=message):
        next(iter(make(Numbered(LENGTHS), cost=cost, budget=1000)))


@pytest.mark.parametrize("axes", [1, 2])
def test_a_cost_that_is_wrong_at_one_size_is_noticed(axes: int) -> None:
    """Of thousands of samples of some thousand sizes, one has the size, in no particular place."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 2000 if axes == 1 else 50, (20_000, axes))
    sizes[sizes[:, 0] == 21] = 20
    sizes[12_345] = 21
    given = sizes if axes > 1 else sizes[:, 0]

    def area(size: Any) -> Any:
        return size if axes == 1 else size.prod(axis=-1)

    def most(size: Any, budget: Any) -> Any:
        wrong = (size if axes == 1 else size[..., 0]) == 21
        return np.where(wrong, 2, 1) * (budget // area(size))

    cost = Users(lambda n, size: n * area(size), most)
    with pytest.raises(CostError, match=r"capacity says that .* of size .*21\b"):
        MemoryBudgetBatchSampler(given, cost, 10**6)


@pytest.mark.parametrize(
    ("time", "said"),
    [
        (lambda n, size: n * size * 0.1, r"time.batch_bytes, .* returned float64"),
        (lambda n, size: n * size - 50, r"1 samples of size \d+ take -\d+, .* is not negative"),
        (lambda n, size: 10_000 + size - n, r"says that 1 samples of size \d+ .* 2 of .* falls"),
        (lambda n, size: 10_000 + n - size, r"1 samples of size \d+ take .* 1 of size .* falls"),
        (lambda n, size: n * np.where(size == LENGTHS.max(), 1, size), r"falls where a batch gro"),
    ],
)
def test_a_time_is_whole_and_rises(time: Any, said: str) -> None:
    wrong = Users(time, lambda size, budget: np.zeros_like(size * budget))
    for steps in ({}, {"samples_per_step": 50}):
        with pytest.raises(CostError, match=said):
            MemoryBudgetBatchSampler(LENGTHS, TOKENS, 1000, time=wrong, **steps)


def test_a_time_of_two_axes_rises_along_both() -> None:
    sizes = np.random.default_rng(0).integers(1, 50, (100, 2))
    wrong = Users(
        lambda n, size: n * 100 + size[..., 0] - size[..., 1], lambda size, _: size[..., 0]
    )
    with pytest.raises(CostError, match=r"of size \[\d+, \d+\] take .* falls"):
        plan_step(sizes, PaddedCost(unit_bytes=(1, 1)), 10**4, time=wrong)


def test_a_cost_is_asked_with_whole_sizes() -> None:
    """Sizes are kept in their smallest type, whose squares would wrap: a cost sees int64."""

    def area(n: Any, size: Any) -> Any:
        return n * size**2

    cost = Users(area, lambda size, budget: budget // np.maximum(size**2, 1))
    budget = int(LENGTHS.max()) ** 2
    for options in ({}, {"num_replicas": 2, "rank": 0, "samples_per_step": 60}):
        sampler = MemoryBudgetBatchSampler(LENGTHS, cost, budget, **options)
        assert sampler.report().over_budget == 0
        for batch in sampler:
            assert len(batch) * int(LENGTHS[batch].max()) ** 2 <= budget


# ---------------------------------------------------------------------- fingerprints


def of_units(unit_bytes: int) -> Users:
    """A user's cost, whose `repr` names an address."""
    return Users(
        lambda n, size: n * size * unit_bytes, lambda size, budget: budget // (size * unit_bytes)
    )


@pytest.mark.parametrize("largest", [1, 50, 4096, 10**6])
def test_a_cost_is_what_it_computes(largest: int) -> None:
    """Two objects, and two classes, that compute the same are the same; otherwise they differ."""
    ours = cost_fingerprint(PaddedCost(unit_bytes=2), largest)
    assert cost_fingerprint(of_units(2), largest) == ours
    assert cost_fingerprint(of_units(2), largest) == cost_fingerprint(of_units(2), largest)
    assert cost_fingerprint(of_units(3), largest) != ours
    assert cost_fingerprint(PaddedCost(unit_bytes=2, fixed_bytes=1), largest) != ours


def test_parts_are_told_apart() -> None:
    """Where a part ends, its type and its numbers all count; its memory's order does not."""
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint(np.arange(3)) != fingerprint(np.arange(3, dtype=np.int32))
    assert fingerprint(np.arange(6)[::2]) == fingerprint(np.array([0, 2, 4]))
