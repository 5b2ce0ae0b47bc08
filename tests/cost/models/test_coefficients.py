"""Coefficients as one vector."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import PaddedCost
from torchbudget.cost.models.padded import (
    coefficients_of,
    cost_of,
    features,
    num_coefficients,
)


def test_features_of_two_axes() -> None:
    assert features([2], [(3, 5)]).tolist() == [[1, 2, 6, 10, 18, 30, 50]]


@given(st.integers(1, 3), st.integers(0, 2**32))
def test_a_cost_is_its_features_times_its_coefficients(axes: int, seed: int) -> None:
    """Bytes are those of the vector, which gives the same cost again, pairs added up."""
    rng = np.random.default_rng(seed)
    vector = rng.integers(1, 100, num_coefficients(axes)).astype(float)
    cost = cost_of(vector, 5)
    assert (cost.axes, cost.floor_bytes) == (axes, 5)
    assert coefficients_of(cost).tolist() == vector.tolist()
    n, sizes = rng.integers(1, 9, 20), rng.integers(1, 99, (20, axes))
    expected = features(n, sizes) @ vector
    found = cost.batch_bytes(n, sizes if axes > 1 else sizes[:, 0])
    assert found.tolist() == expected.astype(int).tolist()


def test_pairs_may_be_stated_in_either_place() -> None:
    lower = PaddedCost(unit_bytes=(1, 1), pair_bytes=((0, 0), (3, 0)))
    upper = PaddedCost(unit_bytes=(1, 1), pair_bytes=((0, 3), (0, 0)))
    assert coefficients_of(lower).tolist() == coefficients_of(upper).tolist()
