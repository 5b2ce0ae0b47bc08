"""The window where the user does not say, in numbers."""

from __future__ import annotations

import math

import pytest

from torchbudget.plan.solver import default_window


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
def test_as_documented(ranks: int, positions: float, micro_batches: float, expected: int) -> None:
    """4,096 or 32 micro-batches for each rank, and at most a quarter of the epoch."""
    found = default_window(ranks, positions=positions, micro_batches=micro_batches)
    assert found == expected
