"""Steps whose memory does not only depend on the shape of their batch in one formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.steps import step_of
from torchbudget import MeasuredCost, measure_cost, trace_peak_bytes
from torchbudget.errors import CostError

WIDTH = 32


def full_step(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Any:
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
    return step_of(lambda batch: forward(model, batch).square().mean(), model)


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 8)


def traced(step: Any, **options: Any) -> MeasuredCost:
    return measure_cost(step, make_batch, **{"max_size": 1024, "method": "trace"} | options)


def test_an_integer_beside_a_table_that_grows() -> None:
    """The integer is only computed with; a buffer that grows with the longest sample is said."""
    table = [torch.zeros(1, 1)]

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(table[0]) < x.shape[1]:
            table[0] = torch.zeros(x.shape[1], 1)
        return model(x + table[0][: x.shape[1]]) / int((x > 0).sum())

    cost = traced(full_step(forward))
    for n, size in ((3, 900), (200, 64)):
        assert cost.batch_bytes(n, size) >= trace_peak_bytes(
            full_step(forward), make_batch(n, size)
        )
    assert len(table[0]) == 1


def test_arrays_are_looked_at_too() -> None:
    """A function that ignores what it is asked for is noticed in batches of NumPy's arrays."""
    step = full_step(lambda model, arrays: model(torch.from_numpy(arrays[0])))
    with pytest.raises(CostError, match="make_batch must return n samples"):
        measure_cost(step, lambda *_: [np.ones((4, 8), np.float32)], max_size=99, method="trace")


def test_a_batch_that_cannot_be_made() -> None:
    """The shape is named, and what to do about short ones."""

    def refuse(n: int, size: int) -> torch.Tensor:
        if size < 50:
            raise ValueError("too short")
        return make_batch(n, size)

    step = full_step(lambda model, x: model(x))
    with pytest.raises(
        CostError, match=r"make_batch\(\d+, \d+\), or .* raised .*too short.* pass min_size"
    ):
        measure_cost(step, refuse, max_size=1024, method="trace")
    measure_cost(step, refuse, max_size=1024, min_size=50, method="trace")


def test_autocast_takes_the_ways_of_cuda() -> None:
    """Softmax is run in float32 there, while the CPU keeps the precision of its input."""

    @torch.autocast("cpu", torch.bfloat16)
    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(model[0](x), dim=-1)

    step = full_step(forward)
    here, there = (traced(step, device=device).traced_bytes(64, 1024) for device in ("cpu", "cuda"))
    assert there >= here + 64 * 1024 * WIDTH * 2
