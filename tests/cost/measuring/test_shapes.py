"""Which shapes are probed, and whether `make_batch` makes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training_cases import CASES
from torchbudget import measure_cost
from torchbudget.cost.measuring.shapes import BatchLimit, Domain, Subject
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.errors import CostError


@pytest.mark.parametrize("ignored", ["n", "size"])
def test_make_batch_that_ignores_what_it_is_asked_for(ignored: str) -> None:
    training = CASES["encoder, fused attention"]()

    def make_batch(n: int, size: int) -> Any:
        return training.make_batch(4, 16)

    with pytest.raises(CostError, match="make_batch ignores what it is asked for"):
        measure_cost(training.step, make_batch, max_size=128, budget="1GiB")


@pytest.mark.parametrize("multiple", [1, 8, 100])
@pytest.mark.parametrize("max_size", [1, 7, 4096, (30, 700), (5, 60, 7000)])
def test_every_size_is_of_the_domain(max_size: Any, multiple: int) -> None:
    """Multiples of the size multiple, from the smallest to the largest rounded up."""
    domain = Domain.of(max_size, multiple)
    sizes = [domain.at(share) for share in (0, 1 / 64, 0.3, 1)]
    sizes += [domain.between(share) for share in (0, 0.4, 0.9, 1, (0.0, 1.0))] + [*domain.judged]
    for size in sizes:
        for one, low, high in zip(size, domain.smallest, domain.largest, strict=True):
            assert low <= one <= high
            assert not one % multiple
    assert domain.at(1) == domain.between(1) == domain.judged[-1] == domain.largest
    assert domain.at(0) == domain.between(0) == domain.judged[0] == domain.smallest
    assert len(set(domain.judged)) == len(domain.judged)


def test_sizes_of_the_data_set_are_judged() -> None:
    """From the shortest to the longest, and the ends are theirs unless they are given."""
    sizes = [[3, 900], [40, 40], [500, 2], [30, 31], [100, 90]]
    domain = Domain.of(None, 1, sizes=sizes)
    assert (domain.smallest, domain.largest) == ((3, 2), (500, 900))
    assert set(domain.judged) == set(map(tuple, sizes))
    assert Domain.of((600, 900), 8, min_size=(8, 8), sizes=sizes).largest == (600, 904)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "give max_size, or the data set's sizes"),
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
    limit = BatchLimit(subject)
    for size in (250, 4000, 16_000):
        bytes_ = 4 * size * limit.most_samples((size,))
        assert 2**27 <= bytes_ <= 2**29 or limit.most_samples((size,)) == 2**16
