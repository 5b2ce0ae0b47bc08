"""Fingerprints: of what a cost computes, of an order, of values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import costs
from torchbudget import PaddedCost
from torchbudget.plan.fingerprint import cost_fingerprint, fingerprint


class Doubled:
    """A user's cost without a `repr`, hence one that names an address."""

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes

    def batch_bytes(self, n: Any, padded_size: Any) -> Any:
        return np.asarray(n, np.int64) * np.asarray(padded_size) * self.unit_bytes

    def capacity(self, padded_size: Any, budget_bytes: Any) -> Any:
        return np.asarray(budget_bytes) // np.maximum(np.asarray(padded_size) * self.unit_bytes, 1)


@pytest.mark.parametrize("largest", [1, 50, 4096, 10**6])
def test_a_cost_is_what_it_computes(largest: int) -> None:
    """Two objects, and two classes, that compute the same are the same; otherwise they differ."""
    ours = cost_fingerprint(PaddedCost(unit_bytes=2), largest)
    assert cost_fingerprint(Doubled(2), largest) == ours
    assert cost_fingerprint(Doubled(2), largest) == cost_fingerprint(Doubled(2), largest)
    assert cost_fingerprint(Doubled(3), largest) != ours
    assert cost_fingerprint(PaddedCost(unit_bytes=2, fixed_bytes=1), largest) != ours


@given(st.data(), st.integers(1, 3))
def test_every_cost_has_one(data: Any, axes: int) -> None:
    """Of any model and number of axes: 32 digits, the same each time."""
    cost = data.draw(costs(axes))
    largest = np.full(axes, data.draw(st.integers(1, 10**6))) if axes > 1 else 1000
    found = cost_fingerprint(cost, largest)
    assert len(found) == 32
    assert int(found, 16) >= 0
    assert found == cost_fingerprint(cost, largest)


def test_parts_are_told_apart() -> None:
    """Where a part ends, its type and its numbers all count; its memory's order does not."""
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint(np.arange(3)) != fingerprint(np.arange(3, dtype=np.int32))
    assert fingerprint(np.arange(6)[::2]) == fingerprint(np.array([0, 2, 4]))
