"""Weights, replacement and `num_samples`: how often an index comes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.oracles import chi_square
from tests.support.samplers import counted, sampler_of


def test_weights_are_frequencies() -> None:
    """Over epochs each sample comes in proportion to its weight; 0 never comes."""
    weights = np.array([0, 1, 2, 3, 4, 0])
    sampler = sampler_of([5] * 6, 25, weights=weights, replacement=True, num_samples=1000)
    drawn = counted(batch for _ in range(10) for batch in sampler)
    assert drawn.total() == 10_000
    assert set(drawn) == {1, 2, 3, 4}
    counts = [drawn[index] for index in (1, 2, 3, 4)]
    assert abs(chi_square(counts, 10_000 * weights[1:5] / 10)) < 4


def test_weights_without_replacement() -> None:
    """Fewer samples than there are, none twice, the heavy ones more often than the light."""
    weights = np.array([1.0] * 10 + [9.0] * 10)
    sampler = sampler_of([5] * 20, 25, weights=weights, num_samples=8)
    drawn: Counter[int] = Counter()
    for _ in range(300):
        epoch = [index for batch in sampler for index in batch]
        assert len(epoch) == len(set(epoch)) == 8
        drawn.update(epoch)
    assert sum(drawn[i] for i in range(10, 20)) > 4 * sum(drawn[i] for i in range(10))


@pytest.mark.parametrize("weights", [[1.0] * 300, torch.ones(300), np.ones(300, np.float32)])
def test_weights_of_any_kind(weights: Any) -> None:
    """Lists, tensors and arrays of any float type mean the same weights."""
    expected = list(sampler_of(weights=np.ones(300), replacement=True))
    assert list(sampler_of(weights=weights, replacement=True)) == expected


def test_replacement_draws_each_position_anew() -> None:
    """Some come twice and some not at all; as many as asked for."""
    drawn = counted(sampler_of(replacement=True, num_samples=900))
    assert drawn.total() == 900
    assert 1 < max(drawn.values()) < 20
    assert len(drawn) < 300


@pytest.mark.parametrize("num_samples", [1, 299, 301, 750])
def test_num_samples(num_samples: int) -> None:
    """Fewer are a part of the samples; more are several passes."""
    drawn = counted(sampler_of(num_samples=num_samples))
    assert drawn.total() == num_samples
    assert max(drawn.values()) == -(-num_samples // 300)
    assert len(drawn) == min(num_samples, 300)
