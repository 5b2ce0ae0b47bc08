"""Losses of half precision carry any weight exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchbudget import GradAccumulator
from torchbudget.train.half_precision import carried_factor

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@given(
    weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    divisor=st.sampled_from([1.0, 3.0, 1024.0]),
)
def test_the_product_of_mean_and_weight_is_of_float32(
    dtype: torch.dtype, weights: list[int], divisor: float
) -> None:
    """Of means that their dtype has exactly, Σ weight · mean / Σ weight is that of float32.

    The dtypes have 8 and 11 binary digits; float16 ends at 65,504.
    """
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    accumulator = GradAccumulator(optimizer, mean=True, divisor=divisor)
    rows = [torch.tensor([[1.0, 3.0 + number]]).expand(4, 2) for number in range(len(weights))]
    for weight, row in zip(weights, rows, strict=True):
        with accumulator.micro_batch(weight):
            accumulator.backward((parameter.to(dtype) * row.to(dtype)).sum(1).mean())
    accumulator.step()
    expected = sum(w * row[0].double() for w, row in zip(weights, rows, strict=True)) / sum(weights)
    torch.testing.assert_close(-parameter.detach().double(), expected, rtol=1e-6, atol=0)


@given(st.sampled_from([1.0, 0.5, 3.0, 2.0**20]), st.booleans())
def test_every_leaf_gets_the_same_factor(divisor: float, checkpoints: bool) -> None:
    """Also one that is no parameter, whose gradient is passed on; also in a checkpoint's graph."""
    parameter, leaf = (nn.Parameter(torch.ones(2)) for _ in range(2))
    accumulator = GradAccumulator(torch.optim.SGD([parameter], lr=1.0), divisor=divisor)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * parameter * leaf).sum().bfloat16()

    with accumulator.micro_batch(1):
        x = torch.full((2,), 3.0, requires_grad=True)
        accumulator.backward(
            checkpoint(forward, x, use_reentrant=True) if checkpoints else forward(x)
        )
    assert parameter.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(parameter.grad * divisor, torch.full((2,), 3.0))
    torch.testing.assert_close(x.grad * divisor, torch.ones(2))
    if not checkpoints:
        torch.testing.assert_close(leaf.grad, parameter.grad)
    accumulator.step()


@given(st.floats(1e-9, 1e9), st.sampled_from(HALVES))
def test_what_is_carried_rounds_nothing(factor: float, dtype: torch.dtype) -> None:
    """It is a power of 2 that the dtype has, by which products are exact, and overflows nothing."""
    carried = carried_factor(factor, dtype)
    assert torch.tensor(carried, dtype=dtype).item() == carried
    assert math.frexp(carried)[0] == 0.5
    assert carried <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_carries_all(dtype: torch.dtype) -> None:
    assert carried_factor(257.3, dtype) == 257.3
