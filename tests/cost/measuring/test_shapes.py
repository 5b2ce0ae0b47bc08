"""Which shapes are probed, and whether `make_batch` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.training_cases import CASES
from torchbudget import measure_cost
from torchbudget.cost.measuring.shapes import BatchLimit, Domain, Subject, batch_bytes
from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState


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


@pytest.mark.parametrize("multiple", [1, 3, 8, 16, 32])
def test_five_sizes_are_judged(multiple: int) -> None:
    """From the shortest to the longest, however sizes are rounded."""
    judged = Domain.of(256, multiple).judged
    assert len(judged) == 5
    assert judged[-1] == (-(-256 // multiple) * multiple,)


@pytest.mark.parametrize("multiple", [1, 16])
def test_a_data_set_with_many_samples_of_one_size_is_judged_at_five(multiple: int) -> None:
    """Also where the quarters of its samples are alike: all others would not be looked at."""
    sizes = [128] * 900 + [*range(129, 4000, 40)]
    judged = Domain.of(None, multiple, sizes=sizes).judged
    assert len(judged) == 5
    assert judged[0] == (128,)
    assert judged[-1] >= (max(sizes),)
    occur = {-(-size // multiple) * multiple for size in sizes}
    assert {size for (size,) in judged} <= occur


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


@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    more: list[Any]


class Attributes:
    def __init__(self, x: torch.Tensor, more: list[Any]) -> None:
        self.x, self.more = x, more


@pytest.mark.parametrize(
    "kind", [Slots, Attributes, lambda x, more: [SimpleNamespace(a=x, b=more)]]
)
def test_batches_of_a_type_of_ones_own_are_limited(kind: Any) -> None:
    """Tensors and arrays in attributes count, each once."""

    def make_batch(n: int, size: int) -> Any:
        x = torch.zeros(n, size, 64)
        return kind(x, [x, {"y": np.zeros((n, size))}, "text"])

    assert batch_bytes(make_batch(5, 10)) == 5 * 10 * (4 * 64 + 8)
    step = CASES["waves"]().step
    state = TrainingState(step)
    limit = BatchLimit(Subject(step, make_batch, Domain.of(512, 1), state, state.device))
    for size in (8, 512):
        assert limit.most_samples((size,)) * size * (4 * 64 + 8) < 2**29
