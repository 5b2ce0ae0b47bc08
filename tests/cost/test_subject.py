"""Which shapes are measured, and whether `make_batch` makes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training_cases import CASES
from torchbudget import measure_cost
from torchbudget.errors import CostError


@pytest.mark.parametrize("ignored", ["n", "size"])
def test_make_batch_that_ignores_what_it_is_asked_for(ignored: str) -> None:
    training = CASES["encoder, fused attention"]()

    def make_batch(n: int, size: int) -> Any:
        return training.make_batch(4 if ignored == "n" else n, 16 if ignored == "size" else size)

    with pytest.raises(CostError, match="make_batch must return n samples"):
        measure_cost(training.step, make_batch, max_size=128, budget="1GiB")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "pass max_size=, or the data set's sizes="),
        ({"max_size": 9, "min_size": 10}, "is above the largest"),
        ({"max_size": 9, "min_size": 0}, "min_size must be"),
        ({"max_size": 9, "min_size": (2, 2)}, "same number of axes"),
        ({"max_size": 9, "sizes": [[2, 2]]}, "same number of axes"),
        ({"sizes": [0.5, 2.0]}, "sizes must be integers"),
        ({"sizes": []}, "sizes must be integers"),
    ],
)
def test_bad_sizes(arguments: Any, said: str) -> None:
    training = CASES["heavy"]()
    with pytest.raises(CostError, match=said):
        measure_cost(training.step, training.make_batch, method="trace", **arguments)
