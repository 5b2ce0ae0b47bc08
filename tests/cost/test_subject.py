"""Which shapes are measured, and whether `make_batch` makes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training_cases import CASES
from torchbudget import measure_cost
from torchbudget.cost.subject import Domain, Subject
from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState


@pytest.mark.parametrize("ignored", ["n", "size"])
def test_make_batch_that_ignores_what_it_is_asked_for(ignored: str) -> None:
    training = CASES["encoder, fused attention"]()

    def make_batch(n: int, size: int) -> Any:
        return training.make_batch(4 if ignored == "n" else n, 16 if ignored == "size" else size)

    with pytest.raises(CostError, match="make_batch must return n samples"):
        measure_cost(training.step, make_batch, max_size=128, budget="1GiB")


def test_sizes_of_the_data_set_are_measured() -> None:
    """The ends are theirs unless they are given, and only sizes that occur are asked for."""
    sizes = [[3, 900], [40, 40], [500, 2], [30, 31], [100, 90], [200, 90], [99, 7]]
    domain = Domain.of(None, 1, sizes=sizes)
    assert (domain.smallest, domain.largest) == ((3, 2), (500, 900))
    asked = {tuple(row) for row in domain.draw(60, 9)[:, 1:].tolist()}
    assert domain.nodes(3) == [[3, 40, 500], [2, 40, 900]]
    # Two samples are padded to (500, 900).
    assert [domain.occurring((1, *one)) for one in [(3, 2), (500, 900), (40, 40), (40, 7)]] == [
        (1, 99, 7), (2, 500, 900), (1, 40, 40), (1, 99, 7)
    ]  # fmt: skip
    asked |= {shape[1:] for shape in domain.recipe_shapes()} | {domain.between(0.65)}
    assert asked <= set(map(tuple, sizes))
    assert Domain.of((600, 900), 8, min_size=(8, 8), sizes=sizes).largest == (600, 904)


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


def test_batches_of_probes_are_limited() -> None:
    """However much of a sample is in its batch, a probe's batch takes some 256 MiB."""
    training = CASES["waves"]()
    state = TrainingState(training.step)
    subject = Subject(training.step, training.make_batch, Domain.of(16_000, 1), state, state.device)
    for size in (250, 4000, 16_000):
        most = subject.most_samples((size,))
        assert 2**27 <= 4 * size * most <= 2**29 or most == 2**16
